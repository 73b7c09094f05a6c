"""How long a mesh takes to make, new and repeated: ours, JAX's, and eformer's when installed.

python benchmarks/creation.py
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import meshwright as mw
from meshwright._text import duration, table
from meshwright.interfaces import mesh_creation
from meshwright.meshes import build, devices
from meshwright.placement import placer

NAMES = ("dp", "fsdp", "ep", "tp", "sp")
DIMS = (2, -1, 1, 8, 1)


def best_of(call: Callable[[], Any], before: Callable[[], Any] = lambda: None, times: int = 7):
    """Median of several timings, each after `before`."""
    seen = []
    for _ in range(times):
        before()
        start = time.perf_counter()
        call()
        seen.append(time.perf_counter() - start)
    return statistics.median(seen)


def repeated(call: Callable[[], Any], times: int = 2000) -> float:
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def forget() -> None:
    mesh_creation._meshes.clear()
    placer._placed.cache_clear()
    build.build_mesh.cache_clear()
    devices._live.cache_clear()


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 512)
    devices = jax.devices()
    makers: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "meshwright.create_mesh": (lambda: mw.create_mesh(DIMS), forget),
        "meshwright.mesh": (lambda: mw.mesh("dp:2, fsdp:-1, tp:8"), forget),
        "jax.make_mesh": (
            lambda: jax.make_mesh(
                (2, 32, 1, 8, 1), NAMES, axis_types=(jax.sharding.AxisType.Auto,) * 5
            ),
            lambda: None,
        ),
    }
    if importlib.util.find_spec("eformer"):
        from eformer.escale.mesh import creation

        def forget_theirs() -> None:
            for value in vars(creation).values():
                getattr(value, "cache_clear", lambda: None)()

        makers["eformer create_mesh"] = (lambda: creation.create_mesh(DIMS, NAMES), forget_theirs)
    ours = repeated(makers["meshwright.create_mesh"][0])
    rows = [["maker", "new", "repeated", "repeated / ours"]]
    for name, (call, before) in makers.items():
        again = repeated(call)
        rows.append([name, duration(best_of(call, before)), duration(again), f"{again / ours:.1f}"])
    print(f"{len(devices)} simulated devices, jax {jax.__version__}")
    print(table(rows, [False, True, True, True]))

    rows = [["placing on", "devices", "request", "wall"]]
    for name, request in (
        ("v5p:16x20x28", "dp:4, fsdp:-1, tp:8"),
        ("tpu7x:16x16x36", "dp:4, fsdp:-1, ep:4, tp:8, sp:2"),
        ("cpu:100000", "dp:-1, fsdp:20, tp:8"),
    ):
        hardware = mw.topology(name)
        wall = best_of(lambda hardware=hardware, request=request: mw.place(request, hardware))
        rows.append([name, f"{hardware.num_devices:,}", request, duration(wall)])
    print(table(rows, [False, True, False, True]))


if __name__ == "__main__":
    main()
