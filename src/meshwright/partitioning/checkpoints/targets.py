"""Does a target fit a checkpoint? Says everything that is wrong, before any data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright.errors import near, short
from meshwright.partitioning.checkpoints.index import PYTHON_TYPES, Entry, type_text
from meshwright.partitioning.checkpoints.leaves import (
    Words,
    is_key,
    shape_of,
    stored_form,
    type_name,
    where,
)
from meshwright.partitioning.leaves import is_array
from meshwright.partitioning.specs import mesh_axes, problems

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
        for text in problems("", tuple(value.shape), sharding.spec, mesh_axes(sharding.mesh)):
            yield text.removeprefix("(the array): ")
