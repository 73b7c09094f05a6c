"""`calibrate`: measure what the devices that are here do, part by part, each bounded in time.

All processes of a job call it together. Every process measures its own devices: accelerators at the
same time, CPUs in turns, since processes of a host share its cores. Collectives run over the whole
mesh. Process 0 joins what all have measured into a `Calibration`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright._checks import check_flag
from meshwright._processes import Interrupted, Together, combine_texts
from meshwright._progress import Pulse, showing
from meshwright._version import __version__
from meshwright.calibration import collective_probes
from meshwright.calibration.collective_probes import CollectiveProbe
from meshwright.calibration.probes import Probe, parts
from meshwright.calibration.timing import Input, Seconds, Timed, fastest, run_all, spread
from meshwright.calibration.trace import Trace
from meshwright.errors import BackendError, CalibrationError, near, short
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import Chip
from meshwright.hardware.measured_figures import Figure
from meshwright.hardware.topology import Topology, topology
from meshwright.meshes.build import explain_mesh
from meshwright.meshes.devices import live_devices
from meshwright.placement.placement import Placement
from meshwright.rehearsal.kernel_speeds import speeds as kernel_speeds
from meshwright.trees.specs import make_spec

_WAIT = 300.0  # seconds for other processes: one may compile for a minute
_LINKS_SECONDS = {True: 20.0, False: 120.0}  # if quick, or not


def calibrate(
    mesh: Mesh | None = None,
    *,
    quick: bool = False,
    only: Sequence[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """Measure the speeds of the devices that are here: products, memory, functions, collectives.

    It takes minutes on accelerators, and nothing else may run on them meanwhile. After Ctrl-C it
    returns what was measured until then (`interrupted`); of several processes one that gets it is
    enough, and `left_out` names it.

    Args:
      mesh: the mesh over whose axes collectives are measured. By default one axis for what joins
        the devices of a host, slice or NVLink domain, and one for the network between them.
      quick: fewer sizes and kinds, in less than a minute.
      only: the parts to measure, by default all: `products`, `memory`, `launches`, `functions`,
        `irregular` (sorts, gathers, scatters), `eight-bit`, `attention`, `host` and `collectives`.
      progress: show what is being measured.

    Raises:
      CalibrationError: for a mesh without devices, if none of the parts can be measured here, or if
        another profiler is running.

    >>> import jax, meshwright as mw
    >>> measured = mw.calibrate(quick=True, only=["memory"], progress=False)
    >>> measured.chip, measured.devices, measured.value("memory copy") > 0
    ('cpu', 8, True)
    """
    check_flag("quick", quick, error=CalibrationError)
    check_flag("progress", progress, error=CalibrationError)
    chosen = _checked_parts(only)
    with Together("calibrate", _WAIT) as together:
        try:
            return _calibrated(mesh, quick, chosen, progress, together)
        except Interrupted as ended:
            raise CalibrationError(f"{ended} All processes end.") from ended
        except Exception as error:
            together.fail(error)
            raise


def _calibrated(
    mesh: Mesh | None,
    quick: bool,
    only: frozenset[str] | None,
    progress: bool,
    together: Together,
) -> Calibration:
    mesh, placement = _meshes(mesh)
    chosen, not_here = _possible_parts(only, mesh, placement.topology.chip, quick)
    # Of several processes, which measure alike, one says so.
    speaks = progress and jax.process_index() == 0
    with showing(speaks), Pulse(f"calibrating {placement.topology.name}") as pulse:
        session = _Session(mesh, placement, quick, chosen, pulse, together)
        session.left_out += not_here
        try:
            together.agree()
            session.measure()
        except Interrupted as ended:
            if ended.problem:
                raise
            session.interrupted, session.alone = True, not ended.processes
            session.left_out.append(f"{pulse.doing} and what comes after: {ended}")
        except KeyboardInterrupt:
            if jax.process_count() > 1:  # the second one
                raise
            session.interrupted = True
        return session.result()


PARTS = (
    *("products", "memory", "launches", "functions", "irregular", "eight-bit", "attention"),
    *("host", "collectives"),
)


def _checked_parts(only: Sequence[str] | None) -> frozenset[str] | None:
    """The parts that are asked for; `None` for all."""
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Sequence):
        raise CalibrationError(
            f"only: {short(only)} is not a list such as ['products'].", option="only"
        )
    for name in only:
        if name not in PARTS:
            raise CalibrationError(
                f"only: there is no part {short(name)}.{near(str(name), PARTS)} Parts: "
                f"{', '.join(PARTS)}.",
                option="only",
            )
    if not only:
        raise CalibrationError(
            f"only: an empty list asks for nothing. Leave it out for all parts, or name some of "
            f"{', '.join(PARTS)}.",
            option="only",
        )
    return frozenset(only)


def _possible_parts(
    only: frozenset[str] | None, mesh: Mesh, chip: Chip, quick: bool
) -> tuple[frozenset[str], list[str]]:
    """Return the parts to measure, and those asked for by name that cannot be, with the reason."""
    if only is None:
        return frozenset(PARTS), []
    reasons = _why_not(mesh, chip, quick)
    not_here = [f"{name}: {reasons[name]}" for name in PARTS if name in only and name in reasons]
    if only <= reasons.keys():
        raise CalibrationError(
            f"only: there is nothing to measure. {'; '.join(not_here)}. Name other parts, or leave "
            "it out for all.",
            option="only",
        )
    return only - reasons.keys(), not_here


def _why_not(mesh: Mesh, chip: Chip, quick: bool) -> dict[str, str]:
    """The parts that these devices have nothing of, each with the reason."""
    reasons = {}
    if quick:
        reasons["eight-bit"] = "not with quick, its compiler takes up to a minute a size"
    if chip.family == "cpu":
        reasons["eight-bit"] = "of GPUs and TPUs, and these devices are CPUs"
        reasons["host"] = "of GPUs and TPUs, and these devices work in the host's own memory"
    if chip.family == "tpu":
        reasons["irregular"] = "not on TPUs, whose compiler works on one sort for a minute"
    if chip.family != "gpu":
        reasons["attention"] = f"of GPUs, and these devices are {chip.family.upper()}s"
    if mesh.size < 2:
        reasons["collectives"] = "of several devices, and there is one"
    return reasons


def _meshes(mesh: Mesh | None) -> tuple[Mesh, Placement]:
    if mesh is None:
        try:
            live = topology(live_devices())
        except BackendError as error:
            raise CalibrationError(f"there is nothing to calibrate: {error}") from error
        slices = live.num_slices
        shape = (slices, live.num_devices // slices)
        grid = np.array(live.devices, dtype=object)[live.index.ravel()].reshape(shape)
        mesh = Mesh(grid, ("network", "inside"))
    elif not isinstance(mesh, Mesh) or mesh.empty:
        raise CalibrationError(
            f"mesh: {short(mesh)} has no devices to measure. Pass a jax.sharding.Mesh, or leave it "
            "out for all devices.",
            option="mesh",
        )
    if not any(each.process_index == jax.process_index() for each in mesh.devices.flat):
        raise CalibrationError(
            f"mesh: none of its {mesh.size} devices is in this process. Every process that calls "
            "calibrate takes part.",
            option="mesh",
        )
    return mesh, explain_mesh(mesh)


@dataclasses.dataclass
class _Session:
    """What was measured so far: seconds of every run by device, for each figure."""

    mesh: Mesh
    placement: Placement
    quick: bool
    only: frozenset[str]
    pulse: Pulse
    together: Together
    runs: dict[str, dict[int, list[float]]] = dataclasses.field(default_factory=dict)
    units: dict[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    links: dict[CollectiveProbe, Seconds] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    alone: bool = False  # the others do not answer any more
    done: int = 0  # programs that were compiled or run, of so many
    total: int = 1

    @functools.cached_property
    def own(self) -> list[int]:
        """The places in the mesh of this process's devices, in the order of the devices' ids."""
        here = jax.process_index()
        flat = list(self.mesh.devices.flat)
        places = [i for i, device in enumerate(flat) if device.process_index == here]
        return sorted(places, key=lambda place: flat[place].id)

    @functools.cached_property
    def local(self) -> Mesh:
        flat = list(self.mesh.devices.flat)
        return Mesh(np.array([flat[place] for place in self.own], dtype=object), ("device",))

    @property
    def target(self) -> float:
        """Seconds for which a program is run."""
        return 0.03 if self.quick else 0.15

    def measure(self) -> None:
        """Measure part after part."""
        chip = self.placement.topology.chip
        listed = {name: part for name, part in parts(chip, self.quick).items() if name in self.only}
        links = list(collective_probes.probes(self.mesh, chip.family, self.quick))
        links = links if "collectives" in self.only else []
        self.total = 2 * (sum(len(probes) for probes, _ in listed.values()) + len(links)) or 1
        for name, (probes, seconds) in listed.items():
            self._part(name, probes, seconds)
        if "host" in self.only:
            self.pulse.now("host transfers", done=self.done / self.total)
            self._host_transfers()
        if links:
            self._collectives(links, _LINKS_SECONDS[self.quick])

    def _tell(self, doing: str, done: int = 0) -> None:
        self.done += done
        self.pulse.now(doing, done=min(1.0, self.done / self.total))

    # Programs of this process's own devices. Processes on CPUs take turns: each is alone on the
    # cores of its host, and a slow one is not hidden by what the others do there.
    def _run_own(self, name: str, programs: Sequence[Timed]) -> Trace | None:
        count, here = jax.process_count(), jax.process_index()

        def ran() -> None:
            self._tell(f"{name}, running", 1)

        if count == 1 or self.placement.topology.chip.family != "cpu":
            return run_all(programs, self.target, self.together.agree, ran)
        trace = None
        for turn in range(count):
            if turn == here:
                try:
                    trace = run_all(programs, self.target, self.together.go_on, ran)
                except KeyboardInterrupt:
                    if not self.together.asked:
                        raise
            else:
                self._tell(f"{name}, process {turn} of {count} running")
            self.together.agree()
        return trace

    def _part(self, name: str, probes: Sequence[Probe], seconds: float) -> None:
        def make(probe: Probe) -> Timed:
            words = f"calibrate_{probe.name}".replace(" ", "_")
            return Timed(words, probe.function, probe.inputs, self.local, traced=not probe.rounds)

        programs = dict(self._compiled(name, probes, make, seconds))
        trace = self._run_own(name, list(programs.values()))
        for probe, timed in programs.items():
            if probe.rounds:
                runs = timed.walls
                work = float(probe.rounds)
                self._keep(probe, dict.fromkeys(range(len(self.own)), runs), work)
                continue
            chosen = probe.chosen(timed.program()) if probe.counted else {}
            work = sum(chosen.values()) if probe.counted else probe.work
            if not work:
                self.left_out.append(f"{probe.name}: the compiler makes something else of it")
                continue
            by_device = timed.seconds(trace, chosen.__contains__ if probe.counted else None)
            if by_device and trace is not None and timed.module not in trace.events:
                self.left_out.append(f"{probe.name}: by the clock, its trace has no event")
            if probe.counted and self.placement.topology.chip.family == "gpu":
                aside = probe.aside(timed.program(), self._copied(), self._sort_start())
                by_device = {
                    device: [max(seconds - aside, seconds / 2) for seconds in runs]
                    for device, runs in by_device.items()
                }
            if probe.burst:
                by_device = {device: fastest(runs) for device, runs in by_device.items()}
            if by_device:
                self._keep(probe, by_device, work)
            else:
                self.left_out.append(f"{probe.name}: the trace has no event of it")

    def _copied(self) -> float:
        """Bytes a second of a copy, as measured; by the table where that was not asked for."""
        runs = [s for each in self.runs.get("memory copy", {}).values() for s in each]
        if not runs:
            return kernel_speeds(self.placement.topology.chip).bytes
        return self.units["memory copy"][1] / float(np.median(runs))

    def _sort_start(self) -> float:
        return self.placement.topology.chip.speeds.value("start sort") or 0.0

    def _host_transfers(self) -> None:
        kinds = {memory.kind for memory in self.local.devices.flat[0].addressable_memories()}
        if self.placement.topology.chip.family == "cpu" or "pinned_host" not in kinds:
            self.left_out.append("host transfers: these devices work in the host's own memory")
            return
        elements = 2**24 if self.quick else 2**26
        memories = {
            "bus to device": ("pinned_host", "device"),
            "bus to host": ("device", "pinned_host"),
        }

        def make(probe: Probe) -> Timed:
            memory, words = memories[probe.name], probe.name.replace(" ", "_")
            target = NamedSharding(self.local, make_spec(["device"]), memory_kind=memory[1])
            move = functools.partial(jax.device_put, device=target)
            name = f"calibrate_{words}"
            return Timed(name, move, probe.inputs, self.local, whole=False, memory=memory)

        probes = [
            Probe(name, "B/s", jax.device_put, (Input((elements,)),), 4.0 * elements)
            for name in memories
        ]
        programs = dict(self._compiled("host", probes, make, 30.0))
        trace = self._run_own("host transfers", list(programs.values()))
        for probe, timed in programs.items():
            self._keep(probe, timed.seconds(trace), probe.work)

    def _keep(self, probe: Probe, seconds: Seconds, work: float) -> None:
        self.units[probe.name] = probe.unit, work
        self.runs[probe.name] = self._placed(seconds)

    def _placed(self, seconds: Seconds) -> Seconds:
        """By the device's place in the mesh, from its number in this process."""
        numbers = sorted(seconds)
        return {self.own[i]: seconds[number] for i, number in enumerate(numbers)}

    def _compiled(
        self, part: str, probes: Sequence[Any], make: Callable[[Any], Timed], seconds: float
    ) -> Iterator[tuple[Any, Timed]]:
        """Compile programs until the time of the part is up; say what is left out."""
        began = time.monotonic()
        for number, probe in enumerate(probes):
            self._tell(f"{part}, compiling", 1)
            # Decided together: the n-th program of one process is the n-th of every other one.
            if self.together.agree(time.monotonic() - began) > seconds:
                rest = ", ".join(each.name for each in probes[number : number + 3])
                more = "" if number + 3 >= len(probes) else ", ..."
                self.left_out.append(f"{part}: {seconds:g} s were over before {rest}{more}")
                return
            timed, problem = None, ""
            try:
                timed = make(probe)
            except Exception as error:  # the compiler has no such kernel for this chip
                problem = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not self.together.agree(float(timed is None)) and timed is not None:
                yield probe, timed
            else:
                self.left_out.append(f"{probe.name}: {short(problem) or 'failed elsewhere'}")

    def _collectives(self, probes: Sequence[CollectiveProbe], seconds: float) -> None:
        programs = dict(
            self._compiled("collectives", probes, lambda probe: probe.timed(self.mesh), seconds)
        )
        told = functools.partial(self._tell, "collectives, running", 1)
        trace = run_all(list(programs.values()), self.target / 3, self.together.agree, told)
        for probe, timed in programs.items():
            own = timed.seconds(trace, probe.is_own(timed)) or timed.seconds(trace)
            self.links[probe] = self._placed(own)

    def result(self) -> Calibration:
        """Join what all processes have measured; the same value in all of them."""
        part = {
            "runs": self.runs,
            "units": self.units,
            "links": [[*dataclasses.astuple(probe), runs] for probe, runs in self.links.items()],
            "interrupted": self.interrupted,
            "left_out": self.left_out,
        }
        text = json.dumps(part)
        answer = None
        if not self.alone:
            answer = combine_texts(
                "calibrate result", text, lambda texts: json.dumps(_joined(texts)), timeout=_WAIT
            )
        data = json.loads(answer) if answer else _joined([text]) | {"interrupted": True}
        return self._calibration(data)

    def _calibration(self, data: Mapping[str, Any]) -> Calibration:
        hardware: Topology = self.placement.topology
        devices = list(self.mesh.devices.flat)
        links = {
            CollectiveProbe(kind, axis, size): {int(k): v for k, v in runs.items()}
            for kind, axis, size, runs in data["links"]
        }
        driver, clocks = _driver_and_clocks(hardware.chip.family)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Calibration(
            hardware.chip.name,
            devices[0].device_kind,
            hardware.name,
            tuple(device.process_index for device in devices),
            now.replace("+00:00", "Z"),
            driver,
            {"meshwright": __version__, **_versions()},
            clocks,
            tuple(
                _figure(
                    name, data["units"][name], {int(k): v for k, v in runs.items()}, len(devices)
                )
                for name, runs in data["runs"].items()
            ),
            collective_probes.fit_all(self.mesh, self.placement, links),
            tuple(dict.fromkeys(data["left_out"])),
            data["interrupted"],
        )


def _joined(texts: Sequence[str]) -> dict[str, Any]:
    """Join the parts of all processes: runs by device."""
    all_parts = [json.loads(text) for text in texts]
    first = all_parts[0]
    links: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    runs: dict[str, dict[str, list[float]]] = {}
    for part in all_parts:
        for name, by_device in part["runs"].items():
            runs.setdefault(name, {}).update(by_device)
            first["units"].setdefault(name, part["units"][name])
        for *probe, by_device in part["links"]:
            links.setdefault(tuple(probe), {}).update(by_device)
    return {
        "runs": runs,
        "units": first["units"],
        "links": [[*probe, by_device] for probe, by_device in links.items()],
        "interrupted": any(part["interrupted"] for part in all_parts),
        "left_out": [words for part in all_parts for words in part["left_out"]],
    }


def _figure(
    name: str, counted: tuple[str, float], runs: Mapping[int, Sequence[float]], devices: int
) -> Figure:
    unit, work = counted
    medians = {place: float(np.median(each)) for place, each in runs.items()}
    together = [seconds for each in runs.values() for seconds in each]

    def value(seconds: float) -> float:
        return seconds / work if unit == "s" else work / max(seconds, 1e-12)

    # Of some devices alone, as after an interrupt, nobody could say whose they are.
    whole = len(medians) == devices
    each = tuple(value(medians[place]) for place in sorted(medians)) if whole else ()
    # A device that is slower than the others is told by `each`, not by the spread of the runs.
    own = float(np.median([spread(runs[place]) for place in runs]))
    return Figure(name, value(float(np.median(together))), unit, own, each)


def _versions() -> dict[str, str]:
    versions = {}
    for library in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions


_ASKED = ("driver_version", "clocks.sm", "clocks.mem")


def _driver_and_clocks(family: str) -> tuple[str, dict[str, float]]:
    """The driver's version and the clocks in MHz, where the vendor's tool is here and says so."""
    tool = shutil.which("nvidia-smi") if family == "gpu" else None
    if tool is None:
        return "", {}
    words = [tool, "-i", "0", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)  # noqa: S603
        version, *numbers = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        return version, dict(zip(("sm", "memory"), map(float, numbers), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", {}
