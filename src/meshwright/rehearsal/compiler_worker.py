"""The compiling process: readies the devices, waits for a job, compiles it, writes the outcome.

Run with a folder: `site` is there from the start, `job` once a line comes by standard input, and
`outcome` in the end. It ends when its standard input does, so that it never outlives the process
that asked. What it imports delays every rehearsal, so it is little.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright import _compat
from meshwright.hlo.instructions import HOST_SPACE
from meshwright.hlo.literals import integer_constants, module_of_proto
from meshwright.rehearsal.compiler import ON_CHIP, SCHEDULED, Job, Outcome, Site, versions

_SIZES = (
    *("argument", "output", "alias", "temp", "generated_code"),
    *("host_argument", "host_output", "host_alias", "host_temp"),
)


def main(folder: str) -> None:
    path = Path(folder)
    site: Site = pickle.loads(path.joinpath("site").read_bytes())  # noqa: S301 - our parent's
    devices = _devices_or_error(site)
    if not os.read(0, 1):
        _leave(folder)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    job: Job = pickle.loads(path.joinpath("job").read_bytes())  # noqa: S301 - our parent's
    _compat.use_shardy(job.shardy)
    if not job.codegen:
        threading.Thread(target=_answer_when_scheduled, args=(path, job), daemon=True).start()
    outcome = compile_job(job, devices)
    if outcome.memory and job.site.platform == "tpu":
        outcome = dataclasses.replace(outcome, memory={**outcome.memory, **_assigned(path)})
        if not job.codegen:  # of a small program there was code before the other thread looked
            outcome = _scheduled(path, job, outcome.seconds) or outcome
    _answer(path, outcome)


_answering = threading.Lock()


def _answer(path: Path, outcome: Outcome) -> None:
    """Write the outcome, once, and exit."""
    _answering.acquire()  # for good: the other thread must not write a second one
    # Renamed when it is whole: an outcome that exists has been written to its end.
    partial = path / "outcome.part"
    partial.write_text(json.dumps(outcome.to_json()), encoding="utf-8")
    partial.replace(path / "outcome")
    sys.stderr.flush()
    os._exit(0)  # nothing is left to tidy, and compilers take their time to unload


# libtpu writes the program with its schedule and memory spaces before it generates code, which
# takes most of its time: 6 s and 6 minutes for two layers of llama3-8b on v6e:2x4, on one busy
# core. But for the estimates of its kernels it is the same program.
_PROTO = ".hlo.pb"  # written after the text
_WRITTEN = f"*.after_optimizations_after_buffer_assignment{_PROTO}"
_LOOK = 0.1  # seconds


_ASSIGNED = re.compile(r"\(color=(\d+)\)\nTotal bytes: (\d+)")


def _assigned(path: Path) -> dict[str, int]:
    """Bytes that the compiler assigned of the device's main memory and of the host's.

    Nothing where it reported none: the user has the compiler's programs written elsewhere.
    """
    reports = path.joinpath(SCHEDULED).glob("*.after_optimizations-memory-usage-report.txt")
    texts = [report.read_text(encoding="utf-8") for report in reports]
    if len(texts) != 1:
        return {}
    by_space = dict(_ASSIGNED.findall(texts[0]))
    return {
        "assigned": int(by_space.get("0", 0)),
        "host_assigned": int(by_space.get(str(HOST_SPACE), 0)),
    }


def _answer_when_scheduled(path: Path, job: Job) -> None:
    """Wait for the scheduled program, and answer with it."""
    began, size = time.monotonic(), -1
    while True:
        time.sleep(_LOOK)
        for file in path.joinpath(SCHEDULED).glob(_WRITTEN):
            before, size = size, file.stat().st_size
            if size and size == before:  # nothing was added since the last look
                outcome = _scheduled(path, job, time.monotonic() - began)
                if outcome is not None:
                    _answer(path, outcome)


def _scheduled(path: Path, job: Job, seconds: float) -> Outcome | None:
    """The program as it was scheduled, or None where that or its memory's report is not there."""
    file = next(path.joinpath(SCHEDULED).glob(_WRITTEN), None)
    memory = _assigned(path)
    if file is None or not memory:
        return None
    module = module_of_proto(file.read_bytes())
    text = Path(str(file).removesuffix(_PROTO) + ".txt").read_text(encoding="utf-8")
    return Outcome(
        "compiled",
        text=text,
        memory=memory,
        seconds=seconds,
        compiler=f"{_compiler(job)}, without code",
        constants=_constants(text, module),
    )


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
    if job.site.platform == "tpu":
        memory["live"] = int(getattr(stats, "peak_memory_in_bytes", 0))
    module = executable.hlo_modules()[0]
    text = module.to_string()
    return Outcome(
        "compiled",
        text=text,
        memory=memory,
        cost=_cost(executable),
        seconds=seconds,
        compiler=_compiler(job),
        shardings=_compat.written_shardings(executable, len(job.free_outputs)),
        constants=_constants(text, module.as_serialized_hlo_module_proto()),
    )


# Bytes of the largest constant to keep: of kernels' masks, of offsets by device.
_TABLES = {True: 1 << 20, False: 1 << 16}


def _constants(text: str, module: bytes) -> dict[str, list[Any]]:
    has_kernels, by_device = '"tpu_custom_call"' in text, "partition-id(" in text
    return integer_constants(module, _TABLES[has_kernels]) if has_kernels or by_device else {}


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
        # The program is read and never run: the machine code, which this alone concerns, may be
        # slow. It takes most of the time (18 s and 5 s with and without for a tiny decoder).
        jax.config.update("jax_disable_most_optimizations", True)  # type: ignore[no-untyped-call]
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
