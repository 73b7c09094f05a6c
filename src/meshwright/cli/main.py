"""`meshwright ...`: read the words, run a command, say what went wrong in a line or two.

Exit codes: 0, 2 for a mistake in the words or in what they ask for, 3 where a rehearsed step does
not fit, 130 after Ctrl-C. Imports are in the functions: what comes before `main` runs cannot be
interrupted in one line.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cli.options import Command
    from meshwright.errors import MeshwrightError

MISTAKE, INTERRUPTED = 2, 130  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Without `arguments` the process is the command's own: it takes the words it was started with,
    and ends here.
    """
    if arguments is not None:
        return _guarded(list(arguments))
    try:
        _end_in_one_line()
        _leave(_guarded(sys.argv[1:]))
    except KeyboardInterrupt:
        _Interrupt.tell()
        os._exit(INTERRUPTED)


def _guarded(words: list[str]) -> int:
    _Interrupt.seen = _Interrupt.told = False
    try:
        return _run(words)
    except KeyboardInterrupt:
        pass
    except BaseException:
        if not _Interrupt.seen:  # else it is what became of the interrupt on its way
            raise
    _Interrupt.tell()
    return INTERRUPTED


# Ctrl-C. The first one unwinds what runs, so that files and processes are tidied, and `_guarded`
# says so. A second one, and one that Python would lose (in a destructor, or a callback of a library
# in C), ends the process at once; its compiling process notices, and ends too.


class _Interrupt:
    seen = told = False

    @classmethod
    def tell(cls) -> None:
        if not cls.told:
            cls.told = True
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # of a line of progress
            print(f"{clear}{_PROGRAM}: interrupted", file=sys.stderr, flush=True)


_PROGRAM = "meshwright"


def _end_in_one_line() -> None:
    import signal

    def interrupt(*_: object) -> None:
        if _Interrupt.seen:
            end()
        _Interrupt.seen = True
        raise KeyboardInterrupt

    def lost(what: Any, usual: Any = sys.unraisablehook) -> None:
        end() if _Interrupt.seen else usual(what)

    def end() -> NoReturn:
        _Interrupt.tell()
        os._exit(INTERRUPTED)

    # Where the signal is ignored (`nohup`, a job in the background of a script) it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = lost


def _leave(code: int) -> NoReturn:
    """End the process without the seconds and the messages of libraries that unload."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        code = code or 1
    os._exit(code)


# A command. What it warns of becomes a note; what it refuses, a message in the words of the command
# line.


def _run(words: list[str]) -> int:
    import io

    from meshwright.cli.options import UsageError, help_text, overview, read_words

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets text
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name == "--version":
        from meshwright._version import __version__

        return _say(f"{_PROGRAM} {__version__}")
    if name in ("-h", "--help", "help"):
        asked = rest[0] if rest and rest[0] in _COMMANDS else None
        return _say(help_text(_command(asked)) if asked else overview(all_commands(), _ABOUT))
    if not name:
        print(overview(all_commands(), _ABOUT), file=sys.stderr)
        return MISTAKE
    if name not in _COMMANDS:
        return _tell(_no_command(name))
    if "-h" in rest or "--help" in rest:
        return _say(help_text(_command(name)))
    try:
        command = read_words(_command(name), rest)
    except UsageError as error:
        return _tell(str(error))
    return _do(command)


_ABOUT = "The mesh layer for JAX: say what parallelism you want, on what hardware."


# The file and class of each command, imported when it is asked for.
_COMMANDS = {
    "mesh": ("mesh_commands", "MeshCommand"),
    "rehearse": ("rehearse", "RehearseCommand"),
    "partition": ("mesh_commands", "PartitionCommand"),
    "schedule": ("schedule", "ScheduleCommand"),
    "devices": ("mesh_commands", "DevicesCommand"),
    "hardware": ("mesh_commands", "HardwareCommand"),
    "models": ("rehearse", "ModelsCommand"),
    "cache": ("rehearse", "CacheCommand"),
    "completion": ("terminal", "CompletionCommand"),
}


def _command(name: str) -> type[Command]:
    import importlib

    file, kind = _COMMANDS[name]
    chosen: type[Command] = getattr(importlib.import_module(f"meshwright.cli.{file}"), kind)
    return chosen


def all_commands() -> dict[str, type[Command]]:
    return {name: _command(name) for name in _COMMANDS}


def _no_command(name: str) -> str:
    from meshwright.errors import near, short

    known = list(_COMMANDS)
    what = f"no option {name} before a command" if name.startswith("-") else f"no {short(name)}"
    return f"there is {what}.{near(name, known)} Commands: {', '.join(known)}. See --help."


def _do(command: Command) -> int:
    import warnings

    from meshwright.errors import MeshwrightError, options_as_flags

    if "jax" not in sys.modules and (getattr(command, "on", None) or not _has_accelerators()):
        # Hardware by name needs no live device, and where there is none, there is none to be seen:
        # JAX shall not look, which takes seconds and lets the vendors' libraries print at length
        # what they miss.
        os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
    try:
        with warnings.catch_warnings(), options_as_flags():
            warnings.showwarning = _note
            code = command.run() or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MeshwrightError as error:
        return _tell(_in_flags(command, error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _tell(f"{where}{error.strerror}")
    return code


# What Linux shows of accelerators: NVIDIA's (also below Windows), AMD's, Intel's, Google's.
_DEVICE_FILES = ("nvidiactl", "dxg", "kfd", "dri/renderD*", "accel*", "vfio/*")


def _has_accelerators() -> bool:
    """Whether an accelerator may be here; on other systems than Linux one always may."""
    from pathlib import Path

    if sys.platform != "linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES)


def _in_flags(command: Command, error: MeshwrightError) -> str:
    """The message with the option it is about written as on the command line."""
    import re

    from meshwright.cli.options import options_of
    from meshwright.errors import ModelError

    text, name = str(error), error.option
    flags = {each.name: each.written for each in options_of(type(command))}
    if isinstance(error, ModelError) and name not in flags and "set" in flags and name != "name":
        return f"{text} (--set {name}=...)"
    flag = flags.get(name or "", "")
    if name is None or not flag.startswith("--") or flag in text or "--set " in text:
        return text
    written, count = re.subn(rf"(?<![\w-]){name}(?=: | goes )", flag, text, count=1)
    return written if count else f"{text} ({flag})"


def _say(text: str) -> int:
    print(text)
    return 0


def _tell(text: str) -> int:
    print(f"{_PROGRAM}: {text}", file=sys.stderr)
    return MISTAKE


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)
