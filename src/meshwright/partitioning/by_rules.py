"""Specs by rules: ordered (pattern, spec) pairs over leaf paths, first match wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from meshwright.errors import PartitionError, short
from meshwright.partitioning.leaves import Leaf
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
    """A spec from a `PartitionSpec`, `None`, one axis name, or a list of entries (as in JSON)."""
    if isinstance(value, PartitionSpec):
        return value
    if value is None:
        return make_spec()
    if isinstance(value, str):
        return make_spec([value])
    if not isinstance(value, (list, tuple)):
        raise PartitionError(f"{where}: {short(value)} is not a spec, e.g. ('fsdp', None, 'tp').")
    entries: list[Any] = []
    for entry in value:
        inner = tuple(entry) if isinstance(entry, (list, tuple)) else entry
        names = inner if isinstance(inner, tuple) else (inner,)
        if not all(name is None or isinstance(name, str) for name in names):
            raise PartitionError(f"{where}: {short(entry)} is not an axis name, a list or None.")
        entries.append(inner)
    return make_spec(entries)


def match_rules(
    leaves: Sequence[Leaf], rules: list[tuple[Any, PartitionSpec]]
) -> tuple[list[PartitionSpec | None], list[Any]]:
    """The spec of the first rule that matches each leaf, and the rules that matched none."""
    compiled = [(compile_pattern(pattern), spec) for pattern, spec in rules]
    used = [False] * len(rules)
    specs: list[PartitionSpec | None] = []
    for leaf in leaves:
        found = None
        # Flax's variables and boxes hold their array as `value`, which nobody calls it by.
        named = leaf.path.removesuffix("/value")
        for place, (pattern, spec) in enumerate(compiled):
            if pattern.search(leaf.path) or (named != leaf.path and pattern.search(named)):
                found, used[place] = spec, True
                break
        specs.append(found)
    return specs, [pattern for (pattern, _), hit in zip(rules, used, strict=True) if not hit]
