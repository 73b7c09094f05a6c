"""Plans in files: mesh and lists by the names of groups, and what they were made for.

A plan is loaded by `plan(step, *args, on=..., saved=path)`: the step is traced again, so that a
file holds no program, only a fingerprint of it. What differs is told, argument by argument.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright._checks import JsonFields
from meshwright._text import plural, write_text
from meshwright._version import __version__
from meshwright.axes import axis_weights
from meshwright.errors import PlanChangedWarning, PlanningError, listing, near, short, warn
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.planning.plan_costs import Lists
from meshwright.planning.plan_search import Candidate, Hardware, speeds_on
from meshwright.planning.remat_choice import Variant
from meshwright.planning.traced_program import TracedProgram
from meshwright.planning.traced_step import TracedStep
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:
    from meshwright.planning.step_plan import Plan

FORMAT, VERSION = "meshwright-plan", 1
_MOST_DIFFERENCES = 6


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """What a file says: the mesh, per axis the names of groups, and what it was made for.

    `program` and `hardware` are as `describe_program` and `describe_hardware` give them. `devices`:
    of a plan for the user's own `Mesh`, the ids of its devices in their order.
    """

    path: str
    spec: MeshSpec
    shards: tuple[tuple[str, ...], ...]
    moved: tuple[float, ...]
    program: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    devices: tuple[int, ...] = ()

    def lists(self, names: Sequence[str]) -> Lists:
        """The lists by the numbers that groups have now; a group that is gone is an error."""
        gone = [name for order in self.shards for name in order if name not in names]
        if gone:
            raise PlanningError(
                f"saved: {self.path} shards {gone[0]!r}, and the step has no such group now."
                f"{near(gone[0], names)} It has {listing([repr(name) for name in names], 12)}. "
                "Plan again without saved=.",
                option="saved",
            )
        return tuple(tuple(names.index(name) for name in order) for order in self.shards)

    def differences(self, program: Mapping[str, Any], hardware: Mapping[str, Any]) -> list[str]:
        """Say what has changed since the plan was made, in sentences; nothing if nothing has."""
        said = _changed_values("the hardware", self.hardware, hardware)
        if self.program["fingerprint"] != program["fingerprint"]:
            said += _changed_arguments(self.program["arguments"], program["arguments"])
            said += _changed_counts(self.program["primitives"], program["primitives"])
            if not said:
                said.append("the program computes otherwise with the same operations")
            if self.versions.get("jax") != jax.__version__:
                said.append(f"jax was {self.versions.get('jax')} and is {jax.__version__}")
        return said


# What a plan was made for.


def describe_program(step: TracedStep, program: TracedProgram) -> dict[str, Any]:
    """Describe a program: its arguments, its primitives, and a fingerprint of the whole.

    The fingerprint covers primitives, shapes, dtypes, how often each operation runs, the dims that
    it iterates over, and what it reads, so it is the same wherever the same step is traced.
    """
    digest = hashlib.sha256()
    for shape, dtype in zip(program.shapes, program.dtypes, strict=True):
        digest.update(f"{dtype}{list(shape)};".encode())
    for operation in program.operations:
        dims = [(dim.kind, list(dim.at)) for dim in operation.dims]
        line = [operation.primitive, operation.inputs, operation.outputs, operation.times, dims]
        digest.update(json.dumps(line).encode())
    digest.update(json.dumps([program.arguments, program.results]).encode())
    counts = collections.Counter(operation.primitive for operation in program.operations)
    return {
        "fingerprint": digest.hexdigest(),
        "arguments": {
            path: f"{program.dtypes[value]}{list(program.shapes[value])}"
            for path, value in zip(step.paths, program.arguments, strict=True)
        },
        "primitives": dict(sorted(counts.items())),
    }


def describe_hardware(topology: Topology) -> dict[str, Any]:
    """Describe hardware by what a plan depends on."""
    chip = topology.chip
    return {
        "name": topology.name,
        "devices": topology.num_devices,
        "chip": chip.name,
        "memory_gb": chip.memory_gb,
        "tflops": chip.tflops,
    }


def _changed_values(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = [
        f"{name} was {before.get(name)} and is {now[name]}"
        for name in now
        if before.get(name) != now[name]
    ]
    return [f"{what} differs: {', '.join(changed)}"] if changed else []


def _changed_arguments(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    told = [
        f"argument {path} was {before[path]} and is {now[path]}"
        for path in before
        if path in now and before[path] != now[path]
    ]
    told += [f"argument {path} is gone" for path in before if path not in now]
    told += [f"argument {path} is new" for path in now if path not in before]
    return _first(told, "arguments")


def _changed_counts(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    told = [
        f"{name} occurs {now.get(name, 0)} times, not {before.get(name, 0)}"
        for name in sorted({*before, *now})
        if before.get(name, 0) != now.get(name, 0)
    ]
    return _first(told, "primitives")


def _first(told: list[str], what: str) -> list[str]:
    rest = len(told) - _MOST_DIFFERENCES
    return told if rest <= 0 else [*told[:_MOST_DIFFERENCES], f"{rest} more {what} differ"]


# Files.


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan as JSON or as a page, by the end of the file's name."""
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix not in (".html", ".json"):
        told = short(str(path) if isinstance(path, os.PathLike) else path)
        raise PlanningError(f"save: {told} ends in neither .json nor .html.", option="path")
    path = Path(path)
    text = plan.page() if path.suffix == ".html" else json.dumps(saved_json(plan), indent=1) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise PlanningError(f"save: {path}: {error.strerror}.", option="path") from error
    return path


def saved_json(plan: Plan) -> dict[str, Any]:
    """What the file of a plan holds."""
    names, sizes = plan.spec.names, plan.spec.sizes
    carried = dict(zip(names, axis_weights(names, sizes, plan.intensity), strict=True))
    own = plan.devices if isinstance(plan.devices, Mesh) else None
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": {"meshwright": __version__, "jax": jax.__version__},
        "name": plan.name,
        "mesh": str(plan.spec),
        "axes": [
            {"name": axis.name, "shards": list(axis.shards), "moved": carried[axis.name]}
            for axis in plan.axes
        ],
        **({"devices": [device.id for device in own.devices.flat]} if own is not None else {}),
        "predicted": dataclasses.asdict(plan.predicted),
        "hardware": describe_hardware(plan.topology),
        "program": describe_program(plan.step, plan.costs.program),
    }


def load_plan(path: str | os.PathLike[str]) -> SavedPlan:
    """Read a file; raises `PlanningError` if it is damaged, newer, or something else."""
    if not isinstance(path, (str, os.PathLike)):
        raise PlanningError(
            f"saved: {short(path)} is no path of a file that Plan.save wrote.", option="saved"
        )
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanningError(f"saved: {path}: {error.strerror}.", option="saved") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanningError(
            f'saved: {path} is not a plan: it has no "format": "{FORMAT}". Plan.save writes one.',
            option="saved",
        )
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not 0 < version <= VERSION:
        raise PlanningError(
            f"saved: {path} is of version {short(version)}, and this meshwright reads up to "
            f"{VERSION}. Update meshwright, or plan again.",
            option="saved",
        )
    try:
        return _read(data, path)
    except ValueError as error:
        raise _damaged(path, str(error).rstrip(".")) from error


def _damaged(path: Path, why: str) -> PlanningError:
    return PlanningError(
        f"saved: {path} is damaged: {why}. Plan again, or take a copy of it.", option="saved"
    )


def _read(data: Mapping[str, Any], path: Path) -> SavedPlan:
    whole = JsonFields(data, "the plan")
    spec = MeshSpec.parse(whole.text("mesh"))
    axes = list(whole.rows("axes"))
    if [axis.text("name") for axis in axes] != list(spec.names):
        raise ValueError(f"its axes are not those of its mesh {spec}")
    if spec.size is None:
        raise ValueError(f"its mesh {spec} is open")
    _check_rest(whole)
    return SavedPlan(
        str(path),
        spec,
        tuple(map(_shards, axes)),
        tuple(axis.number("moved") for axis in axes),
        _program(JsonFields(whole.object_of("program"), "program")),
        _hardware(JsonFields(whole.object_of("hardware"), "hardware")),
        _texts(JsonFields(whole.object_of("made_by"), "made_by")),
        _devices(whole, spec),
    )


def _shards(axis: JsonFields) -> tuple[str, ...]:
    """The groups of an axis, each of them once."""
    shards = tuple(axis.as_text("shards", name) for name in axis.list_of("shards"))
    if len(set(shards)) < len(shards):
        raise axis.wrong("shards", list(shards), "a list of groups, each of them once")
    return shards


def _devices(whole: JsonFields, spec: MeshSpec) -> tuple[int, ...]:
    """The ids of the devices of a mesh of the user's own, in their order; none of other plans."""
    if "devices" not in whole.data:
        return ()
    ids = tuple(int(whole.as_number("devices", each)) for each in whole.list_of("devices"))
    if len(set(ids)) < len(ids) or len(ids) != spec.size:
        raise ValueError(f"its devices are not {spec.size} different ones, as its mesh {spec} has")
    return ids


def _program(program: JsonFields) -> dict[str, Any]:
    """What `describe_program` gave."""
    counts = JsonFields(program.object_of("primitives"), "program primitives")
    return {
        "fingerprint": program.text("fingerprint"),
        "arguments": _texts(JsonFields(program.object_of("arguments"), "program arguments")),
        "primitives": {name: counts.count(name, 1) for name in counts.data},
    }


def _hardware(hardware: JsonFields) -> dict[str, Any]:
    """What `describe_hardware` gave."""
    return {
        "name": hardware.text("name"),
        "devices": hardware.count("devices", 1),
        "chip": hardware.text("chip"),
        "memory_gb": hardware.number("memory_gb"),
        "tflops": hardware.number("tflops"),
    }


def _texts(fields: JsonFields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields.data}


def _check_rest(whole: JsonFields) -> None:
    """Refuse what no plan is made from, if it is there and is no such thing."""
    if not isinstance(name := whole.data.get("name", ""), str):
        raise whole.wrong("name", name, "a text")
    if "predicted" in whole.data:
        predicted = JsonFields(whole.object_of("predicted"), "predicted")
        for name in predicted.data:
            predicted.number(name)


def saved_for(path: Any, mesh: Any, keep: Any) -> SavedPlan:
    """Read a saved plan; a `Mesh` with its axes may go with it."""
    for option, value in (("mesh", None if isinstance(mesh, Mesh) else mesh), ("keep", keep)):
        if value is not None:
            raise PlanningError(
                f"{option}: a saved plan has its own mesh and lists; pass saved or {option}.",
                option=option,
            )
    read = load_plan(path)
    sizes = dict(zip(read.spec.names, read.spec.sizes, strict=True))
    if mesh is not None and dict(mesh.shape) != sizes:
        raise PlanningError(
            f"mesh: {read.path} is a plan for {read.spec}, not for {short(mesh)}. Pass a mesh with "
            "these axes, or leave mesh= out.",
            option="mesh",
        )
    return read


def mesh_of_saved(saved: SavedPlan, mesh: Mesh | None, on: Any) -> Mesh | MeshSpec:
    """Return the mesh that a saved plan is applied to: the user's, the one it was made for, or new.

    The one it was made for needs its devices, by their ids, on the same hardware.
    """
    if mesh is not None:
        return mesh
    here = {device.id: device for device in jax.devices()} if saved.devices and on is None else {}
    if not saved.devices or not here.keys() >= set(saved.devices):
        return saved.spec
    devices = np.array([here[number] for number in saved.devices])
    if read_topology(list(devices)).name != saved.hardware["name"]:
        return saved.spec
    return Mesh(devices.reshape(tuple(saved.spec.sizes)), tuple(saved.spec.names))


def check_devices(saved: SavedPlan, hardware: Topology) -> None:
    """Refuse a plan for more devices than there are."""
    devices = math.prod(saved.spec.sizes)
    if devices > hardware.num_devices:
        raise PlanningError(
            f"saved: {saved.path} is a plan for {plural(devices, 'device')}, {saved.spec} on "
            f"{saved.hardware.get('name')}, and {hardware.name} has {hardware.num_devices:,}. Plan "
            "again without saved=.",
            option="saved",
        )


def saved_candidate(
    saved: SavedPlan, variant: Variant, hardware: Hardware, scatters: bool
) -> Candidate:
    """Cost a saved plan for the program that there is now."""
    sizes = tuple(saved.spec.sizes)
    costs = variant.costs.on(speeds_on(sizes, hardware, saved.moved, scatters))
    lists = saved.lists(variant.names)
    return Candidate(sizes, lists, costs.objective(lists), costs.totals(lists), saved.moved)


def told_changes(
    saved: SavedPlan | None, variant: Variant, hardware: Topology, *, on_a_mesh: bool
) -> tuple[str, ...]:
    """Warn of what has changed since a plan was saved; returns the same as a note.

    `on_a_mesh`: whether it is applied to a mesh that is there, the user's or its own.
    """
    if saved is None:
        return ()
    now = describe_program(variant.step, variant.program)
    changed = saved.differences(now, describe_hardware(hardware))
    if saved.devices and not on_a_mesh:
        changed.append(
            "the mesh that it was for, whose devices had an order of their own, is not here, and "
            "it is laid out anew: pass that mesh with it, mesh=mesh, or to the step, p.jit(mesh)"
        )
    if not changed:
        return (f"From {saved.path}, for the same program and hardware.",)
    said = f"Since {saved.path} was saved, {'; '.join(changed)}. Planning again may be better."
    warn(said, PlanChangedWarning)
    return (said,)
