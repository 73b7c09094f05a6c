"""A pipeline of two groups in one process and in two, over loopback: the time of a step.

    python benchmarks/pipeline_processes.py [--shared]

Two processes get a half of the machine's cores each, one process all of them; with `--shared`
nobody is bound to cores, and the thread pools of both processes compete for all.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw
from meshwright._text import duration

LAYERS, HIDDEN, ROWS, MICROBATCHES, STEPS = 8, 256, 64, 32, 15


SCHEDULES = ("1f1b", "eager-1f1b")
PAIRS = 5  # interleaved, since the machine is not ours alone


def main(shared: bool) -> None:
    for schedule in SCHEDULES:
        pairs = [(run(1, schedule, shared), run(2, schedule, shared)) for _ in range(PAIRS)]
        one, two = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{schedule}: one process {duration(one)}, two processes {duration(two)}: "
            f"{two / one:.2f}"
        )


def run(processes: int, schedule: str, shared: bool) -> float:
    """The median time of a step, as the first process sees it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    setting = [schedule, str(int(shared)), str(port), str(processes)]
    words = [[sys.executable, __file__, *setting, str(me)] for me in range(2)]
    running = [
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for line in words[:processes]
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    return float(json.loads(said[0].splitlines()[-1]))


def work(schedule: str, shared: bool, port: int, processes: int, me: int) -> None:
    if not shared:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[me::processes])
    jax.config.update("jax_num_cpu_devices", 2 // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, processes, me, coordinator_bind_address=address)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 1), ("pp", "dp"))
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(HIDDEN, HIDDEN)).astype("float32") / 16 for _ in range(LAYERS)]
    x = rng.normal(size=(ROWS * MICROBATCHES, HIDDEN)).astype("float32")
    groups = mw.MpmdMesh(mesh, "pp")
    with mw.pipeline(train, groups, schedule=schedule, microbatches=MICROBATCHES) as step:
        times = []
        for _ in range(STEPS + 3):
            start = time.perf_counter()
            params, value = step(params, x)
            float(value)
            times.append(time.perf_counter() - start)
    print(json.dumps(statistics.median(times[3:])), flush=True)
    os._exit(0)


def train(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, grads = mw.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    h = x
    for n, weight in enumerate(params):
        h = jnp.tanh(h @ weight)
        if n == LAYERS // 2 - 1:
            h = mw.stage_end(h)
    return jnp.mean((h - x) ** 2)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        name, *numbers = sys.argv[1:]
        work(name, *map(int, numbers))
    else:
        main("--shared" in sys.argv)
