"""Where in the user's code an instruction comes from.

A text names its places in tables at the top (`FileNames`, `FunctionNames`, `FileLocations`,
`StackFrames`) to which `stack_frame_id` points, or, in an older form, by `source_file` and
`source_line` in the instruction itself.
"""

from __future__ import annotations

import dataclasses
import re

from meshwright.rehearsal.programs.instructions import Instruction

_SECTION = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.M
)
_NAME = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", re.M)
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_BYTES = re.compile(r"(?:\\[0-3][0-7]{2})+")
# Frames that say less than their caller's: JAX, the libraries built on it, Python's own.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|equinox|haiku)/"
    r"|/lib/python3\.\d+/[^/]+\.py$|<frozen "
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A place in the user's code. `function` is empty where the text does not say."""

    file: str
    line: int
    function: str = ""

    @property
    def library(self) -> bool:
        return bool(_LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclasses.dataclass(frozen=True, eq=False)
class SourceTable:
    """Stack frames by number, each with its caller's number (0: none)."""

    frames: dict[int, tuple[Source, int]]

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """All frames, innermost first."""
        numbered = _FRAME_ID.search(instruction.rest)
        if numbered:
            return self._walk(int(numbered[1]))
        named = _FILE_AND_LINE.search(instruction.rest)
        return (Source(plain(named[1]), int(named[2] or 0)),) if named else ()

    def source(self, instruction: Instruction) -> Source | None:
        """The innermost frame of the user's own code, or the innermost of all."""
        frames = self.stack(instruction)
        own = (frame for frame in frames if not frame.library)
        return next(own, frames[0] if frames else None)

    def _walk(self, number: int) -> tuple[Source, ...]:
        frames = []
        while number in self.frames:
            frame, number = self.frames[number]
            frames.append(frame)
        return tuple(frames)


def plain(name: str) -> str:
    r"""A name with the letters that a program's text writes as the bytes they are made of.

    >>> plain(r"m\303\266 d.py")
    'mö d.py'
    """
    return _BYTES.sub(
        lambda found: bytes(int(one, 8) for one in found[0].split("\\")[1:]).decode(
            "utf-8", "replace"
        ),
        name,
    )


def read_sources(head: str) -> SourceTable:
    """The tables at the top of a text; empty where there are none."""
    sections = dict(_SECTION.findall(head))
    files = {n: plain(name) for n, name in _NAME.findall(sections.get("FileNames", ""))}
    functions = dict(_NAME.findall(sections.get("FunctionNames", "")))
    places = {
        number: Source(files.get(file, "?"), int(line), functions.get(function, ""))
        for number, file, function, line in _LOCATION.findall(sections.get("FileLocations", ""))
    }
    frames = [
        (int(number), place, int(parent or 0))
        for number, place, parent in _FRAME.findall(sections.get("StackFrames", ""))
    ]
    # XLA prints a caller's number one too high: no frame is its own caller.
    shift = int(any(number == parent for number, _, parent in frames))
    return SourceTable(
        {number: (places[place], max(parent - shift, 0)) for number, place, parent in frames}
    )
