"""Remedies that cut a step otherwise: more fsdp, tensor axes, a larger slice of the same chips."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright.axes import role
from meshwright.errors import MeshwrightError, on_command_line, option_text
from meshwright.hardware.chips import BELOW_CUBE, CHIPS, DOCUMENTED, PLANAR, Chip, shape_text
from meshwright.hardware.topology import Topology
from meshwright.meshes.build import abstract_mesh
from meshwright.rehearsal.model_commands import changed_words, rehearse_command
from meshwright.rehearsal.peak_estimates import PeakEstimate, Scales
from meshwright.rehearsal.remedy_table import Remedy
from meshwright.rehearsal.request import Request
from meshwright.rehearsal.step_arguments import as_shapes, has_rows, sharding_table
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:  # `result` imports `remedies`, which imports this file
    from meshwright.rehearsal.result import Rehearsal

_WORTH_TENSORS = 0.1  # of the peak: gathered weights below that are not worth another axis
_MOST_PARTS = 1024  # slices or NVLink domains that a larger machine is looked for among
_MOST_CPUS = 2048  # simulated devices that one process makes


def other_meshes(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Yield other meshes on the same devices: more fsdp, then a tensor axis."""
    sizes = _sizes(result.placement.spec)
    data = next((n for n in sizes if role(n).name == "data" and sizes[n] % 2 == 0), None)
    fsdp = next((n for n in sizes if role(n).name == "fsdp"), None)
    if data is not None:
        if fsdp is None:
            axes = {("fsdp" if name == data else name): size for name, size in sizes.items()}
        else:
            axes = {**sizes, fsdp: sizes[fsdp] * 2, data: sizes[data] // 2}
        yield from _changed(result, estimate, "shard parameters further", axes, {})
    source = data or (fsdp if fsdp is not None and sizes[fsdp] % 2 == 0 else None)
    gathered = estimate.bytes_of("gathered")
    if source is not None and gathered > _WORTH_TENSORS * result.memory.peak:
        axes = _grown({**sizes, source: sizes[source] // 2}, "tensor", 2)
        # Twice the rows on a device, and half the width of what the axis cuts.
        scales: Scales = {"gathered": 0.5}
        yield from _changed(result, estimate, "shard tensors further", axes, scales)


def _changed(
    result: Rehearsal,
    estimate: PeakEstimate,
    what: str,
    axes: Mapping[str, int],
    scales: Scales,
    on: str | None = None,
    slices: int = 1,
) -> Iterator[Remedy]:
    """Yield the remedy of another mesh, if the step can be cut so and it saves anything."""
    spec = MeshSpec.parse(dict(axes))
    request = _on_mesh(result, spec, on, slices)
    peak = _peak(result, estimate, request, scales)
    if peak is None or peak >= result.memory.peak:
        return
    command = rehearse_command(request)
    changes = [option_text("mesh", str(spec))]
    if on is not None:
        changes.append(option_text("on", on))
    if on is not None and slices > 1:
        changes.append(f"--slices {slices}" if on_command_line() else f"slices={slices}")
    how = (" " if on_command_line() else ", ").join(changes)
    if command:
        how = changed_words(result.request, request)
    # Given shardings name the axes of the old mesh.
    own = result.request.in_shardings is not None
    yield Remedy(what, how, peak, result.memory.peak, None if own else request, command)


def _peak(
    result: Rehearsal, estimate: PeakEstimate, request: Request, scales: Scales
) -> int | None:
    """Estimate the peak on another mesh: arguments exactly, what has their shapes alike."""
    given = result.request.in_shardings is not None
    if given:  # not known how they would be cut: as much as there are more devices
        sizes = _sizes(result.placement.spec), _sizes(MeshSpec.parse(request.mesh))
        before, after = (_state_shards(each) for each in sizes)
        state = sum(row.device_bytes for row in estimate.state_rows)
        arguments = result.memory.arguments - state + state * before // after
    else:
        exact = argument_bytes_of(request)
        if exact is None:
            return None
        arguments = exact
    share = arguments / result.memory.arguments if result.memory.arguments else 1.0
    return estimate.peak({"state": min(1.0, share), **scales}, arguments=arguments)


def _state_shards(sizes: Mapping[str, int]) -> int:
    return math.prod(size for name, size in sizes.items() if role(name).shards_weights)


def larger_slice(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Yield the smallest larger machine of the same chips on which the step should fit."""
    if result.fits:
        return
    request, topology = result.request, result.placement.topology
    sizes = _sizes(result.placement.spec)
    rows = data_rows(request.args, request.data)
    for name, slices, devices in larger_machines(topology):
        factor, rest = divmod(devices, topology.num_devices)
        if rest or factor < 2:
            continue
        # The batch is cut as far as it has rows, and tensors are from there on.
        shards = data_shards(result.placement.spec)
        fitting = (f for f in _divisors(factor) if not rows or rows % (shards * f) == 0)
        by_rows = max(fitting, default=1)
        axes = _grown(_grown(sizes, "fsdp", by_rows), "tensor", factor // by_rows)
        scales: Scales = {
            "activation": 1 / by_rows,
            "scores": 1 / by_rows,
            "gathered": by_rows / factor,
        }
        ways = list(_changed(result, estimate, "take a larger slice", axes, scales, name, slices))
        if ways and ways[0].peak <= result.memory.limit:
            yield ways[0]
            return


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _grown(sizes: Mapping[str, int], meaning: str, factor: int) -> dict[str, int]:
    """Make an axis of a role larger, or add one."""
    if factor == 1:
        return dict(sizes)
    name = next((n for n in sizes if role(n).name == meaning), None)
    name = name or {"fsdp": "fsdp", "tensor": "tp"}[meaning]
    return {**sizes, name: sizes.get(name, 1) * factor}


def larger_machines(topology: Topology) -> Iterator[tuple[str, int, int]]:
    """Yield name, slices and devices of machines with more of these chips, smallest first."""
    chip = CHIPS.get(topology.chip.name)
    if chip is None:
        return
    if chip.family == "tpu":
        yield from _larger_tpus(chip, topology)
    elif chip.family == "cpu":
        for devices in _doubled(topology.num_devices, _MOST_CPUS):
            yield f"cpu:{devices}", 1, devices
    else:
        inside = topology.size_of("switch")
        full = chip.domain or inside
        for devices in _doubled(topology.num_devices, full * _MOST_PARTS):
            domains, rest = divmod(devices, full)
            if devices <= full:
                yield f"{chip.name}:{devices}", 1, devices
            elif not rest:
                yield f"{chip.name}:{full}x{domains}", 1, devices


def _larger_tpus(chip: Chip, topology: Topology) -> Iterator[tuple[str, int, int]]:
    shapes = PLANAR if chip.torus == 2 else (*BELOW_CUBE, *DOCUMENTED)
    known = sorted({math.prod(shape): shape for shape in reversed(shapes)}.items())
    slices = topology.num_slices
    here = topology.num_devices // (chip.cores * slices)
    for chips, shape in known:
        if here < chips <= chip.pod:
            yield f"{chip.name}:{shape_text(shape)}", slices, chips * chip.cores * slices
    chips, shape = max((item for item in known if item[0] <= chip.pod), default=(0, ()))
    for parts in _doubled(slices, _MOST_PARTS) if here == chips or slices == 1 else ():
        yield f"{chip.name}:{shape_text(shape)}", parts, chips * chip.cores * parts


def _doubled(start: int, most: int) -> Iterator[int]:
    while (start := start * 2) <= most:
        yield start


def _on_mesh(result: Rehearsal, spec: MeshSpec, on: str | None = None, slices: int = 1) -> Request:
    """Return the request with another mesh, on the same machine unless it says another."""
    request = result.request
    if on is not None:
        return dataclasses.replace(request, mesh=str(spec), on=on, slices=slices)
    if not isinstance(request.mesh, (Mesh, AbstractMesh)):
        return dataclasses.replace(request, mesh=str(spec))
    # A mesh object stood for its devices as well; those are named by `on` now.
    machine = dataclasses.replace(result.placement.topology, devices=None)
    return dataclasses.replace(request, mesh=str(spec), on=machine, slices=1)


def _sizes(spec: MeshSpec) -> dict[str, int]:
    return dict(zip(spec.names, spec.sizes, strict=True))


def data_shards(spec: MeshSpec) -> int:
    """Over how many devices a mesh cuts the rows of data."""
    return math.prod(n for name, n in _sizes(spec).items() if role(name).name in ("data", "fsdp"))


def data_rows(args: Sequence[Any], data: Sequence[int]) -> int:
    """The rows of the largest array among the data; 0 where none has any.

    Beside it there may be small ones of another length, such as the sizes of groups.
    """
    leaves = (leaf for i in data for leaf in jax.tree.leaves(args[i]))
    shapes = [leaf.shape for leaf in filter(has_rows, leaves)]
    return int(max(shapes, key=math.prod)[0]) if shapes else 0


def argument_bytes_of(request: Request) -> int | None:
    """Bytes of a request's arguments on a device, exactly; `None` where they cannot be cut so."""
    try:
        is_mesh = isinstance(request.mesh, (Mesh, AbstractMesh))
        if is_mesh or -1 in MeshSpec.parse(request.mesh).sizes:
            mesh = request.abstract(request.place()[0], "cpu")
        else:
            mesh = abstract_mesh(MeshSpec.parse(request.mesh))
        specs, _ = request.specs(mesh)
        shapes = as_shapes(request.args, specs, mesh)
        return sharding_table(request.argument_names, shapes, mesh).device_bytes
    except MeshwrightError:
        return None
