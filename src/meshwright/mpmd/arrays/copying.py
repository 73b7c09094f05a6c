"""Moving arrays, some of them to several places; a source is given up after its last copy."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.partitioning.moving.donating import (
    Memory,
    memory,
    own_memory,
    return_freed_memory,
)
from meshwright.partitioning.moving.moves import Move, platform
from meshwright.partitioning.moving.resharding import _as_asked, batches, move_batch
from meshwright.partitioning.moving.ways import put_from_host, way

# Freed memory goes back to the system once it is worth the call.
_WORTH_RETURNING = 2 * 2**20


def move_all(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """The results in order. Memory is bounded as in `reshard`."""
    owned = _owned(moves) if donate else {}
    last = {id(move.value): place for place, move in enumerate(moves)}
    living: dict[int, set[Any]] = collections.defaultdict(set)
    results: list[jax.Array] = []
    with _as_asked(moves):
        for batch in batches(moves):
            freed = 0
            for move, value in zip(batch, move_batch(batch), strict=True):
                source = id(move.value)
                if source in owned and way(move) is not put_from_host:
                    living[source] |= memory(value)
                own = owned.get(source)
                if own and last[source] == len(results) and not own & living[source]:
                    freed += _delete(move)
                results.append(value)
            _return(freed)
    return results


def once(moves: Sequence[Move], *, donate: bool) -> list[jax.Array]:
    """The same, where an array that goes to one place twice is moved once, and stays one."""
    names = [(id(move.value), move.target) for move in moves]
    single = dict(zip(names, moves, strict=True))
    moved = dict(zip(single, move_all(list(single.values()), donate=donate), strict=True))
    return [moved[name] for name in names]


def give_up(arrays: Iterable[jax.Array], results: Iterable[Any]) -> None:
    """Delete arrays that are no results, but for those whose memory another live array shares."""
    kept = {id(_data(value)) for value in results if isinstance(value, jax.Array)}
    single = {id(array): array for array in arrays if not array.is_deleted()}
    moves = [_resting(_data(array)) for array in single.values()]
    freed = 0
    for move, own in zip(moves, own_memory(moves), strict=True):
        if own and id(move.value) not in kept:
            freed += _delete(move)
    _return(freed)


def _owned(moves: Sequence[Move]) -> dict[int, Memory]:
    """The memory of each source that nothing else uses."""
    sources = {id(move.value): move for move in moves}
    return dict(zip(sources, own_memory(list(sources.values())), strict=True))


def _delete(move: Move) -> int:
    """Returns the bytes that the host got back."""
    on_cpu = platform(move.value.sharding) == "cpu"
    move.value.delete()
    return move.bytes if on_cpu else 0


def _return(freed: int) -> None:
    if freed >= _WORTH_RETURNING:
        return_freed_memory()


def _data(array: jax.Array) -> jax.Array:
    """The array itself; of keys the integers they are made of."""
    keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if keys else array


def _resting(array: jax.Array) -> Move:
    """An array that goes nowhere."""
    split: Any = array.sharding
    return Move("", array.shape, np.dtype(array.dtype), array, split, split)
