"""The file beside the arrays: for every leaf its path, shape, type and checksum."""

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
from meshwright.errors import PartitionError, near, short
from meshwright.transfers.device_put import native
from meshwright.trees.specs import mesh_axes, spec_problems
from meshwright.trees.walk import flatten as flatten_tree
from meshwright.trees.walk import is_array, printable, shown_path

NAME = "meshwright.json"
FORMAT = 1

# Leaves that are no arrays, and how text brings them back exactly.
PYTHON_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf as it was saved: an array with its checksum, or a Python value as text."""

    words: tuple[str, ...]
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
        """The Python value."""
        text = self.text or ""
        if self.dtype == "float":
            return float.fromhex(text)
        return text == "True" if self.dtype == "bool" else PYTHON_TYPES[self.dtype](text)

    def __str__(self) -> str:
        return f"Python {self.dtype}" if self.is_python else type_text(self.dtype, self.shape)


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """
    >>> type_text("float32", (8, 2))
    'float32[8,2]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def python_entry(words: tuple[str, ...], value: Any) -> Entry:
    """An entry that holds the value itself."""
    text = value.hex() if isinstance(value, float) else str(value)
    return Entry(words, type(value).__name__, text=text)


def write_index(folder: Path, entries: Sequence[Entry]) -> None:
    leaves = [dataclasses.asdict(entry) for entry in entries]
    content = {"format": FORMAT, "leaves": leaves, "sha256": _digest(leaves)}
    (folder / NAME).write_text(json.dumps(content, indent=1))


def read_index(folder: Path) -> list[Entry] | None:
    """What was saved, or `None` when the file is missing. Damage of the file itself is found."""
    file = folder / NAME
    try:
        content = json.loads(file.read_bytes())
        leaves, known = content["leaves"], content["format"] == FORMAT
        if known and content["sha256"] != _digest(leaves):
            raise ValueError("its own sha256 does not fit")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PartitionError(
            f"{file}: the checksum file is damaged ({type(error).__name__}: {short(str(error))}). "
            "Restore another checkpoint, or pass verify=False to read the arrays unchecked."
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


# What a leaf becomes on the disk, and how it comes back with every bit.
#
# Orbax writes no keys and not every narrow type. Keys are stored as their `uint32` data, types of
# less than a byte as bytes; the type of the target brings them back.


# What Orbax 0.12 (TensorStore 0.1) stores as it is.
_PLAIN = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 "
    "complex64 complex128 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
)
# The others, as what they are stored, and through which type of equal width their bits go.
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

Words = tuple[str, ...]


def is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def shape_of(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def flatten(tree: Any) -> list[tuple[Words, Any]]:
    """Every leaf with the words of its path, whatever is in them."""
    flat, _ = flatten_tree(tree)
    return [(tuple(map(_word, path)), value) for path, value in flat]


def _word(key: Any) -> str:
    return str(jax.tree_util.keystr((key,), simple=True))


def where(words: Words) -> str:
    """The path of a leaf in a message."""
    return shown_path(printable("/".join(words))) if words else "(the tree)"


def type_name(dtype: Any) -> str:
    """The name of a type; numbers are saved in one byte order."""
    return str(native(dtype))


def to_stored(value: Any) -> Any:
    """The array to hand to Orbax; bits are kept, numpy stays on the host."""
    if isinstance(value, jax.Array):
        changed = is_key(value.dtype) or value.dtype.name in _WIDENED
        return jax.jit(_encode)(value) if changed else value
    value = np.asarray(value)
    if value.dtype.name in _WIDENED:
        return np.asarray(jax.jit(_encode)(value))
    return np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)


def stored_form(target: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and sharding under which the disk's form of a leaf is read."""
    form = shape_of(target.shape, target.dtype)
    if is_key(target.dtype) or target.dtype.name in _WIDENED:
        form = jax.eval_shape(_encode, form)
    return shape_of(form.shape, form.dtype, target.sharding)


def from_stored(stored: jax.Array, target: Any) -> jax.Array:
    """The leaf again, with the type and sharding of the target."""
    if not is_key(target.dtype) and target.dtype.name not in _WIDENED:
        return stored
    # One function and static arguments, so that leaves of one kind share what is compiled.
    decode = jax.jit(_decode, static_argnames=("dtype", "impl"), out_shardings=target.sharding)
    placed: jax.Array = decode(stored, dtype=target.dtype, impl=_key_impl(target.dtype))
    return placed


def empty(target: Any) -> jax.Array:
    """The form on the disk of an array without elements, which Orbax does not store."""
    form = stored_form(target)
    make = functools.partial(jnp.zeros, form.shape, form.dtype)
    placed: jax.Array = jax.jit(make, out_shardings=form.sharding)()
    return placed


def leaf_problems(leaves: Sequence[tuple[Words, Any]]) -> Iterator[str]:
    """Everything about a tree that keeps it from being saved."""
    if not leaves:
        yield "the tree has no leaves."
    seen: dict[str, Words] = {}
    for words, value in leaves:
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
    wide, bits = _WIDENED[value.dtype.name]
    if bits:
        value = jax.lax.bitcast_convert_type(value, jnp.dtype(bits))
    return value.astype(wide)


def _decode(value: Any, dtype: Any, impl: Any) -> Any:
    if impl is not None:
        return jax.random.wrap_key_data(value, impl=impl)
    _, bits = _WIDENED[dtype.name]
    if bits:
        return jax.lax.bitcast_convert_type(value.astype(bits), dtype)
    return value.astype(dtype)


def _key_impl(dtype: Any) -> Any:
    """The generator of a key type, which JAX tells of arrays only: of a traced one, here."""
    if not is_key(dtype):
        return None
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), shape_of((), dtype))
    return found[0]


# Does a target fit a checkpoint? Says everything that is wrong, before any data is read.


FIX = (
    "Pass meshwright.shard(shapes, mesh), or a ShapeDtypeStruct with a sharding from "
    "meshwright.shardings(tree, mesh)."
)
_X64 = (
    "JAX narrowed the target: call jax.config.update('jax_enable_x64', True) before it is made, "
    "or save the narrow type."
)
# Looking for a near name takes a while: for so many, among so many.
MOST_HINTS, MOST_NAMES = 6, 1000


def target_problems(
    saved: Mapping[Words, Entry], target: Sequence[tuple[Words, Any]]
) -> Iterator[str]:
    """Paths that only one side has, then shapes, types and shardings that do not fit."""
    wanted = {words for words, _ in target}
    missing = [entry for words, entry in saved.items() if words not in wanted]
    yield from (f"{where(e.words)}: saved as {e}, not in the target." for e in missing)
    names = [entry.path for entry in missing] if len(missing) <= MOST_NAMES else []
    unknown = 0
    for words, value in target:
        path = "/".join(words)
        entry = saved.get(words)
        if entry is None:
            unknown += 1
            hint = near(path, names) if unknown <= MOST_HINTS else ""
            yield f"{where(words)}: in the target, not in the checkpoint.{hint}"
        else:
            yield from (f"{where(words)}: {text}" for text in _faults(entry, value))


def _faults(entry: Entry, value: Any) -> Iterator[str]:
    if not is_array(value):
        if not entry.is_python:
            yield f"saved as {entry}, but the target holds {short(value)}. {FIX}"
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
        yield from _type_faults(entry, value)
        yield from _sharding_faults(value)


def _type_faults(entry: Entry, value: Any) -> Iterator[str]:
    mine = (type_name(value.dtype), tuple(value.shape))
    if mine != (entry.dtype, entry.shape) and entry.checksum:
        fix = _X64 if mine == (_narrowed(entry.dtype), entry.shape) else "Make them the same."
        yield f"saved as {entry}, but the target is {type_text(*mine)}. {fix}"
    elif not entry.checksum:  # what Orbax knows is the form on the disk
        form = stored_form(shape_of(value.shape, value.dtype))
        if (str(form.dtype), form.shape) != (entry.dtype, entry.shape):
            yield f"stored as {entry}, but the target is {type_text(*mine)}. Make them the same."
    if not is_key(value.dtype) and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        yield (
            f"type {value.dtype} needs 64 bits on the devices. "
            "Call jax.config.update('jax_enable_x64', True) first."
        )


def _narrowed(dtype: str) -> str:
    """What JAX makes of a type, which is less where 64 bits are not enabled."""
    try:
        return str(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:
        return dtype


def _sharding_faults(value: Any) -> Iterator[str]:
    sharding = getattr(value, "sharding", None)
    if isinstance(value, (jax.core.Tracer, np.ndarray, np.generic)) or sharding is None:
        yield f"has no sharding, so its place is unknown. {FIX}"
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
            yield text.removeprefix("(the array): ")
