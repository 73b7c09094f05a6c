"""Specs by rules: ordered (pattern, spec) pairs over leaf paths, first match wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf, shown
from meshwright.partitioning.pattern_list import PatternList
from meshwright.partitioning.patterns import compile_pattern
from meshwright.partitioning.specs import make_spec

Rules = Mapping[str, Any] | Sequence[tuple[Any, Any]]
Unmatched = Literal["error", "replicate", "shape"]


def read_rules(rules: Any) -> list[tuple[Any, PartitionSpec]]:
    """Rules as patterns and specs; says which entry is not one."""
    if isinstance(rules, Mapping):
        rules = list(rules.items())
    if isinstance(rules, str) or not isinstance(rules, (list, tuple)):
        raise PartitionError(
            f"rules: {short(rules)} is not a table. Pass pairs such as "
            "[('attn/*', ('fsdp', 'tp')), ('**', None)] or a dict."
        )
    found = []
    for place, rule in enumerate(rules):
        if not isinstance(rule, (list, tuple)) or len(rule) != 2:
            raise PartitionError(
                f"rules: entry {place}, {short(rule)}, is not a (pattern, spec) pair."
            )
        compile_pattern(rule[0])
        found.append((rule[0], read_spec(rule[1], f"rules: entry {place}, {short(rule[0])}")))
    return found


def read_spec(value: Any, where: str) -> PartitionSpec:
    """A spec from a `PartitionSpec`, `None`, one axis name, or a list of entries (as in JSON).

    It is as long as it was written, whole dims at the end included.
    """
    if isinstance(value, PartitionSpec):
        return value
    if value is None:
        return make_spec()
    if isinstance(value, str) and value:
        return make_spec([value])
    if not isinstance(value, (list, tuple)):
        raise PartitionError(f"{where}: {short(value)} is not a spec, e.g. ('fsdp', None, 'tp').")
    entries: list[Any] = []
    for entry in value:
        names = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
        named = bool(names) and all(isinstance(name, str) and name for name in names)
        if entry is not None and not named:
            raise PartitionError(
                f"{where}: {short(entry)} is not an axis name, a list of them, or None for a whole "
                "dim."
            )
        entries.append(names if isinstance(entry, (list, tuple)) else entry)
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def match_rules(
    leaves: Sequence[Leaf], rules: list[tuple[Any, PartitionSpec]]
) -> tuple[list[PartitionSpec | None], Iterator[str]]:
    """The spec of the first rule that matches each leaf, and what is wrong with unused rules."""
    patterns = PatternList([pattern for pattern, _ in rules])
    places = [patterns.first(leaf.path) for leaf in leaves]
    specs = [None if place is None else rules[place][1] for place in places]
    return specs, _unused(leaves, places, [pattern for pattern, _ in rules])


def _unused(
    leaves: Sequence[Leaf], places: Sequence[int | None], patterns: Sequence[Any]
) -> Iterator[str]:
    """What is wrong with rules that take no leaf: they match none, or another comes first."""
    used = set(places)
    never = [place for place in range(len(patterns)) if place not in used]
    late = PatternList([patterns[place] for place in never])
    before: dict[int, tuple[str, int]] = {}
    for leaf, place in zip(leaves, places, strict=True):
        if never and place is not None:
            for hit in late.matching(leaf.path):
                before.setdefault(never[hit], (leaf.path, place))
    for rule in never:
        if rule not in before:
            yield (
                f"rule {_text(patterns[rule])} matches no leaf. Mend or drop it, or pass "
                "unused='allow'."
            )
            continue
        path, first = before[rule]
        yield (
            f"rule {_text(patterns[rule])} is never reached: rule {_text(patterns[first])} comes "
            f"first and takes {shown(path)}. Move it up, drop it, or pass unused='allow'."
        )


def _text(pattern: Any) -> str:
    return short(str(getattr(pattern, "pattern", pattern)))
