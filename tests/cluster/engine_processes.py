"""The processes that an engine starts for a test: found by a mark in their environment, ended."""

import contextlib
import dataclasses
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
MARK = "MESHWRIGHT_TEST_JOB"  # inherited by all that a test starts
# Generous: four processes that import JAX on two busy cores. Nothing here waits for a fixed time.
START, SOON = 400.0, 60.0

T = TypeVar("T")


def until(condition: Callable[[], T], deadline: float, what: Callable[[], str]) -> T:
    """Wait until `condition` holds and return what it gives; past the deadline say what is."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:.0f} s:\n{what()}")
        time.sleep(0.02)
    return value


def environment(mark: str, **more: str) -> dict[str, str]:
    """What the processes of a job get: this Python and package, the CPU, loopback alone."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("XLA_")}
    return {
        **ours,
        MARK: mark,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # Bare, JAX's coordinator listens on every address of the machine.
        "JAX_COORDINATOR_PORT": (port := str(free_port())),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        # Four compilers and four pools of threads on two cores are in each other's way.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@dataclasses.dataclass(frozen=True)
class Process:
    """One that lives, with the environment it was started with."""

    pid: int
    name: str
    environ: dict[str, str]

    @property
    def gone(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"


def marked(mark: str) -> list[Process]:
    """All processes that live and have inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "environ").read_bytes().split(b"\0")
            if wanted in fields:
                pairs = (field.decode(errors="replace").partition("=") for field in fields)
                name = (folder / "comm").read_text().strip()
                process = Process(
                    int(folder.name), name, {key: value for key, _, value in pairs if key}
                )
                if not process.gone:
                    processes.append(process)
    return processes


def workers(mark: str, rank: str, count: int = 4) -> dict[int, Process]:
    """The Python processes of a job by their number, which the engine has put into `rank`."""
    group = {
        int(process.environ[rank]): process
        for process in sorted(marked(mark), key=lambda process: -process.pid)
        if rank in process.environ and process.name.startswith("python")
    }
    assert sorted(group) == list(range(count)), group
    return group


def kill(group: dict[int, Process], victim: int) -> float:
    """Kill a worker; the seconds until all are gone. Without a watchdog JAX takes 100."""
    os.kill(group[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    until(
        lambda: all(process.gone for process in group.values()),
        SOON,
        lambda: f"still there: {[number for number in group if not group[number].gone]}",
    )
    return time.monotonic() - killed


def end_all(mark: str) -> None:
    """End what a test has left, by process id."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in marked(mark) if process.pid != os.getpid()]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        with contextlib.suppress(AssertionError):
            until(lambda left=left: all(process.gone for process in left), 5.0, str)


def listening_addresses(mark: str) -> dict[str, set[str]]:
    """Where the processes of a job listen, by the program's name, as `ss` says."""
    names = {process.pid: process.name for process in marked(mark)}
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    addresses: dict[str, set[str]] = {}
    for line in said.splitlines():
        local = line.split()[3].rpartition(":")[0]
        for pid in map(int, re.findall(r"pid=(\d+)", line)):
            if pid in names:
                addresses.setdefault(names[pid], set()).add(local)
    return addresses


def assert_loopback_alone(mark: str, *programs: str) -> None:
    """Each of the programs listens, and none of all on another address than loopback's."""
    addresses = listening_addresses(mark)
    assert set(programs) <= set(addresses), addresses
    outside = {
        f"{name} on {address}"
        for name, places in addresses.items()
        for address in places
        if not address.startswith("127.") and address not in ("[::1]", "[::ffff:127.0.0.1]")
    }
    assert not outside, outside


# A network that has loopback alone, for engines that listen on every address there is. And no logs
# of libtpu, which Ray would print as its own whoever has written them.
_LOGS = Path(tempfile.gettempdir()) / "tpu_logs"
_ALONE = f"""\
ip link set lo up || exit 1
if [ -d {_LOGS} ]; then mount -t tmpfs none {_LOGS} || exit 1; fi
exec "$0" "$@"
"""
ISOLATED = ("unshare", "--net", "--mount", "sh", "-c", _ALONE)


def cannot_isolate() -> str:
    """Why a job cannot have a network of its own here, or nothing."""
    try:
        done = subprocess.run([*ISOLATED, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return done.stderr.strip()


def assert_isolated(pid: int) -> None:
    """The network of a process has loopback's addresses alone."""
    inside = ("nsenter", f"--target={pid}", "--net", "ip", "-oneline", "address")
    addresses = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1] for line in addresses.splitlines()} == {"lo"}, addresses


@dataclasses.dataclass(frozen=True)
class Output:
    """What a job has written so far, of all processes and restarts together."""

    path: Path

    def text(self) -> str:
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        # mpirun tags every piece that it reads of a line, not every line.
        return re.sub(r"\[\d+,\d+\]<std(?:out|err)>:", "", text)

    def wait_for(self, pattern: str, start: int = 0, deadline: float = START) -> re.Match[str]:
        """Wait for a match after `start`, a place in the text; not if the program has failed."""
        search = re.compile(pattern).search
        failed = re.compile(r"meshwright: process \d+ raised").search

        def look() -> re.Match[str] | None:
            text = self.text()
            assert not failed(text, start), text[-6000:]
            return search(text, start)

        return until(look, deadline, lambda: self.text()[-6000:])

    def losses(self) -> list[tuple[int, float]]:
        lines = re.findall(r"step (\d+) loss (\d+\.\d+)", self.text())
        return [(int(step), float(loss)) for step, loss in lines]

    def named(self) -> list[str]:
        """Who is at fault, of each process that said so."""
        return re.findall(r"meshwright: (process \d+ died)", self.text())


def assert_as_uninterrupted(output: Output) -> None:
    """All losses of a job, restarted on whatever, are those of a run without any of it, here."""
    losses = output.losses()
    expected = _losses_here(1 + max(step for step, _ in losses))
    for step, loss in losses:
        assert abs(loss - expected[step]) <= 1e-4 * expected[step], (step, losses)


def _losses_here(steps: int) -> list[float]:
    program = runpy.run_path(str(ROOT / "examples/cluster/train.py"))
    state, losses = program["make_state"](jax.random.key(0)), []
    for step in range(steps):
        state, loss = program["train_step"](state, program["read"](step, slice(None)))
        losses.append(float(loss))
    return losses
