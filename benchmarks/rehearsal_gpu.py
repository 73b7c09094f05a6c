"""On a real GPU: rehearsed memory and time of steps against measured ones.

    python benchmarks/rehearsal_gpu.py [h200:1] [step ...]     # rehearse and measure
    python benchmarks/rehearsal_gpu.py measure FILE [step ...] # only measure, into a JSON file
    python benchmarks/rehearsal_gpu.py against FILE [step ...] # rehearse against that file, no GPU

Each step (`gpu_steps.py`) is rehearsed for one GPU that the compiler only knows by its description,
and run on the real one, in a process of its own that finds it compiled: the compiler tries kernels
out and needs memory for that, which is no part of the step's. The means are over the steps that the
model was made on (`SEEN`), and those that it never met (`BLIND`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_steps
import jax
import jax.numpy as jnp

import meshwright as mw

RUNS = 10
GPU = "h200:1"
GROUPS = {"seen": gpu_steps.SEEN, "never met": gpu_steps.BLIND}


def filled(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Random values: counters are 0, ids spread evenly, weights of the size that training has."""
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        top = 32_000 if shape.shape else 1
        return jax.random.randint(key, shape.shape, 0, top, jnp.int32).astype(shape.dtype)
    return (0.02 * jax.random.normal(key, shape.shape, jnp.bfloat16)).astype(shape.dtype)


def measured(name: str) -> dict[str, float]:
    """Peak memory and the best of a few times of a step on the GPU that is here."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    step, shapes = gpu_steps.STEPS[name]()
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    make = jax.jit(lambda keys: [filled(k, s) for k, s in zip(keys, leaves, strict=True)])
    args = treedef.unflatten(make(keys))
    compiled = jax.jit(step).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]  # before results pile up
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(RUNS):
            out = compiled(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / RUNS)
    return {"seconds": min(times), "peak": peak}


def in_a_process(name: str) -> dict[str, float]:
    """Measure a step twice, each time in a process of its own: the second finds it compiled."""
    command = [sys.executable, __file__, "one", name]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        for _ in range(2):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            if done.returncode:
                return {"error": done.stderr[-400:]}  # type: ignore[dict-item]
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rehearsed(name: str, on: str) -> Any:
    step, shapes = gpu_steps.STEPS[name]()
    return mw.rehearse(step, *shapes, mesh="dp:1", on=on, name=name)


def compare(names: list[str], on: str, real: dict[str, dict[str, float]] | None) -> None:
    print(
        f"{'step':<22}{'rehearsed':>11}{'measured':>11}{'ratio':>7}"
        f"{'modelled':>12}{'measured':>12}{'ratio':>7}"
    )
    times: dict[str, list[float]] = {group: [] for group in GROUPS}
    peaks: dict[str, list[float]] = {group: [] for group in GROUPS}
    for name in names:
        got = in_a_process(name) if real is None else real.get(name, {"error": "not measured"})
        if "error" in got:
            print(f"{name:<22}not measured: {got['error']}", flush=True)
            continue
        result = rehearsed(name, on)
        modelled = result.time.total
        group = next(group for group, steps in GROUPS.items() if name in steps)
        times[group].append(abs(modelled / got["seconds"] - 1))
        peaks[group].append(abs(result.memory.peak / got["peak"] - 1))
        print(
            f"{name:<22}{result.memory.peak / 2**30:>7.2f} GiB{got['peak'] / 2**30:>7.2f} GiB"
            f"{result.memory.peak / got['peak']:>7.2f}"
            f"{modelled * 1e3:>9.2f} ms{got['seconds'] * 1e3:>9.2f} ms"
            f"{modelled / got['seconds']:>7.2f}",
            flush=True,
        )
    for group in GROUPS:
        if times[group]:
            print(
                f"{len(times[group])} steps {group}: mean error of time "
                f"{statistics.mean(times[group]):.1%}, of peak memory "
                f"{statistics.mean(peaks[group]):.1%} (worst {max(peaks[group]):.1%})"
            )


def main(args: list[str]) -> None:
    if args[:1] == ["one"]:
        print(json.dumps(measured(args[1])))
        return
    jax.config.update("jax_platforms", "cpu")  # the GPU is for the processes that measure
    if args[:1] == ["measure"]:
        names = args[2:] or list(gpu_steps.STEPS)
        real = {}
        for name in names:
            real[name] = in_a_process(name)
            print(name, real[name], flush=True)
            Path(args[1]).write_text(json.dumps(real, indent=1))
        return
    real = None
    if args[:1] == ["against"]:
        real = json.loads(Path(args[1]).read_text())
        args = [GPU, *args[2:]]
    compare(args[1:] or list(gpu_steps.STEPS), args[0] if args else GPU, real)


if __name__ == "__main__":
    main(sys.argv[1:])
