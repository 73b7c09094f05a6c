"""Parse what people write for a mesh into a `MeshSpec`: strings, dicts, pairs, sizes plus names.

The grammar of a string, with spaces allowed around every part:

    spec = axis ("," axis)*
    axis = name (":" | "=") size [":" type]
    size = number | slow "*" fast          -1 takes what is left
    type = "auto" | "explicit" | "manual"

Nothing is guessed and nothing is repaired. Input is bounded before it is read, so that a message
about it stays short and quick to make.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright._checks import MOST_AXES, TYPE_WORDS
from meshwright.errors import SpecError, listing, short
from meshwright.spec.mesh_spec import AxisSpec, MeshSpec

# ASCII only: `\d` and `int` also take the digits of other scripts.
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
LONGEST_TEXT = 10_000  # more than any spec can need
EXAMPLE = "Write e.g. 'dp:2, fsdp:-1, tp:4'."


def parse(value: object, names: Sequence[str] | None = None) -> MeshSpec:
    """Parse any form of a spec; a `MeshSpec` is returned as it is."""
    if isinstance(value, MeshSpec):
        if names is not None:
            raise SpecError(
                "names were given beside a MeshSpec, which has names of its own.", option="names"
            )
        return value
    if isinstance(value, str):
        return _from_string(value, names)
    if isinstance(value, Mapping):
        if names is not None:
            raise SpecError(
                "names were given beside a dict, which has names of its own.", option="names"
            )
        return MeshSpec(tuple(_axis(name, size) for name, size in value.items()))
    items = _items(value)
    if names is not None:
        return _from_sizes(items, names)
    if items and not all(_is_pair(item) for item in items):
        raise SpecError(
            f"{short(value)}: sizes without names. Pass names=('dp', 'tp'), or pairs "
            "[('dp', 2), ('tp', 4)].",
            option="names",
        )
    return MeshSpec(tuple(_axis(*item) for item in items))


def _from_string(text: str, names: Sequence[str] | None) -> MeshSpec:
    if len(text) > LONGEST_TEXT:
        raise SpecError(f"the spec has {len(text)} characters; at most {LONGEST_TEXT}. {EXAMPLE}")
    if not text.strip():
        raise SpecError(f"the spec is empty. {EXAMPLE}")
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) > MOST_AXES:
        raise SpecError(f"{len(entries)} axes; at most {MOST_AXES}.")
    if "" in entries:
        raise SpecError(f"an entry of {short(text)} is empty (a comma too many?). {EXAMPLE}")
    if names is not None:
        if any(":" in entry or "=" in entry for entry in entries):
            raise SpecError(
                f"names were given beside {short(text)}, which has names of its own.",
                option="names",
            )
        return _from_sizes([_size(entry, entry) for entry in entries], names)
    return MeshSpec(tuple(_axis_from_string(entry) for entry in entries))


def _axis_from_string(entry: str) -> AxisSpec:
    fields = [field.strip() for field in re.split("[:=]", entry)]
    # "dp:2 tp:4" and "dp:2; tp:4" both arrive here as one entry.
    commas = " Separate axes with commas." if re.search(r"[\s;]", entry) else ""
    if len(fields) not in (2, 3) or not fields[0]:
        raise SpecError(f"{short(entry)} is not name:size.{commas} {EXAMPLE}")
    name, size = fields[:2]
    axis_type = None
    if len(fields) == 3:
        axis_type = fields[2].lower()
        if axis_type not in TYPE_WORDS:
            raise SpecError(
                f"axis {short(name)}: type {short(fields[2])} is not one of "
                f"{', '.join(TYPE_WORDS)}.{commas}"
            )
    return dataclasses.replace(_axis(name, _size(entry, size)), type=axis_type)


def _size(entry: str, text: str) -> int | tuple[int, int]:
    """A number, or `slow*fast`."""
    if "*" not in text:
        return _number(entry, text)
    slow, _, fast = text.partition("*")
    return _number(entry, slow.strip()), _number(entry, fast.strip())


def _number(entry: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise SpecError(
            f"{short(entry)}: {short(text)} is not a size. Use a positive integer, or -1 for "
            "what is left, or slow*fast such as 2*8."
        )
    if len(text) > 12:  # Python refuses to convert 4,300 digits and more, with an error of its own
        raise SpecError(f"{short(entry)}: size {short(text)} is far too large.")
    return int(text)


def _from_sizes(sizes: list[Any], names: object) -> MeshSpec:
    if isinstance(names, str) or not isinstance(names, (list, tuple)):
        raise SpecError(
            f"names: {short(names)} is not a list or tuple of axis names.", option="names"
        )
    if len(sizes) != len(names):
        raise SpecError(
            f"{len(sizes)} sizes for {len(names)} names ({listing(short(n, 20) for n in names)}). "
            "Give one size per name.",
            option="names",
        )
    return MeshSpec(tuple(_axis(name, size) for name, size in zip(names, sizes, strict=True)))


def _items(value: object) -> list[Any]:
    """The entries of a list, tuple or array; sets and generators have no order to rely on."""
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        try:
            items = list(value)  # type: ignore[call-overload]
        except TypeError:  # an array without dimensions
            items = None
        if items is not None and len(items) <= MOST_AXES:
            return list(items)
        if items is not None:
            raise SpecError(f"{len(items)} axes; at most {MOST_AXES}.")
    raise SpecError(f"cannot read a mesh spec from {short(value)}. {EXAMPLE}")


def _is_pair(item: object) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2


def _axis(name: Any, size: Any) -> AxisSpec:
    """An axis of a size, or of a `(slow, fast)` pair."""
    if isinstance(size, (list, tuple)):
        if len(size) != 2:
            raise SpecError(f"axis {short(name)}: {short(size)} is not a (slow, fast) pair.")
        return AxisSpec(name, size[1], slow=size[0])
    return AxisSpec(name, size)
