"""A Slurm of our own on loopback: daemons with ports, keys and state of their own."""

import contextlib
import getpass
import json
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine_processes import SOON, START, Output, end_all, environment, until
from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "ss")

# Eight CPUs are told where there may be two, so that four tasks run. JAX's coordinator is the
# first of the job's nodes, so the node's name is one that leads to loopback.
CONF = """\
ClusterName=meshwright
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SrunPortRange={ports[2]}-{last}
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ReturnToService=2
KillWait=30
MinJobAge=3600
JobRequeue=1
RequeueExit=75,81,82,137,143
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here, or nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if not socket.gethostbyname(socket.gethostname()).startswith("127."):
        return "the machine's own name does not lead to loopback, see /etc/hosts"
    return ""


class Slurm:
    """The commands of a user, each with the environment that leads to this Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, folder.name
        self.env = environment(self.mark, SLURM_CONF=str(folder / "slurm.conf"))

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=SOON, cwd=self.folder
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str) -> tuple[str, Output]:
        """Submit a batch job: its number, and what it writes."""
        path = self.folder / f"job-{secrets.token_hex(4)}.out"
        number = self.call("sbatch", "--parsable", f"--output={path}", *words)
        return number, Output(path)

    def job(self, number: str) -> dict:
        """What the controller knows of a job."""
        fields = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for_job(self, number: str, deadline: float = SOON, **fields: str) -> dict:
        """Wait until a job has these fields."""

        def settled() -> dict | None:
            job = self.job(number)
            return job if fields.items() <= job.items() else None

        return until(settled, deadline, lambda: json.dumps(self.job(number), indent=1))

    def wait_for_requeue(self, number: str, count: int) -> None:
        """Wait until a job is in the queue again, for the `count`-th time."""
        self.wait_for_job(number, JobState="PENDING", Restarts=str(count))

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log")
        )


@contextlib.contextmanager
def private_slurm() -> Iterator[Slurm]:
    """Start the daemons; at the end, or if this process dies, they end too."""
    # A short path: that of a socket has 107 bytes at most.
    slurm = Slurm(Path(tempfile.mkdtemp(prefix="slurm-")))
    folder = slurm.folder
    try:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = (free_port(), free_port(), free_port())
        (folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname(),
                user=getpass.getuser(),
                folder=folder,
                ports=ports,
                last=ports[2] + 60,
            )
        )
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        _daemon(
            slurm,
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        until((folder / "munge.socket").exists, SOON, slurm.logs)
        _daemon(slurm, "slurmctld", "-D")
        _daemon(slurm, "slurmd", "-D")
        until(lambda: _states(slurm) == {"idle"}, SOON, slurm.logs)
        yield slurm
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            _end_jobs(slurm)
        end_all(slurm.mark)
        shutil.rmtree(folder, ignore_errors=True)


def _daemon(slurm: Slurm, *command: str) -> None:
    # setpriv: it gets SIGTERM when the process that runs the tests dies.
    with (slurm.folder / f"{command[0]}.out.log").open("w") as log:
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            env=slurm.env,
            cwd=slurm.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _states(slurm: Slurm) -> set[str]:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"], env=slurm.env, capture_output=True, text=True
    )
    return set(done.stdout.split())


def _end_jobs(slurm: Slurm) -> None:
    slurm.call("scancel", "--user", getpass.getuser())
    slurm.call("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
    until(lambda: not slurm.call("squeue", "--noheader"), START, slurm.logs)
