"""`Job`: a program and the hardware to compile it for; `Outcome`: what the compiler made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshwright.errors import RehearsalError
from meshwright.hardware.topology import Topology

# What changes the result, besides the job itself: whose versions, which variables.
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 3

Platform = Literal["tpu", "cuda", "cpu"]
PLATFORMS: Mapping[str, Platform] = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}  # by chip family


@dataclasses.dataclass(frozen=True)
class Site:
    """The hardware that a program is compiled for, known before the program is.

    `positions` holds, for each partition of the program, the place of its device in the
    topology, as its `index` counts.
    """

    platform: Platform
    topology: Topology
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """A program in the compiler's bytecode, and where its parts run.

    `free_outputs` says whose sharding the compiler chooses, `shardy` in which of XLA's two
    languages the program's shardings are written, `options` are its `jit`'s compiler options.
    `identity` stands for the program where there is one: its bytecode holds the lines of whoever
    called.
    """

    name: str
    code: bytes
    site: Site
    free_outputs: tuple[bool, ...]
    shardy: bool = True
    identity: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """The same for the same program, hardware, versions and compiler flags."""
        hardware = self.site.topology
        parts = (
            _FORMAT,
            self.identity or self.code,
            self.site.platform,
            (hardware.name, hardware.chip.name, hardware.axes, hardware.host.tobytes()),
            hardware.index.astype(np.int64).tobytes(),
            self.site.positions.astype(np.int64).tobytes(),
            self.free_outputs,
            self.shardy,
            sorted((name, repr(value)) for name, value in self.options),
            versions(),
            tuple(os.environ.get(flag, "") for flag in FLAGS),
        )
        return hashlib.sha256(pickle.dumps(parts, protocol=4)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`verdict`: "compiled"; "exhausted" when the compiler ran out of memory; else "failed".

    `reason` is the compiler's own text where it refused, `notes` what it wrote on the way.
    `shardings` are those of the results, as `_compat.written_shardings` writes them.
    """

    verdict: Literal["compiled", "exhausted", "failed"]
    text: str = ""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    notes: str = ""
    compiler: str = ""
    shardings: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def versions() -> tuple[tuple[str, str], ...]:
    """The versions of what takes part in a compile."""
    return tuple((name, _version(name)) for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# Compiling in a process of its own, with its own environment, a deadline and signs of life.


_TICK = 0.1  # seconds between two looks at the compiler
_LINES = 12  # of what it wrote last, where it crashed
_REASON = re.compile(r"^F\d{4} |Check failed|[Uu]nknown (command line )?flag")


class Compiler:
    """A process that readies itself for some hardware while its program is still being traced.

    With `with`: at its end, and when this process ends, so does the other.
    """

    def __init__(self, site: Site):
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        self._place = Path(self._folder.name)
        self._place.joinpath("site").write_bytes(pickle.dumps(site))
        with self._place.joinpath("notes").open("wb") as notes:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", f"{__package__}.compiler_worker", self._folder.name],
                stdin=subprocess.PIPE,
                stdout=notes,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def run(self, job: Job, deadline: float, tick: Callable[[float], None]) -> Outcome:
        """Compile a job, once; `tick` is called with the seconds that passed."""
        self._place.joinpath("job").write_bytes(pickle.dumps(job))
        with contextlib.suppress(BrokenPipeError):  # it has crashed, which is told below
            os.write(self._process.stdin.fileno(), b"\n")  # type: ignore[union-attr]
        status = _wait(job, self._process, deadline, tick)
        written = self._place.joinpath("notes").read_text(encoding="utf-8", errors="replace")
        answer = self._place / "outcome"
        if not answer.exists():
            raise RehearsalError(_crash(job, status, written))
        return Outcome(**{**json.loads(answer.read_text(encoding="utf-8")), "notes": written})

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)
        self._folder.cleanup()


def environment() -> dict[str, str]:
    """The variables of the compiling process: ours, with the CPU as JAX's only live platform."""
    own = dict(os.environ)
    own["JAX_PLATFORMS"] = "cpu"
    flags = own.get("XLA_FLAGS", "").split()
    own["XLA_FLAGS"] = " ".join(
        flag for flag in flags if "xla_force_host_platform_device_count" not in flag
    )
    package = str(Path(__file__).parents[2])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (package, own.get("PYTHONPATH"))))
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS"):
        own.pop(name, None)
    return own


def _wait(
    job: Job, process: subprocess.Popen[bytes], deadline: float, tick: Callable[[float], None]
) -> int:
    began = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_TICK)
        passed = time.monotonic() - began
        if passed > deadline:
            raise RehearsalError(
                f"{job.name}: the compiler was not done after {deadline:g} s and was ended. Pass "
                "deadline=... seconds to wait longer, or try fewer layers first."
            )
        tick(passed)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _crash(job: Job, status: int, written: str) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    lines = written.strip().splitlines()
    why = [line for line in lines if _REASON.search(line)]
    last = [line[:400] for line in why[:3]] or [line[:160] for line in lines[-_LINES:]]
    said = "\n  ".join(["It wrote:", *last]) if last else "It wrote nothing."
    return f"{job.name}: the compiling process crashed ({how}). {said}"


# Outcomes kept on disk, one file each, by the key of their job.
#
# A file holds a checksum, then the outcome, compressed. One that is damaged counts as not there.


_CHECKSUM = 32  # bytes


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshwright"


def load(folder: Path, job: Job) -> Outcome | None:
    """What is kept for this job, if anything is."""
    try:
        content = _file(folder, job).read_bytes()
        checksum, packed = content[:_CHECKSUM], content[_CHECKSUM:]
        if hashlib.sha256(packed).digest() != checksum:
            return None
        return Outcome(**json.loads(zlib.decompress(packed)))
    except (OSError, ValueError, TypeError, zlib.error):
        return None


def save(folder: Path, job: Job, outcome: Outcome) -> None:
    """Keep an outcome; a folder that cannot be written only costs the time of another compile."""
    packed = zlib.compress(json.dumps(outcome.to_json()).encode(), level=1)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(packed).digest() + packed)
            Path(name).replace(_file(folder, job))
        finally:
            Path(name).unlink(missing_ok=True)


def _file(folder: Path, job: Job) -> Path:
    return folder / f"{job.key}.rehearsal"


# The compiler's answer to a job: kept from before, or asked for now and kept.


_ANSWER_LINES = 12  # of a compiler's own error


def answer(
    job: Job,
    folder: Path | None,
    deadline: float,
    tick: Callable[[float], None],
    ready: Compiler | None = None,
) -> tuple[Outcome, bool]:
    """What the compiler says, or said before; whether it is from the folder.

    `ready` is a compiler that was started before for this hardware; else one is started.
    """
    kept = None if folder is None else load(folder, job)
    if kept is not None:
        return kept, True
    with ready or Compiler(job.site) as compiler:
        outcome = compiler.run(job, deadline, tick)
    if outcome.verdict == "failed":
        lines = [line[:160] for line in outcome.reason.splitlines()[:_ANSWER_LINES]]
        raise RehearsalError("\n  ".join([f"{job.name}: the compiler refused it.", *lines]))
    if folder is not None:
        save(folder, job, outcome)
    return outcome, False
