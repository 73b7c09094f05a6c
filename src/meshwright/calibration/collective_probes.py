"""Every collective over every axis of a mesh at several sizes, and the line through their times.

The time of a collective contains waiting for the others of its group. The device that comes last
waits for none: the least of a group's times is that of the links.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.calibration.timing import Input, Seconds, Timed, spread
from meshwright.hardware.measured_figures import COLLECTIVES as KINDS
from meshwright.hardware.measured_figures import LinkFigure
from meshwright.placement.cost_model import INSIDE, links_text
from meshwright.placement.placement import AxisPlan, Placement
from meshwright.trees.specs import make_spec

_WIDTH = 4  # bytes of a float32
_lax: Any = jax.lax  # in which collectives are untyped


def sizes(family: str, quick: bool) -> tuple[int, ...]:
    """Bytes of the larger side of a collective, at least six of them."""
    if family == "cpu":
        return tuple(4**power * 1024 for power in range(1, 7))  # 4 KiB to 4 MiB
    if quick:
        return tuple(8**power * 16 * 1024 for power in range(6))  # 16 KiB to 512 MiB
    return tuple(4**power * 16 * 1024 for power in range(9))  # 16 KiB to 1 GiB


@dataclasses.dataclass(frozen=True)
class CollectiveProbe:
    """One collective over one axis: `size` are the bytes of its larger side on a device."""

    kind: str
    axis: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.axis} {self.size}".replace("-", "_").replace(" ", "_")

    def timed(self, mesh: Mesh) -> Timed:
        """Compile it for all devices of a mesh."""
        members = mesh.shape[self.axis]
        elements = max(members, self.size // _WIDTH // members * members)
        function = _FUNCTIONS[self.kind](self.axis, members)
        given = elements // members if self.kind == "all-gather" else elements
        spec = make_spec([mesh.axis_names])
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        program = mapped(function, check_vma=False)
        return Timed(f"calibrate_{self.name}", program, [Input((given,))], mesh, whole=False)

    def is_own(self, timed: Timed) -> Callable[[str], bool]:
        """Whether an instruction of the program is the collective, by its opcode.

        Its end is one too: on a TPU it takes as long as the device waits there.
        """
        computations = timed.program().computations
        opcodes = (self.kind, f"{self.kind}-start", f"{self.kind}-done", "async-done")
        own = {
            each.name
            for computation in computations.values()
            for each in computation.instructions
            if each.opcode in opcodes
            or (
                each.opcode == "async-start"  # as GPUs have it: the collective is what it calls
                and any(
                    inner.opcode == self.kind
                    for _, name in each.called
                    for inner in computations[name].instructions
                )
            )
        }
        return own.__contains__


def _ring(axis: str, members: int) -> Callable[[jax.Array], jax.Array]:
    pairs = [(i, (i + 1) % members) for i in range(members)]
    return lambda x: _lax.ppermute(x, axis, pairs)


def _all_to_all(axis: str, members: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: _lax.all_to_all(x.reshape(members, -1), axis, 0, 0).reshape(-1)


_FUNCTIONS: Mapping[str, Callable[[str, int], Callable[[jax.Array], Any]]] = {
    "all-gather": lambda axis, _: lambda x: _lax.all_gather(x, axis, tiled=True),
    "reduce-scatter": lambda axis, _: lambda x: _lax.psum_scatter(x, axis, tiled=True),
    "all-reduce": lambda axis, _: lambda x: _lax.psum(x, axis),
    "all-to-all": _all_to_all,
    "collective-permute": _ring,
}


def probes(mesh: Mesh, family: str, quick: bool) -> Iterator[CollectiveProbe]:
    """All collectives over all axes: size by size, so that less time leaves fewer sizes."""
    for size in sizes(family, quick):
        for axis in mesh.axis_names:
            if mesh.shape[axis] > 1:
                for kind in KINDS:
                    yield CollectiveProbe(kind, str(axis), size)


# In: every device's seconds of each run, by probe. Out: a line for each collective over each axis.
# A run's time is the least of its group; the figure is the median of runs, then of groups.
def fit_all(
    mesh: Mesh, placement: Placement, measured: Mapping[CollectiveProbe, Seconds]
) -> tuple[LinkFigure, ...]:
    """Fit latency and bandwidth to what was measured."""
    by_line: dict[tuple[str, str], list[CollectiveProbe]] = {}
    for probe in measured:
        by_line.setdefault((probe.kind, probe.axis), []).append(probe)
    plans = dict(zip(mesh.axis_names, placement.axes, strict=True))
    lines = []
    for (kind, axis), own in by_line.items():
        points, each = [], np.empty(0)
        groups = _groups(mesh, axis)
        for probe in sorted(own, key=lambda probe: probe.size):
            runs = _of_groups(groups, measured[probe])
            if runs.size:
                points.append((float(probe.size), float(np.median(runs)), spread(runs.ravel())))
                each = np.median(runs, axis=1)
        if points:
            plan = plans[axis]
            latency, bandwidth, error = fit_line(points)
            own_each = np.empty(mesh.size)
            own_each[groups] = each[:, None]
            lines.append(
                LinkFigure(
                    *(kind, axis, links_of(kind, placement, plan), plan.size, plan.slow),
                    *(latency, bandwidth, error, tuple(points), tuple(own_each.tolist())),
                )
            )
    return tuple(lines)


def links_of(kind: str, placement: Placement, plan: AxisPlan) -> str:
    """What joins the devices of an axis, as rehearsals write it."""
    topology = placement.topology
    if kind == "collective-permute":  # from neighbour to neighbour, over the slowest of these
        return "network" if plan.slow > 1 else INSIDE[topology.chip.family]
    return links_text(topology, plan.cost.shape, plan.size, plan.slow)


def _groups(mesh: Mesh, axis: str) -> np.ndarray:
    """The places of the devices of every group of an axis, `(groups, members)`."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    along = np.moveaxis(places, mesh.axis_names.index(axis), -1)
    return along.reshape(-1, mesh.shape[axis])


def _of_groups(groups: np.ndarray, seconds: Seconds) -> np.ndarray:
    """The least of every group in each run, `(groups, runs)`; empty where a device has none."""
    if any(not seconds.get(int(place)) for place in groups.ravel()):
        return np.empty((0, 0))
    runs = min(map(len, seconds.values()))
    table = np.array([seconds[int(place)][-runs:] for place in groups.ravel()])
    least: np.ndarray = table.reshape(*groups.shape, runs).min(axis=1)
    return least


# A time is too long or too short by a factor, and factors count alike in both directions and at all
# sizes. (Of relative errors a line that is far too short has at most 100 %: ten times too short
# costs less than twice too long, and points above the line are given up.) By the least squares of
# logarithms, time = (size + half) / bandwidth, where `half` are the bytes that take as long as the
# latency: for each `half` the best bandwidth is known, and what is left is a search in one number.
def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Latency (s), bandwidth (bytes/s) and root mean square error of the line through points.

    The error is that of the logarithm, as a factor less 1: 0.5 is 1.5 times too long or too short.

    >>> latency, bandwidth, error = fit_line([(1e3, 11e-6, 0.0), (1e6, 1010e-6, 0.0)])
    >>> round(latency * 1e6, 3), round(bandwidth / 1e9, 3), round(error, 6)
    (10.0, 1.0, 0.0)
    """
    size = np.array([point[0] for point in points])
    seconds = np.maximum([point[1] for point in points], 1e-9)  # what a trace can tell
    low, high = size.min() * 1e-3, size.max() * 1e3
    halves = np.concatenate([[0.0], np.geomspace(low, high, 400)])
    for _ in range(8):  # each time between the neighbours of the best: to 1e-12 of it
        best = int(np.argmin(_log_errors(size, seconds, halves)[0]))
        low, high = halves[max(best - 1, 0)], halves[min(best + 1, halves.size - 1)]
        halves = np.linspace(low, high, 51)
    errors, slopes = _log_errors(size, seconds, halves)
    best = int(np.argmin(errors))
    latency, slope = halves[best] * slopes[best], slopes[best]
    if halves[best] > size.max() * 500:  # size made no difference: an upper bound of both
        latency, slope = seconds.min(), seconds[-1] / size[-1]
    logs = np.log((latency + slope * size) / seconds)
    return float(latency), float(1 / slope), float(np.expm1(np.sqrt(np.mean(logs**2))))


def _log_errors(
    size: np.ndarray, seconds: np.ndarray, halves: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each `half`, the variance of the logarithms, and the seconds a byte that give it."""
    logs = np.log(seconds) - np.log(size + halves[:, None])
    return logs.var(axis=1), np.exp(logs.mean(axis=1))
