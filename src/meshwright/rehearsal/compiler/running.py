"""Compiling in a process of its own, with its own environment, a deadline and signs of life."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RehearsalError
from meshwright.rehearsal.compiler.jobs import Job, Outcome

_TICK = 0.1  # seconds between two looks at the compiler
_LINES = 12  # of what it wrote last, where it crashed


def run(job: Job, deadline: float, tick: Callable[[float], None]) -> Outcome:
    """Compile a job; `tick` is called with the seconds that passed.

    The process is ended when the deadline passes, and when this one is interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        question, answer = Path(folder, "job"), Path(folder, "outcome")
        question.write_bytes(pickle.dumps(job))
        with Path(folder, "notes").open("w+b") as notes:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", f"{__package__}.child", str(question), str(answer)],
                stdin=subprocess.PIPE,
                stdout=notes,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
            try:
                status = _wait(job, process, deadline, tick)
            finally:
                _end(process)
            notes.seek(0)
            written = notes.read().decode("utf-8", "replace")
        if not answer.exists():
            raise RehearsalError(_crash(job, status, written))
        return Outcome(**{**json.loads(answer.read_text(encoding="utf-8")), "notes": written})


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
    last = [line[:160] for line in written.strip().splitlines()[-_LINES:]]
    said = "\n  ".join(["It wrote last:", *last]) if last else "It wrote nothing."
    return f"{job.name}: the compiling process crashed ({how}). {said}"
