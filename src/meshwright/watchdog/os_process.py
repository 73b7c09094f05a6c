"""How a process is, and how it ends: whether it lives, is stopped or dead (`status`), whether a
signal has arrived here (`SignalTrap`), where a thread stands (`standing`, and from other processes
`blocked_stack`), and what it exits with (`ExitStatus`, `exit_now`).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import dataclasses
import enum
import errno
import faulthandler
import functools
import inspect
import itertools
import linecache
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

# A process whose interpreter is blocked for seconds publishes nothing, but is neither dead nor
# stopped. Linux tells these apart for processes of the same machine; of a process on another
# machine only the missing heartbeat is known.
ALIVE, STOPPED, DEAD, UNKNOWN = "alive", "stopped", "dead", "unknown"

_PROC = Path("/proc")
# Fields of /proc/<pid>/stat (see proc(5)), counted after the name in brackets.
_STATE, _FLAGS, _STARTED = 0, 6, 19
# PF_EXITING and PF_DUMPCORE of the kernel's include/linux/sched.h: a large process may spend
# seconds in either before it becomes a zombie.
_EXITING = 0x4 | 0x200


def identity() -> str:
    """Return what identifies this process: machine, PID namespace, PID, start time, SIGABRT trap.

    Without /proc it is empty. The boot id and the namespace say whether another process may look
    its PID up; the start time tells it from a later process with the same PID; the last field is
    1 if a handler for SIGABRT was set when this was called.
    """
    try:
        machine = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        pid = os.getpid()
        return f"{machine} {namespace} {pid} {_stat(pid)[_STARTED]} {_catches_sigabrt(pid):d}"
    except (OSError, IndexError):
        return ""


def status(of: str) -> str:
    """Return how the process with an identity is: `ALIVE`, `STOPPED` or `DEAD`.

    It is `UNKNOWN` from another machine or PID namespace, or without /proc.
    """
    own, fields = identity().split(), of.split()
    if len(own) != 5 or len(fields) != 5 or fields[:2] != own[:2]:
        return UNKNOWN
    pid = int(fields[2])
    try:
        stat, catches_sigabrt = _stat(pid), _catches_sigabrt(pid)
    except (FileNotFoundError, ProcessLookupError):
        return DEAD
    except OSError:
        return UNKNOWN
    if stat[_STARTED] != fields[3] or stat[_STATE] in "ZX" or int(stat[_FLAGS]) & _EXITING:
        return DEAD
    if stat[_STATE] == "T":
        return STOPPED
    # Its trap for SIGABRT was triggered: it sleeps in the handler, perhaps with the interpreter
    # locked so that it cannot say so itself, and then aborts.
    return DEAD if fields[4] == "1" and not catches_sigabrt else ALIVE


def resume(of: str) -> None:
    """Send SIGCONT to a stopped process of this machine, so that it learns that all end."""
    if status(of) == STOPPED:
        with contextlib.suppress(OSError):
            os.kill(int(of.split()[2]), signal.SIGCONT)


def _stat(pid: int) -> list[str]:
    text = (_PROC / str(pid) / "stat").read_text()
    # The name may itself hold spaces and brackets.
    return text[text.rindex(")") + 1 :].split()


def _catches_sigabrt(pid: int) -> bool:
    text = (_PROC / str(pid) / "status").read_text()
    return bool(int(text.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGABRT - 1) & 1)


# Python runs its signal handlers in the main thread only, which may be deep inside a computation.
# So a harmless function of libc becomes the handler, for one time (`sysv_signal` sets
# SA_RESETHAND): once the signal has arrived, the kernel puts the default back, and any thread can
# see that with `sigaction`.
#
# SIGTERM gets `abs`, which does nothing. SIGABRT gets `sleep`, called with the signal's number as
# its argument: six seconds of life for the other threads. Without them JAX's client, which aborts
# when process 0 is lost, would end this process before it has said why.

_active: list[SignalTrap] = []


class SignalTrap:
    """Notices that one signal arrived, once. Does nothing where libc is not GNU's.

    `function` names the function of libc that handles it: `int -> anything`, safe in a handler.
    """

    def __init__(self, number: signal.Signals, function: str) -> None:
        libc = ctypes.CDLL(None)
        self.number, self.set = number, hasattr(libc, "sysv_signal")
        if not self.set:
            return
        self._before = _get_action(number)
        libc.sysv_signal.restype = ctypes.c_void_p
        libc.sysv_signal(int(number), ctypes.cast(getattr(libc, function), ctypes.c_void_p))
        self._ours = _get_action(number)
        _active.append(self)

    @property
    def triggered(self) -> bool:
        """Whether the signal has arrived."""
        if not self.set:
            return False
        # The kernel resets the handler but not the flags, which tells this from SIG_DFL set by
        # other code.
        now = _get_action(self.number)
        return now.handler is None and now.flags == self._ours.flags

    def restore(self) -> None:
        """Put back the earlier action, unless other code has set another one since."""
        if self.set and (self.triggered or _get_action(self.number).handler == self._ours.handler):
            ctypes.CDLL(None).sigaction(int(self.number), ctypes.byref(self._before), None)
        with contextlib.suppress(ValueError):
            _active.remove(self)
        self.set = False


def keep_action(number: signal.Signals) -> Callable[[], None]:
    """Return a function that puts back what handles a signal now, Python's code or C's.

    To be called in the main thread. Without GNU's libc a handler of C code becomes the default.
    """
    handler = signal.getsignal(number)
    action = _get_action(number) if hasattr(ctypes.CDLL(None), "sysv_signal") else None

    def put_back() -> None:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if handler is None and action is not None:
            ctypes.CDLL(None).sigaction(int(number), ctypes.byref(action), None)

    return put_back


def unhandled(number: signal.Signals) -> bool:
    """Whether no Python code handles this signal. Handlers set by C code are not seen."""
    return signal.getsignal(number) in (signal.SIG_DFL, None)


class _Action(ctypes.Structure):
    """GNU's struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _get_action(number: int) -> _Action:
    """Return the action for a signal as libc has it, whoever set it."""
    action = _Action()
    ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    return action


def _restore_after_fork() -> None:
    # A forked child has no monitor thread: a trap there would swallow its first SIGTERM.
    for trap in list(_active):
        trap.restore()


os.register_at_fork(after_in_child=_restore_after_fork)


# Where a thread stands. A process that waits for the others stands in JAX: the innermost Python
# frame is JAX's own, or it calls a compiled function, whose fast path has no Python frame. That
# call is read from the source, since the interpreter does not show what C function a frame is in.

_MOST_FRAMES = 20
_TRACERS = ("jax/_src/interpreters/partial_eval.py", "jax/_src/interpreters/mlir.py")


class Stands(enum.IntEnum):
    """Where a thread stands; the lowest is the first to be suspected of a hang."""

    ELSEWHERE, UNKNOWN, IN_JAX = range(3)


@dataclasses.dataclass(frozen=True)
class Standing:
    """A thread's stack, innermost frame first, where it stands, and whether XLA compiles there.

    `tracing` says that JAX traces or lowers a program.
    """

    stack: str = ""
    stands: Stands = Stands.UNKNOWN
    compiling: bool = False
    tracing: bool = False


def standing(thread: int) -> Standing:
    """Return where a thread of this process stands, or a callback of the program that JAX runs."""
    frames = sys._current_frames()
    callbacks = [
        frame
        for ident, frame in frames.items()
        if ident not in (thread, threading.get_ident()) and _in_callback(frame)
    ]
    frame = callbacks[0] if callbacks else frames.get(thread)
    if frame is None:
        return Standing()
    files = [code.co_filename for code, _ in _walk(frame)]
    callback = _in_callback(frame)
    return Standing(
        "\n".join(
            f'  File "{code.co_filename}", line {line} in {code.co_name}'
            for code, line in itertools.islice(_walk(frame), _MOST_FRAMES)
        ),
        Stands.IN_JAX if _is_jax(files[0]) else Stands.ELSEWHERE if callback else _stands(frame),
        not callback and any(file.endswith("jax/_src/compiler.py") for file in files),
        not callback and any(file.endswith(_TRACERS) for file in files),
    )


def context_switches(thread: int) -> str:
    """Return how often a thread of this process has gone to sleep, as text; empty if unknown."""
    native = [each.native_id for each in threading.enumerate() if each.ident == thread]
    with contextlib.suppress(OSError, IndexError):
        text = (_PROC / f"self/task/{native[0]}/status").read_text()
        return text.partition("\nvoluntary_ctxt_switches:")[2].split("\n")[0].strip()
    return ""


def _walk(frame: types.FrameType | None) -> Iterator[tuple[types.CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _is_jax(file: str) -> bool:
    return any(
        file.startswith(str(Path(module.__file__).parent) + os.sep)
        for module in map(sys.modules.get, ("jax", "jaxlib"))
        if module is not None and module.__file__
    )


def _in_callback(frame: types.FrameType) -> bool:
    """Whether JAX called the program here, from a compiled function, and the program goes on."""
    files = [code.co_filename for code, _ in _walk(frame)]
    return not _is_jax(files[0]) and any(file.endswith("jax/_src/callback.py") for file in files)


def _stands(frame: types.FrameType) -> Stands:
    """Say whether the call that a frame is in is one of a compiled function or of an array."""
    try:
        call = _current_expression(frame)
        if not isinstance(call, ast.Call):
            return Stands.ELSEWHERE
        function, owner = _function_and_owner(frame, call.func)
    except Exception:  # no source, or a name that the frame does not have
        return Stands.UNKNOWN
    while isinstance(function, functools.partial):
        function = function.func
    modules = {type(value).__module__.partition(".")[0] for value in (function, owner)}
    return Stands.IN_JAX if modules & {"jax", "jaxlib"} else Stands.ELSEWHERE


def _current_expression(frame: types.FrameType) -> ast.expr:
    code = frame.f_code
    position = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    first, last, begin, end = (0 if number is None else number for number in position)
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    if not all(lines):
        raise LookupError(code.co_filename)
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return ast.parse(f"({b''.join(lines).decode()})", mode="eval").body


def _function_and_owner(frame: types.FrameType, name: ast.expr) -> tuple[object, object]:
    """Return what a dotted name means in a frame, and what it is an attribute of, if it is.

    No code of the program runs for that: a property gives the property.
    """
    if isinstance(name, ast.Attribute):
        owner, _ = _function_and_owner(frame, name.value)
        return inspect.getattr_static(owner, name.attr), owner
    # A debugger in that frame writes its copy of the locals back.
    if not isinstance(name, ast.Name) or frame.f_trace is not None:
        raise LookupError(ast.dump(name))
    local = frame.f_locals
    try:
        if name.id in local:
            return local[name.id], None
    finally:
        # Before Python 3.13 that is a copy which the frame keeps, and with it arrays that the
        # program has let go of.
        if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            local.clear()
    names = frame.f_globals if name.id in frame.f_globals else vars(builtins)
    return names[name.id], None


# The stack of a process whose interpreter is blocked, so that it cannot tell it itself: a signal
# makes faulthandler's C code write it into a file in memory, which others read through /proc.

_DUMP_TIMEOUT = 0.4


class StackDump:
    """Lets other processes of this machine have the stacks of this one. Linux only.

    `address` is what `blocked_stack` needs: a file descriptor and a signal.
    """

    def __init__(self) -> None:
        self.address, self._file, self._signal = "", -1, 0
        if not hasattr(os, "memfd_create"):
            return
        free = (
            n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if not _get_action(n).handler
        )
        self._signal = next(free, 0)
        if self._signal:
            self._file = os.memfd_create("meshwright stacks")
            faulthandler.register(self._signal, self._file, all_threads=True)
            self.address = f"{self._file} {self._signal}"

    def close(self) -> None:
        if self.address:
            faulthandler.unregister(self._signal)
            os.close(self._file)
            self.address = ""


def blocked_stack(of: str, address: str, thread: int) -> str:
    """Return the stack of a thread in a live process of this machine, or nothing."""
    if not address or status(of) != ALIVE:
        return ""
    pid, (file, number) = int(of.split()[2]), map(int, address.split())
    dumped = _PROC / str(pid) / "fd" / str(file)
    text = ""
    with contextlib.suppress(OSError):
        earlier = before = text = dumped.read_text()  # others may have asked too
        os.kill(pid, number)
        deadline = time.monotonic() + _DUMP_TIMEOUT
        while text in (earlier, "") or text != before:  # until it is there, and whole
            if time.monotonic() > deadline:
                break
            time.sleep(0.03)
            before, text = text, dumped.read_text()
    # Each thread has a header with its number, then its frames; the last dump counts.
    frames: list[str] = []
    wanted = False
    for line in text.splitlines():
        if not line.startswith("  File "):
            wanted = f"{thread:x}" in line
            frames = [] if wanted else frames
        elif wanted:
            frames.append(line)
    return "\n".join(frames[:_MOST_FRAMES])


# The exit of a process that cannot go on. JAX's own exit waits up to 300 s for the other processes,
# so these do not pass through it, nor through Python's `atexit`.

_FLUSH_TIMEOUT = 1.0


class ExitStatus(enum.IntEnum):
    """What a process exits with. Schedulers report the greatest of a job: it is the cause's.

    Above these are those of the system after a signal: 137 killed, 139 a segmentation fault.
    """

    SAVED = 75  # preempted; all have saved: run the job again
    OTHERS_FAULT = 81  # another process is at fault
    MACHINE_ERROR = 82  # at fault: it hung, was stopped, lost the network or a device
    USER_ERROR = 83  # at fault: its program raised, left early, or ran another step than the others
    INTERRUPTED = 128 + signal.SIGINT
    ABORTED = 128 + signal.SIGABRT
    TERMINATED = 128 + signal.SIGTERM


# How XLA's errors begin that the program causes, and would cause again.
_OF_THE_PROGRAM = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "FAILED_PRECONDITION")
_OF_THE_SYSTEM = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENODEV, errno.EROFS)


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that raised: its own where it asked for one.

    >>> exit_status(KeyError("x")), exit_status(TimeoutError()), exit_status(SystemExit(3))
    (<ExitStatus.USER_ERROR: 83>, <ExitStatus.MACHINE_ERROR: 82>, 3)
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    of_xla = type(error).__name__ == "JaxRuntimeError"
    if of_xla and not str(error).startswith(_OF_THE_PROGRAM):
        return ExitStatus.MACHINE_ERROR
    of_system = isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM
    if of_system or isinstance(error, ConnectionError | TimeoutError):
        return ExitStatus.MACHINE_ERROR
    return ExitStatus.USER_ERROR


def exit_after(seconds: float, status: int) -> None:
    """Exit the process after a time, whatever its other threads wait for then."""

    def wait_and_exit() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=wait_and_exit, name="meshwright end", daemon=True).start()


def exit_now(status: int) -> None:
    """Flush what was printed and exit."""
    exit_after(_FLUSH_TIMEOUT, status)  # a full pipe that nobody reads blocks the flush
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
