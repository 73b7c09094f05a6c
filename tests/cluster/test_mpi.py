"""A real Open MPI runs examples/cluster: a process killed, and restored onto fewer."""

import shutil
import subprocess

import pytest
from engine_processes import (
    ISOLATED,
    MARK,
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
    workers,
)


def missing():
    return "no mpirun" if shutil.which("mpirun") is None else cannot_isolate()


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no Open MPI here, {missing()}"),
]


@pytest.fixture
def env(tmp_path):
    mark = f"mpi-{tmp_path}"
    yield environment(
        mark,
        OMPI_MCA_rmaps_base_oversubscribe="1",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    end_all(mark)


def start(env, processes, output, *options):
    with output.path.open("w") as file:
        return subprocess.Popen(
            [*ISOLATED, "examples/cluster/mpirun.sh", str(processes), *options],
            env=env,
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )


def test_a_killed_process_ends_all_and_fewer_go_on(env, show, tmp_path):
    mark = env[MARK]
    output, rest = Output(tmp_path / "first"), Output(tmp_path / "second")
    folder = ("--folder", str(tmp_path / "checkpoints"))
    job = start(env, 4, output, *folder, "--steps", "20000", "--pause", "0.02")
    output.wait_for("step 50 loss")
    assert_isolated(job.pid)
    seconds = kill(workers(mark, "OMPI_COMM_WORLD_RANK"), 3)
    show(f"Open MPI: all out {seconds:.2f} s after the kill")
    output.wait_for("mpirun ended with 137, again", deadline=SOON)
    end_all(mark)
    job.wait(SOON)
    # mpirun may end the others before they have said who it was.
    assert set(output.named()) <= {"process 3 died"}, output.text()[-6000:]
    assert_as_uninterrupted(output)

    last = 20 + max(step for step, _ in output.losses())
    again = start(env, 2, rest, *folder, "--steps", str(last))
    assert again.wait(START) == 0, rest.text()[-6000:]
    rest.wait_for(r"on 2 devices from step [1-9]\d*\n")
    rest.wait_for(f"done after step {last}\n")
    assert_as_uninterrupted(rest)
