"""What the commands share: output that is coloured on a terminal and plain when piped, and calls
of `module:function` in a user's code."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright._text import amount, text_width
from meshwright.cli.dispatch import all_commands
from meshwright.cli.options import Command, completion, positional
from meshwright.errors import MeshwrightError, near, short
from meshwright.placement.placement import Placement, draw_groups

if TYPE_CHECKING:
    from meshwright.hardware.topology import Topology
    from meshwright.rehearsal.avoidable_costs import AvoidableCosts
    from meshwright.rehearsal.remedy_table import Remedy
    from meshwright.rehearsal.result import Rehearsal

_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")

Piece = tuple[str, str]  # a text and its style, in rich's words


def show(lines: Iterable[Piece]) -> None:
    """Print lines, with their styles where somebody looks at them."""
    show_pieces([line] for line in lines)


def show_pieces(lines: Iterable[Sequence[Piece]]) -> None:
    """Print lines of several styles."""
    if not (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")):
        for line in lines:
            print("".join(text for text, _ in line).rstrip())
        return
    # In the function: rich takes a tenth of a second to load, for colours that a pipe has not.
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        joined = Text.assemble(*line)
        joined.rstrip()
        console.print(joined, soft_wrap=True)


def wrapped(text: str) -> str:
    """Break a line of prose at the width of the screen."""
    return textwrap.fill(text, text_width())


def tell_written(*files: Path | None) -> None:
    """Say which files were written, beside the output itself."""
    for file in files:
        if file is not None:
            whole = -(-file.stat().st_size // 1024) * 1024
            print(f"wrote {file} ({amount(whole)})", file=sys.stderr)


def show_topology(topology: Topology) -> None:
    first, *rest = str(topology).splitlines()
    lines = [(first, "bold"), *((line, "") for line in rest)]
    chip, chips = topology.chip, topology.num_chips
    if chip.family != "cpu":
        lines.append(
            (
                f"  {chip.name}: {chip.tflops:,g} TFLOP/s bf16, {chip.memory_gb:g} GB at "
                f"{chip.memory_tbps:g} TB/s a chip; in all {chip.tflops * chips / 1000:,.4g} "
                f"PFLOP/s, {chip.memory_gb * chips / 1000:,.4g} TB",
                "",
            )
        )
    show(lines)


def show_placement(placement: Placement) -> None:
    headline, heading, *rest = str(placement).splitlines()
    title, *drawn = draw_groups(placement).splitlines()
    show([(headline, "bold"), (heading, "dim"), *((line, "") for line in rest)])
    show([(title, "dim")])
    show_pieces(map(_coloured, drawn))


def _coloured(line: str) -> list[Piece]:
    return [
        (letter, _COLOURS[ord(letter) % len(_COLOURS)] if letter.strip() else "") for letter in line
    ]


def show_rehearsal(result: Rehearsal, ways: Sequence[Remedy], costs: AvoidableCosts | None) -> None:
    """Print everything, the verdict in colour, what to do next at the end."""
    # In the function: it comes with JAX, which no other command that prints needs.
    from meshwright.rehearsal.rendering import as_text

    text = as_text(result, ways, costs)
    show((line, _style(line, number)) for number, line in enumerate(text.splitlines()))


def _style(line: str, number: int) -> str:
    if line.startswith(("fits: ", "fits (")):
        return "bold green"
    if line.startswith("does NOT fit"):
        return "bold red"
    return "bold" if number == 0 or line.startswith("What to do next") else ""


@dataclasses.dataclass(kw_only=True)
class CompletionCommand(Command):
    """Print a script that completes commands, options and names in a shell."""

    command = "completion"
    examples = (
        "meshwright completion bash >> ~/.bashrc",
        "meshwright completion fish > ~/.config/fish/completions/meshwright.fish",
    )

    shell: str = positional(
        "Whose: bash, zsh or fish.", metavar="SHELL", choices=("bash", "zsh", "fish")
    )

    def run(self) -> None:
        print(completion(all_commands(), self.shell))


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
        message = str(getattr(error, "msg", error))
        if inner := _raised_in_callback(message):
            raise MeshwrightError(f"{what}: {inner}") from error
        lines = message.splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
        raise MeshwrightError(f"{what}: {text}{_where(error)}") from error


# In: the text of an error of XLA. Out: the line that a callback of the user's code raised and its
# place, or nothing where the text holds no traceback. Example: `INTERNAL: CpuCallback error calling
# callback: Traceback (most recent call last):`, lines of frames and `ValueError: no data` come out
# as `ValueError: no data (train.py:12)`.
def _raised_in_callback(message: str) -> str:
    _, found, inner = message.partition(_TRACEBACK)
    if not found:
        return ""
    frames = [traceback.FrameSummary(file, int(line), "") for file, line in _FRAME.findall(inner)]
    # What stands after the last frame and its line of code, if the text has that.
    after = inner.splitlines()
    last = max((n for n, line in enumerate(after) if line.startswith("  ")), default=-1)
    raised = [line for line in after[last + 1 :] if line.strip()]
    return f"{raised[0]}{_own_place(frames)}" if raised else ""


_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)


def _where(error: BaseException) -> str:
    """Return the file and line of the user's code that an error comes from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in _OURS and not frame.filename.startswith("<frozen ")
    ]
    return _own_place(frames)


def _own_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last frame in the user's own files: what is below it belongs to a library."""
    own = [frame for frame in frames if Path.cwd() in Path(frame.filename).parents]
    own = [frame for frame in own if "site-packages" not in Path(frame.filename).parts]
    last = (own or frames)[-1:]
    return f" ({last[0].filename}:{last[0].lineno})" if last else ""
