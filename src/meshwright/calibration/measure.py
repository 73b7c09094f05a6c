"""`measure`: run a real step under the profiler, and lay it beside the model of its program.

In order: compile the step for its own arguments, run it until nothing changes any more, time it
without the profiler, run it under the profiler, read the trace, join it with the program that ran
(`joining`). On a GPU kernels run inside of CUDA graphs by default, which hide their names from the
profiler: the step is timed as it is, and traced as it is compiled without them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright._checks import check_flag
from meshwright._processes import combine_texts
from meshwright._progress import Pulse, showing
from meshwright._text import plural
from meshwright.calibration.joining import (
    DeviceRecord,
    Instructions,
    join,
    read_records,
    record_device,
)
from meshwright.calibration.measurement import Measurement
from meshwright.calibration.trace import Event, Trace, record
from meshwright.errors import CalibrationError, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import measured_by
from meshwright.hlo.program import read_program
from meshwright.meshes.build import explain_mesh
from meshwright.placement.placement import Placement
from meshwright.placement.placer import measure as measure_placement
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.kernel_speeds import speeds as kernel_speeds
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_arguments import argument_names, is_jitted, unbound
from meshwright.rehearsal.step_time import step_time
from meshwright.trees.walk import walk

_ROUNDS = 3  # of timing
_MOST_COMPILES = 3  # until the step gives back what it takes
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def measure(
    step: Callable[..., Any],
    *args: Any,
    rehearsal: Rehearsal | None = None,
    mesh: Mesh | None = None,
    steps: int = 5,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    trace: str | Path | None = None,
    progress: bool = True,
    name: str | None = None,
) -> Measurement:
    """Run a step on the devices that are here, and say what every part of it takes.

    The step runs as in a training loop: what it returns in place of a donated argument goes into
    the next one. Donated arguments are used up, as by any call; `results` of the answer is what the
    last step returned. In a job of several processes all call this; process 0 shows all devices,
    the others their own.

    Args:
      step: the step, bare or with `jax.jit`, `nnx.jit` or `eqx.filter_jit`.
      *args: its arguments, arrays on the devices.
      rehearsal: the rehearsal of this step, whose promises are shown beside.
      mesh: the mesh of the devices; by default that of the arguments' shardings.
      steps: how many to run in each round of timing and under the profiler.
      speeds: measured speeds that the model goes by, as for `rehearse`; by default the tables'.
      trace: a folder to keep the profiler's own files in, for xprof or Perfetto.
      progress: as for `rehearse`.
      name: what the result is called; by default the function's name.

    Raises:
      CalibrationError: for shapes in place of arrays, a donated argument that no result can take
        the place of, a profiler that runs already, a trace without events. What the step itself
        raises comes through.

    >>> import jax, meshwright as mw
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = mw.mesh("fsdp:8")
    >>> w = jax.device_put(jax.numpy.ones((512, 512)), NamedSharding(mesh, P("fsdp")))
    >>> x = jax.device_put(jax.numpy.ones((64, 512)), NamedSharding(mesh, P("fsdp")))
    >>> m = mw.measure(lambda w, x: x @ w, w, x)
    >>> [(entry.collective.kind, entry.runs) for entry in m.collectives]
    [('all-gather', 1)]
    """
    if type(steps) is not int or steps < 1:
        raise CalibrationError(f"steps: {short(steps)} is not a number from 1 on.", option="steps")
    if rehearsal is not None and not isinstance(rehearsal, Rehearsal):
        raise CalibrationError(
            f"rehearsal: {short(rehearsal)} is not what rehearse returns.", option="rehearsal"
        )
    if not callable(step):
        raise CalibrationError(f"step: {short(step)} cannot be called.", option="step")
    if hasattr(step, "call_compiled"):  # a pipeline's: many programs, on groups of devices
        raise CalibrationError(
            "step: a pipeline runs many programs at once. step.timeline(*args) measures when each "
            "of its tasks ran.",
            option="step",
        )
    check_flag("progress", progress)
    called = name or str(getattr(unbound(step), "__name__", "step"))
    folder = None if trace is None else _trace_folder(trace)
    on_mesh = _mesh_of(args, mesh, argument_names(unbound(step), len(args)))
    placement = _placement(on_mesh, speeds)
    with showing(progress), Pulse(f"measuring {called}") as pulse:
        run = _Run(step, args, on_mesh, pulse)
        times = run.times(steps)
        pulse.now(f"{plural(steps, 'step')} under the profiler")
        run.without_graphs()
        with record(folder) as recording:
            traced = run.round(steps)
        pulse.now("reading the trace")
        return _measurement(
            run, placement, recording.trace, steps, times, traced, called, rehearsal
        )


def _trace_folder(trace: str | Path) -> Path:
    folder = Path(trace).expanduser()
    if folder.exists() and not folder.is_dir():
        raise CalibrationError(f"trace: {folder} is a file, not a folder.", option="trace")
    return folder


def _mesh_of(args: Sequence[Any], mesh: Mesh | None, names: Sequence[str]) -> Mesh:
    """The mesh of the arguments, which must be arrays; of one device where they have none."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise CalibrationError(
            f"mesh: {short(mesh)} is not a jax.sharding.Mesh of devices that are here. "
            "mw.mesh(spec) makes one.",
            option="mesh",
        )
    devices: dict[Any, None] = {}
    for name, arg in zip(names, args, strict=True):
        for leaf in walk(arg).arrays:
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise CalibrationError(
                    f"{name}: a shape, where a step that is run needs an array. Shapes alone can "
                    "be rehearsed: mw.rehearse(step, *args, mesh=...).",
                    option="args",
                )
            sharding: Any = getattr(leaf.value, "sharding", None)
            if isinstance(sharding, NamedSharding) and mesh is None:
                mesh = sharding.mesh if isinstance(sharding.mesh, Mesh) else None
            if sharding is not None:
                devices |= dict.fromkeys(sharding.device_set)
    if mesh is not None:
        return mesh
    used = sorted(devices, key=lambda device: device.id) or jax.devices()[:1]
    return Mesh(np.array(used), ("devices",))


def _placement(mesh: Mesh, speeds: str | os.PathLike[str] | Calibration | None) -> Placement:
    """How the mesh lies on the devices, with measured speeds where they are given."""
    placement = explain_mesh(mesh)
    if speeds is None:
        return placement
    hardware = measured_by(placement.topology, speeds)
    return measure_placement(placement.spec, hardware, placement.positions)


class _Run:
    """A step that is compiled, and run again and again on what it returns."""

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], mesh: Mesh, pulse: Pulse):
        self.step, self.args, self.mesh, self.pulse = step, list(args), mesh, pulse
        self.names = argument_names(unbound(step), len(args))
        self.notes: list[str] = []
        self.platform = next(iter(mesh.devices.flat)).platform
        self.results: Any = None
        # Donated arguments, and the result that takes the place of each; unknown until it has run.
        self.taken: dict[int, int] | None = None
        for compiles in range(_MOST_COMPILES):
            pulse.now("compiling")
            self.compiled = self._compile({})
            before = _looks(self.args)
            self._once()
            if _looks(self.args) == before:
                break
            if compiles == 0:
                self.notes.append(
                    "The first step gives back arrays of other shardings or types than it takes, "
                    "so that JAX compiles it twice; measured is the second program."
                )
        else:
            raise CalibrationError(
                f"the step gives back other shapes or shardings than it takes, "
                f"{_MOST_COMPILES} times in a row: {_difference(before, _looks(self.args))}. A "
                "loop would compile it anew each time. Give its jit out_shardings, or keep shapes "
                "as they are."
            )
        self.traced = self.compiled

    def _compile(self, options: dict[str, Any]) -> Any:
        """Compile for the arguments of now; `options` are the compiler's."""
        function: Any = self.step
        bound: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        if isinstance(function, functools.partial) and is_jitted(function.func):
            function, bound, named = function.func, function.args, function.keywords
        if not is_jitted(function):
            function = jax.jit(function)
        lowered = function.lower(*bound, *self.args, **named)
        info = getattr(lowered, "args_info", None)
        if info is not None:  # static arguments are not among those of a compiled program
            if len(info[0]) != len(bound) + len(self.args):
                raise CalibrationError(
                    "step: it has static arguments by number. Bind them by name: "
                    "functools.partial(jax.jit(f, static_argnames='train'), train=True).",
                    option="step",
                )
            named = {name: value for name, value in named.items() if name in info[1]}
        self.donated = _donated(lowered, len(bound))
        compiled = lowered.compile(options) if options else lowered.compile()
        return functools.partial(compiled, *bound, **named) if bound or named else compiled

    def _once(self) -> None:
        """Run a step; what it returns takes the place of what it has used up."""
        compiled = self.traced if hasattr(self, "traced") else self.compiled
        self.results = compiled(*self.args)
        elements = _elements(self.results)
        if self.taken is None:
            _wait(self.results)
            self.taken = self._match(elements)
        for number, result in self.taken.items():
            self.args[number] = elements[result]

    def _match(self, elements: Sequence[Any]) -> dict[int, int]:
        """Find the result that takes the place of each argument that is used up."""
        free, taken = list(range(len(elements))), {}
        for number, arg in enumerate(self.args):
            gone = _is_gone(arg)
            if not gone and number not in self.donated:
                continue
            wanted = _structure(arg)
            match = next((n for n in free if _structure(elements[n]) == wanted), None)
            if match is None and not gone:  # a donation that the compiler has no use for
                continue
            if match is None:
                raise CalibrationError(
                    f"{self.names[number]} is donated, and no result of the step has its structure "
                    "and shapes: the step cannot be run again. Return the new one, or do not "
                    "donate it.",
                    option="step",
                )
            free.remove(match)
            taken[number] = match
        return taken

    def round(self, steps: int) -> float:
        """Seconds of a step, the mean of some in a row."""
        _wait(self.args)
        began = time.perf_counter()
        for _ in range(steps):
            self._once()
            if self.platform == "cpu":  # simulated devices share threads: one step at a time
                _wait(self.results)
        _wait((self.results, self.args))
        return (time.perf_counter() - began) / steps

    def times(self, steps: int) -> list[float]:
        self.pulse.now(f"{plural(steps, 'step')}, three times")
        self.round(1)
        return sorted(self.round(steps) for _ in range(_ROUNDS))

    def without_graphs(self) -> None:
        """On a GPU, compile the step that is traced so that kernels keep their names."""
        if self.platform != "gpu":
            return
        self.pulse.now("compiling without CUDA graphs")
        self.traced = self._compile(_NO_GRAPHS)
        self.round(1)

    def all_notes(self) -> tuple[str, ...]:
        """What is different from a plain run."""
        notes = list(self.notes)
        if self.platform == "cpu":
            notes.append(
                "Simulated devices share this machine's cores: counts, waiting and order are real, "
                "speeds are not those of any accelerator."
            )
        if self.traced is not self.compiled:
            notes.append(
                "Traced without CUDA graphs (command buffers), which hide the names of kernels; "
                "the step's own time is with them."
            )
        return tuple(notes)

    @property
    def text(self) -> str:
        """The program that was traced."""
        compiled = self.traced
        while not hasattr(compiled, "as_text"):
            inner = compiled.func if isinstance(compiled, functools.partial) else compiled.compiled
            compiled = inner
        return str(compiled.as_text())


def _wait(values: Any) -> None:
    jax.block_until_ready(values)  # type: ignore[no-untyped-call]


def _elements(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _donated(lowered: Any, bound: int) -> set[int]:
    """Which arguments a step donates, as far as its `jit` says; the first ones are bound."""
    positional, _ = getattr(lowered, "args_info", ((), {}))
    return {
        number - bound
        for number, entry in enumerate(positional)
        if any(getattr(leaf, "donated", False) for leaf in jax.tree.leaves(entry))
    }


def _is_gone(arg: Any) -> bool:
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arg))


def _structure(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _looks(args: Sequence[Any]) -> list[tuple[str, Any]]:
    """What a compiled program depends on of its arguments, with their paths."""
    flat = jax.tree_util.tree_leaves_with_path(tuple(args))
    return [
        (jax.tree_util.keystr(path), (np.shape(leaf), getattr(leaf, "dtype", None), _spec(leaf)))
        for path, leaf in flat
    ]


def _spec(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return None
    dims = len(leaf.shape)
    shards: dict[Any, Any] = dict(leaf.sharding.devices_indices_map(leaf.shape))
    return dims, str(sorted((device.id, str(index)) for device, index in shards.items()))


def _difference(before: list[Any], after: list[Any]) -> str:
    for (path, old), (_, new) in zip(before, after, strict=True):
        if old != new:
            what = "shape" if old[0] != new[0] else "dtype" if old[1] != new[1] else "sharding"
            return f"the {what} of argument {path}"
    return "their structure"


def _measurement(
    run: _Run,
    placement: Placement,
    trace: Trace,
    steps: int,
    times: Sequence[float],
    traced: float,
    called: str,
    rehearsal: Rehearsal | None,
) -> Measurement:
    text = run.text
    program = read_program(text)
    collectives = analyze(program, placement)
    instructions = Instructions(program, collectives)
    events = trace.of(text.split(maxsplit=2)[1].rstrip(","))
    records = _of_all_processes(_own_records(run, events, instructions))
    chip = placement.topology.chip
    joined = join(records, instructions, collectives, placement, kernel_speeds(chip), steps)
    modelled = step_time(program, collectives, chip, find_repeated_work(program, placement, ()))
    return Measurement(
        called,
        str(placement.spec),
        placement.topology.name,
        chip.whose_speeds(placement.topology.num_devices),
        steps,
        statistics.median(times),
        times[0],
        times[-1],
        traced,
        modelled,
        joined.parts,
        joined.kernels,
        joined.collectives,
        joined.devices,
        joined.unknown,
        joined.silent,
        run.all_notes(),
        rehearsal,
        run.results,
    )


def _own_records(
    run: _Run, events: Sequence[Event], instructions: Instructions
) -> list[DeviceRecord]:
    """What the devices of this process did."""
    records = []
    for position, device in enumerate(run.mesh.devices.flat):
        if device.process_index != jax.process_index():
            continue
        # Simulated devices are noted by their number in the job, others by that on their host.
        noted = device.id if run.platform == "cpu" else device.local_hardware_id
        own = [event for event in events if event.device == noted]
        name = f"{device.platform}:{device.id}"
        records.append(
            record_device(own, instructions, position, name, device.process_index, _peak(device))
        )
    return records


def _peak(device: Any) -> int | None:
    stats = device.memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _of_all_processes(records: list[DeviceRecord]) -> list[DeviceRecord]:
    """In process 0 the records of all processes, in others their own."""
    if jax.process_count() == 1:
        return records
    gathered: list[str] = []

    def combine(texts: Sequence[str]) -> str:
        gathered.extend(texts)
        return "read"

    text = json.dumps([each.to_json() for each in records])
    combine_texts("measure", text, combine, timeout=math.inf)
    if not gathered:
        return records
    return [each for text in gathered for each in read_records(json.loads(text))]
