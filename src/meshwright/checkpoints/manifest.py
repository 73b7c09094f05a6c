"""The manifest of a checkpoint: path, shape, type and checksum of every leaf, as JSON.

Also what a leaf becomes on the disk and how it comes back, and the checks of a tree before it is
saved and of a target before it is restored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright._show import short_repr
from meshwright.errors import CheckpointError, PartitionError, near, short
from meshwright.transfers.device_put import native
from meshwright.trees.specs import mesh_axes, spec_problems
from meshwright.trees.walk import flatten as flatten_tree
from meshwright.trees.walk import is_array, is_key, printable, shown_path

MANIFEST_NAME = "meshwright.json"
FORMAT = 1

# The keys along a leaf's path, one text each. Not joined by "/", which may stand in a key.
Words = tuple[str, ...]

# Leaves that are no arrays. They are kept as text in the manifest, floats as hexadecimal, so that
# they come back exactly.
PYTHON_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True, repr=False)
class Entry:
    """A leaf as it was saved: an array with its checksum, or a Python value as text.

    The names of the fields are the keys of the file: to rename one is to change the format.
    """

    words: Words
    dtype: str
    shape: tuple[int, ...] = ()
    checksum: str = ""
    text: str | None = None

    @property
    def path(self) -> str:
        return "/".join(self.words)

    @property
    def is_python(self) -> bool:
        return self.text is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether Orbax holds it: Python values and arrays without elements are not there."""
        return not self.is_python and 0 not in self.shape

    @property
    def value(self) -> Any:
        """The Python value, from its text."""
        text = self.text or ""
        if self.dtype == "float":
            return float.fromhex(text)
        return text == "True" if self.dtype == "bool" else PYTHON_TYPES[self.dtype](text)

    def __str__(self) -> str:
        return f"Python {self.dtype}" if self.is_python else type_text(self.dtype, self.shape)

    def __repr__(self) -> str:
        return short_repr(self, f"{where(self.words)}: {self}")


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """Write dtype and shape.

    >>> type_text("float32", (8, 2))
    'float32[8,2]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def python_entry(words: Words, value: Any) -> Entry:
    """Make an entry that holds the value itself."""
    text = value.hex() if isinstance(value, float) else str(value)
    return Entry(words, type(value).__name__, text=text)


def write_manifest(folder: Path, entries: Sequence[Entry]) -> None:
    """Write the entries, with a digest of their own, into a folder."""
    leaves = [dataclasses.asdict(entry) for entry in entries]
    content = {"format": FORMAT, "leaves": leaves, "sha256": _digest(leaves)}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1))


def read_manifest(folder: Path) -> list[Entry] | None:
    """Read what was saved, or return `None` without a manifest; raise if it is damaged itself."""
    file = folder / MANIFEST_NAME
    try:
        content = json.loads(file.read_bytes())
        leaves, known = content["leaves"], content["format"] == FORMAT
        # Another format may compute its digest in another way, so that is said first.
        if known and content["sha256"] != _digest(leaves):
            raise ValueError("its own sha256 does not fit")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file}: the checksum file is damaged ({type(error).__name__}: {short(str(error))}). "
            "Restore another checkpoint, or pass verify=False to read the arrays unchecked.",
            option="verify",
        ) from error
    if not known:
        raise PartitionError(
            f"{file}: has format {short(content['format'])}, this version reads {FORMAT}. "
            "Restore with the version that wrote it."
        )
    return [_entry(leaf) for leaf in leaves]


def _entry(leaf: dict[str, Any]) -> Entry:
    return Entry(**{**leaf, "words": tuple(leaf["words"]), "shape": tuple(leaf["shape"])})


def _digest(leaves: Any) -> str:
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


# What a leaf becomes on the disk, its stored form, and how it comes back with every bit.
#
# Orbax writes no keys and not every narrow type. Keys are stored as their `uint32` data, types of
# less than a byte as bytes; the type of the target brings them back.

# What Orbax 0.12 (TensorStore 0.1) stores as it is.
_PLAIN = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 "
    "complex64 complex128 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)
# The others: as what they are stored, and through which integer type of equal width their bits go
# (none for integers, whose values fit the wider type).
_WIDENED = {
    "int2": ("int8", ""),
    "int4": ("int8", ""),
    "uint2": ("uint8", ""),
    "uint4": ("uint8", ""),
    "float4_e2m1fn": ("uint8", "uint4"),
    "float8_e4m3": ("uint8", "uint8"),
    "float8_e8m0fnu": ("uint8", "uint8"),
}
_CANNOT = (
    "cannot be saved; arrays, bool, int, float and str can. Take it out of the tree, e.g. with "
    "equinox.filter(tree, equinox.is_array)."
)


def _shape_struct(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def leaves_with_words(tree: Any) -> list[tuple[Words, Any]]:
    """Return every leaf with the words of its path, whatever is in them."""
    flat, _ = flatten_tree(tree)
    return [(tuple(map(_word, path)), value) for path, value in flat]


def _word(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))


def where(words: Words) -> str:
    """Return the path of a leaf for a message."""
    return shown_path(printable("/".join(words))) if words else "(the tree)"


def type_name(dtype: Any) -> str:
    """Return the name of a type in this machine's byte order, in which arrays are saved."""
    return str(native(dtype))


def to_stored(value: Any) -> Any:
    """Return the array to hand to Orbax; bits are kept, numpy arrays stay on the host."""
    if isinstance(value, jax.Array):
        changed = is_key(value.dtype) or value.dtype.name in _WIDENED
        return jax.jit(_encode)(value) if changed else value
    value = np.asarray(value)
    if value.dtype.name in _WIDENED:
        return np.asarray(jax.jit(_encode)(value))
    return np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)


def stored_form(target: Any) -> jax.ShapeDtypeStruct:
    """Return shape, type and sharding under which the stored form of a leaf is read."""
    form = _shape_struct(target.shape, target.dtype)
    if is_key(target.dtype) or target.dtype.name in _WIDENED:
        form = jax.eval_shape(_encode, form)
    # Keys have one dim more here; a spec that is shorter than its array leaves that dim whole.
    return _shape_struct(form.shape, form.dtype, target.sharding)


def from_stored(stored: jax.Array, target: Any) -> jax.Array:
    """Return the leaf from its stored form, with the type and sharding of the target."""
    if not is_key(target.dtype) and target.dtype.name not in _WIDENED:
        return stored
    # One function and static arguments, so that leaves of one kind share what is compiled.
    decode = jax.jit(_decode, static_argnames=("dtype", "impl"), out_shardings=target.sharding)
    placed: jax.Array = decode(stored, dtype=target.dtype, impl=_key_impl(target.dtype))
    return placed


def empty_stored(target: Any) -> jax.Array:
    """Make the stored form of an array without elements, which Orbax does not write."""
    form = stored_form(target)
    make = functools.partial(jnp.zeros, form.shape, form.dtype)
    placed: jax.Array = jax.jit(make, out_shardings=form.sharding)()
    return placed


def leaf_problems(leaves: Sequence[tuple[Words, Any]]) -> Iterator[str]:
    """Yield everything about a tree that keeps it from being saved."""
    if not leaves:
        yield "the tree has no leaves."
    seen: dict[str, Words] = {}
    for words, value in leaves:
        # Our messages join words by "/", Orbax names its files by joining them with ".".
        path, name = "/".join(words), ".".join(words)
        if path in seen or name in seen:
            other = seen.get(name, words)
            yield f"{where(words)}: has the same name as {where(other)}. Rename one of them."
        seen[path] = seen[name] = words
        problem = _value_problem(value)
        if problem:
            yield f"{where(words)}: {problem}"


def _value_problem(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return "is traced, it has no values yet. Save outside of jit, grad and vmap."
    if isinstance(value, jax.ShapeDtypeStruct):
        return "is the shape of an array, without values. Save the arrays themselves."
    if not is_array(value):
        return "" if type(value) in PYTHON_TYPES.values() else f"{short(value)} {_CANNOT}"
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return (
            f"{type(value).__name__} has a shape but is no array. Save numpy.asarray(x), or place "
            "it first with meshwright.shard(tree, mesh)."
        )
    if not is_key(value.dtype) and value.dtype.name not in _PLAIN | _WIDENED.keys():
        return f"type {value.dtype} cannot be saved. Convert it to a number type of JAX."
    if isinstance(value, jax.Array):
        return _array_problem(value)
    return ""


def _array_problem(value: jax.Array) -> str:
    if value.is_deleted():
        return (
            "has been deleted (or donated to a jitted function). Save it before, or its successor."
        )
    if jax.process_count() > 1 and value.is_fully_addressable:
        return (
            "lives in one process alone, of several. Place it on a mesh of all of them first, "
            "e.g. with meshwright.shard(tree, mesh)."
        )
    return ""


def _encode(value: Any) -> Any:
    if is_key(value.dtype):
        return jax.random.key_data(value)
    wide, same_width = _WIDENED[value.dtype.name]
    if same_width:
        value = jax.lax.bitcast_convert_type(value, jnp.dtype(same_width))
    return value.astype(wide)


def _decode(value: Any, dtype: Any, impl: Any) -> Any:
    if impl is not None:
        return jax.random.wrap_key_data(value, impl=impl)
    _, same_width = _WIDENED[dtype.name]
    if same_width:
        return jax.lax.bitcast_convert_type(value.astype(same_width), dtype)
    return value.astype(dtype)


def _key_impl(dtype: Any) -> Any:
    """Return the generator of a key type, `None` for other types.

    `jax.random.key_impl` takes arrays only (jax 0.10 to 0.12), so it is asked for a traced one.
    """
    if not is_key(dtype):
        return None
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), _shape_struct((), dtype))
    return impls[0]


# Does a target fit a checkpoint? Yields everything that is wrong, before any data is read.

_FIX = (
    "Pass meshwright.shard(shapes, mesh), or a ShapeDtypeStruct with a sharding from "
    "meshwright.shardings(tree, mesh)."
)
_X64 = (
    "JAX narrowed the target: call jax.config.update('jax_enable_x64', True) before it is made, "
    "or save the narrow type."
)
# A near name is sought for so many leaves (as a message lists), among so many names: it takes time
# in the order of their product.
_MOST_HINTS, _MOST_NAMES = 6, 1000


def target_problems(
    saved: Mapping[Words, Entry], target: Sequence[tuple[Words, Any]]
) -> Iterator[str]:
    """Yield paths that only one side has, then shapes, types and shardings that do not fit."""
    wanted = {words for words, _ in target}
    missing = [entry for words, entry in saved.items() if words not in wanted]
    yield from (f"{where(e.words)}: saved as {e}, not in the target." for e in missing)
    names = [entry.path for entry in missing] if len(missing) <= _MOST_NAMES else []
    unknown = 0
    for words, value in target:
        path = "/".join(words)
        entry = saved.get(words)
        if entry is None:
            unknown += 1
            hint = near(path, names) if unknown <= _MOST_HINTS else ""
            yield f"{where(words)}: in the target, not in the checkpoint.{hint}"
        else:
            yield from (f"{where(words)}: {text}" for text in _target_leaf_problems(entry, value))


def _target_leaf_problems(entry: Entry, value: Any) -> Iterator[str]:
    if not is_array(value):
        if not entry.is_python:
            yield f"saved as {entry}, but the target holds {short(value)}. {_FIX}"
        elif type(value) is not PYTHON_TYPES[entry.dtype]:
            yield (
                f"saved as {entry}, but the target holds {short(value)}. "
                f"Put any {entry.dtype} there, e.g. {PYTHON_TYPES[entry.dtype]()!r}."
            )
    elif entry.is_python:
        yield (
            f"saved as {entry}, but the target is {type_text(value.dtype, value.shape)}. "
            f"Put any {entry.dtype} there, e.g. {PYTHON_TYPES[entry.dtype]()!r}."
        )
    else:
        yield from _type_problems(entry, value)
        yield from _sharding_problems(value)


def _type_problems(entry: Entry, value: Any) -> Iterator[str]:
    wanted = (type_name(value.dtype), tuple(value.shape))
    if wanted != (entry.dtype, entry.shape) and entry.checksum:
        fix = _X64 if wanted == (_narrowed(entry.dtype), entry.shape) else "Make them the same."
        yield f"saved as {entry}, but the target is {type_text(*wanted)}. {fix}"
    elif not entry.checksum:  # read by Orbax alone, which knows the stored form
        form = stored_form(_shape_struct(value.shape, value.dtype))
        if (str(form.dtype), form.shape) != (entry.dtype, entry.shape):
            yield f"stored as {entry}, but the target is {type_text(*wanted)}. Make them the same."
    if not is_key(value.dtype) and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        yield (
            f"type {value.dtype} needs 64 bits on the devices. "
            "Call jax.config.update('jax_enable_x64', True) first."
        )


def _narrowed(dtype: str) -> str:
    """Return what JAX makes of a type: 32 bits of 64 where x64 is not enabled."""
    try:
        return str(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:
        return dtype


def _sharding_problems(value: Any) -> Iterator[str]:
    sharding = getattr(value, "sharding", None)
    if isinstance(value, (jax.core.Tracer, np.ndarray, np.generic)) or sharding is None:
        yield f"has no sharding, so its place is unknown. {_FIX}"
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        yield "its sharding is on an AbstractMesh, which has no devices. Use meshwright.mesh(...)."
    elif _compat.is_compile_only(next(iter(sharding.device_set))):
        yield "its devices exist for the compiler only. Use a mesh of devices that are here."
    elif jax.process_count() > 1 and sharding.is_fully_addressable:
        yield "its sharding is of one process alone, of several. Use a mesh of all of them."
    elif isinstance(sharding, NamedSharding):
        if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec):
            yield f"{sharding.spec} leaves a dim unconstrained. Use None, or an axis."
        for text in spec_problems("", tuple(value.shape), sharding.spec, mesh_axes(sharding.mesh)):
            yield text.removeprefix("(the array): ")  # the caller puts the leaf's path there
