"""On a real GPU: `mw.measure` of steps; do the kernels add up, and how true is the model of each.

    python benchmarks/measured_gpu.py [--json FILE] [--speeds FILE] [step ...]

Each step is one of `gpu_steps.py`. The first table: the step's time, what the kernels of its trace
add up to, what the model makes of the program that ran, and what the profiler added. The second:
modelled and measured time of each class of kernels, over all steps. With `--speeds` the model goes
by a file of `meshwright calibrate`.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import gpu_steps
import jax
from rehearsal_gpu import filled

import meshwright as mw

STEPS = ("llama3-8b", "bf16 products", "flash 8k", "softmax", "resnet50", "table of 32k")


def measured(name: str, speeds: str | None) -> mw.Measurement:
    step, shapes = gpu_steps.STEPS[name]()
    leaves, treedef = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    make = jax.jit(lambda keys: [filled(k, s) for k, s in zip(keys, leaves, strict=True)])
    args = treedef.unflatten(make(keys))
    return mw.measure(jax.jit(step), *args, steps=10, name=name, speeds=speeds)


def main(words: list[str]) -> None:
    out = speeds = None
    while words[:1] in (["--json"], ["--speeds"]):
        out = Path(words[1]) if words[0] == "--json" else out
        speeds = words[1] if words[0] == "--speeds" else speeds
        words = words[2:]
    told: dict[str, object] = {}
    errors: list[float] = []
    classes: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    print(
        f"{'step':<24}{'step':>11}{'kernels':>11}{'ratio':>7}{'modelled':>11}{'ratio':>7}"
        f"{'profiler':>10}{'silent':>8}{'unknown':>9}"
    )
    for name in words or STEPS:
        m = measured(name, speeds)
        told[name] = m.to_json()
        print(
            f"{name:<24}{m.seconds * 1e3:>8.2f} ms{m.kernel_seconds * 1e3:>8.2f} ms"
            f"{m.kernel_seconds / m.seconds:>7.3f}{m.time.total * 1e3:>8.2f} ms{m.ratio:>7.2f}"
            f"{m.overhead:>+10.1%}{len(m.silent):>8}{sum(m.unknown.values()) * 1e3:>6.2f} ms",
            flush=True,
        )
        for part in m.parts:
            classes[part.name][0] += part.modelled
            classes[part.name][1] += part.measured
        if out is not None:
            out.write_text(json.dumps(told, indent=1))
        errors.append(abs(m.ratio - 1))
    print(f"mean error of the modelled step {sum(errors) / len(errors):.1%}")
    print(f"\n{'class of kernels':<24}{'modelled':>11}{'measured':>12}{'ratio':>7}")
    for name, (modelled, real) in sorted(classes.items(), key=lambda entry: -entry[1][1]):
        ratio = modelled / real if real else 0.0
        print(f"{name:<24}{modelled * 1e3:>8.2f} ms{real * 1e3:>9.2f} ms{ratio:>7.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
