"""Ours against `jax.experimental.mesh_utils` (and eformer, when installed) on 70 requests.

    make bench                                   # or, with libtpu and the CUDA plugin installed:
    python benchmarks/placement.py [--markdown]

Every layout, theirs and ours, is costed by the same model on the same devices: those of the
vendors' compilers, no accelerator needed. JAX gets its best of three calls: without splitting,
with splitting, and as a hybrid mesh with the slow split that we found (it does not search one).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.experimental import mesh_utils

import meshwright as mw
from meshwright._text import duration, table
from meshwright.meshes.devices import target_topology
from meshwright.placement.placer import measure

# Hardware, slices, requests. Those that mesh_utils is known to fail on are among them.
PAIRS: list[tuple[str, int, list[str]]] = [
    ("v5e:2x4", 1, ["dp:2, tp:4", "fsdp:4, tp:2", "tp:8"]),
    ("v5e:4x4", 1, ["fsdp:4, tp:4", "dp:2, fsdp:2, tp:4", "fsdp:2, tp:8"]),
    ("v5e:4x8", 1, ["fsdp:8, tp:4", "fsdp:4, tp:8", "dp:2, fsdp:4, tp:4"]),
    ("v5e:16x16", 1, ["fsdp:64, tp:4", "fsdp:32, tp:8", "fsdp:16, tp:16", "fsdp:256"]),
    ("v5e:16x16", 1, ["dp:4, fsdp:16, tp:4", "pp:4, fsdp:16, tp:4", "fsdp:32, sp:2, tp:4"]),
    ("v5e:16x16", 2, ["dp:2, fsdp:64, tp:4", "fsdp:128, tp:4"]),
    ("v5e:16x16", 4, ["dp:4, fsdp:32, tp:8", "dp:2, fsdp:64, tp:8"]),
    ("v6e:2x4", 1, ["dp:2, tp:4", "fsdp:4, tp:2"]),
    ("v6e:8x16", 1, ["fsdp:32, tp:4", "fsdp:16, tp:8"]),
    ("v6e:16x16", 1, ["fsdp:64, tp:4", "fsdp:32, tp:8", "dp:2, fsdp:32, tp:4"]),
    ("v4:4x4x4", 1, ["fsdp:16, tp:4", "fsdp:8, tp:8", "dp:4, fsdp:4, tp:4"]),
    ("v4:8x8x8", 1, ["fsdp:64, tp:8", "fsdp:128, tp:4"]),
    ("v5p:2x2x4", 1, ["dp:2, fsdp:2, tp:4", "fsdp:4, tp:4", "fsdp:8, tp:2"]),
    ("v5p:4x4x4", 1, ["fsdp:16, tp:4", "fsdp:8, tp:8", "dp:4, fsdp:4, tp:4", "ep:8, tp:8"]),
    ("v5p:4x4x8", 1, ["fsdp:16, tp:8", "fsdp:32, tp:4", "dp:2, fsdp:16, tp:4"]),
    ("v5p:4x4x16", 1, ["a:4, b:4, c:16", "fsdp:64, tp:4", "dp:4, fsdp:16, tp:4"]),
    ("v5p:4x4x20", 1, ["fsdp:40, tp:8", "fsdp:80, tp:4", "dp:5, fsdp:16, tp:4"]),
    ("v5p:4x4x28", 1, ["fsdp:56, tp:8", "dp:7, fsdp:8, tp:8", "dp:7, fsdp:16, tp:4"]),
    ("v5p:8x8x8", 1, ["fsdp:64, tp:8", "fsdp:128, tp:4", "dp:2, fsdp:16, tp:16", "fsdp:32, tp:16"]),
    ("v5p:16x16x16", 1, ["fsdp:512, tp:8", "dp:4, fsdp:8, ep:4, tp:8, sp:4", "fsdp:1024, tp:4"]),
    ("v5p:16x20x28", 1, ["fsdp:1120, tp:8", "dp:4, fsdp:280, tp:8", "dp:7, fsdp:80, tp:16"]),
    ("v5p:4x4x8", 2, ["dp:2, fsdp:16, tp:8", "fsdp:32, tp:8"]),
    ("tpu7x:4x4x4", 1, ["fsdp:16, tp:8", "fsdp:32, tp:4", "dp:4, fsdp:4, tp:8"]),
    ("tpu7x:16x16x36", 1, ["fsdp:2304, tp:8", "dp:4, fsdp:576, tp:8", "pp:3, fsdp:768, tp:8"]),
    ("h100:8x2", 1, ["fsdp:4, tp:4", "dp:2, tp:8"]),
    ("h100:8x4", 1, ["fsdp:4, tp:8", "dp:2, fsdp:4, tp:4", "dp:4, pp:2, tp:4"]),
    ("gb200:72x4", 1, ["dp:4, fsdp:9, tp:8", "fsdp:36, tp:8"]),
]


@dataclass
class Outcome:
    """A layout's cost under the model, or why there is none, and the wall time it took."""

    cost: float | None
    wall: float
    axes: tuple[float, ...] = ()
    why: str = ""
    by_default: bool = True


def main() -> int:
    if not (_installed("libtpu") and _installed("jax_plugins.xla_cuda13")):
        print("needs the vendors' compilers: make bench, or pip install 'jax[tpu]'")
        return 0
    rows = []
    for name, slices, requests in PAIRS:
        hardware = target_topology(name, None, slices)
        for request in requests:
            spec = mw.MeshSpec.parse(request)
            rows.append((name, slices, spec, ours(spec, hardware), jax_best(spec, hardware)))
    report(rows, markdown="--markdown" in sys.argv)
    report_eformer(rows)
    return 0


def ours(spec: mw.MeshSpec, hardware: mw.Topology) -> Outcome:
    start = time.perf_counter()
    placed = mw.place(spec, hardware)
    wall = time.perf_counter() - start
    return Outcome(placed.cost, wall, tuple(a.cost.all_gather for a in placed.axes))


def jax_best(spec: mw.MeshSpec, hardware: mw.Topology) -> Outcome:
    """The best of what mesh_utils offers for this request."""
    devices = list(hardware.devices or ())
    place_of = {device: place for place, device in enumerate(devices)}
    best = Outcome(None, 0.0)
    start = time.perf_counter()
    for number, call in enumerate(_jax_calls(spec, hardware, devices)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                grid = call()
        except Exception as error:
            best.why = best.why or type(error).__name__
            best.by_default = best.by_default and number > 0
            continue
        found = measure(spec, hardware, np.vectorize(place_of.__getitem__)(grid))
        if best.cost is None or found.cost < best.cost:
            axes = tuple(a.cost.all_gather for a in found.axes)
            best = Outcome(found.cost, 0.0, axes, best.why, best.by_default)
    best.wall = time.perf_counter() - start
    return best


def _jax_calls(spec, hardware, devices):
    for split in (False, True):
        yield lambda split=split: mesh_utils.create_device_mesh(
            spec.sizes, devices, allow_split_physical_axes=split
        )
    slow = [axis.slow for axis in mw.place(spec, hardware).axes]
    if hardware.num_slices == 1:
        return
    inside = [size // part for size, part in zip(spec.sizes, slow, strict=True)]
    for process in (False, True):
        yield lambda process=process: mesh_utils.create_hybrid_device_mesh(
            inside, slow, devices, process_is_granule=process, allow_split_physical_axes=True
        )


def report(rows, markdown: bool) -> None:
    heading = ["hardware", "request", "all-gather per axis, ours", "JAX's", "ours", "JAX", "ratio"]
    heading += ["our wall", "JAX's wall"]
    lines = [heading]
    for name, slices, spec, mine, theirs in rows:
        ratio = f"{theirs.cost / mine.cost:.2f}" if theirs.cost else "-"
        lines.append(
            [
                name + (f" x {slices}" if slices > 1 else ""),
                str(spec),
                _times(mine),
                _times(theirs),
                duration(mine.cost),
                duration(theirs.cost) if theirs.cost else f"fails ({theirs.why})",
                ratio,
                duration(mine.wall),
                duration(theirs.wall),
            ]
        )
    right = [False, False, True, True, True, True, True, True, True]
    print(_markdown(lines) if markdown else table(lines, right))
    failed = sum(theirs.cost is None for *_, theirs in rows)
    ratios = [theirs.cost / mine.cost for *_, mine, theirs in rows if theirs.cost]
    better = sum(ratio >= 1.3 for ratio in ratios)
    print(
        f"\n{len(rows)} pairs. Ours places {sum(m.cost is not None for *_, m, _ in rows)}; "
        f"JAX places {len(rows) - failed}, "
        f"{sum(t.by_default for *_, t in rows)} of them by its default call. "
        f"Where both do, JAX's weighted cost is {min(ratios):.2f} to {max(ratios):.2f} times "
        f"ours (geometric mean {np.exp(np.mean(np.log(ratios))):.2f}); at least 1.3 times "
        f"on {better} of {len(rows)} pairs, and {failed} more fail. Slowest placement: ours "
        f"{duration(max(m.wall for *_, m, _ in rows))}, JAX "
        f"{duration(max(t.wall for *_, t in rows))}. jax {jax.__version__}."
    )
    worse = [str(spec) for _, _, spec, m, t in rows if t.cost and t.cost < m.cost * (1 - 1e-9)]
    print(f"Ours is worse on {len(worse)}{': ' if worse else '.'}{'; '.join(worse)}")


def _times(outcome: Outcome) -> str:
    return " / ".join(duration(t) if t else "-" for t in outcome.axes) or "-"


def _markdown(lines: list[list[str]]) -> str:
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(lines[0]), *body[1:]])


def eformer_layout(spec: mw.MeshSpec, hardware: mw.Topology) -> Outcome:
    """What eformer's `create_mesh` builds where `jax.devices()` are these: it asks JAX itself."""
    from unittest import mock

    from eformer.escale.mesh import creation

    for value in vars(creation).values():  # its cache does not look at the devices
        getattr(value, "cache_clear", lambda: None)()
    devices = list(hardware.devices or ())
    here = mock.patch.multiple(
        jax,
        devices=lambda backend=None: devices,
        device_count=lambda backend=None: len(devices),
        local_device_count=lambda backend=None: len(devices) // hardware.num_hosts,
        process_count=lambda backend=None: hardware.num_hosts,
        default_backend=lambda: hardware.chip.family,
    )
    place_of = {device: place for place, device in enumerate(devices)}
    start = time.perf_counter()
    try:
        with here, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = creation.create_mesh(spec.sizes, spec.names)
        wall = time.perf_counter() - start
        if built.devices.shape != spec.sizes:
            return Outcome(None, wall, why=f"gives {built.devices.shape}")
        places = np.vectorize(place_of.__getitem__)(built.devices)
        return Outcome(measure(spec, hardware, places).cost, wall)
    except Exception as error:
        return Outcome(None, time.perf_counter() - start, why=type(error).__name__)


def report_eformer(rows) -> None:
    """A line on eformer, when it is there to be measured."""
    if not _installed("eformer"):
        print("eformer: not installed, not compared (pip install eformer, in a venv of its own).")
        return
    pairs = []
    for name, slices, spec, mine, _ in rows:
        pairs.append((name, spec, mine, eformer_layout(spec, target_topology(name, None, slices))))
    ratios = [theirs.cost / mine.cost for *_, mine, theirs in pairs if theirs.cost]
    failures = Counter(theirs.why for *_, theirs in pairs if theirs.cost is None)
    print(
        f"eformer places {len(ratios)} of {len(pairs)}"
        + (f" (fails: {dict(failures)})" if failures else "")
        + (
            f"; where it does, its weighted cost is {min(ratios):.2f} to {max(ratios):.2f} times "
            f"ours (geometric mean {np.exp(np.mean(np.log(ratios))):.2f}), at least 1.3 times on "
            f"{sum(ratio >= 1.3 for ratio in ratios)}."
            if ratios
            else "."
        )
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
