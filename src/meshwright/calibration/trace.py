"""`record` runs a block under JAX's profiler; `Trace` says which instruction ran when, and where.

What the profiler writes, by platform (jax 0.10 to 0.12):

- simulated CPU devices: all in the plane `/host:CPU`, one device's events on several threads;
  every event has its device's number;
- GPUs: a plane for each, `/device:GPU:0`, with a line for each stream;
- TPUs: a plane for each, `/device:TPU:0`, with the lines `XLA Ops` and `Async XLA Ops`; those of
  their sparse cores, `/device:TPU:0 SparseCore 0`, are left out. Where an event does not say whose
  it is, its name is the instruction, and the line `XLA Modules` has the program of that time.

The name of an instruction is in the event; what it is, only the program says: in a trace an
all-reduce may be called `psum.7`.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright import _compat
from meshwright.errors import CalibrationError

_DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)")
_TPU_LINES = ("XLA Ops", "Async XLA Ops")
_TPU_PROGRAMS = "XLA Modules"
_NAME = re.compile(r"%?([\w.-]+)")  # of `fusion.3`, `%fusion.3 = ...` and `jit_step(123)`


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One run of an instruction, times in seconds.

    `device` is its number on this host; of a simulated one its `id`.
    """

    device: int
    instruction: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Trace:
    """The events of some programs, by the program's name (`jit_step`), in order of their start."""

    events: dict[str, list[Event]]

    def __repr__(self) -> str:
        return f"<Trace of {', '.join(self.events) or 'nothing'}>"

    def of(self, module: str) -> list[Event]:
        """The events of a program; raises `CalibrationError` where the trace has none."""
        if events := self.events.get(module):
            return events
        seen = ", ".join(self.events) or "no program at all"
        raise CalibrationError(
            f"the profiler's trace has no events of {module} on any device, only of {seen}. "
            "Another profiler may hold the devices (Nsight, DCGM, xprof); end it and try again."
        )


class Recording:
    """What `record` gives: `trace` is there when the block has ended."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            raise CalibrationError("the block is still being recorded.")
        return self._trace


# In: a block that runs compiled programs and waits for them. Out: its trace. Invariant: the
# profiler is stopped and its files are gone when the block is left, however it is left, unless
# `keep` names a folder for them. Example: `with record() as recording: step(x)`, then
# `recording.trace.of("jit_step")`.
@contextlib.contextmanager
def record(keep: Path | None = None) -> Iterator[Recording]:
    """Run the block under the profiler; `keep` is a folder that the profiler's own files go to.

    Raises `CalibrationError` if a profiler runs already or its files cannot be written.
    """
    recording = Recording()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events are not ours, and cost a third of a step
    options.host_tracer_level = 2
    with _folder(keep) as folder:
        _start(folder, options)
        try:
            yield recording
        except BaseException:
            try:
                jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
            except Exception:  # what the block raised is the news
                _compat.forget_profiler()
            raise
        try:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
            profile = _read(folder)
        except (OSError, RuntimeError) as error:
            _compat.forget_profiler()
            raise _no_room(folder, keep, error) from error
        recording._trace = read_trace(profile)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    # A folder of its own: the profiler names traces by the second.
    try:
        folder = Path(tempfile.mkdtemp(prefix="meshwright-trace-"))
    except OSError as error:
        raise _no_room(Path(tempfile.gettempdir()), keep, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _no_room(folder: Path, keep: Path | None, error: Exception) -> CalibrationError:
    """What is raised where the profiler's files cannot be written."""
    # XLA writes `RESOURCE_EXHAUSTED: <a long path>; No space left on device`.
    why = str(getattr(error, "strerror", None) or _line(error, most=2000)).rpartition(";")[2]
    other = "name another folder" if keep is not None else "point TMPDIR elsewhere"
    return CalibrationError(
        f"the profiler's trace could not be written to {folder}: {why.strip()[:200]}. It takes "
        f"about 1 MB a step and device; make room, or {other}."
    )


def _start(folder: Path, options: Any) -> None:
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        if "already" not in str(error):
            raise CalibrationError(f"the profiler does not start: {_line(error)}.") from error
        raise running_already() from error


def running_already() -> CalibrationError:
    """What is raised where another profiler records in this process."""
    return CalibrationError(
        "a profiler is running already in this process (jax.profiler.start_trace or "
        "jax.profiler.trace); only one can. End it, then measure."
    )


def _read(folder: Path) -> Any:
    files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise OSError("it wrote no file")
    return jax.profiler.ProfileData.from_file(str(files[-1]))


def _line(error: Exception, most: int = 80) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:most]


def read_trace(profile: Any) -> Trace:
    """Read the events of compiled programs out of a `jax.profiler.ProfileData`."""
    events: dict[str, list[Event]] = collections.defaultdict(list)
    with warnings.catch_warnings():
        # Reading statistics warns of a type without `__module__` (jax 0.11, Python 3.12).
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            accelerator = _DEVICE.fullmatch(plane.name)
            if accelerator:
                lines = [line for line in plane.lines if _is_of_programs(accelerator[1], line.name)]
                programs = _program_spans(plane) if accelerator[1] == "TPU" else []
                _read_lines(lines, int(accelerator[2]), events, programs)
            elif plane.name == "/host:CPU":
                _read_lines(plane.lines, None, events)
    for each in events.values():
        each.sort(key=lambda event: event.start)
    return Trace(dict(events))


def _is_of_programs(kind: str, line: str) -> bool:
    """Whether a line of an accelerator has what ran; others are made from those."""
    return line in _TPU_LINES if kind == "TPU" else line.startswith("Stream")


def _program_spans(plane: Any) -> list[tuple[float, float, str]]:
    """When which program ran on a TPU: start, end (ns) and name, in order."""
    lines = [line for line in plane.lines if line.name == _TPU_PROGRAMS]
    return sorted(
        (event.start_ns, event.start_ns + event.duration_ns, named[1])
        for line in lines
        for event in line.events
        if (named := _NAME.match(event.name))
    )


def _read_lines(
    lines: Sequence[Any],
    device: int | None,
    events: dict[str, list[Event]],
    programs: Sequence[tuple[float, float, str]] = (),
) -> None:
    starts = [start for start, _, _ in programs]
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            where = stats.get("device_ordinal") if device is None else device
            if programs and "hlo_op" not in stats and (named := _NAME.match(event.name)):
                stats["hlo_op"] = named[1]
            if programs and "hlo_module" not in stats:
                at = bisect.bisect_right(starts, event.start_ns) - 1
                if at >= 0 and event.start_ns < programs[at][1]:
                    stats["hlo_module"] = programs[at][2]
            if "hlo_op" not in stats or "hlo_module" not in stats or where is None:
                continue
            name, module = str(stats["hlo_op"]), str(stats["hlo_module"])
            start, seconds = event.start_ns * 1e-9, event.duration_ns * 1e-9
            events[module].append(Event(int(where), name, start, seconds))


# Times of events: several may run at once on a device.


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, joined where they meet.

    >>> union([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(spans: Sequence[tuple[float, float]]) -> float:
    """The time that joined spans cover."""
    return sum(end - start for start, end in spans)


def outside(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """How much of a span none of the others, joined and in order, covers.

    >>> outside((0, 10), [(2, 3), (8, 12)])
    7
    """
    start, end = span
    covered = sum(max(0, min(end, b) - max(start, a)) for a, b in others)
    return (end - start) - covered
