"""Compiling in a process of its own, with its own environment, a deadline and signs of life."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RehearsalError
from meshwright.rehearsal.compiler.jobs import Job, Outcome, Site

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
                [sys.executable, "-P", "-m", f"{__package__}.child", self._folder.name],
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
    package = str(Path(__file__).parents[3])
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
