"""On a real GPU: rehearsed memory and time of train steps against measured ones.

python benchmarks/rehearsal_gpu.py [h200:1]

Each model is rehearsed for one GPU that the compiler only knows by its description, then run on
the real one, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import jax

import meshwright as mw

STEPS = 10
# Name, batch, row length, changes to the preset.
MODELS = (
    ("llama3-8b", 8, 2048, {"layers": 4, "vocab": 32_000}),
    ("mixtral-8x7b", 4, 2048, {"layers": 2, "mlp": 3584, "vocab": 32_000}),
    ("vit-l16", 128, None, {}),
    ("resnet50", 256, None, {}),
)


def rehearsed(
    on: str, name: str, batch: int, seq: int | None, changes: dict
) -> mw.rehearsal.Rehearsal:
    model = mw.models.model(name, **changes)
    return mw.rehearse_model(model, batch=batch, seq=seq, mesh="dp:1", on=on, cache=False)


def measured(name: str, batch: int, seq: int | None, changes: dict) -> dict[str, float]:
    """Peak memory and time of a step on the GPU that is here."""
    model = mw.models.model(name, **changes)
    state = jax.jit(model.state)(jax.random.key(0))
    data = jax.device_put(model.example(batch, seq))
    step = jax.jit(model.train_step, donate_argnums=0)
    state, _ = step(state, data)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(STEPS):
        state, metrics = step(state, data)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - began) / STEPS
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return {"peak": peak, "seconds": seconds}


def in_a_process(number: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "measure", str(number)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(on: str) -> None:
    print(
        f"{'model':<14}{'rehearsed':>11}{'measured':>11}{'ratio':>7}"
        f"{'modelled':>11}{'measured':>11}{'ratio':>7}{'utilisation':>13}"
    )
    for number, (name, batch, seq, changes) in enumerate(MODELS):
        result = rehearsed(on, name, batch, seq, changes)
        real = in_a_process(number)
        time_ = result.time
        print(
            f"{name:<14}{result.memory.peak / 2**30:>7.2f} GiB{real['peak'] / 2**30:>7.2f} GiB"
            f"{result.memory.peak / real['peak']:>7.2f}"
            f"{time_.total * 1e3:>8.1f} ms{real['seconds'] * 1e3:>8.1f} ms"
            f"{time_.total / real['seconds']:>7.2f}"
            f"{time_.flops / time_.peak_flops / real['seconds']:>13.0%}",
            flush=True,
        )
        print("   ", {part: round(s * 1e3, 1) for part, s in time_.parts().items()}, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measured(*MODELS[int(sys.argv[2])])))
    else:
        jax.config.update("jax_platforms", "cpu")  # the GPU is for the processes that measure
        main(*sys.argv[1:] or ["h200:1"])
