"""A training loop that saves beside itself, killed at random moments, again and again.

    PYTHONPATH=src:tests python tests/multiprocess/kill_storm.py --processes 1 2 --kills 50

Every round resumes from what the last one left, checks every value, and trains on until one process
is killed (SIGKILL): just before a random change that it makes to the disk, in the middle of the
manifest, or at a random time, in each phase of a save in turn. The others are killed soon after,
as an engine does. No round may find other values than were saved, or a checkpoint more than one
interval behind the last `save` that returned.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from joining import start
from ports import free_port

import meshwright as mw
from meshwright.checkpoints import async_saves, orbax_io

orbax_io.orbax()  # loaded once, for all that is forked

EVERY, KEEP, DEADLINE = 2, 2, 120.0
CHANGES = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
SHAPES = {"w": (64, 32), "b": (48,)}


def build() -> dict:
    return {**{name: jnp.zeros(shape) for name, shape in SHAPES.items()}, "step": 0}


def expected(step: int) -> dict:
    """The state after so many steps, in closed form: each step adds its number to all."""
    total = step * (step + 1) / 2
    arrays = {name: np.full(shape, total, np.float32) for name, shape in SHAPES.items()}
    return {**arrays, "step": step}


def is_right(state: dict, step: int) -> bool:
    right = expected(step)
    return state["step"] == step and all(
        np.array_equal(shard.data, right[name][shard.index])
        for name in SHAPES
        for shard in state[name].addressable_shards
    )


@dataclasses.dataclass(frozen=True)
class Kill:
    """Who is killed, in which phase of a save, after how many saves."""

    phase: str
    victim: int
    saves: int
    change: int  # its number among those of the phase
    seconds: float


def phase_of(change: str, arguments: tuple) -> str:
    """Name what a change to the disk is for."""
    text = " ".join(str(argument) for argument in arguments)
    if "old" in text or change in ("unlink", "rmdir"):
        return "deletion"
    if change == "rename" and "orbax-checkpoint-tmp" not in text:
        return "rename"
    return "sync" if change == "fsync" else "write"


def die_at(kill: Kill) -> None:
    """Have this process killed before a change to the disk, or in the middle of the manifest."""
    count, lock = itertools.count(), threading.Lock()

    def die_if(phase: str) -> None:
        with lock:
            if phase == kill.phase and next(count) == kill.change:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched(name, original):
        def changed(*arguments, **options):
            die_if(phase_of(name, arguments))
            return original(*arguments, **options)

        return changed

    def half_a_manifest(folder, entries, original=async_saves.write_manifest):
        original(folder, entries)
        if kill.phase == "manifest":
            file = folder / "meshwright.json"
            file.write_text(file.read_text()[: file.stat().st_size // 2])
            die_if("manifest")

    for name in CHANGES:
        setattr(os, name, watched(name, getattr(os, name)))
    async_saves.write_manifest = half_a_manifest


def worker(folder: str, port: int, me: int, count: int, kill: Kill | None, pipe: Connection):
    """Resume, say where and whether the values are right, and train on until killed."""
    warnings.simplefilter("error")
    silent = os.open(os.devnull, os.O_WRONLY)  # of what JAX says when another process dies
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    if count > 1:
        start(port, me, count, 1)
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    step, state, _ = mw.resume(folder, build, mesh="fsdp:-1", min_shard_bytes=0)
    pipe.send(("resumed", step, is_right(state, step)))
    if kill is None:
        if count > 1:  # the first takes the others with it if it ends before they have spoken
            jax.distributed.shutdown()
        return
    update = jax.jit(lambda x, n: x + n, donate_argnums=0)
    saves = 0
    with mw.Checkpoints(folder, every=EVERY, keep=KEEP) as checkpoints:
        for number in range(step + 1, step + 1000):
            arrays = {name: update(state[name], float(number)) for name in SHAPES}
            state = {**arrays, "step": number}
            if me == kill.victim and saves == kill.saves and number % EVERY == 0:
                if kill.phase == "any time":
                    me_too = (os.getpid(), signal.SIGKILL)
                    threading.Timer(kill.seconds, os.kill, me_too).start()
                else:
                    die_at(kill)
            if checkpoints.save(number, state):
                saves += 1
                pipe.send(("saved", number))
            time.sleep(0.005)


def start_processes():
    """Start processes from one that has imported everything, which saves seconds for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__module__])
    return context.Process


@dataclasses.dataclass
class Round:
    """What a round found, and how it ended."""

    resumed: int
    right: bool
    saved: int  # by the last `save` that returned in all processes


def run(folder: Path, count: int, kill: Kill | None, delay: float = 0.0) -> Round:
    port, process = free_port(), start_processes()
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(count)]
    running = [
        process(target=worker, args=(str(folder), port, me, count, kill, pipes[me][1]))
        for me in range(count)
    ]
    for each in running:
        each.start()
    victim = running[kill.victim] if kill else running[0]
    victim.join(DEADLINE)
    time.sleep(delay)
    for each in running:
        if kill:
            each.kill()
        each.join(DEADLINE)
    said = []
    for here, there in pipes:
        there.close()
        lines = []
        try:
            while here.poll(0):
                lines.append(here.recv())
        except EOFError:
            pass
        said.append(lines)
    resumed = [line for lines in said for line in lines if line[0] == "resumed"]
    assert len(resumed) == count, f"{len(resumed)} of {count} processes resumed: {said}"
    assert len({step for _, step, _ in resumed}) == 1, f"they differ: {resumed}"
    saved = [max((line[1] for line in lines if line[0] == "saved"), default=0) for lines in said]
    return Round(resumed[0][1], all(right for _, _, right in resumed), min(saved))


PHASES = {"write": 6, "manifest": 1, "sync": 16, "rename": 4, "deletion": 12, "any time": 1}


def storm(folder: Path, count: int, kills: int, seed: int) -> int:
    """Kill so many times, in each phase in turn; return how often an interval was lost."""
    rng = random.Random(seed)  # noqa: S311
    newest = lost = 0
    for number, phase in zip(range(kills + 1), itertools.cycle(PHASES)):
        victim = rng.randrange(count) if phase == "any time" else 0  # which does the changes
        seconds = rng.uniform(0.0, 0.15)
        kill = Kill(phase, victim, rng.randrange(1, 4), rng.randrange(PHASES[phase]), seconds)
        ended = run(folder, count, kill if number < kills else None, rng.uniform(0, 0.3))
        assert ended.right, f"other values at step {ended.resumed}"
        assert newest - EVERY <= ended.resumed <= newest + EVERY, f"{newest}, then {ended}"
        lost += ended.resumed < newest
        newest = max(ended.saved, ended.resumed)
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kills", type=int, default=50, help="for each number of processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for count in options.processes:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            lost = storm(Path(folder), count, options.kills, options.seed)
        print(
            f"{count} processes, {options.kills} kills: always a whole checkpoint with the right "
            f"values, {lost} times that of one interval before the last save that returned; "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
