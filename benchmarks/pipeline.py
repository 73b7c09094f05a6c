"""The pipeline runtime: its own cost, a step against SpectraX's and against jit, memory, timeline.

    python benchmarks/pipeline.py [--peer PYTHON]

`--peer` is the Python of an environment of its own where SpectraX is installed; the same model,
schedule and machine then run there too, between our runs (see `peer_spectrax.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw
from meshwright._text import duration, table
from meshwright.pipelines.runtime import bind_arguments
from meshwright.pipelines.step import PipelineStep
from meshwright.trees.split import split_arrays

LAYERS, GROUPS = 8, 4
# hidden, rows of a microbatch, microbatches, steps to time
CASES = {"tiny": (8, 4, 8, 30), "hidden 256": (256, 64, 32, 15)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default=None)
    peer = parser.parse_args().peer
    jax.config.update("jax_num_cpu_devices", GROUPS)
    for name, (hidden, rows, microbatches, steps) in CASES.items():
        compare(name, hidden, rows, microbatches, steps, peer)
    memory()


def model(hidden: int, rows: int, microbatches: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    scale = np.float32(np.sqrt(hidden))
    weights = [rng.normal(size=(hidden, hidden)).astype("float32") / scale for _ in range(LAYERS)]
    x = rng.normal(size=(rows * microbatches, hidden)).astype("float32")
    return [(w, np.zeros(hidden, "float32")) for w in weights], x, np.roll(x, 1, axis=1)


def loss(params: Any, x: Any, y: Any) -> Any:
    for n, (w, b) in enumerate(params):
        x = jnp.tanh(x @ w + b)
        if n % 2 and n + 1 < LAYERS:
            x = mw.stage_end(x)
    return jnp.mean((x - y) ** 2)


def groups() -> mw.MpmdMesh:
    return mw.MpmdMesh(mw.mesh(f"pp:{GROUPS}", devices=jax.devices()[:GROUPS]), "pp")


def compare(
    name: str, hidden: int, rows: int, microbatches: int, steps: int, peer: str | None
) -> None:
    args = model(hidden, rows, microbatches)
    step = mw.pipeline(loss, groups(), schedule="1f1b", microbatches=microbatches)
    start = time.perf_counter()
    value, grads = jax.block_until_ready(step(*args))
    first = time.perf_counter() - start
    weights = [
        tuple(jax.device_put(p, g.sharding) for p, g in zip(layer, grad, strict=True))
        for layer, grad in zip(args[0], grads, strict=True)
    ]
    args = (weights, *args[1:])
    ours = timed(lambda: step(*args), steps)
    bare, tasks = bare_loop(step, args, steps)
    one = timed(one_device(args, microbatches), steps)
    theirs = run_peer(peer, hidden, rows, microbatches, steps)
    ours = min(ours, timed(lambda: step(*args), steps))
    predicted = microbatches / (microbatches + GROUPS - 1)
    print(f"{name}: {LAYERS} layers, hidden {hidden}, {GROUPS} groups, {microbatches} microbatches")
    lines = [["what", "time", "of ours"]]
    figures = {
        "our step": ours,
        "the same tasks and transfers in a bare loop": bare,
        "jit of one microbatch after the other, one device": one,
        "our first step, tracing and compiling": first,
    }
    if theirs:
        if abs(theirs["value"] - float(value)) > 1e-4:
            raise SystemExit(f"SpectraX gives {theirs['value']}, we give {float(value)}")
        figures |= {"SpectraX's step": theirs["step"], "its first step": theirs["first"]}
    lines += [[what, duration(t), f"{t / ours:.2f}"] for what, t in figures.items()]
    print(table(lines, [False, True, True]))
    print(f"own cost: {1e6 * (ours - bare) / tasks:.0f} us a task of {tasks}")
    if theirs:
        print(f"our step by SpectraX's: {ours / theirs['step']:.2f}", end=", ")
        print(f"first step {first / theirs['first']:.2f}")
    seen = [step.timeline(*args).ratio for _ in range(5)]
    print(f"predicted by measured makespan: {statistics.median(seen):.2f}")
    print(f"share of a group's time in the pipeline without a bubble: {predicted:.2f}\n")


def bare_loop(step: PipelineStep, args: Any, steps: int) -> tuple[float, int]:
    """The compiled tasks and transfers of a step, called one after the other with stored values."""
    plan = next(reversed(step._plans.values()))
    tasks = sum(operation.task is not None for operation in plan.operations)
    parts = split_arrays(args)

    def once() -> Any:
        slots = bind_arguments(plan.assembled.builder, parts.arrays, step.local_groups)
        last = None
        for call, ins, outs in calls:
            last = call(*[slots[n] for n in ins])
            for n, result in zip(outs, last, strict=True):
                slots[n] = result
        return last

    calls = [(operation.call, operation.ins, operation.outs) for operation in plan.operations]
    return timed(once, steps), tasks


def one_device(args: Any, microbatches: int) -> Callable[[], Any]:
    params, x, y = jax.device_put(args, jax.devices()[0])
    gradient = jax.jit(jax.value_and_grad(loss))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    rows = x.shape[0] // microbatches
    pieces = [(x[n : n + rows], y[n : n + rows]) for n in range(0, x.shape[0], rows)]

    def run() -> Any:
        total = None
        for piece in pieces:
            found = gradient(params, *piece)
            total = found if total is None else add(total, found)
        return total

    return run


def run_peer(peer: str | None, *sizes: int) -> dict[str, float]:
    if peer is None:
        return {}
    script = Path(__file__).with_name("peer_spectrax.py")
    done = subprocess.run(
        [peer, str(script), *map(str, sizes)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory() -> None:
    """Activations that a group holds at once, as counted while a step runs, and as proved."""
    args = model(64, 16, 16)
    print("activations held by each group, counted and proved")
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
        step = mw.pipeline(loss, groups(), schedule=name, microbatches=16)
        jax.block_until_ready(step(*args))
        plan = next(reversed(step._plans.values()))
        print(f"  {name:12} {held(plan, split_arrays(args).arrays, step)} {plan.proof.live}")


def held(plan: Any, arrays: Any, step: PipelineStep) -> tuple[int, ...]:
    """The most microbatches whose stage activations are in slots at the same time."""
    gc.collect()
    slots = bind_arguments(plan.assembled.builder, arrays, step.local_groups)
    made: dict[int, tuple[int, int]] = {}
    most = [0] * GROUPS
    for operation in plan.operations:
        results = operation.call(*[slots[n] for n in operation.ins])
        for n, result in zip(operation.outs, results, strict=True):
            slots[n] = result
        task = operation.task
        if task is not None and task.kind == "F":
            kept = operation.outs[: len(plan.programs["F", task.stage].outs)]
            made.update(dict.fromkeys(kept, (operation.group, task.microbatch)))
        for group in range(GROUPS):
            live = {at for n, at in made.items() if slots[n] is not None and at[0] == group}
            most[group] = max(most[group], len(live))
        for n in operation.drop:
            slots[n] = None
    return tuple(most)


def timed(call: Callable[[], Any], times: int) -> float:
    """The median, after three to warm up."""
    seen = []
    for _ in range(times + 3):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seen.append(time.perf_counter() - start)
    return statistics.median(seen[3:])


if __name__ == "__main__":
    main()
