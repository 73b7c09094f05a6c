"""Faults in an ordinary SPMD loop under watch: who is named, and how soon all are out.

    PYTHONPATH=src:tests python tests/multiprocess/spmd_faults.py --processes 2 3 4 --rounds 1

Every process runs the same jitted step with a collective; at some step something happens to one
of them. The line of each kind says how many of the other processes named the right one, how many
showed its stack, and the longest time until all were out, after the timeout if it is a hang.
`--healthy 1800` runs steps for so many seconds at least: one process compiles for 40 s, then the
system stops all of them for 20 s; if the timeout is longer than that, all sleep for 20 s as well.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from joining import start
from ports import free_port

from meshwright.watchdog.watchdog import Watchdog

LONG, DEADLINE = 60.0, 90.0
NO_HANG = ("kill", "stop", "raise", "exit 0", "sigterm", "segfault")
HANG = ("sleep before", "sleep inside", "lock", "busy loop", "read", "callback", "gil")
# The engine sends SIGTERM to the others when one was killed, or to all; another batch in one.
ENGINE = ("killed, then told", "killed, then told to save", "all told", "saved", "shape")
KINDS = NO_HANG + HANG


def happen(kind: str) -> None:
    """What goes wrong."""
    if kind == "kill" or kind.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise":
        raise ValueError("no luck")
    if kind == "exit 0":
        sys.exit(0)
    if kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind in ("sleep before", "sleep inside", "callback"):
        time.sleep(LONG)
    if kind == "lock":
        lock = threading.Lock()
        with lock, lock:
            pass
    if kind == "busy loop":
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            pass
    if kind == "read":
        os.read(os.pipe()[0], 1)
    if kind == "gil":  # no other thread of Python runs meanwhile, and no signal ends it
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


@dataclasses.dataclass
class Case:
    """One run: who, at which step, under a watchdog that is told of steps in one of three ways."""

    kind: str
    count: int
    victim: int
    at: int = 50
    told: str = "wrap"  # or "step", or "nothing"
    timeout: float = 3.0
    last: int = 0  # step of a healthy run
    sleep: float = 0.0  # of all processes in a healthy run


def loop(case: Case, me: int, watch: Watchdog, here: Connection) -> None:
    sick = [False]

    def fail() -> None:
        sick[0] = False
        here.send(time.monotonic())
        happen(case.kind)

    def host(x):
        if sick[0] and case.kind == "callback":
            fail()
        return x

    def body(x):
        if case.kind == "callback":
            x = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x + 1e-9 * jax.lax.psum(jnp.sum(x), "dp")

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("dp",))
    spec = PartitionSpec("dp")
    compiled = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))

    def train_step(x):
        if sick[0] and case.kind in HANG[1:] and case.kind != "callback":
            fail()
        if sick[0] and case.kind == "healthy":
            compile_long()  # in one process, while the others wait for it
            here.send(time.monotonic())
        if case.kind == "killed, then told to save":  # the others do not wait inside of the step
            time.sleep(0.01)
            return x
        return jax.block_until_ready(compiled(x))

    step = watch.wrap(train_step) if case.told == "wrap" else train_step

    def make(rows: int) -> jax.Array:
        ones = np.ones((rows, 4), np.float32)
        return jax.make_array_from_callback(
            ones.shape, NamedSharding(mesh, spec), lambda index: ones[index]
        )

    x = make(case.count)
    for i in range(1_000_000):
        if case.told == "step":
            watch.step = i
        sick[0] = me == case.victim and i == case.at
        if sick[0] and (case.kind in NO_HANG + ENGINE or case.kind == HANG[0]):
            fail()
        if case.kind == "shape" and me == case.victim and i == case.at:
            x = make(2 * case.count)
        x = step(x)
        if case.last:
            time.sleep(case.sleep if i == case.at + 100 else 0.02)
        if i == case.last > 0:
            return


def compile_long(seconds: float = 40.0) -> None:
    """Have XLA compile a program for so long at least: a larger one if it was quick."""
    layers, took = 2200, 0.0

    def unrolled(v):
        for _ in range(layers):
            v = jnp.sin(v) @ jnp.cos(v).T @ v
        return v

    while took < seconds:
        lowered = jax.jit(unrolled).lower(jnp.ones((4, 4)))
        began = time.monotonic()
        lowered.compile()
        took = time.monotonic() - began
        print(f"compiled for {took:.1f} s", flush=True)
        layers = int(layers * 1.3)


def worker(case: Case, me: int, port: int, output: str, here: Connection) -> None:
    """All that is printed goes to the file `output`; `here` hears when the fault happens."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("error")
    start(port, me, case.count, 1)
    options: dict = {"check_steps": case.kind == "shape"}
    if case.kind in ("saved", "killed, then told to save"):
        options |= {"on_preemption": "save", "save": lambda: print("saved", watch.step, flush=True)}
    with Watchdog(timeout=case.timeout, **options) as watch:
        loop(case, me, watch, here)


@dataclasses.dataclass
class Ended:
    """How a process ended: its exit status, seconds after the fault, and what it printed."""

    code: int | None
    after: float
    output: str

    @property
    def line(self) -> str:
        lines = [line for line in self.output.splitlines() if line.startswith("meshwright:")]
        return lines[-1] if lines else ""


def start_processes():
    """Starts processes from one that has imported everything, which saves seconds for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "meshwright.watchdog.watchdog"])
    return context.Process


def run(case: Case) -> list[Ended]:
    """Run a case; how each process ended."""
    port, process = free_port(), start_processes()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(me)) for me in range(case.count)]
        pipes = [multiprocessing.Pipe() for _ in files]
        running = [
            process(target=worker, args=(case, me, port, str(files[me]), pipes[me][1]))
            for me in range(case.count)
        ]
        for each in running:
            each.start()
        times: dict = {}
        try:
            if not pipes[case.victim][0].poll(DEADLINE * (4 if case.last else 1)):
                return [
                    Ended(each.exitcode, DEADLINE, f.read_text())
                    for each, f in zip(running, files, strict=True)
                ]
            failed = pipes[case.victim][0].recv()  # one machine has one such clock
            tell(case, running)
            waited = set(running) - ({running[case.victim]} if case.kind == "gil" else set())
            end = time.monotonic() + (case.last or DEADLINE)
            while waited - times.keys() and time.monotonic() < end:
                sentinels = {each.sentinel: each for each in waited - times.keys()}
                ready = multiprocessing.connection.wait(sentinels, end - time.monotonic())
                times |= {sentinels[sentinel]: time.monotonic() for sentinel in ready}
        finally:
            for each in running:
                each.kill()
                each.join(DEADLINE)
        return [
            Ended(each.exitcode, times.get(each, failed + DEADLINE) - failed, file.read_text())
            for each, file in zip(running, files, strict=True)
        ]


def tell(case: Case, running: list) -> None:
    """Send SIGTERM as an engine does."""
    if case.kind.startswith("killed"):
        running[case.victim].join(DEADLINE)
    if case.kind == "healthy":
        pause(running, 20)
    if case.kind.startswith("killed") or case.kind in ("all told", "saved"):
        for each in running:
            if each.is_alive():
                os.kill(each.pid, signal.SIGTERM)


def survivors(case: Case, ended: list[Ended]) -> list[Ended]:
    return [each for me, each in enumerate(ended) if me != case.victim]


def pause(running: list, seconds: float) -> None:
    """Stop all processes for a while, as a machine that sleeps does."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for each in running:
            os.kill(each.pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS + ENGINE)
    parser.add_argument("--told", default="wrap", choices=("wrap", "step", "nothing"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--healthy", type=int, default=0, help="seconds, at least")
    parser.add_argument("--timeout", type=float, default=5.0, help="of a healthy run")
    options = parser.parse_args()
    if options.healthy:
        sleep = 20.0 if options.timeout > 20 else 0.0
        healthy = Case("healthy", 2, 1, 100, "wrap", options.timeout, 50 * options.healthy, sleep)
        for end in run(healthy):
            print(f"exit {end.code} after {end.after:.0f} s: {end.output}")
        print("load", *os.getloadavg())
        return
    rng = random.Random(options.seed)  # noqa: S311
    totals = [0, 0]
    for kind in options.kinds:
        right = shown = total = 0
        longest, slow = 0.0, []
        for count in options.processes:
            for _ in range(options.rounds):
                case = Case(kind, count, rng.randrange(count), rng.randrange(20, 80), options.told)
                ended = run(case)
                others = survivors(case, ended)
                total += len(others)
                named = [
                    each.line.startswith(f"meshwright: process {case.victim} ") for each in others
                ]
                right += sum(named)
                shown += sum(" in happen\n" in each.output for each in others)
                late = max(each.after for each in others) - case.timeout * (kind in HANG)
                longest = max(longest, late)
                if not all(named) or late > 2:
                    slow.append(
                        (
                            case,
                            [
                                (each.code, round(each.after, 1), each.output[-600:])
                                for each in ended
                            ],
                        )
                    )
        totals = [totals[0] + right, totals[1] + total]
        print(
            f"{kind:13} right {right}/{total}  stack {shown}/{total}  out after {longest:.2f} s"
            f"  load {os.getloadavg()[1]:.1f}",
            flush=True,
        )
        for what in slow:
            print("   ", what, flush=True)
    print(f"all: right {totals[0]}/{totals[1]}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
