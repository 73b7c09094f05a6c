"""A real Open MPI runs examples/cluster: a process killed, and restored onto fewer."""

import getpass
import shutil
import subprocess
import sys

import pytest
from engine_processes import (
    ROOT,
    SOON,
    START,
    Output,
    assert_as_uninterrupted,
    assert_loopback_alone,
    end_all,
    environment,
    kill,
    workers,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI here"),
]


@pytest.fixture
def env(tmp_path):
    mark = f"mpi-{tmp_path.name}-{getpass.getuser()}"
    yield environment(
        mark,
        OMPI_MCA_oob_tcp_if_include="lo",
        OMPI_MCA_btl_tcp_if_include="lo",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    end_all(mark)


def start(env, processes, output, *options):
    """Start examples/cluster/train.py as mpirun.sh does, but once."""
    command = ["mpirun", "-n", str(processes), "--tag-output", sys.executable]
    with output.path.open("w") as file:
        return subprocess.Popen(
            [*command, "examples/cluster/train.py", *options],
            env=env,
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )


def test_a_killed_process_ends_all_and_fewer_go_on(env, show, tmp_path):
    mark = env["MESHWRIGHT_TEST_JOB"]
    output, rest = Output(tmp_path / "first"), Output(tmp_path / "second")
    folder = ("--folder", str(tmp_path))
    job = start(env, 4, output, *folder, "--steps", "20000", "--pause", "0.02")
    output.wait_for("step 50 loss")
    assert_loopback_alone(mark, "mpirun", "python")
    seconds = kill(workers(mark, "OMPI_COMM_WORLD_RANK"), 3)
    assert job.wait(SOON) == 137, output.text()[-6000:]
    show(f"Open MPI: all out {seconds:.2f} s after the kill")
    # mpirun may be quicker than the others' output is.
    assert set(output.named()) <= {"process 3 died"}, output.text()[-6000:]
    assert_as_uninterrupted(output)

    last = 20 + max(step for step, _ in output.losses())
    again = start(env, 2, rest, *folder, "--steps", str(last))
    assert again.wait(START) == 0, rest.text()[-6000:]
    rest.wait_for(r"on 2 devices from step [1-9]\d*\n")
    rest.wait_for(f"done after step {last}\n")
    assert_as_uninterrupted(rest)
