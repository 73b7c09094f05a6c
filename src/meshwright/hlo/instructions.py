"""The parts of an HLO program as its text has them: `Instruction` and `Computation`, and in them
shapes, attributes, names of operations and lines of the user's code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

from meshwright._show import short_repr
from meshwright._text import plural

_OPERAND = re.compile(r"%([\w.-]+(?:#\d+)*)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r", (calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(%[\w.-]+|\{[^}]*\})"
)


# Compared and hashed by identity: names are unique only within a computation.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Instruction:
    """One line of a program, e.g. `ROOT %sum = f32[4]{0} add(%x, %x), metadata={...}`.

    `operand_text` is what is between the brackets: operands, a parameter's number, a constant's
    value. `attributes` is the text that follows: attributes, metadata, backend_config. Both are
    taken apart only when asked for, since a program may have 100,000 instructions. `computation`
    is the name of the one it is in.
    """

    name: str
    opcode: str
    shape: Shape
    operand_text: str
    attributes: str
    computation: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands, which are instructions of the same computation."""
        return tuple(_OPERAND.findall(self.operand_text))

    @functools.cached_property
    def op_name(self) -> str:
        """The user's operation, e.g. `jit(step)/jvp()/dot_general`; empty if the text has none."""
        match = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """Every computation it calls and the attribute that says so: `("body", "region_0.1")`."""
        # Most instructions call nothing and have no % behind their operands, which is quick to see.
        if "%" not in self.attributes:
            return ()
        return tuple(
            (how, name)
            for how, names in _CALLED.findall(self.attributes)
            for name in _OPERAND.findall(names)
        )

    @property
    def only_calls(self) -> bool:
        """Whether it does nothing but run other computations, e.g. `while` or `fusion-start`."""
        return self.opcode in ("while", "call", "conditional") or (
            self.opcode.endswith("-start") and ", calls=" in self.attributes
        )

    def attribute(self, name: str) -> str | None:
        """Return the value of an attribute as it is written, or `None`."""
        return attribute(self.attributes, name)

    def __repr__(self) -> str:
        return short_repr(self, f"%{self.name} = {self.shape.text} {self.opcode}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Computation:
    """A function of the program: its instructions, in the order in which they run.

    That is the compiler's order if the header says `is_scheduled=true`, and some order in which
    operands come first if not.
    """

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
            int(instruction.operand_text): instruction
            for instruction in self.instructions
            if instruction.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """`{name of an instruction: those that read it}`; without an entry if none does."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Return the operands of one of its instructions."""
        return tuple(self.by_name[name] for name in instruction.operands)

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}, {plural(len(self.instructions), 'instruction')}")


# Reading shapes.
# Input: a shape as a compiler writes it, `(bf16[64,256]{1,0:T(8,128)}, /*index=1*/s4[3]{0})`.
# Output: its arrays in order, `bf16[64,256]` and `s4[3]`; nested tuples become one flat list.
# Invariant: layouts and tilings in braces are dropped, so sizes are those without padding; what is
# stored with it is `Shape.stored`.

_LEAF = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_SPACE = re.compile(r"[a-z][a-z0-9]*\[[^\]]*\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_TILED = re.compile(r"[a-z][a-z0-9]*\[[^\]]*\](?:\{([\d,]*)(?::T\(([\d,]+)\))?[^{}]*\})?")
_DIGITS = re.compile(r"\d+")
# Types without their number of bits in their name. XLA stores a `pred` in a whole byte.
_BITS_BY_NAME = {"pred": 8, "token": 0, "opaque": 0}
HOST_SPACE = 5  # `S(5)` of a layout is the host's memory, for TPUs and GPUs


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a shape: its element type and the sizes of its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        # Rounded up: elements of less than a byte are packed.
        return -(-self.elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, repr=False)
class Shape:
    """An array or a tuple of arrays; nested tuples become one flat list.

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

    @functools.cached_property
    def spaces(self) -> tuple[int, ...]:
        """The memory space of each leaf, 0 for main memory: `S(1)` of a layout is on chip.

        >>> Shape("(bf16[64]{0:T(128)S(1)}, f32[3]{0})").spaces
        (1, 0)
        """
        return tuple(int(space or 0) for space in _SPACE.findall(self.text))

    @property
    def stored(self) -> tuple[int, ...]:
        """Bytes of each leaf in memory: a TPU's tiles, `T(8,128)`, fill up the last of its dims.

        >>> Shape("(bf16[4,60,100]{2,1,0:T(8,128)(2,1)}, f32[60,100]{0,1:T(8,128)})").stored
        (65536, 53248)
        >>> Shape("(f32[3]{0:T(128)}, f32[3]{0})").stored
        (512, 12)
        """
        return _stored(self.text)

    def element(self, index: int) -> Shape:
        """Return one of the shapes of a tuple.

        >>> Shape("(bf16[64]{0:T(8,128)}, (s4[3], f32[]))").element(1).text
        '(s4[3], f32[])'
        """
        start = 1
        for _ in range(index):
            start = end_of_value(self.text, start) + 1
        text = self.text[start : end_of_value(self.text, start)].strip()
        return Shape(text.partition("*/")[2] if text.startswith("/*") else text)

    def __repr__(self) -> str:
        return short_repr(self, self.text)


# A program has many instructions and few different shapes.
@functools.lru_cache(maxsize=4096)
def _leaves(text: str) -> tuple[Leaf, ...]:
    return tuple(
        # A bounded dimension, `<=8`, counts as its bound.
        Leaf(dtype, tuple(int(size) for size in _DIGITS.findall(dims)))
        for dtype, dims in _LEAF.findall(text)
    )


# In: `bf16[4,60,100]{2,1,0:T(8,128)}`: the order of dims in memory, the last first, and the tile,
# whose last side is along the last dim. Out: the bytes with each of these dims filled up.
@functools.lru_cache(maxsize=4096)
def _stored(text: str) -> tuple[int, ...]:
    sizes = []
    for leaf, (order, tile) in zip(_leaves(text), _TILED.findall(text), strict=True):
        if not tile:
            sizes.append(leaf.bytes)
            continue
        dims = [leaf.dims[int(number)] for number in _DIGITS.findall(order)]
        sides = [int(side) for side in reversed(_DIGITS.findall(tile))]
        dims += [1] * (len(sides) - len(dims))
        filled = [-(-size // side) * side for size, side in zip(dims, sides, strict=False)]
        elements = math.prod([*filled, *dims[len(sides) :]])
        sizes.append(-(-elements * bits(leaf.dtype) // 8))
    return tuple(sizes)


@functools.cache
def bits(dtype: str) -> int:
    """Return the number of bits of one element.

    >>> [bits(dtype) for dtype in ("bf16", "f8e4m3fn", "s4", "c64", "pred", "f4e2m1fn", "token")]
    [16, 8, 4, 64, 8, 4, 0]
    """
    if dtype in _BITS_BY_NAME:
        return _BITS_BY_NAME[dtype]
    size = _DIGITS.search(dtype)
    return int(size[0]) if size else 0


# Reading attributes.
# Input: the text behind an instruction's operands, `, dimensions={0}, metadata={op_name="a, b"}`.
# Output: the text of one value, `{0}`. Invariant: brackets and quotes inside a value are kept
# together, so its commas do not end it; a value that is not there is `None`, never empty.
# Values are searched when asked for, since most are never needed.

_OPEN, _CLOSE = "({[", ")}]"
_DELIMITER = re.compile(r'[(){}\[\],"]')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def attribute(text: str, name: str) -> str | None:
    """Return the value of an attribute as it is written, or `None`.

    >>> attribute(", replica_groups={{0,1},{2,3}}, to_apply=%add", "replica_groups")
    '{{0,1},{2,3}}'
    """
    start = text.find(f", {name}=")
    if start < 0:
        return None
    start += len(name) + 3
    return text[start : end_of_value(text, start)]


def end_of_value(text: str, start: int) -> int:
    """Return where a value ends: at a comma or a closing bracket that does not belong to it."""
    depth, position = 0, start
    while match := _DELIMITER.search(text, position):
        delimiter, position = match[0], match.end()
        if delimiter == '"':
            quoted = _QUOTED.match(text, match.start())
            position = quoted.end() if quoted else position
        elif delimiter in _OPEN:
            depth += 1
        elif depth == 0:
            return match.start()
        elif delimiter in _CLOSE:
            depth -= 1
    return len(text)


def integers(text: str | None) -> tuple[int, ...]:
    """Return all integers in a text, none for `None`.

    >>> integers("{0,2}")
    (0, 2)
    """
    return tuple(int(number) for number in re.findall(r"-?\d+", text or ""))


def primitives(op_name: str) -> list[str]:
    """Return the JAX primitives that an `op_name` ends with.

    An instruction that the compiler merged from several has their names, joined by colons.

    >>> primitives("jit(f)/jvp()/while/body/dot_general")
    ['dot_general']
    >>> primitives("jit(f)/(transpose(jvp())/scatter-add:jvp()/reduce_sum)")
    ['scatter-add', 'reduce_sum']
    """
    last_parts = (part.rpartition("/")[2].strip("()") for part in op_name.split(":"))
    return list(dict.fromkeys(name for name in last_parts if name))


# Reading source lines.
# Input: tables above the first computation (`FileNames`, `FunctionNames`, `FileLocations`,
# `StackFrames`), to which an instruction's `stack_frame_id=3` points; or, in an older form,
# `source_file="a.py" source_line=7` in the instruction itself.
# Output: the frames of an instruction, innermost first: `ufuncs.py:99`, `train.py:12`.
# Invariant: an instruction without either has no frames; nothing is guessed.

_SECTION = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.M
)
_NAME = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", re.M)
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_OCTAL_BYTES = re.compile(r"(?:\\[0-3][0-7]{2})+")
# Files whose frames tell a user less than their caller's: JAX, libraries built on it, Python's own.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|equinox|haiku)/"
    r"|/lib/python3\.\d+/[^/]+\.py$|<frozen "
)


@dataclasses.dataclass(frozen=True, repr=False)
class Source:
    """A line of code. `function` is empty if the text does not name it."""

    file: str
    line: int
    function: str = ""

    @property
    def in_library(self) -> bool:
        """Whether it is in JAX, a library built on it, or Python's standard library."""
        return bool(_LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    def __repr__(self) -> str:
        return short_repr(self, f"{self} in {self.function}" if self.function else str(self))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SourceTable:
    """The stack frames by number, each with its caller's number (0: none)."""

    frames: dict[int, tuple[Source, int]]

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Return all frames above an instruction, innermost first."""
        frame_id = _FRAME_ID.search(instruction.attributes)
        if frame_id:
            return self._stack_of(int(frame_id[1]))
        place = _FILE_AND_LINE.search(instruction.attributes)
        return (Source(decode_octal(place[1]), int(place[2] or 0)),) if place else ()

    def source(self, instruction: Instruction) -> Source | None:
        """Return the innermost frame of the user's own code, or else the innermost of all."""
        frames = self.stack(instruction)
        users_own = (frame for frame in frames if not frame.in_library)
        return next(users_own, frames[0] if frames else None)

    def __repr__(self) -> str:
        return short_repr(self, plural(len(self.frames), "frame"))

    def _stack_of(self, number: int) -> tuple[Source, ...]:
        frames = []
        while number in self.frames:
            frame, number = self.frames[number]
            frames.append(frame)
        return tuple(frames)


def decode_octal(name: str) -> str:
    r"""Decode a name in which the text writes what is not ASCII as octal bytes of UTF-8.

    >>> decode_octal(r"m\303\266 d.py")
    'mö d.py'
    """

    def decode(match: re.Match[str]) -> str:
        octal = match[0].split("\\")[1:]
        return bytes(int(byte, 8) for byte in octal).decode("utf-8", "replace")

    return _OCTAL_BYTES.sub(decode, name)


def read_sources(head: str) -> SourceTable:
    """Read the tables above a program's first computation; empty if there are none."""
    sections = dict(_SECTION.findall(head))
    files = {n: decode_octal(name) for n, name in _NAME.findall(sections.get("FileNames", ""))}
    functions = dict(_NAME.findall(sections.get("FunctionNames", "")))
    locations = {
        number: Source(files.get(file, "?"), int(line), functions.get(function, ""))
        for number, file, function, line in _LOCATION.findall(sections.get("FileLocations", ""))
    }
    frames = [
        (int(number), location, int(parent or 0))
        for number, location, parent in _FRAME.findall(sections.get("StackFrames", ""))
    ]
    # XLA prints a caller's number one too high (seen in jaxlib 0.10.2), so that a frame seems to be
    # its own caller. Where none does, the numbers are taken as they are.
    shift = int(any(number == parent for number, _, parent in frames))
    return SourceTable(
        {
            number: (locations[location], max(parent - shift, 0))
            for number, location, parent in frames
        }
    )
