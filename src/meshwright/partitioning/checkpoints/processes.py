"""Several processes that save or restore as one: they add up, and they fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from meshwright.errors import LONGEST_MESSAGE, PartitionError
from meshwright.partitioning.checkpoints.checksums import WORD
from meshwright.partitioning.specs import make_spec

_LIMBS = (0, 16, 32, 48)  # a sum of 16-bit parts fits 32 bits on up to 65,536 processes


def is_first() -> bool:
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What fails in one process fails in all, with the same text; nobody waits alone."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return
    texts = _texts_of_all(str(problem) or repr(problem) if problem else "")
    first = next((text for text in texts if text), None)
    if first is not None:
        raise problem or PartitionError(first)


def add_up(sums: Sequence[int]) -> list[int]:
    """Each sum over all processes, modulo 2**64."""
    if jax.process_count() == 1 or not sums:
        return list(sums)
    parts = np.array([[total >> at & 0xFFFF for at in _LIMBS] for total in sums], np.uint32)
    rows = _over_processes(parts, lambda stacked: stacked.sum(axis=0)).tolist()
    return [sum(part << at for part, at in zip(row, _LIMBS, strict=True)) % WORD for row in rows]


def _over_processes(mine: NDArray[Any], combine: Callable[[Any], Any]) -> NDArray[Any]:
    """What `combine` makes of the arrays of all processes, stacked; all have the same shape."""
    heads = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([heads[process] for process in sorted(heads)]), ("process",))
    cut, whole = (NamedSharding(mesh, make_spec(axes)) for axes in (["process"], []))
    stacked = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        cut, mine[None]
    )
    return np.asarray(jax.jit(combine, out_shardings=whole)(stacked).addressable_data(0))


def _texts_of_all(text: str) -> list[str]:
    room = np.zeros(4 * LONGEST_MESSAGE, np.uint8)
    raw = np.frombuffer(text.encode()[: room.size], np.uint8)
    room[: raw.size] = raw
    rows = _over_processes(room, lambda stacked: stacked)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
