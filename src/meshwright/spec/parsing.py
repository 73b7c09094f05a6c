"""From what people write to a `MeshSpec`. Nothing is guessed and nothing is repaired."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright._checks import MOST_AXES, TYPE_WORDS
from meshwright.errors import SpecError, listing, short
from meshwright.spec.mesh_spec import AxisSpec, MeshSpec

_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
LONGEST_TEXT = 10_000  # more than any spec can need
EXAMPLE = "Write e.g. 'dp:2, fsdp:-1, tp:4'."


def parse(value: object, names: Sequence[str] | None = None) -> MeshSpec:
    """The one door: strings, dicts, pairs, sizes plus names, or a `MeshSpec` as it is."""
    if isinstance(value, MeshSpec):
        if names is not None:
            raise SpecError("names were given beside a MeshSpec, which has names of its own.")
        return value
    if isinstance(value, str):
        return _from_string(value, names)
    if isinstance(value, Mapping):
        if names is not None:
            raise SpecError("names were given beside a dict, which has names of its own.")
        return MeshSpec(tuple(_axis(name, size) for name, size in value.items()))
    items = _items(value)
    if names is not None:
        return _from_sizes(items, names)
    if items and not all(_is_pair(item) for item in items):
        raise SpecError(
            f"{short(value)}: sizes without names. Pass names=('dp', 'tp'), or pairs "
            "[('dp', 2), ('tp', 4)]."
        )
    return MeshSpec(tuple(_axis(*item) for item in items))


def _items(value: object) -> list[Any]:
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        try:
            items = list(value)  # type: ignore[call-overload]
        except TypeError:
            items = None
        if items is not None and len(items) <= MOST_AXES:
            return list(items)
        if items is not None:
            raise SpecError(f"{len(items)} axes; at most {MOST_AXES}.")
    raise SpecError(f"cannot read a mesh spec from {short(value)}. {EXAMPLE}")


def _is_pair(item: object) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2


def _axis(name: Any, size: Any) -> AxisSpec:
    """A size, or a `(slow, fast)` pair."""
    if isinstance(size, (list, tuple)):
        if len(size) != 2:
            raise SpecError(f"axis {short(name)}: {short(size)} is not a (slow, fast) pair.")
        return AxisSpec(name, size[1], slow=size[0])
    return AxisSpec(name, size)


def _from_sizes(sizes: list[Any], names: object) -> MeshSpec:
    if isinstance(names, str) or not isinstance(names, (list, tuple)):
        raise SpecError(f"names: {short(names)} is not a list or tuple of axis names.")
    if len(sizes) != len(names):
        raise SpecError(
            f"{len(sizes)} sizes for {len(names)} names ({listing(short(n, 20) for n in names)}). "
            "Give one size per name."
        )
    return MeshSpec(tuple(_axis(name, size) for name, size in zip(names, sizes, strict=True)))


def _from_string(text: str, names: Sequence[str] | None) -> MeshSpec:
    if len(text) > LONGEST_TEXT:
        raise SpecError(f"the spec has {len(text)} characters; at most {LONGEST_TEXT}. {EXAMPLE}")
    if not text.strip():
        raise SpecError(f"the spec is empty. {EXAMPLE}")
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MOST_AXES:
        raise SpecError(f"{len(parts)} axes; at most {MOST_AXES}.")
    if "" in parts:
        raise SpecError(f"an entry of {short(text)} is empty (a comma too many?). {EXAMPLE}")
    if names is not None:
        if any(":" in part or "=" in part for part in parts):
            raise SpecError(f"names were given beside {short(text)}, which has names of its own.")
        return _from_sizes([_size(part, part) for part in parts], names)
    return MeshSpec(tuple(_axis_from_string(part) for part in parts))


def _axis_from_string(part: str) -> AxisSpec:
    fields = [field.strip() for field in re.split("[:=]", part)]
    commas = " Separate axes with commas." if re.search(r"[\s;]", part) else ""
    if len(fields) not in (2, 3) or not fields[0]:
        raise SpecError(f"{short(part)} is not name:size.{commas} {EXAMPLE}")
    name, size = fields[:2]
    kind = None
    if len(fields) == 3:
        kind = fields[2].lower()
        if kind not in TYPE_WORDS:
            raise SpecError(
                f"axis {short(name)}: type {short(fields[2])} is not one of "
                f"{', '.join(TYPE_WORDS)}.{commas}"
            )
    axis = _axis(name, _size(part, size))
    return dataclasses.replace(axis, type=kind)


def _size(part: str, text: str) -> int | tuple[int, int]:
    """A number, or `slow*fast`."""
    if "*" not in text:
        return _number(part, text)
    slow, _, fast = text.partition("*")
    return _number(part, slow.strip()), _number(part, fast.strip())


def _number(part: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise SpecError(
            f"{short(part)}: {short(text)} is not a size. Use a positive integer, or -1 for "
            "what is left, or slow*fast such as 2*8."
        )
    if len(text) > 12:
        raise SpecError(f"{short(part)}: size {short(text)} is far too large.")
    return int(text)
