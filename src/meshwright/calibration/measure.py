"""`measure`: run a real step under the profiler, and lay it beside the model of its program.

In order: compile the step for its own arguments, run it until nothing changes any more, time it
without the profiler, run it under the profiler, read the trace, join it with the program that ran
(`joining`). On a GPU kernels run inside of CUDA graphs by default, which hide their names from the
profiler: the step is timed as it is, and traced as it is compiled without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright._checks import check_flag
from meshwright._processes import Interrupted, Together, combine_texts
from meshwright._progress import Pulse, showing
from meshwright._text import plural
from meshwright.calibration.joining import (
    DeviceRecord,
    Instructions,
    join,
    own_records,
    read_records,
)
from meshwright.calibration.measurement import Measurement
from meshwright.calibration.pipeline_measurement import PipelineMeasurement
from meshwright.calibration.pipeline_steps import measure_pipeline
from meshwright.calibration.step_checks import (
    argument_shardings,
    bound_method,
    check_options,
    check_trace,
    executable,
    program_mesh,
    refuse_arguments,
    refuse_no_work,
    refuse_recording,
    refuse_rehearsal,
    shardings_mesh,
)
from meshwright.calibration.timing import (
    NO_GRAPHS,
    changed_argument,
    elements,
    refuse_donation,
    structure,
    wait,
)
from meshwright.calibration.trace import Trace, record
from meshwright.errors import CalibrationError, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import measured_by
from meshwright.hlo.program import read_program
from meshwright.meshes.build import explain_mesh
from meshwright.pipelines.step import PipelineStep
from meshwright.placement.placement import Placement
from meshwright.placement.placer import measure as measure_placement
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.kernel_speeds import speeds as kernel_speeds
from meshwright.rehearsal.pipelines import PipelineRehearsal
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_arguments import argument_names, array_types, is_jitted, unbound
from meshwright.rehearsal.step_time import step_time
from meshwright.trees.split import is_number
from meshwright.trees.walk import is_array

# Rounds of timing: at the least, and for how many seconds on an accelerator. Power and heat change
# its clock for the first second, and from one second to the next.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 100, 2.0
_WARM, _STEADY = 1.0, 0.02  # seconds at the least; by how much two rounds may differ
_MOST_COMPILES = 3  # until the step gives back what it takes


@overload
def measure(
    step: PipelineStep,
    *args: Any,
    rehearsal: PipelineRehearsal | None = None,
    steps: int = 5,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    trace: str | Path | None = None,
    progress: bool = True,
    name: str | None = None,
) -> PipelineMeasurement: ...


@overload
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
) -> Measurement: ...


def measure(
    step: Callable[..., Any],
    *args: Any,
    rehearsal: Rehearsal | PipelineRehearsal | None = None,
    mesh: Mesh | None = None,
    steps: int = 5,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    trace: str | Path | None = None,
    progress: bool = True,
    name: str | None = None,
) -> Measurement | PipelineMeasurement:
    """Run a step on the devices that are here, and say what every part of it takes.

    The step runs as in a training loop: what it returns in place of a donated argument goes into
    the next one. Donated arguments are used up, as by any call; `results` of the answer is what the
    last step returned. In a job of several processes all call this; process 0 shows all devices,
    the others their own.

    Args:
      step: the step, with `jax.jit`, `nnx.jit` or `eqx.filter_jit`; a bare one gets `jax.jit`. Of
        what `pipeline` returned a `PipelineMeasurement` comes out, as from `step.measure(...)`.
      *args: its arguments, arrays on the devices.
      rehearsal: the rehearsal of this step, whose promises are shown beside; with other arguments
        or devices it is refused.
      mesh: the mesh whose axes name the collectives, of the step's devices in their order; by
        default that of the arguments' shardings, or of the compiled program's.
      steps: how many to run in each round of timing and under the profiler.
      speeds: measured speeds that the model goes by, as for `rehearse`; by default the tables'.
      trace: a folder to keep the profiler's own files in, for xprof or Perfetto.
      progress: as for `rehearse`.
      name: what the result is called; by default the function's name.

    Raises:
      CalibrationError: before the first run for shapes or deleted arrays, a mesh or a rehearsal of
        something else, a profiler that runs already, a trace's folder that cannot be written to;
        after it for a donated argument that no result can take the place of, a trace without
        events. What the step itself raises comes through.

    >>> import jax, meshwright as mw
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = mw.mesh("fsdp:8")
    >>> w = jax.device_put(jax.numpy.ones((512, 512)), NamedSharding(mesh, P("fsdp")))
    >>> x = jax.device_put(jax.numpy.ones((64, 512)), NamedSharding(mesh, P("fsdp")))
    >>> m = mw.measure(lambda w, x: x @ w, w, x)
    >>> [(entry.collective.kind, entry.runs) for entry in m.collectives]
    [('all-gather', 1)]
    """
    check_options(step, steps, name, mesh)
    check_flag("progress", progress)
    folder = check_trace(trace)
    speaks = progress and jax.process_index() == 0
    if isinstance(step, PipelineStep):
        _check_rehearsal(rehearsal, PipelineRehearsal, "rehearse_pipeline")
        _check_pipeline(step, args, mesh)
        called = name or str(getattr(step.fn, "__name__", "step"))
        with showing(speaks), Pulse(f"measuring {called}") as pulse:
            return measure_pipeline(
                step,
                args,
                rehearsal if isinstance(rehearsal, PipelineRehearsal) else None,
                steps,
                functools.partial(_placement, speeds=speeds),
                folder,
                called,
                pulse,
            )
    _check_rehearsal(rehearsal, Rehearsal, "rehearse")
    called = name or str(getattr(unbound(step), "__name__", "step"))
    refuse_arguments(args, argument_names(unbound(step), len(args)))
    with showing(speaks), Pulse(f"measuring {called}") as pulse, _ending_together() as together:
        # What can be refused is refused before the first run: it uses donated arguments up.
        refuse_recording(folder)
        run = _Run(step, args, mesh, pulse, together)
        placement = _placement(run.mesh, speeds)
        arguments = array_types(args)
        if isinstance(rehearsal, Rehearsal):
            refuse_rehearsal(rehearsal, placement.positions.size, arguments)
        together.agree()
        run.settle()
        times = run.times(steps)
        run.without_graphs()
        run.warm_up(steps)
        together.agree()
        pulse.now(f"{plural(steps, 'step')} under the profiler", done=_done(_ROUNDS + 1))
        with record(folder) as recording:
            traced = run.round(steps)
        together.agree()
        pulse.now("reading the trace", done=_done(_ROUNDS + 2))
        measured = _measurement(
            run, placement, recording.trace, steps, times, traced, called, arguments
        )
        return measured.compare(rehearsal) if isinstance(rehearsal, Rehearsal) else measured


def _done(phases: int) -> float:
    """The part of the work behind: compiling, rounds of timing, one under the profiler, reading."""
    return phases / (_ROUNDS + 3)


# Processes that run a step together: one that leaves at once would let the others wait in the next
# one. After Ctrl-C in one of them all end after the round that they are in.
@contextlib.contextmanager
def _ending_together() -> Iterator[Together]:
    with Together("measuring", math.inf) as together:
        try:
            yield together
        except Interrupted as ended:
            if jax.process_index() in ended.processes and not ended.problem:
                raise KeyboardInterrupt from ended
            raise CalibrationError(f"{ended}. All end; nothing was measured.") from ended
        except CalibrationError as error:
            together.fail(error)
            raise
        except Exception as error:
            together.fail(error)
            error.add_note("The step raised this while measure ran it; nothing was measured.")
            raise


def _check_rehearsal(rehearsal: Any, wanted: type, maker: str) -> None:
    if rehearsal is not None and not isinstance(rehearsal, wanted):
        raise CalibrationError(
            f"rehearsal: {short(rehearsal)} is not what {maker} returns.", option="rehearsal"
        )


def _check_pipeline(step: PipelineStep, args: Sequence[Any], mesh: Mesh | None) -> None:
    """Refuse what a pipeline cannot be measured with; its arguments it checks itself."""
    if mesh is not None:
        raise CalibrationError("mesh: a pipeline has its groups; leave it out.", option="mesh")
    if step.groups.compile_only:
        raise CalibrationError(
            "step: its groups are on hardware that is not here. rehearse_pipeline(step, ...) "
            "compiles every task for it.",
            option="step",
        )
    if not args:
        raise CalibrationError("step: pass its arguments, to run it with.", option="args")


def find_mesh(step: Callable[..., Any], args: Sequence[Any]) -> Mesh:
    """The mesh that a step runs on: its arguments', else that of the program, which is compiled."""
    if mesh := shardings_mesh(argument_shardings(args)):
        return mesh
    refuse_arguments(args, argument_names(unbound(step), len(args)))
    return program_mesh(_compile(step, args, {}).compiled, args, None)


def _placement(mesh: Mesh, speeds: str | os.PathLike[str] | Calibration | None) -> Placement:
    """How the mesh lies on the devices, with measured speeds where they are given."""
    placement = explain_mesh(mesh)
    if speeds is None:
        return placement
    hardware = measured_by(placement.topology, speeds)
    return measure_placement(placement.spec, hardware, placement.positions)


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A step compiled for some arguments, which it is called with; `donated` are numbers of them.

    `jitted`: the step was a `jit` already.
    """

    compiled: Any
    donated: frozenset[int]
    jitted: bool


def _compile(step: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> _Compiled:
    """Compile a step for these arguments; `options` are the compiler's."""
    function: Any = step
    bound: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(function, functools.partial) and is_jitted(function.func):
        function, bound, named = function.func, function.args, function.keywords
    jitted = is_jitted(function)
    if jitted:
        function, instance = bound_method(function)
        bound = (*instance, *bound)
    else:
        function = jax.jit(function)
    lowered = function.lower(*bound, *args, **named)
    info = getattr(lowered, "args_info", None)
    if info is not None:  # static arguments are not among those of a compiled program
        if len(info[0]) == len(args) and not _has_arrays(bound):
            bound = ()  # all of them static, as `self` mostly is
        if len(info[0]) != len(bound) + len(args):
            raise CalibrationError(
                "step: it has static arguments by number. Bind them by name: "
                "functools.partial(jax.jit(f, static_argnames='train'), train=True).",
                option="step",
            )
        named = {name: value for name, value in named.items() if name in info[1]}
    donated = frozenset(_donated(lowered, len(bound)))
    compiled = lowered.compile(options) if options else lowered.compile()
    if bound or named:
        compiled = functools.partial(compiled, *bound, **named)
    return _Compiled(compiled, donated, jitted)


def _has_arrays(bound: Sequence[Any]) -> bool:
    return any(is_array(leaf) or is_number(leaf) for leaf in jax.tree.leaves(bound))


class _Run:
    """A step that is compiled, and run again and again on what it returns."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        mesh: Mesh | None,
        pulse: Pulse,
        together: Together,
    ):
        """Compile the step, and look at its program; nothing runs yet."""
        self.step, self.args, self.pulse = step, list(args), pulse
        self.together = together
        self.names = argument_names(unbound(step), len(args))
        self.notes: list[str] = []
        self.results: Any = None
        # Donated arguments, and the result that takes the place of each; unknown until it has run.
        self.taken: dict[int, int] | None = None
        self._compile_now()
        refuse_no_work(read_program(self.text))
        self.mesh = program_mesh(self.compiled, self.args, mesh)
        self.platform = next(iter(self.mesh.devices.flat)).platform

    def _compile_now(self) -> None:
        self.pulse.now("compiling", done=0.0)
        made = _compile(self.step, self.args, {})
        self.compiled = self.traced = made.compiled
        self.donated, self.jitted = made.donated, made.jitted

    def settle(self) -> None:
        """Run until the step takes what it gives, and no `jit` would compile it anew."""
        for compiles in range(_MOST_COMPILES):
            if compiles:
                self._compile_now()
                self.together.agree()
            before = _looks(self.args)
            self._once()
            if _looks(self.args) == before:
                return
            if compiles == 0:
                self.notes.append(
                    "The first step gives back arrays of other shardings or types than it takes, "
                    "so that JAX compiles it twice; measured is the second program."
                )
        raise CalibrationError(
            f"the step gives back other shapes or shardings than it takes, "
            f"{_MOST_COMPILES} times in a row: {_difference(before, _looks(self.args))}. A "
            "loop would compile it anew each time. Give its jit out_shardings, or keep shapes "
            "as they are."
        )

    def _once(self) -> None:
        """Run a step; what it returns takes the place of what it has used up."""
        self.results = self.traced(*self.args)
        given = elements(self.results)
        if self.taken is None:
            wait(self.results)
            self.taken = self._match(given)
        for number, result in self.taken.items():
            self.args[number] = given[result]

    def _match(self, given: Sequence[Any]) -> dict[int, int]:
        """Find the result that takes the place of each argument that is used up."""
        free, taken = list(range(len(given))), {}
        for number, arg in enumerate(self.args):
            gone = _is_gone(arg)
            if not gone and number not in self.donated:
                continue
            wanted = structure(arg)
            match = next((n for n in free if structure(given[n]) == wanted), None)
            name = self.names[number]
            if match is None and not gone:  # a donation that the compiler has no use for
                if problem := changed_argument(name, arg, given):
                    raise problem
                self.notes.append(
                    f"{name} is donated, but no result has its shapes to take its place: every "
                    "step got the same one."
                )
                continue
            if match is None:
                raise refuse_donation(name, arg, given)
            free.remove(match)
            taken[number] = match
        return taken

    def round(self, steps: int) -> float:
        """Seconds of a step, the mean of some in a row."""
        wait(self.args)
        began = time.perf_counter()
        for _ in range(steps):
            self._once()
            if self.platform == "cpu":  # simulated devices share threads: one step at a time
                wait(self.results)
        wait((self.results, self.args))
        return (time.perf_counter() - began) / steps

    def times(self, steps: int) -> list[float]:
        self.warm_up(steps)
        times: list[float] = []
        while len(times) < _ROUNDS or self._goes_on(times, steps):
            number = min(len(times) + 1, _ROUNDS)
            words = f"{plural(steps, 'step')}, round {len(times) + 1}"
            self.pulse.now(words, done=_done(number))
            self.together.agree()
            times.append(self.round(steps))
        return sorted(times)

    def _goes_on(self, times: Sequence[float], steps: int) -> bool:
        """Whether more rounds are run; processes decide alike, by numbers that all of them have."""
        if self.platform == "cpu" or len(times) >= _MOST_ROUNDS:
            return False
        return self._longest(sum(times) * steps) < _SECONDS

    def _longest(self, seconds: float) -> float:
        """The longest of all processes': they run as many steps each."""
        if jax.process_count() == 1:
            return seconds
        answer = combine_texts(
            "measure round", repr(seconds), lambda texts: repr(max(map(float, texts)))
        )
        return float(answer) if answer else math.inf

    def warm_up(self, steps: int) -> None:
        """Run until the clock is what it is in a long run: a second, and two rounds alike."""
        once = self.round(1)
        if self.platform == "cpu":
            return
        last = spent = self._longest(once)
        few = int(np.clip(_WARM / 5 / last, 1, steps))
        while spent < 3 * _WARM:
            self.together.agree()
            now = self._longest(self.round(few))
            spent += now * few
            if spent >= _WARM and abs(now - last) <= _STEADY * now:
                return
            last = now

    def without_graphs(self) -> None:
        """On a GPU, compile the step that is traced so that kernels keep their names."""
        if self.platform != "gpu":
            return
        self.pulse.now("compiling without CUDA graphs", done=_done(_ROUNDS + 1))
        self.traced = _compile(self.step, self.args, NO_GRAPHS).compiled

    def all_notes(self) -> tuple[str, ...]:
        """What is different from a plain run."""
        notes = list(self.notes)
        if not self.jitted:
            notes.append("The step is not jitted; it ran as jax.jit(step), without donation.")
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
        return str(executable(self.traced).as_text())


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
    arguments: tuple[str, ...],
) -> Measurement:
    text = run.text
    program = read_program(text)
    collectives = analyze(program, placement)
    instructions = Instructions(program, collectives)
    events = trace.of(text.split(maxsplit=2)[1].rstrip(","))
    records = _of_all_processes(own_records(run.mesh, events, instructions))
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
        None,
        run.results,
        arguments,
    )


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
