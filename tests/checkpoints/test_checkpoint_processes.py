"""Killed in the middle, or one of several: a checkpoint is whole, and the same for all."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import assert_same
from ports import free_port

import meshwright as mw
from meshwright.checkpoints import checkpoint
from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.errors import PartitionError

WORKER = Path(__file__).with_name("checkpoint_worker.py")
DEADLINE = 300


def either(place, old, new):
    """Which of two checkpoints is found, whole."""
    back = restore_checkpoint(place, {"w": jnp.zeros((16, 3)), "step": 0})
    assert back["step"] in (old, new)
    assert_same(back["w"], jnp.full((16, 3), back["step"], jnp.float32))
    return back["step"]


@pytest.mark.slow
def test_killed_at_any_step_the_old_or_the_new_checkpoint_is_whole(tmp_path):
    done = subprocess.run(
        [sys.executable, str(WORKER), "kill", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    killed_before = done.stdout.split()
    assert killed_before.count("rename") >= 3
    assert len(killed_before) > 20
    moments = [tmp_path / str(moment) / "checkpoint" for moment in range(len(killed_before) + 1)]
    found = [either(place, 1, 2) for place in moments]
    assert found == sorted(found)  # once the new one is there, it stays
    assert (found[0], found[-1]) == (1, 2)
    assert not (moments[-1].parent / ".checkpoint.meshwright").exists()
    half_done = [place for place in moments if not place.exists()]
    assert half_done
    for place in half_done:
        with pytest.raises(PartitionError, match="there is a checkpoint already"):
            save_checkpoint(place, {"w": jnp.ones(2)})
    for place in moments:
        save_checkpoint(place, {"w": jnp.full((16, 3), 3.0), "step": 3}, overwrite=True)
        assert either(place, 3, 3) == 3
        assert [item.name for item in place.parent.iterdir()] == ["checkpoint"]


class Killed(BaseException):
    """Stands for SIGKILL: the code under test has nothing that runs after it."""


def write(path, content):
    folder = checkpoint.prepare_staging(path)
    folder.mkdir()
    (folder / "a").write_text(content)
    (folder / "b").write_text(content)
    checkpoint.commit(path)


def killed(monkeypatch, moment, action):
    """Run until the given change to the disk; whether it came to that."""
    count = itertools.count()

    def watched(original):
        def change(*arguments, **options):
            if next(count) == moment:
                raise Killed
            return original(*arguments, **options)

        return change

    with monkeypatch.context() as patch:
        for step in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, step, watched(getattr(os, step)))
        try:
            action()
        except Killed:
            return True
    return False


def test_killed_twice_a_checkpoint_is_still_whole(tmp_path, monkeypatch):
    def content(path):
        place = checkpoint.current_folder(path)
        assert place is not None
        return {(place / name).read_text() for name in ("a", "b")}

    def after_kills(folder, first, second):
        path = folder / "x"
        write(path, "1")
        went_on = killed(monkeypatch, first, lambda: write(path, "2"))
        (before,) = content(path)
        ended = not killed(monkeypatch, second, lambda: write(path, "3"))
        (after,) = content(path)
        assert after == "3" if ended else after in (before, "3")
        write(path, "4")
        assert content(path) == {"4"}
        assert os.listdir(folder) == ["x"]  # noqa: PTH208
        return went_on, ended

    for first in itertools.count():
        for second in itertools.count():
            folder = tmp_path / f"{first}-{second}"
            folder.mkdir()
            went_on, ended = after_kills(folder, first, second)
            if ended:
                break
        if not went_on:
            break
    assert first > 8


def test_what_was_half_deleted_is_never_found(tmp_path, monkeypatch):
    for moment in itertools.count():
        path = tmp_path / str(moment) / "x"
        write(path, "1")
        write(checkpoint.staging_folder(path) / "new", "2")  # killed just before it took its place
        if not killed(monkeypatch, moment, lambda path=path: checkpoint.prepare_staging(path)):
            break
        shutil.rmtree(path)
        place = checkpoint.current_folder(path)
        assert place is None or {item.name for item in place.iterdir()} == {"a", "b"}
    assert moment > 3


def test_killed_at_any_moment_of_a_save_beside_the_loop_a_step_is_whole(tmp_path, monkeypatch):
    def value(step):
        return {"w": jnp.full((16, 3), step, jnp.float32), "step": step}

    def save(path, *steps, keep=2):
        with mw.Checkpoints(path, keep=keep) as checkpoints:
            for step in steps:
                checkpoints.save(step, value(step))

    def save_and_hear(path):
        """As a kill: what was raised in the thread ends this one too, and nothing is cleared up."""
        raised = []
        monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
        checkpoints = mw.Checkpoints(path, keep=2)
        checkpoints.save(3, value(3))
        checkpoints._thread.join()
        if raised:
            raise Killed

    save(tmp_path / "before", 1, 2)
    moment, steps = 0, []
    while True:
        path = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", path)
        went_on = killed(monkeypatch, moment, lambda path=path: save_and_hear(path))
        step, state, _ = mw.resume(path, lambda: value(0), mesh="fsdp:-1")
        assert_same(state, value(step))
        steps.append(step)
        if not went_on:
            break
        moment += 3
    assert steps == sorted(steps)
    assert (set(steps), len(steps) > 5) == ({2, 3}, True)
    save(tmp_path / str(moment - 3), 4)  # and the next save clears up
    left = sorted(item.name for item in (tmp_path / str(moment - 3)).iterdir())
    assert left == ["step_3", "step_4"]


def as_one(folder, processes):
    """What each of several processes saw."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "as_one", *map(str, (folder, port, me, processes))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(processes)
    ]
    end = time.monotonic() + DEADLINE
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, end - time.monotonic()))
        process.kill()  # nothing, where it has ended by itself
    done = [(process.returncode, *process.communicate()) for process in running]
    assert not any(status for status, _, _ in done), [error[-2000:] for _, _, error in done]
    # Among what Gloo prints about its peers.
    return [json.loads(re.search(r"^{.*}$", output, re.MULTILINE)[0]) for _, output, _ in done]


def test_several_processes_save_and_restore_as_one(tmp_path):
    reports = as_one(tmp_path, 2)
    for report in reports:
        assert report["same"] == [True, True]
        assert report["key"] == "key<fry>"
        assert report["step"] == 7
        assert "there is a checkpoint already" in report["exists"]
        assert "w: lives in one process alone" in report["local"]
        assert "w: its sharding is of one process alone" in report["local target"]
        assert "float32[64,64], but the target is float32[65,64]" in report["other target"]
        assert report["damaged"] == reports[0]["damaged"]
        assert "w could not be read" in report["damaged"]
        assert "step_4: could not be written" in report["half"]
        assert "(ZeroDivisionError: " in report["half"]
        assert report["steps"] == [1, 2, 3]
        assert (report["resumed"], report["equal"]) == (2, True)
        unseen = "step_{}: processes 1 of 2 do not see its meshwright.json."
        for warned, step in zip(report["warned"], (5, 3), strict=True):
            assert warned.startswith("Going on from step 2. Passed over: ")
            assert warned.endswith(unseen.format(step))
    kept = {"checkpoint", "whole", "steps", "stale"}
    assert {item.name for item in tmp_path.iterdir()} == kept
    assert sorted(item.name for item in (tmp_path / "steps").iterdir()) == [
        "step_2",
        "step_3",
        "step_5",
    ]
    values = np.sin(np.arange(4096, dtype=np.float32)).reshape(64, 64)
    back = restore_checkpoint(tmp_path / "whole", {"w": jnp.zeros((64, 64))})
    assert_same(back["w"], jnp.asarray(values))
