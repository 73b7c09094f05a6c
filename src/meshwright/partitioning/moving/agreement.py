"""All processes go ahead, or all refuse with the same words, before any device works.

They tell each other through JAX's coordination service: each says what is wrong and what it was
given, the first one compares, and its verdict is everyone's.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright import _compat
from meshwright.errors import listing
from meshwright.partitioning.moving.boxes import Shape, boxes
from meshwright.partitioning.moving.moves import Move, on_host

# How long to wait for a process that does not call; it may still be loading or compiling.
PATIENCE = 600.0
_MOST_PROBLEMS = 50
_calls = itertools.count()


def agree(problems: Sequence[str], moves: Sequence[Move]) -> list[str]:
    """The problems of all processes, the same in each; all of them call it."""
    client = _compat.coordination_client()
    if client is None:
        return list(problems)
    call = next(_calls)
    room = f"meshwright/reshard/{call}"
    report = {"problems": list(problems)[:_MOST_PROBLEMS], "arrays": list(map(fingerprint, moves))}
    client.key_value_set(f"{room}/{jax.process_index()}", json.dumps(report))
    if jax.process_index() == 0:
        client.key_value_set(f"{room}/verdict", json.dumps(_verdict(client, room, moves)))
        if call:
            client.key_value_delete(f"meshwright/reshard/{call - 1}/")
    verdict = _get(client, f"{room}/verdict", time.monotonic() + 2 * PATIENCE)
    return ["process 0 did not call reshard, or left."] if verdict is None else verdict


def _verdict(client: Any, room: str, moves: Sequence[Move]) -> list[str]:
    end = time.monotonic() + PATIENCE
    reports = [_get(client, f"{room}/{process}", end) for process in range(jax.process_count())]
    absent = [process for process, report in enumerate(reports) if report is None]
    if absent:
        return [
            f"{_named(absent)} did not call it within {PATIENCE:.0f} s. "
            "Every process must, also one that holds none of the arrays."
        ]
    found = dict.fromkeys(problem for report in reports for problem in report["problems"])
    return list(found) or list(differences([report["arrays"] for report in reports], moves))


def differences(prints: Sequence[Sequence[int]], moves: Sequence[Move]) -> Iterator[str]:
    """What processes were given otherwise than the first, whose moves these are."""
    first = prints[0]
    for process, other in enumerate(prints):
        if len(other) != len(first):
            yield f"process {process} passed {len(other)} arrays, process 0 passed {len(first)}."
            return
    for number, move in enumerate(moves):
        odd = [process for process, other in enumerate(prints) if other[number] != first[number]]
        if odd:
            yield (
                f"{move.where}: {_named(odd)} passed another shape, split, spec or other values "
                f"than process 0 ({move.dtype}{list(move.shape)} to {move.target.spec}). Pass the "
                "same global array everywhere: a process that holds none of it passes "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=its sharding)."
            )


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {listing(processes)}"


def fingerprint(move: Move) -> int:
    """A number that tells arrays, splits and destinations apart; of host arrays the values too."""
    if move.source is None:
        values = np.ascontiguousarray(on_host(move.value))
        source = zlib.crc32(values.reshape(-1).view(np.uint8).data)
    else:
        source = _split(move.source, move.shape)
    what = (move.where, move.shape, move.dtype.name, source, move.target.mesh.axis_names)
    return zlib.crc32(repr((*what, move.target.spec, _split(move.target, move.shape))).encode())


@functools.lru_cache(maxsize=1024)
def _split(sharding: Sharding, shape: Shape) -> int:
    where = [(device.id, box) for device, box in boxes(sharding, shape).items()]
    return zlib.crc32(repr(sorted(where)).encode())


def _get(client: Any, key: str, end: float) -> Any:
    wait = max(200, int(1000 * (end - time.monotonic())))
    try:
        return json.loads(client.blocking_key_value_get(key, wait))
    except jax.errors.JaxRuntimeError:
        return None
