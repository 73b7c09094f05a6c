"""Compile a program in a process of its own, or take the answer from the cache on disk.

A `Job` is a program and the `Site` to compile it for, an `Outcome` what the compiler made of it;
`compile_or_load(job, ...)` gets the one for the other. The process apart is what makes this safe: a
compiler that aborts, hangs or fills the memory ends with it, and JAX here keeps its devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshwright.errors import RehearsalError, listing, on_command_line
from meshwright.hardware.topology import Topology
from meshwright.hlo.instructions import Source

if TYPE_CHECKING:
    from meshwright.hlo.program import Program

# What changes the result besides the job itself, and so is in the cache's key: versions of packages
# and variables that reach the compiler.
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 7  # of cache entries: raise it when `Outcome` or the worker changes

Platform = Literal["tpu", "cuda", "cpu"]
PLATFORMS: Mapping[str, Platform] = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}  # by chip family


@dataclasses.dataclass(frozen=True)
class Site:
    """The hardware that a program is compiled for; known before the program is traced.

    `positions` holds, for each partition of the program, the number of its device in
    `topology.index`.
    """

    platform: Platform
    topology: Topology
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """A StableHLO program as bytecode, and the hardware for its partitions.

    `free_outputs` says which results the compiler may shard as it likes, `shardy` whether the
    program's shardings are written for Shardy or for GSPMD, `options` are its `jit`'s compiler
    options. `identity`, if given, is hashed in place of `code`: bytecode has the line of every
    caller in it, and would miss the cache when a call moves. `partitioners` cut the functions with
    `custom_partitioning`, as `_compat_lowering.restore_partitioners` reads them; their modules are
    in the folders of `module_path`. Without `codegen` the scheduled program is enough.
    """

    name: str
    code: bytes
    site: Site
    free_outputs: tuple[bool, ...]
    shardy: bool = True
    identity: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    partitioners: bytes = b""
    module_path: tuple[str, ...] = ()
    codegen: bool = True

    @property
    def key(self) -> str:
        """Hash the program, the hardware, the versions and the compiler's flags."""
        hardware = self.site.topology
        parts = (
            _FORMAT,
            self.identity or self.code,
            self.site.platform,
            (hardware.name, hardware.chip.name, hardware.axes, hardware.host.tobytes()),
            hardware.index.astype(np.int64).tobytes(),
            self.site.positions.astype(np.int64).tobytes(),
            self.free_outputs,
            self.shardy,
            sorted((name, repr(value)) for name, value in self.options),
            versions(),
            tuple(os.environ.get(flag, "") for flag in FLAGS),
            self.partitioners,
            self.codegen,
        )
        return hashlib.sha256(pickle.dumps(parts, protocol=4)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a compiler made of a job.

    `verdict` is "exhausted" where it ran out of memory, "failed" for any other refusal; `reason`
    has its own text then. `text` is the optimised HLO, `memory` the compiler's sizes in bytes
    (`assigned` alone where it was ended before it generated code), `cost` its own estimates,
    `seconds` how long it took, `notes` what it printed. `shardings` are those of the results, as
    `_compat.written_shardings` writes them; `constants` are tables that kernels and devices look
    things up in and the text leaves out, as `integer_constants` writes them.
    """

    verdict: Literal["compiled", "exhausted", "failed"]
    text: str = dataclasses.field(default="", repr=False)
    memory: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)
    cost: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)
    seconds: float = 0.0
    reason: str = dataclasses.field(default="", repr=False)
    notes: str = dataclasses.field(default="", repr=False)
    compiler: str = ""
    shardings: list[str] = dataclasses.field(default_factory=list, repr=False)
    constants: dict[str, list[Any]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def scheduled(self) -> bool:
        """Whether the compiler was ended when it had scheduled the program, before it had code."""
        return "assigned" in self.memory and "temp" not in self.memory

    @functools.cached_property
    def program(self) -> Program | None:
        """The optimised HLO as data, read once; `None` where the compiler left none."""
        # In the function: the compiling process reads no programs, and must start fast.
        from meshwright.hlo.program import read_program

        return None if self.verdict != "compiled" else read_program(self.text, self.constants)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# How the compilers name the memories of a chip's cores when a kernel does not fit them.
ON_CHIP = re.compile(r"space[= ](?:vmem|smem|cmem)|scoped vmem|Shared memory size limit")
# Custom calls that are kernels of Pallas: for TPUs, by Triton (with XLA's own call, or JAX's).
_KERNEL_CALLS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
SCHEDULED = "scheduled"  # folder for programs that the compiler writes before it generates code
_ATTRIBUTES = re.compile(r"(%[\w.-]+) = .*?metadata=\{[^}]*\}\.")  # of an instruction
_TICK = 0.1  # seconds between two looks at the compiling process
_MOST_LINES = 12  # of a compiler's own words in a message
_FATAL = re.compile(r"^F\d{4} |Check failed|[Uu]nknown (command line )?flag")  # glog and absl


def compile_or_load(
    job: Job,
    folder: Path | None,
    timeout: float,
    tick: Callable[[float], None],
    ready: Compiler | None = None,
) -> tuple[Outcome, bool]:
    """Compile a job, or load its outcome from `folder`; also return whether it was loaded.

    `ready` is a compiler that was started before for this site; else one is started. `tick` is
    called with the seconds that have passed. Raises `RehearsalError` where the compiler refuses,
    crashes or takes longer than `timeout` seconds; running out of memory is an outcome.
    """
    kept = None if folder is None else load(folder, job)
    if kept is not None:
        return kept, True
    with ready or Compiler(job.site, job.codegen) as compiler:
        outcome = compiler.run(job, timeout, tick)
    if _stopped_by_tiles(job, outcome):
        again = dataclasses.replace(job, options=(*job.options, (_TRITON_PRODUCTS, False)))
        with Compiler(job.site) as compiler:
            outcome = compiler.run(again, timeout, tick)
        outcome = dataclasses.replace(outcome, compiler=f"{outcome.compiler}, products by cuBLAS")
    if outcome.verdict == "failed":
        raise RehearsalError(_refusal(job, outcome.reason))
    if folder is not None:
        save(folder, job, outcome)
    return outcome, False


# Where there is no GPU, XLA (jax 0.10.2) makes every product a Triton kernel with tiles of its
# choice, and gives up where none of them divide the rows (vision transformers: 128 x 196 patches).
# Where there is one it measures, and falls back to cuBLAS; so does this. Not for every program: of
# the steps in benchmarks/gpu_steps.py the products' memory is 30 % too high then, fp8's time 64 %.
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_NO_TILES = "Couldn't find output tile sizes"


def _stopped_by_tiles(job: Job, outcome: Outcome) -> bool:
    given = {name for name, _ in job.options}
    failed = outcome.verdict == "failed" and _NO_TILES in outcome.reason
    return failed and job.site.platform == "cuda" and _TRITON_PRODUCTS not in given


# What the CUDA compiler writes where it misses a tool: part of no toolkit here, nor of a package.
_NO_TOOLS = re.compile(r"libdevice not found|find a suitable version of (ptxas|nvlink)")


def _refusal(job: Job, reason: str) -> str:
    """The compiler's own words; those of a kernel with the lines where the kernels are called."""
    # In the function: what reads the cache alone needs no JAX.
    from meshwright import _compat

    lines = reason.splitlines()[:_MOST_LINES]
    if job.site.platform == "cuda" and _NO_TOOLS.search(reason):
        lines.insert(
            0,
            "It needs libdevice and ptxas, from two packages (and no toolkit): "
            "pip install nvidia-nvvm nvidia-cuda-nvcc",
        )
    stacks = [
        [Source(*frame) for frame in stack]
        for stack in _compat.custom_call_stacks(job.code, _KERNEL_CALLS)
    ]
    if not any(stacks) or not (ON_CHIP.search(reason) or "Mosaic" in reason):
        return "\n  ".join(
            [f"{job.name}: the compiler refused it.", *(line[:160] for line in lines)]
        )
    users_own = (
        next((s for s in stack if not s.in_library), stack[0]) for stack in stacks if stack
    )
    named = dict.fromkeys(map(str, users_own))
    if not ON_CHIP.search(reason):
        fix = "Change the operation that it names, or the shapes of its blocks."
    elif job.site.platform == "tpu":
        fix = "Make its blocks smaller, or raise vmem_limit_bytes of pltpu.CompilerParams."
    else:
        fix = "Make its blocks smaller, or have fewer stages (num_stages)."
    # libtpu's first line may be a mere heading.
    words = " ".join(lines[:2] if lines[0].rstrip().endswith(":") else lines[:1])
    words = _ATTRIBUTES.sub(r"\1.", words)
    return (
        f"{job.name}: {words[:500]}\n  The compiler refused a kernel; this program's are called "
        f"at {listing(named)}. {fix}"
    )


# The two processes talk through a folder. The parent writes `site` before it starts the worker,
# which loads the compiler meanwhile; then `job`, and a byte down the worker's standard input. The
# worker answers with `outcome`; all it prints goes to `notes`. The pipe is also its sign of life:
# a worker whose standard input ends has lost its parent and ends itself.
class Compiler:
    """A process that readies itself for some hardware while its program is still being traced.

    A context manager: the process is ended when the block is left.
    """

    def __init__(self, site: Site, codegen: bool = True):
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        self._path = Path(self._folder.name)
        self._path.joinpath("site").write_bytes(pickle.dumps(site))
        with self._path.joinpath("notes").open("wb") as notes:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                # -P: modules in the working directory must not hide the compiler's own.
                [sys.executable, "-P", "-m", f"{__package__}.compiler_worker", self._folder.name],
                stdin=subprocess.PIPE,
                stdout=notes,
                stderr=subprocess.STDOUT,
                env=environment(_dump(self._path / SCHEDULED, site.platform, codegen)),
                start_new_session=True,  # so that Ctrl-C reaches it through us alone
            )

    def run(self, job: Job, timeout: float, tick: Callable[[float], None]) -> Outcome:
        """Compile a job, once; `tick` is called with the seconds that have passed."""
        self._path.joinpath("job").write_bytes(pickle.dumps(job))
        with contextlib.suppress(BrokenPipeError):  # it has crashed, which is reported below
            os.write(self._process.stdin.fileno(), b"\n")  # type: ignore[union-attr]
        status = _wait(job, self._process, timeout, tick)
        notes = self._path.joinpath("notes").read_text(encoding="utf-8", errors="replace")
        outcome = self._path / "outcome"
        if not outcome.exists():
            raise RehearsalError(_crash(job, status, notes))
        return Outcome(**{**json.loads(outcome.read_text(encoding="utf-8")), "notes": notes})

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)
        self._folder.cleanup()


def _dump(folder: Path, platform: Platform, codegen: bool) -> list[str]:
    """Flags with which a TPU's compiler writes down the memory that it assigns.

    Without code, the program, too. A user who has that written elsewhere keeps it.
    """
    if platform != "tpu" or (codegen and "xla_dump" in os.environ.get("XLA_FLAGS", "")):
        return []
    program = [] if codegen else ["--xla_dump_hlo_as_proto"]
    return [f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text", *program]


def environment(flags: Sequence[str] = ()) -> dict[str, str]:
    """The variables of the compiling process: ours, with the CPU as JAX's only live platform.

    `flags`: more for the compiler than the user's own.
    """
    variables = dict(os.environ)
    variables["JAX_PLATFORMS"] = "cpu"  # the accelerators of this machine, if any, stay ours
    given = variables.get("XLA_FLAGS", "").split()
    # How many CPU devices there are is the job's to say; the other flags reach the compiler.
    kept = [flag for flag in given if "xla_force_host_platform_device_count" not in flag]
    variables["XLA_FLAGS"] = " ".join([*kept, *flags])
    package = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (package, variables.get("PYTHONPATH"))))
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS"):
        variables.pop(name, None)
    return variables


def _wait(
    job: Job, process: subprocess.Popen[bytes], timeout: float, tick: Callable[[float], None]
) -> int:
    began = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_TICK)
        passed = time.monotonic() - began
        if passed > timeout:
            raise RehearsalError(
                f"{job.name}: the compiler was not done after {timeout:g} s and was ended. Wait "
                f"longer, {_flag('timeout=', '--timeout ')}{2 * timeout:g}{_sooner(job)}, or try "
                "fewer layers first.",
                option="timeout",
            )
        tick(passed)


def _sooner(job: Job) -> str:
    if job.site.platform != "tpu" or not job.codegen:
        return ""
    return f", ask for no code, {_flag('codegen=False', '--no-codegen')}, which takes seconds"


def _flag(argument: str, flag: str) -> str:
    return flag if on_command_line() else argument


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with what it may have started
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _crash(job: Job, status: int, notes: str) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    lines = notes.strip().splitlines()
    # A failed check says why on one line; the last lines are then a stack without symbols.
    fatal = [line for line in lines if _FATAL.search(line)]
    shown = [line[:400] for line in fatal[:3]] or [line[:160] for line in lines[-_MOST_LINES:]]
    wrote = "\n  ".join(["It wrote:", *shown]) if shown else "It wrote nothing."
    return f"{job.name}: the compiling process crashed ({how}). {wrote}"


def versions() -> tuple[tuple[str, str], ...]:
    """Name and version of every package that takes part in a compile, empty where not installed."""
    return tuple((name, _version(name)) for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# Outcomes are kept on disk, one file each, named by the key of their job. A file holds a checksum,
# then the outcome, compressed. One that is damaged counts as not there. Of more than `MOST_BYTES`
# those go that were not used for longest.

MOST_BYTES = 2 << 30
_CHECKSUM = 32  # bytes of a SHA-256
_ENTRY, _PARTIAL, _TIMES = ".rehearsal", "partial-", "times.json"
_MOST_TIMES = 500


def default_folder() -> Path:
    """The folder where this platform keeps caches; on Linux below `$XDG_CACHE_HOME`."""
    from platformdirs import user_cache_path  # in the function: a folder may be given

    return user_cache_path("meshwright", appauthor=False)


def cached(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """List the entries of a cache, those that were not used for longest first."""
    entries = []
    for file in folder.glob(f"*{_ENTRY}"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            entries.append((file, file.stat()))
    return sorted(entries, key=lambda entry: entry[1].st_mtime)


def clear(folder: Path) -> None:
    """Remove everything that rehearsals have put into a folder."""
    for file in (*folder.glob(f"*{_ENTRY}"), *folder.glob(f"{_PARTIAL}*"), folder / _TIMES):
        file.unlink(missing_ok=True)


def load(folder: Path, job: Job) -> Outcome | None:
    """Load the outcome of a job; `None` where there is none, or its file is damaged."""
    file = folder / f"{job.key}{_ENTRY}"
    try:
        content = file.read_bytes()
        checksum, packed = content[:_CHECKSUM], content[_CHECKSUM:]
        if hashlib.sha256(packed).digest() != checksum:
            return None
        outcome = Outcome(**json.loads(zlib.decompress(packed)))
    except (OSError, ValueError, TypeError, zlib.error):
        return None
    with contextlib.suppress(OSError):  # a folder that may only be read
        os.utime(file)
    return outcome


def save(folder: Path, job: Job, outcome: Outcome) -> None:
    """Keep an outcome; a folder that cannot be written only costs the time of another compile."""
    packed = zlib.compress(json.dumps(outcome.to_json()).encode(), level=1)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{job.key}{_ENTRY}", hashlib.sha256(packed).digest() + packed)
        times = {**_times(folder), _alike(job): outcome.seconds}
        _write(folder / _TIMES, json.dumps(dict(list(times.items())[-_MOST_TIMES:])).encode())
        _drop_oldest(folder)


def _write(file: Path, content: bytes) -> None:
    """Write beside and rename, so that a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as partial:
            partial.write(content)
        Path(name).replace(file)
    finally:
        Path(name).unlink(missing_ok=True)


def _drop_oldest(folder: Path) -> None:
    entries = cached(folder)
    size = sum(stat.st_size for _, stat in entries)
    for file, stat in entries[:-1]:  # the newest stays, however large
        if size <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        size -= stat.st_size


# How long compiles took, by what they were called and for what: what to expect of the next one.


def last_seconds(folder: Path | None, job: Job) -> float | None:
    """Seconds that the last compile like this one took, if that is known."""
    seconds = None if folder is None else _times(folder).get(_alike(job))
    return float(seconds) if isinstance(seconds, (int, float)) else None


def _alike(job: Job) -> str:
    code = "" if job.codegen else ", without code"
    return f"{job.name} on {job.site.topology.name} by {job.site.platform}{code}"


def _times(folder: Path) -> dict[str, Any]:
    try:
        times = json.loads((folder / _TIMES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return times if isinstance(times, dict) else {}
