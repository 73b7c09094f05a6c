"""The compiling process: readies the devices, waits for a job, compiles it, writes the outcome.

Run with a folder: `site` is there from the start, `job` once a line comes by standard input, and
`outcome` in the end. It ends when its standard input does, so that it never outlives the process
that asked. What it imports delays every rehearsal, so it is little.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright import _compat
from meshwright.hlo.literals import integer_constants
from meshwright.rehearsal.compiler import ON_CHIP, Job, Outcome, Site, versions

_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: str) -> None:
    path = Path(folder)
    site: Site = pickle.loads(path.joinpath("site").read_bytes())  # noqa: S301 - our parent's
    devices = _devices_or_error(site)
    if not os.read(0, 1):
        _leave(folder)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    job: Job = pickle.loads(path.joinpath("job").read_bytes())  # noqa: S301 - our parent's
    _compat.use_shardy(job.shardy)
    outcome = compile_job(job, devices)
    # Renamed when it is whole: an outcome that exists has been written to its end.
    partial = path / "outcome.part"
    partial.write_text(json.dumps(outcome.to_json()), encoding="utf-8")
    partial.replace(path / "outcome")
    sys.stderr.flush()
    os._exit(0)  # nothing is left to tidy, and compilers take their time to unload


def _devices_or_error(site: Site) -> list[Any] | Exception:
    """Return the devices to compile for, or what went wrong with them: that too is an outcome."""
    try:
        return _devices(site)
    except Exception as error:
        return error


def compile_job(job: Job, devices: list[Any] | Exception) -> Outcome:
    """Compile a job; what the compiler raises is an outcome too."""
    began = time.monotonic()
    try:
        if isinstance(devices, Exception):
            raise devices
        free = list(job.free_outputs)
        if job.partitioners:
            # In the function: few programs have any. They must live until it is compiled.
            from meshwright._compat_lowering import restore_partitioners

            sys.path += [folder for folder in job.module_path if folder not in sys.path]
            kept = restore_partitioners(job.partitioners, devices, job.site.platform)  # noqa: F841
        executable = _compat.compile_bytecode(job.code, devices, free, dict(job.options))
    except Exception as error:  # whatever a compiler raises is its verdict
        reason = str(error).strip()
        exhausted = "RESOURCE_EXHAUSTED" in reason or "Ran out of memory" in reason
        # A kernel too large for the memory on chip is a fault of the kernel, not of the step.
        exhausted = exhausted and not ON_CHIP.search(reason)
        return Outcome(
            "exhausted" if exhausted else "failed",
            reason=reason,
            seconds=time.monotonic() - began,
            compiler=_compiler(job),
        )
    seconds = time.monotonic() - began
    stats = executable.get_compiled_memory_stats()
    memory = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in _SIZES}
    memory["live"] = int(getattr(stats, "peak_memory_in_bytes", 0))
    module = executable.hlo_modules()[0]
    text = module.to_string()
    has_kernels, by_device = '"tpu_custom_call"' in text, "partition-id(" in text
    serialized = module.as_serialized_hlo_module_proto() if has_kernels or by_device else b""
    return Outcome(
        "compiled",
        text=text,
        memory=memory,
        cost=_cost(executable),
        seconds=seconds,
        compiler=_compiler(job),
        shardings=_compat.written_shardings(executable, len(job.free_outputs)),
        constants=integer_constants(serialized, _TABLES[has_kernels]),
    )


# Bytes of the largest constant to keep: of kernels' masks, of offsets by device.
_TABLES = {True: 1 << 20, False: 1 << 16}


def _cost(executable: Any) -> dict[str, float]:
    try:
        costs = executable.cost_analysis()
    except Exception:  # the CUDA compiler has none without a driver
        return {}
    costs = (costs[0] if isinstance(costs, list) else costs) or {}
    wanted = ("flops", "bytes accessed", "optimal_seconds")
    return {name: float(costs[name]) for name in wanted if name in costs}


def _devices(site: Site) -> list[Any]:
    """Return the devices of a topology, in the order of the program's partitions."""
    if site.platform == "cpu":
        count = int(site.positions.size)
        jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]
        return list(jax.devices("cpu"))
    # In the function: jobs for CPUs need none of what this imports.
    from meshwright.meshes.devices import target_topology

    here = target_topology(site.topology, None, 1)
    devices = here.devices or ()
    # The compiler counts its devices in an order of its own; the points of the grid are the same.
    points = np.argsort(site.topology.index.ravel())[site.positions.ravel()]
    return [devices[number] for number in here.index.ravel()[points]]


def _compiler(job: Job) -> str:
    """Name the compiler and its version, e.g. `libtpu 0.0.42, jax 0.10.2`."""
    known = dict(versions())
    vendor = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "cpu": "jaxlib"}[job.site.platform]
    return f"{vendor} {known[vendor]}, jax {known['jax']}"


def _end_with_parent(folder: str) -> None:
    while os.read(0, 1):
        pass
    _leave(folder)


def _leave(folder: str) -> None:
    """Remove the folder and exit: the parent, which would have removed it, is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
