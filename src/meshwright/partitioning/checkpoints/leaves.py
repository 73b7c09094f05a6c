"""What a leaf becomes on the disk, and how it comes back with every bit.

Orbax writes no keys and not every narrow type. Keys are stored as their `uint32` data, types of
less than a byte as bytes; the type of the target brings them back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import short
from meshwright.partitioning.checkpoints.index import PYTHON_TYPES
from meshwright.partitioning.leaves import is_array, printable, shown
from meshwright.partitioning.nodes import flatten as flatten_tree
from meshwright.partitioning.values import native

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
    return shown(printable("/".join(words))) if words else "(the tree)"


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
