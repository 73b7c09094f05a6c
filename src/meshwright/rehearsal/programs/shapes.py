"""Shapes as a compiler writes them: `bf16[64,256]{1,0:T(8,128)}`, tuples, tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

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
