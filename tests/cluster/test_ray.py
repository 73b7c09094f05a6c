"""A real Ray runs examples/cluster: a worker is killed, the group starts again and goes on."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from engine_processes import (
    ISOLATED,
    ROOT,
    SOON,
    START,
    Output,
    assert_as_uninterrupted,
    assert_isolated,
    cannot_isolate,
    end_all,
    environment,
    kill,
    marked,
)


def missing():
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return cannot_isolate()


pytestmark = [pytest.mark.ray, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture
def job(tmp_path):
    """The launcher, its output and the mark of its processes."""
    # A short path: those of its sockets have 107 bytes at most.
    scratch = tempfile.mkdtemp(prefix="ray-")
    mark = Path(scratch).name
    env = environment(
        mark,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_COLOR_PREFIX="0",
        RAY_worker_niceness="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_OVERRIDE_RESOURCES='{"CPU": 8}',
        RAY_TMPDIR=scratch,
    )
    # Ray says itself where the coordinator is, and this would count all the same.
    env = {key: env[key] for key in env if not key.startswith("JAX_COORDINATOR_")}
    output = Output(tmp_path / "output")
    command = [sys.executable, "examples/cluster/ray_launch.py", "--folder", str(tmp_path)]
    options = ["--platform", "cpu", "--workers", "4", "--steps", "400", "--pause", "0.05"]
    with output.path.open("w") as file:
        launcher = subprocess.Popen(
            [*ISOLATED, *command, *options], env=env, cwd=ROOT, stdout=file, stderr=file
        )
    try:
        yield launcher, output, mark
    finally:
        end_all(mark)
        launcher.wait(SOON)
        shutil.rmtree(scratch, ignore_errors=True)


def test_a_killed_worker_is_replaced_with_its_group_which_goes_on(job, show):
    launcher, output, mark = job
    first = output.wait_for(r"on 4 devices from step 0\n")
    output.wait_for("step 50 loss")
    assert_isolated(launcher.pid)
    ranks = dict(re.findall(r"pid=(\d+)\) world_rank=(\d)", output.text()))
    group = {int(ranks[str(p.pid)]): p for p in marked(mark) if str(p.pid) in ranks}
    assert sorted(group) == [0, 1, 2, 3]
    seconds = kill(group, 2)
    show(f"Ray: all workers out {seconds:.2f} s after the kill")
    output.wait_for(r"on 4 devices from step [1-9]\d*\n", first.end())
    assert launcher.wait(START) == 0, output.text()[-6000:]
    output.wait_for("done after step 400")
    assert set(output.named()) <= {"process 2 died"}, output.named()
    assert_as_uninterrupted(output)
