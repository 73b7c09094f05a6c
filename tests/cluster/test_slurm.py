"""A real Slurm runs examples/cluster: a task killed, the job requeued, restored, preempted."""

import re
import subprocess

import pytest
from engine_processes import (
    ROOT,
    SOON,
    Output,
    assert_as_uninterrupted,
    assert_loopback_alone,
    kill,
    workers,
)
from private_slurm import missing, private_slurm

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm here, {missing()}"),
]

TRAIN = "examples/cluster/train.py"
SRUN = ("srun", "--ntasks=4", "--unbuffered")
RANK = "SLURM_PROCID"
LONG = ("--steps", "20000", "--pause", "0.02")


@pytest.fixture(scope="module")
def slurm():
    with private_slurm() as running:
        yield running


def test_a_killed_task_is_named_though_srun_stops_all_others(slurm, show, tmp_path):
    """`srun -n 4` with a bare `jax.distributed.initialize()`, listening on loopback alone."""
    output = Output(tmp_path / "output")
    with output.path.open("w") as file:
        step = subprocess.Popen(
            [*SRUN, "--kill-on-bad-exit=1", "python", TRAIN, "--folder", str(tmp_path), *LONG],
            env=slurm.env,
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
    output.wait_for("on 4 devices from step 0")
    output.wait_for("step 50 loss")
    assert_loopback_alone(slurm.mark, "slurmctld", "slurmd", "srun", "python")
    seconds = kill(workers(slurm.mark, RANK), 2)
    assert step.wait(SOON) == 137, output.text()[-6000:]
    show(f"Slurm, --kill-on-bad-exit=1: all out {seconds:.2f} s after the kill")
    assert set(output.named()) == {"process 2 died"}, output.text()[-6000:]


def test_a_job_is_requeued_preempted_and_goes_on_with_fewer_tasks(slurm, show, tmp_path):
    words = ("--chdir", str(ROOT), str(ROOT / "examples/cluster/slurm.sh"))
    folder = ("--folder", str(tmp_path))
    number, output = slurm.submit("--ntasks=4", *words, *folder, *LONG)

    # A task is killed: requeued by its exit status, restored onto four tasks.
    output.wait_for("step 50 loss")
    seconds = kill(workers(slurm.mark, RANK), 1)
    show(f"Slurm, --kill-on-bad-exit=0: all out {seconds:.2f} s after the kill")
    slurm.wait_for_requeue(number, 1)
    # It would wait for two minutes, Slurm's time for the nodes to be clean.
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    assert set(output.named()) == {"process 1 died"}, output.text()[-6000:]
    start = output.wait_for(r"on 4 devices from step ([1-9]\d+)\n")
    output.wait_for("step \\d+ loss", start.end())

    # Told to stop: saves, leaves with 75, is requeued. Two tasks go on from that very step.
    slurm.call("scancel", "--signal=TERM", number)
    saved = output.wait_for(
        r"have saved before step (\d+)\. Run the job again\.", start.end(), SOON
    )
    slurm.wait_for_requeue(number, 2)
    slurm.call("scancel", number)
    assert_as_uninterrupted(output)
    last = int(saved[1]) + 20
    number, rest = slurm.submit("--ntasks=2", *words, *folder, "--steps", str(last))
    rest.wait_for(f"on 2 devices from step {saved[1]}\n")
    rest.wait_for(f"done after step {last}\n")
    slurm.wait_for_job(number, JobState="COMPLETED", ExitCode="0:0")
    assert_as_uninterrupted(rest)


def test_slurm_requeues_by_exit_status(slurm):
    """`RequeueExit` as docs/watchdog.md has it: errors of the program are not run again."""
    (statuses,) = re.findall(r"RequeueExit=([\d,]+)", (ROOT / "docs/watchdog.md").read_text())
    assert f"RequeueExit={statuses}\n" in (slurm.folder / "slurm.conf").read_text()
    machine, _ = slurm.submit("--wrap", "exit 82")
    program, _ = slurm.submit("--wrap", "exit 83")
    slurm.wait_for_job(machine, JobState="PENDING", Restarts="1")
    slurm.wait_for_job(program, JobState="FAILED", Restarts="0", ExitCode="83:0")
