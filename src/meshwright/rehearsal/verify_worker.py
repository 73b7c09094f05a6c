"""The process of `verify` that simulates devices: runs two exported programs on the same arguments.

Run with a folder: `task` is there from the start, `answer` in the end, with the results of both.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def main(folder: str) -> None:
    task = Path(folder, "task").read_bytes()
    count, names, kinds, wide, programs, values = pickle.loads(task)  # noqa: S301 - our parent's
    jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]
    jax.config.update("jax_enable_x64", wide)  # type: ignore[no-untyped-call]
    types = tuple(AxisType[kind] for kind in kinds)
    answer = [run(sizes, names, types, code, values) for sizes, code in programs]
    # Renamed when it is whole: an answer that exists has been written to its end.
    partial = Path(folder, "answer.part")
    partial.write_bytes(pickle.dumps(answer))
    partial.replace(Path(folder, "answer"))


def run(sizes: Any, names: Any, types: Any, code: bytes, values: list[Any]) -> list[Any]:
    """Run a program on as many devices as it was exported for; return its results on the host."""
    exported = jax.export.deserialize(bytearray(code))
    devices = np.array(jax.devices("cpu")[: int(np.prod(sizes))])
    mesh = Mesh(devices.reshape(sizes), names, axis_types=types)
    placed = [
        jax.device_put(value, sharding)
        for value, sharding in zip(values, exported.in_shardings_jax(mesh), strict=True)
    ]
    with jax.set_mesh(mesh):
        return [np.asarray(result) for result in jax.jit(exported.call)(placed)]


if __name__ == "__main__":
    main(*sys.argv[1:])
