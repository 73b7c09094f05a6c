"""Transfers between two groups: time to dispatch and in all, against JAX's own `device_put`.

    python benchmarks/transfers.py            # two processes of 4 devices each, over loopback
    python benchmarks/transfers.py --local    # two groups of 4 devices in one process

Each message is one array of 16 KiB or 1 MiB, or 8 arrays of 16 KiB, over 4 devices. `dispatch` is
what a call takes in the receiving process (both calls where one process does both), `in all` is
until the last of `--times` messages has arrived, per message. `device_put` cannot do other splits
across processes: the ratio is then to the same split.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import _compat
from meshwright._text import duration, table

SIZES = {"16 KiB": (1, 64), "1 MiB": (1, 512), "8 x 16 KiB": (8, 64)}
SPLITS = {"same split": P("a"), "other split": P(None, "a")}
DEADLINE = 300


def start(port: int, me: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mw.transfers.allow_puts()
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, 2, me, coordinator_bind_address=address)


def groups() -> tuple[Mesh, Mesh]:
    devices = np.array(jax.devices())
    return Mesh(devices[:4], ("a",)), Mesh(devices[4:], ("a",))


def tree(first: Mesh, count: int, side: int) -> list[jax.Array]:
    values = np.ones((side, side if side > 64 else 64), np.float32)
    where = NamedSharding(first, P("a"))
    return [
        jax.make_array_from_callback(values.shape, where, lambda i: values[i], dtype=values.dtype)
        for _ in range(count)
    ]


def timed(step: Callable[[], Any], times: int) -> tuple[float, float]:
    """Seconds to dispatch one and in all, per step, after a few for warmth."""
    for _ in range(5):
        jax.block_until_ready(step())
    meet()
    begun = time.perf_counter()
    results = [step() for _ in range(times)]
    dispatched = time.perf_counter()
    jax.block_until_ready(results)
    done = time.perf_counter()
    meet()
    return (dispatched - begun) / times, (done - begun) / times


_met = 0


def meet() -> None:
    """Wait until the other process is here too, if there is one."""
    global _met
    client = _compat.coordination_client()
    if client is not None:
        _met += 1
        client.wait_at_barrier(f"meshwright/benchmark/{_met}", 60_000)


def ways(arrays: list[jax.Array], target: NamedSharding, same: bool) -> dict[str, Any]:
    """What is compared: a call of each process per message."""
    route = mw.transfers.route(arrays, target)
    names = ["local"] if jax.process_count() == 1 else ["pull", "put"]
    links = {name: mw.transfers.connect(transport=name) for name in names}
    found: dict[str, Any] = {}
    if same or len(names) == 1:
        found["device_put"] = lambda: jax.device_put(arrays, [target] * len(arrays))
    for name, link in links.items():
        found[name] = lambda link=link: link.move(route, 0, arrays)
    return found


def measure(times: int) -> list[list[Any]]:
    first, last = groups()
    rows = []
    for size, (count, side) in SIZES.items():
        arrays = tree(first, count, side)
        for split, spec in SPLITS.items():
            target = NamedSharding(last, spec)
            for way, step in ways(arrays, target, spec == P("a")).items():
                rows.append([size, split, way, *timed(step, times)])
    return rows


def show(rows: list[list[Any]]) -> str:
    heading = ["message", "target", "way", "dispatch", "in all", "to device_put"]
    lines, base = [heading], 0.0
    for size, split, way, dispatched, total in rows:
        base = total if way == "device_put" else base
        ratio = f"{total / base:.2f}"
        lines.append([size, split, way, duration(dispatched), duration(total), ratio])
    return table(lines, [False, False, False, True, True, True])


def across(times: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--times", str(times), "--process"]
    running = [
        subprocess.Popen([*command, str(port), str(me)], stdout=subprocess.PIPE, text=True)
        for me in range(2)
    ]
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    print(f"Two processes of 4 CPU devices, jax {jax.__version__}, the receiving one:")
    print(show(json.loads(outputs[1].splitlines()[-1])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--process", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        start(*options.process)
        print(json.dumps(measure(options.times)), flush=True)
    elif options.local:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        print(f"Two groups of 4 CPU devices in one process, jax {jax.__version__}:")
        print(show(measure(options.times)))
    else:
        across(options.times)


if __name__ == "__main__":
    main()
