"""Small compiled programs on one device: shards cut into pieces, pieces joined into shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.mpmd.transfers.items import Device
from meshwright.partitioning.moving.boxes import Box

Cuts = tuple[tuple[int, Box], ...]  # of which argument, which part of it
Joins = tuple[tuple[tuple[int, Box], ...], ...]  # per result: which arguments, where they go
Program = Callable[..., Sequence[jax.Array]]


@functools.lru_cache(maxsize=4096)
def cutter(device: Device, cuts: Cuts) -> Program:
    """A program that takes shards and returns pieces of them."""

    def cut(*shards: jax.Array) -> list[jax.Array]:
        return [_slice(shards[number], part) for number, part in cuts]

    return _on(device, cut)


@functools.lru_cache(maxsize=4096)
def joiner(device: Device, joins: Joins) -> Program:
    """A program that takes pieces and returns the shards they are parts of."""

    def join(*pieces: jax.Array) -> list[jax.Array]:
        return [_join([(pieces[number], place) for number, place in some]) for some in joins]

    return _on(device, join)


def _on(device: Device, function: Any) -> Program:
    """Not compiled ahead: compiled programs refuse 4-bit integers for their layout (jax 0.10)."""
    program: Program = jax.jit(function)
    alone = Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))

    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        if jax.sharding.get_abstract_mesh().empty:
            return program(*arguments)
        # A mesh that the caller has set would be taken for the program's own.
        with jax.set_mesh(alone):
            return program(*arguments)

    return run


def _slice(shard: jax.Array, part: Box) -> jax.Array:
    starts, stops = [start for start, _ in part], [stop for _, stop in part]
    piece = jax.lax.slice(_bits(shard), starts, stops)
    return _unbits(piece, shard.dtype)


def _join(parts: Sequence[tuple[jax.Array, Box]]) -> jax.Array:
    """The parts of a shard form a grid: join them dim by dim, the last dim first."""
    dtype = parts[0][0].dtype
    return _unbits(_grid([(_bits(value), place) for value, place in parts], 0), dtype)


def _grid(parts: Sequence[tuple[jax.Array, Box]], dim: int) -> jax.Array:
    if len(parts) == 1:
        return parts[0][0]
    rows: dict[int, list[tuple[jax.Array, Box]]] = {}
    for value, place in parts:
        rows.setdefault(place[dim][0], []).append((value, place))
    joined = [_grid(rows[start], dim + 1) for start in sorted(rows)]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=dim)


def _bits(array: jax.Array) -> jax.Array:
    """Short floats as integers: a compiler may pass them through longer ones, and lose NaNs."""
    width = jax.dtypes.itemsize_bits(array.dtype)
    if width < 32 and jnp.issubdtype(array.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(array, f"uint{width}")
    return array


def _unbits(array: jax.Array, dtype: Any) -> jax.Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
