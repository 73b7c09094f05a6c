"""`integer_constants`: constants of a compiled program, whose text leaves the larger ones out.

Kernels may decide by a constant what they do: splash attention skips the blocks that its mask, a
table of bytes, says are empty; and each device looks its offsets up in a table by its own number.
The values are in the program as a message of protocol buffers; no small package reads those of XLA,
so the few fields that are needed are read here by number (hlo.proto and xla_data.proto of XLA).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_MOST_BYTES = 1 << 20  # of a constant: tables of blocks are far smaller, weights are no tables
# Numbers of fields: HloModuleProto, HloComputationProto, HloInstructionProto, ShapeProto, Layout.
_COMPUTATIONS, _INSTRUCTIONS = 3, 2
_NAME, _OPCODE, _SHAPE, _LITERAL = 1, 2, 3, 8
_DIMENSIONS, _LAYOUT, _MINOR_TO_MAJOR = 3, 5, 1
# Numbers of LiteralProto's fields for integers, as bytes or as packed numbers.
_AS_BYTES = {15: np.int8, 3: np.uint8}
_PACKED = {4: np.int32, 5: np.int64, 6: np.uint32, 7: np.uint64}
# The opening fields of an instruction, its name and opcode, are within so many bytes.
_HEAD = 400


# In: a program as the compiler serializes it. Out: its integer constants, those too large for the
# text among them. Invariant: values are in row-major order, whatever layout they are stored in;
# what is no table (weights, floats) is left out. Example: a mask of 4 x 4 blocks is
# {"constant.7": ["int8", [4, 4], "AQAA..."]}.
def integer_constants(module: bytes, largest: int = _MOST_BYTES) -> dict[str, list[Any]]:
    """Return `{instruction: [dtype, dims, values as base64]}` of a serialized `HloModuleProto`.

    Those with dims and of at most `largest` bytes; plain data, for `decode_constants` to read.
    """
    constants = {}
    for number, computation in _fields(memoryview(module)):
        if number != _COMPUTATIONS:
            continue
        for inner, instruction in _fields(computation):
            if inner == _INSTRUCTIONS and b"constant" in bytes(instruction[:_HEAD]):
                name, values = _constant(instruction, largest)
                if values is not None:
                    text = base64.b64encode(values.tobytes()).decode()
                    constants[name] = [values.dtype.name, list(values.shape), text]
    return constants


def module_of_proto(program: bytes) -> bytes:
    """Return the `HloModuleProto` of a serialized `HloProto`, as the compiler writes it to a file.

    >>> module_of_proto(bytes([0x0A, 2, 7, 8, 0x1A, 0]))
    b'\\x07\\x08'
    """
    return next(bytes(value) for number, value in _fields(memoryview(program)) if number == 1)


def decode_constants(constants: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
    """Return arrays by the names of their instructions.

    >>> decode_constants({"c": ["int8", [2], "AQI="]})["c"].tolist()
    [1, 2]
    """
    return {
        name: np.frombuffer(base64.b64decode(text), dtype).reshape(dims)
        for name, (dtype, dims, text) in constants.items()
    }


def _constant(instruction: memoryview, largest: int) -> tuple[str, np.ndarray | None]:
    parts = {number: part for number, part in _fields(instruction) if number <= _LITERAL}
    name = bytes(parts.get(_NAME, b"")).decode()
    if bytes(parts.get(_OPCODE, b"")) != b"constant" or _LITERAL not in parts:
        return name, None
    dims: list[int] = []
    minor_to_major: list[int] = []
    for number, part in _fields(parts[_SHAPE]):
        if number == _DIMENSIONS:
            dims += _packed(part)
        elif number == _LAYOUT:
            minor_to_major = [
                d for n, p in _fields(part) if n == _MINOR_TO_MAJOR for d in _packed(p)
            ]
    if not dims or len(parts[_LITERAL]) > largest:
        return name, None
    for number, part in _fields(parts[_LITERAL]):
        if number in _AS_BYTES:
            values = np.frombuffer(bytes(part), _AS_BYTES[number])
        elif number in _PACKED:
            values = np.array(_packed(part), np.uint64).astype(_PACKED[number])
        else:
            continue
        if values.size == math.prod(dims):
            return name, _in_order(values, dims, minor_to_major)
    return name, None


def _in_order(values: np.ndarray, dims: list[int], minor_to_major: list[int]) -> np.ndarray:
    """Return an array with its dims in order; a literal has them as its layout has."""
    order = minor_to_major[::-1] or list(range(len(dims)))
    stored = values.reshape([dims[dim] for dim in order])
    return np.ascontiguousarray(stored.transpose(np.argsort(order)))


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and bytes of every field; those of a number are the bytes it is written in."""
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        start, kind = position, key & 7
        if kind == 0:
            _, position = _varint(message, position)
        elif kind == 2:
            size, start = _varint(message, position)
            position = start + size
        else:
            position += {1: 8, 5: 4}[kind]
        yield key >> 3, message[start:position]


def _packed(numbers: memoryview) -> list[int]:
    position, values = 0, []
    while position < len(numbers):
        value, position = _varint(numbers, position)
        values.append(value)
    return values


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
