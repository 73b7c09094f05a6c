"""Seconds that a training loop stands still for a checkpoint, and that resuming from one takes.

    python benchmarks/checkpoints.py [megabytes]

The state is float32 noise in 16 arrays over eight simulated CPU devices; the median of five saves,
each of other values, into a temporary directory.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax

import meshwright as mw

ARRAYS, SAVES = 16, 5


def build(key: jax.Array, megabytes: int) -> list[jax.Array]:
    rows = megabytes * 1_000_000 // ARRAYS // 4 // 1024 // 8 * 8
    return [jax.random.normal(each, (rows, 1024)) for each in jax.random.split(key, ARRAYS)]


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    mesh = mw.mesh("fsdp:-1")
    blocking, returned, written = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = mw.Checkpoints(f"{folder}/run", keep=2)
        for number in range(SAVES):
            state = mw.init(build, jax.random.key(number), megabytes, mesh=mesh)
            jax.block_until_ready(state)
            began = time.perf_counter()
            mw.save_checkpoint(f"{folder}/alone", state, overwrite=True)
            blocking.append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoints.save(number, state)
            returned.append(time.perf_counter() - began)
            checkpoints.wait()
            written.append(time.perf_counter() - began)
        del state
        began = time.perf_counter()
        jax.block_until_ready(
            mw.resume(f"{folder}/run", build, jax.random.key(0), megabytes, mesh=mesh).state
        )
        resumed = time.perf_counter() - began
    for what, seconds in (
        ("save_checkpoint", statistics.median(blocking)),
        ("Checkpoints.save returns after", statistics.median(returned)),
        ("... and is on the disk after", statistics.median(written)),
        ("resume", resumed),
    ):
        print(f"{what:34}{seconds:8.3f} s")


if __name__ == "__main__":
    main()
