"""A tour in about a minute on two cores, with no accelerator and no vendor's library.

python examples/demo.py [meshwright-report.html]

A mesh is placed on 256 TPU chips, an 8B model is cut over it and its train step rehearsed on
simulated devices; a tiny one is trained on eight of them, sharded and as a pipeline; and each model
gets a page of its own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright.cli import terminal
from meshwright.pipelines.explanation import Explanation
from meshwright.rehearsal.collectives.types import cause_line

MODEL, MESH, POD, BATCH, SEQ = "llama3-8b", "fsdp:-1, tp:4", "v5e:16x16", 256, 2048
SHARDED, PIPELINED = "fsdp:4, tp:2", "pp:2, fsdp:2, tp:2"
STEPS, ROWS, MICROBATCHES = 10, 16, 4
TOLERANCE = 1e-4
BEGAN = time.monotonic()


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    report = Path(sys.argv[1] if len(sys.argv) > 1 else "meshwright-report.html")

    say(f"1. {MESH!r} on {POD}: which chip goes where")
    placed = mw.place(MESH, POD)
    terminal.show_placement(placed)

    say(f"2. {MODEL}: how every parameter is cut")
    big = mw.models.model(MODEL)
    mesh = mw.abstract_mesh(placed.spec)
    print(mw.explain(big.shapes()["params"], mesh, rules=big.rules(mesh), unused="allow"))

    say(f"3. {MODEL} rehearsed: {BATCH} rows of {SEQ} on {placed.positions.size} simulated devices")
    result = mw.rehearse_model(MODEL, batch=BATCH, seq=SEQ, mesh=MESH, on=POD, compiler="cpu")
    print(result.memory.verdict())
    for cause, entries in result.collectives.by_cause().items():
        print(cause_line(cause, entries))
    if result.time is not None:
        print(result.time)

    say(f"4. The tiny model trained on 8 simulated devices, as {SHARDED}")
    tiny = mw.models.model("tiny", stages=2)
    start = jax.device_get(jax.jit(tiny.state)(jax.random.key(0)))
    sharded = train_sharded(tiny, start)

    say(f"5. The same from the same start as a pipeline, {PIPELINED}")
    pipelined, explained = train_pipelined(tiny, start)
    check_same(sharded, pipelined)

    say(f"6. The report: {report}")
    result.save(report)
    print(result.advice())
    print(f"\nOpen {report} in a browser ({report.stat().st_size // 1024} KiB, works offline).")
    other = report.with_name(f"{report.stem}-tiny.html")
    ran = mw.rehearse_model(tiny, batch=ROWS, mesh=SHARDED, on="cpu:8")
    runs = {f"as {SHARDED}": sharded, f"as {PIPELINED}": pipelined}
    text = mw.report.page(ran, pipeline={f"as {PIPELINED}": explained}, training=runs)
    other.write_text(text, encoding="utf-8")
    print(f"What ran is in {other}: losses, and the pipeline's timeline.")


def train_sharded(model: mw.models.Model, start: dict) -> list[float]:
    """A few steps of one program over all devices."""
    mesh = mw.mesh(SHARDED)
    state = mw.shard(start, mesh, rules=model.rules(mesh), unused="allow")
    rows = NamedSharding(mesh, model.batch_spec(mesh))
    step = jax.jit(model.train_step, donate_argnums=0)
    losses = []
    with jax.set_mesh(mesh):
        for seed in range(STEPS):
            batch = jax.device_put(model.example(ROWS, seed=seed), rows)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    show(losses)
    return losses


def train_pipelined(model: mw.models.Model, state: dict) -> tuple[list[float], Explanation]:
    """The same steps, the layers' two halves in two groups of devices."""
    groups = mw.MpmdMesh(mw.mesh(PIPELINED), "pp")
    step = mw.pipeline(model.train_step, groups, microbatches=MICROBATCHES)
    losses = []
    for seed in range(STEPS):
        state, metrics = step(state, model.example(ROWS, seed=seed))
        losses.append(float(metrics["loss"]))
    show(losses)
    return losses, step.explain(state, model.example(ROWS))


def check_same(ours: list[float], theirs: list[float]) -> None:
    """Stop if the two runs are not the same, or learned nothing."""
    apart = max(abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True))
    if not apart <= TOLERANCE:
        raise SystemExit(f"the pipeline's losses are {apart:.1e} from the sharded run's")
    if not ours[-1] < ours[0] / 2:
        raise SystemExit(f"the loss did not fall: {ours[0]:.4f} to {ours[-1]:.4f}")
    print(f"both runs agree: at most {apart:.1e} apart")


def show(losses: list[float]) -> None:
    print("loss", " ".join(f"{loss:.3f}" for loss in losses))


def say(title: str) -> None:
    print(f"\n== {title}  [{time.monotonic() - BEGAN:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
