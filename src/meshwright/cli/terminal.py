"""What the commands share: output that is coloured on a terminal and plain when piped, and calls
of `module:function` in a user's code."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.text import Text

from meshwright.errors import MeshwrightError, near, short
from meshwright.hardware.topology import Topology
from meshwright.placement.placement import Placement, draw_groups

_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")


def show_topology(topology: Topology) -> None:
    console = _console()
    first, *rest = str(topology).splitlines()
    _print(console, Text(first, style="bold"))
    for line in rest:
        _print(console, Text(line))
    chip, chips = topology.chip, topology.num_chips
    if chip.family != "cpu":
        _print(
            console,
            Text(
                f"  {chip.name}: {chip.tflops:,g} TFLOP/s bf16, {chip.memory_gb:g} GB at "
                f"{chip.memory_tbps:g} TB/s a chip; in all {chip.tflops * chips / 1000:,.4g} "
                f"PFLOP/s, {chip.memory_gb * chips / 1000:,.4g} TB"
            ),
        )


def show_placement(placement: Placement) -> None:
    console = _console()
    headline, heading, *rest = str(placement).splitlines()
    _print(console, Text(headline, style="bold"))
    _print(console, Text(heading, style="dim"))
    for line in rest:
        _print(console, Text(line))
    title, *lines = draw_groups(placement).splitlines()
    _print(console, Text(title, style="dim"))
    for line in lines:
        _print(console, _coloured(line))


def _coloured(line: str) -> Text:
    text = Text()
    for letter in line:
        style = _COLOURS[ord(letter) % len(_COLOURS)] if letter.strip() else ""
        text.append(letter, style=style)
    return text


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


# Call `module:function` of a user's code; what goes wrong there is reported in one line.

_OURS = (__file__, importlib.__file__)


def call(source: str) -> Any:
    """Call the function and return its result, from the working directory; prints go to stderr."""
    name, colon, function = source.partition(":")
    if not (name and colon and function):
        raise MeshwrightError(f"{short(source)} is not module:function, e.g. my_model:init_shapes.")
    if name.endswith(".py") or not all(word.isidentifier() for word in name.split(".")):
        raise MeshwrightError(
            f"{short(name)} is not the name of a module. Give it as import does, from the folder "
            f"it is in: {_stem(name)}:{function}."
        )
    with _working_directory(), contextlib.redirect_stdout(sys.stderr):
        users_function = _function(_module(name), function)
        with explained(f"{source} failed"):
            return users_function()


def _stem(name: str) -> str:
    stem = Path(name).stem
    return stem if stem.isidentifier() else "my_model"


def _module(name: str) -> ModuleType:
    with explained(f"cannot import {short(name)}"):
        return importlib.import_module(name)


def _function(module: ModuleType, function: str) -> Any:
    value = getattr(module, function, None)
    if not callable(value):
        hint = near(function, [n for n in vars(module) if callable(getattr(module, n))])
        raise MeshwrightError(f"{module.__name__} has no function {short(function)}.{hint}")
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        code = getattr(value, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise MeshwrightError(
            f"{module.__name__}:{function}{where} cannot be called without arguments: {error}. "
            "Give a function that needs none."
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return value


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
    """The working directory on the path, and off it again, whatever else was put there."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry is not here]


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of a user's code into one line with file and line; our own pass as they are."""
    try:
        yield
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        lines = str(getattr(error, "msg", error)).splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
        raise MeshwrightError(f"{what}: {text}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """Return the file and line of the user's code that an error comes from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in _OURS and not frame.filename.startswith("<frozen ")
    ]
    # The last frame in the user's own files: what is below it belongs to a library.
    own = [frame for frame in frames if Path.cwd() in Path(frame.filename).parents]
    own = [frame for frame in own if "site-packages" not in Path(frame.filename).parts]
    last = (own or frames)[-1:]
    return f" ({last[0].filename}:{last[0].lineno})" if last else ""
