"""`reshard(...)`: a tree of arrays from any meshes and splits to another, checked first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshwright.partitioning.leaves import refuse, walk
from meshwright.partitioning.moving.agreement import agree
from meshwright.partitioning.moving.donating import (
    Memory,
    memory,
    own_memory,
    return_freed_memory,
)
from meshwright.partitioning.moving.movable import plan, spans_processes
from meshwright.partitioning.moving.moves import Move, platform
from meshwright.partitioning.moving.ways import Way, assemble, keep, put, put_from_host, way
from meshwright.partitioning.specs import AnyMesh
from meshwright.spec.checks import check_flag

# Arrays are moved in batches: small ones together, for speed, large ones alone, for memory.
_LARGEST_BATCH = 64 * 2**20
_SMALLEST_BATCH = 4 * 2**20


def reshard(tree: Any, mesh: AnyMesh, specs: Any, *, donate: bool = False) -> Any:
    """The tree with every array on `mesh`, split by `specs`; other leaves pass through.

    No bit changes. Arrays may come from any mesh, split, single device or from host memory, and
    go to fewer, more or other devices. `specs` is a tree of `PartitionSpec`s (or of
    `NamedSharding`s on `mesh`), a prefix of one, or one spec for all. Pieces that already lie as
    asked are not copied: the result then shares its memory with the array that was given, so
    donating one of the two to a jitted function deletes the other.

    `donate=True` gives up the arrays as they are moved, so that little more than one of them
    exists twice. An array stays as it was, not deleted, when its pieces already lie in place, or
    when its memory is shared with another live array.

    In several processes all call it with the same global arrays. A process that holds no part of
    an array passes the global array without shards, as JAX makes it, or a
    `jax.ShapeDtypeStruct(shape, dtype, sharding=...)`; host arrays must be equal everywhere.
    What cannot be done is refused with the same words in each.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import PartitionSpec as P
    >>> train, serve = mw.mesh("fsdp:8"), mw.mesh("tp:2", devices=jax.devices()[:2])
    >>> params = {"w": jax.device_put(np.ones((8, 8)), jax.NamedSharding(train, P("fsdp")))}
    >>> mw.reshard(params, serve, P(None, "tp"))["w"].sharding.shard_shape((8, 8))
    (8, 4)
    """
    donate = check_flag("donate", donate)
    found = walk(tree)
    planned = plan(tree, found, mesh, specs)
    problems: Sequence[str] = planned.problems
    spans = spans_processes(found, mesh)
    if spans:
        problems = agree(problems, planned.moves)
    refuse("reshard", problems)
    with _as_asked(planned.moves):
        # What is one object here may be two in another process: there each is moved on its own.
        moved = _each(planned.moves, donate) if spans else _once(planned.moves, donate)
    return found.rebuild(
        [finish(value) for finish, value in zip(planned.finish, moved, strict=True)]
    )


def _once(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    """An array that the tree holds twice is moved once, and stays one."""
    names = [(id(move.value), move.target) for move in moves]
    single = dict(zip(names, moves, strict=True))
    moved = dict(zip(single, _each(list(single.values()), donate), strict=True))
    return [moved[name] for name in names]


def _each(moves: Sequence[Move], donate: bool) -> list[jax.Array]:
    owned = own_memory(moves) if donate else []
    results: list[jax.Array] = []
    for batch in batches(moves):
        values = move_batch(batch)
        if donate:
            _give_up(batch, values, owned[len(results) :])
        results += values
    return results


def _give_up(batch: Sequence[Move], values: Sequence[jax.Array], owned: Sequence[Memory]) -> None:
    """Delete what was moved, unless its memory is shared or the result lives on in it."""
    freed = 0
    for move, value, own in zip(batch, values, owned, strict=False):
        if own and (way(move) is put_from_host or not own & memory(value)):
            freed += move.bytes if platform(move.value.sharding) == "cpu" else 0
            move.value.delete()
    if freed >= _SMALLEST_BATCH // 2:
        return_freed_memory()


def batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """In order; a batch is no larger than the largest array, within reason."""
    largest = max((move.bytes for move in moves), default=0)
    room = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, largest))
    batch: list[Move] = []
    filled = 0
    for move in moves:
        if batch and filled + move.bytes > room:
            yield batch
            batch, filled = [], 0
        batch.append(move)
        filled += move.bytes
    if batch:
        yield batch


def move_batch(batch: Sequence[Move]) -> list[jax.Array]:
    """Move arrays together, and wait for them: what is on its way stays bounded."""
    by_way: dict[Way, list[int]] = {keep: [], put: [], put_from_host: [], assemble: []}
    for number, move in enumerate(batch):
        by_way[way(move)].append(number)
    results: dict[int, jax.Array] = {}
    for do, numbers in by_way.items():
        if numbers:
            results.update(zip(numbers, do([batch[n] for n in numbers]), strict=True))
    ready = [results[number] for number in range(len(batch))]
    jax.block_until_ready(ready)  # type: ignore[no-untyped-call]
    return ready


@contextlib.contextmanager
def _as_asked(moves: Sequence[Move]) -> Iterator[None]:
    """Transfers are what was asked for; 64-bit arrays stay so whatever JAX is set to."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard("allow"))
        if any(move.dtype.itemsize >= 8 for move in moves):
            stack.enter_context(jax.enable_x64(True))
        yield
