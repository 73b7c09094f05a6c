"""Read the words of `meshwright ...`, run the command, say what went wrong in a line or two.

What a command warns of becomes a note; what it refuses, a message in the words of the command line.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from meshwright._version import __version__
from meshwright.cli.options import (
    PROGRAM,
    Command,
    UsageError,
    help_text,
    options_of,
    overview,
    read_words,
)
from meshwright.errors import MeshwrightError, ModelError, near, options_as_flags, short

MISTAKE = 2  # exit code


def run(words: list[str]) -> int:
    """Run the command of these words; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets text
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name == "--version":
        return _say(f"{PROGRAM} {__version__}")
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
    "plan": ("plan_command", "PlanCommand"),
    "measure": ("measure_command", "MeasureCommand"),
    "calibrate": ("rehearse", "CalibrateCommand"),
    "partition": ("mesh_commands", "PartitionCommand"),
    "schedule": ("schedule", "ScheduleCommand"),
    "devices": ("mesh_commands", "DevicesCommand"),
    "hardware": ("mesh_commands", "HardwareCommand"),
    "models": ("rehearse", "ModelsCommand"),
    "cache": ("rehearse", "CacheCommand"),
    "completion": ("terminal", "CompletionCommand"),
}


def _command(name: str) -> type[Command]:
    file, kind = _COMMANDS[name]
    chosen: type[Command] = getattr(importlib.import_module(f"meshwright.cli.{file}"), kind)
    return chosen


def all_commands() -> dict[str, type[Command]]:
    """Every command by its name, imported."""
    return {name: _command(name) for name in _COMMANDS}


def _no_command(name: str) -> str:
    known = list(_COMMANDS)
    what = f"no option {name} before a command" if name.startswith("-") else f"no {short(name)}"
    return f"there is {what}.{near(name, known)} Commands: {', '.join(known)}. See --help."


def _do(command: Command) -> int:
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
    if sys.platform != "linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES)


def _in_flags(command: Command, error: MeshwrightError) -> str:
    """The message with the option it is about written as on the command line."""
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
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    return MISTAKE


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)
