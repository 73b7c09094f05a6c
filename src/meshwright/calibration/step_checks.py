"""What is looked at before a step runs for the first time, while its arguments are still whole.

`refuse_arguments` needs the arguments alone, `refuse_recording` looks for what would keep the
profiler from it, `program_mesh` asks the compiled program on which devices it runs,
`refuse_rehearsal` whether a rehearsal is of this step.
"""

from __future__ import annotations

import collections
import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright import _compat
from meshwright._text import plural
from meshwright.calibration.trace import running_already
from meshwright.errors import CalibrationError, listing, short
from meshwright.hlo.program import Program
from meshwright.rehearsal.pipelines import PipelineRehearsal
from meshwright.rehearsal.result import Rehearsal
from meshwright.trees.walk import walk

# Opcodes that compute and move nothing: a program of these alone leaves no event in a trace.
_NO_WORK = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})


def check_options(step: Any, steps: Any, name: Any, mesh: Any) -> None:
    """Refuse options of `measure` that are wrong whatever the step does."""
    if type(steps) is not int or steps < 1:
        raise CalibrationError(f"steps: {short(steps)} is not a number from 1 on.", option="steps")
    if name is not None and not isinstance(name, str):
        raise CalibrationError(f"name: {short(name)} is not a text.", option="name")
    if isinstance(step, jax.stages.Compiled):
        raise CalibrationError(
            "step: a compiled program, which measure would have to compile again for its trace. "
            "Pass the jitted function that it came from, with the same arguments.",
            option="step",
        )
    if not callable(step):
        raise CalibrationError(f"step: {short(step)} cannot be called.", option="step")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise CalibrationError(
            f"mesh: {short(mesh)} is not a jax.sharding.Mesh of devices that are here. "
            "mw.mesh(spec) makes one.",
            option="mesh",
        )


def refuse_arguments(args: Sequence[Any], names: Sequence[str]) -> None:
    """Refuse what no step can be run with: shapes, arrays that are gone, values of a trace."""
    if getattr(jax.config, "jax_disable_jit", False):
        raise CalibrationError(
            "jax_disable_jit is set (jax.disable_jit()): nothing is compiled, so that there is no "
            "program to measure. Call measure without it."
        )
    if _compat.is_tracing():
        raise CalibrationError(
            "measure runs a step on the devices, and was called inside of a function that JAX "
            "traces (jit, grad, vmap, scan). Call it outside, with arrays."
        )
    for name, arg in zip(names, args, strict=True):
        for leaf in walk(arg).arrays:
            where = f"{name}/{leaf.path}".rstrip("/")
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise CalibrationError(
                    f"{where}: a shape, where a step that is run needs an array. Shapes alone can "
                    "be rehearsed: mw.rehearse(step, *args, mesh=...).",
                    option="args",
                )
            if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
                raise CalibrationError(
                    f"{where}: the array has been deleted, mostly because an earlier call took it "
                    "as a donated argument. Pass what that call returned; of measure it is "
                    "`results`.",
                    option="args",
                )


def check_trace(trace: Any) -> Path | None:
    """The folder that a trace shall be kept in, which need not be there yet."""
    if trace is None:
        return None
    if not isinstance(trace, (str, os.PathLike)):
        raise CalibrationError(
            f"trace: {short(trace)} is not a folder's name, a text or a pathlib.Path.",
            option="trace",
        )
    folder = Path(trace).expanduser()
    if folder.exists() and not folder.is_dir():
        raise CalibrationError(f"trace: {folder} is a file, not a folder.", option="trace")
    return folder


def refuse_recording(folder: Path | None) -> None:
    """Refuse before the first run what would keep the profiler from recording the last ones."""
    if _compat.profiler_runs():
        raise running_already()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CalibrationError(
            f"trace: no file can be written to {folder}: {error.strerror}. Name another folder.",
            option="trace",
        ) from error


def bound_method(step: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A method as its function and the object it is bound to; any other step as it is.

    `lower` of a jitted method is that of its function, and would take the first argument for
    `self`.
    """
    if inspect.ismethod(step):
        return step.__func__, (step.__self__,)
    return step, ()


def executable(compiled: Any) -> Any:
    """The program itself, below what `nnx.jit`, `eqx.filter_jit` and partials put around it."""
    while not isinstance(compiled, jax.stages.Compiled):
        inner = compiled.func if hasattr(compiled, "func") else compiled.compiled
        compiled = inner
    return compiled


def shardings_mesh(shardings: Sequence[Any], devices: set[Any] | None = None) -> Mesh | None:
    """The first mesh among shardings; of exactly these devices where they are given."""
    for sharding in shardings:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and devices in (None, set(mesh.devices.flat)):
            return mesh
    return None


def argument_shardings(args: Sequence[Any]) -> list[Any]:
    """The shardings of all arrays of the arguments, in order."""
    found = [getattr(leaf.value, "sharding", None) for arg in args for leaf in walk(arg).arrays]
    return [each for each in found if each is not None]


def program_mesh(compiled: Any, args: Sequence[Any], mesh: Mesh | None) -> Mesh:
    """The mesh that a compiled step runs on: the given one, if it has the program's devices.

    By default that of the arguments, or of the program's own shardings (`in_shardings`,
    `shard_map`, constraints); a row of devices where all of them have none.
    """
    program = executable(compiled)
    own = jax.tree.leaves((program.input_shardings, program.output_shardings))
    own = [each for each in own if hasattr(each, "device_set")]  # an unused argument has none
    devices = {device for each in own for device in each.device_set}
    devices = devices or set(program.runtime_executable().local_devices())
    named = shardings_mesh([*argument_shardings(args), *own], devices)
    if mesh is None:
        return named or Mesh(np.array(sorted(devices, key=lambda each: each.id)), ("devices",))
    if set(mesh.devices.flat) != devices:
        raise CalibrationError(
            f"mesh: the step is compiled for {_devices_text(devices)}, and the mesh has "
            f"{_devices_text(set(mesh.devices.flat))}. Leave mesh= out to take the step's own, or "
            "place its arguments on this mesh: mw.shard(args, mesh, specs).",
            option="mesh",
        )
    # A program counts devices by their order: of another one collectives get the wrong axes.
    if named is not None and list(named.devices.flat) != list(mesh.devices.flat):
        raise CalibrationError(
            "mesh: it has the step's devices in another order than the step's own mesh, "
            f"{dict(named.shape)}. Leave mesh= out, or make it of the same order: "
            "Mesh(own.devices.reshape(...), names).",
            option="mesh",
        )
    return mesh


def _devices_text(devices: set[Any]) -> str:
    numbers = sorted(device.id for device in devices)
    if len(numbers) == 1:
        return f"1 device (number {numbers[0]})"
    return f"{plural(len(numbers), 'device')} (numbers {numbers[0]} to {numbers[-1]})"


def refuse_no_work(program: Program) -> None:
    """Refuse a program that does nothing on a device, of which no trace has an event."""
    opcodes = {
        each.opcode for group in program.computations.values() for each in group.instructions
    }
    if opcodes <= _NO_WORK:
        raise CalibrationError(
            "step: its program does no work on a device: it returns constants or its arguments, or "
            "nothing at all. Return what it computes, or the compiler drops it.",
            option="step",
        )


# Whether a rehearsal is of the step that runs. Times of other arguments or of another number of
# devices mean nothing beside the measured ones: refused. Another chip, mesh or name may be meant: a
# note says what was rehearsed.

_NOTE = "Rehearsed was "


def refuse_rehearsal(rehearsal: Rehearsal, devices: int, arguments: Sequence[str]) -> None:
    """Refuse the rehearsal of a step with other arguments, or on another number of devices."""
    rehearsed = rehearsal.placement.positions.size
    again = "Rehearse this step: mw.rehearse(step, *args, mesh=mesh)."
    _refuse_devices(_what(rehearsal), rehearsed, devices, again)
    _refuse_arguments(_what(rehearsal), rehearsal.array_types, arguments, again)


def refuse_pipeline_rehearsal(
    rehearsal: PipelineRehearsal,
    groups: Sequence[int],
    microbatches: int,
    arguments: Sequence[str],
) -> None:
    """Refuse the rehearsal of a pipeline with other groups, microbatches or arguments.

    `groups` are their numbers of devices.
    """
    again = "Rehearse this one: mw.rehearse_pipeline(step, *args)."
    if rehearsal.group_sizes != tuple(groups):
        raise CalibrationError(
            f"rehearsal: of {rehearsal.name} on {_groups_text(rehearsal.group_sizes)}, and the "
            f"step runs on {_groups_text(groups)}. {again}",
            option="rehearsal",
        )
    rehearsed = rehearsal.timeline and rehearsal.timeline.schedule.microbatches
    if rehearsed not in (None, microbatches):
        raise CalibrationError(
            f"rehearsal: of {rehearsal.name} in {plural(rehearsed or 0, 'microbatch')}, and the "
            f"step has {microbatches}. {again}",
            option="rehearsal",
        )
    _refuse_arguments(rehearsal.name, rehearsal.array_types, arguments, again)


def with_note(
    notes: Sequence[str], rehearsed: Sequence[str], ran: Sequence[str]
) -> tuple[str, ...]:
    """The notes of a measurement beside a rehearsal, which is named where it is of something else.

    `rehearsed` and `ran` are names, meshes and hardware.

    >>> with_note((), ("step", "dp:4", "v5e:2x2"), ("step", "dp:4", "cpu:4"))
    ('Rehearsed was step as dp:4 on v5e:2x2; step ran as dp:4 on cpu:4.',)
    """
    kept = tuple(note for note in notes if not note.startswith(_NOTE))
    if tuple(rehearsed) == tuple(ran):
        return kept
    first, second = ((name, f"as {mesh} on {on}") for name, mesh, on in (rehearsed, ran))
    return (*kept, f"{_NOTE}{' '.join(first)}; {second[0]} ran {second[1]}.")


def _what(rehearsal: Rehearsal) -> str:
    return f"{rehearsal.name} as {rehearsal.placement.spec} on {rehearsal.placement.topology.name}"


def _groups_text(groups: Sequence[int]) -> str:
    sizes = plural(groups[0], "device") if len(set(groups)) == 1 else f"{listing(groups)} devices"
    return f"{plural(len(groups), 'group')} of {sizes}"


def _refuse_devices(what: str, rehearsed: int, ran: int, again: str) -> None:
    if rehearsed != ran:
        raise CalibrationError(
            f"rehearsal: of {what}, {plural(rehearsed, 'device')}, and the step runs on {ran}. "
            f"{again}",
            option="rehearsal",
        )


def _refuse_arguments(what: str, rehearsed: Sequence[str], ran: Sequence[str], again: str) -> None:
    first, second = collections.Counter(rehearsed), collections.Counter(ran)
    if first == second:
        return
    there = listing((first - second).elements(), limit=3) or "fewer arrays"
    here = listing((second - first).elements(), limit=3) or "fewer arrays"
    raise CalibrationError(
        f"rehearsal: of {what} with other arguments: {there} there, {here} here. {again}",
        option="rehearsal",
    )
