"""Instructions and computations, as the text has them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r", (calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(%[\w.-]+|\{[^}]*\})"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program.

    `inside` is the text between the brackets (operands, a parameter's number, a constant's
    value), `rest` all that follows.
    """

    name: str
    opcode: str
    shape: Shape
    inside: str
    rest: str
    computation: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.inside))

    @functools.cached_property
    def op_name(self) -> str:
        """The user's operation: `jit(step)/jvp()/dot_general`; empty where the text is silent."""
        found = _OP_NAME.search(self.rest)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """Every computation it calls and the attribute that says so: `("body", "region_0.1")`."""
        return tuple(
            (how, name)
            for how, names in _CALLED.findall(self.rest)
            for name in _OPERAND.findall(names)
        )

    @property
    def only_calls(self) -> bool:
        """Whether it does nothing but run other computations; `fusion-start` begins one."""
        return self.opcode in ("while", "call", "conditional") or (
            self.opcode.endswith("-start") and ", calls=" in self.rest
        )

    def attribute(self, name: str) -> str | None:
        return attribute(self.rest, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run, where the program is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {
            int(instruction.inside): instruction
            for instruction in self.instructions
            if instruction.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Per instruction, those that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(self.by_name[name] for name in instruction.operands)


# Shapes as a compiler writes them: `bf16[64,256]{1,0:T(8,128)}`, tuples, tokens.


_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_DIGITS = re.compile(r"\d+")
# Types whose name does not begin with a letter and their number of bits.
_ODD_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array or a tuple of arrays, nested tuples laid flat.

    >>> shape = Shape("(bf16[64,256]{1,0:T(8,128)}, /*index=1*/s4[3]{0}, token[])")
    >>> shape.bytes, [str(leaf) for leaf in shape.leaves]
    (32770, ['bf16[64,256]', 's4[3]', 'token[]'])
    """

    text: str

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return _leaves(self.text)

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves)


@functools.lru_cache(maxsize=4096)
def _leaves(text: str) -> tuple[Leaf, ...]:
    return tuple(
        # A bounded dimension, `<=8`, counts as its bound.
        Leaf(dtype, tuple(int(size) for size in _DIGITS.findall(dims)))
        for dtype, dims in _LEAF.findall(text)
    )


@functools.cache
def bits(dtype: str) -> int:
    """
    >>> [bits(dtype) for dtype in ("bf16", "f8e4m3fn", "s4", "c64", "pred", "f4e2m1fn", "token")]
    [16, 8, 4, 64, 8, 4, 0]
    """
    if dtype in _ODD_BITS:
        return _ODD_BITS[dtype]
    size = _DIGITS.search(dtype)
    return int(size[0]) if size else 0


# Values of attributes, read when asked for: `name=value` behind an instruction's operands.


_OPEN, _CLOSE = "({[", ")}]"
_MARK = re.compile(r'[(){}\[\],"]')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def attribute(text: str, name: str) -> str | None:
    """The value of an attribute as it is written, or `None`.

    >>> attribute(", replica_groups={{0,1},{2,3}}, to_apply=%add", "replica_groups")
    '{{0,1},{2,3}}'
    """
    start = text.find(f", {name}=")
    if start < 0:
        return None
    start += len(name) + 3
    return text[start : end_of_value(text, start)]


def end_of_value(text: str, start: int) -> int:
    """Where a value ends: at a comma or a closing bracket that does not belong to it."""
    depth, at = 0, start
    while found := _MARK.search(text, at):
        mark, at = found[0], found.end()
        if mark == '"':
            quoted = _QUOTED.match(text, found.start())
            at = quoted.end() if quoted else at
        elif mark in _OPEN:
            depth += 1
        elif depth == 0:
            return found.start()
        elif mark in _CLOSE:
            depth -= 1
    return len(text)


def whole_numbers(text: str | None) -> tuple[int, ...]:
    """
    >>> whole_numbers("{0,2}")
    (0, 2)
    """
    return tuple(int(number) for number in re.findall(r"-?\d+", text or ""))


# Names of operations as a program carries them.


def primitives(op_name: str) -> list[str]:
    """The operations that a name, or several put together, stand for.

    >>> primitives("jit(f)/jvp()/while/body/dot_general")
    ['dot_general']
    >>> primitives("jit(f)/(transpose(jvp())/scatter-add:jvp()/reduce_sum)")
    ['scatter-add', 'reduce_sum']
    """
    last = (part.rpartition("/")[2].strip("()") for part in op_name.split(":"))
    return list(dict.fromkeys(name for name in last if name))


# Where in the user's code an instruction comes from.
#
# A text names its places in tables at the top (`FileNames`, `FunctionNames`, `FileLocations`,
# `StackFrames`) to which `stack_frame_id` points, or, in an older form, by `source_file` and
# `source_line` in the instruction itself.


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
