"""Flax NNX variables that a tree holds twice: rebuilding the tree would make two of one."""

from __future__ import annotations

import functools
import sys
from typing import Any

from meshwright.partitioning.leaves import path_text, shown
from meshwright.partitioning.nodes import flatten


def tie_problems(tree: Any) -> list[str]:
    """Every variable of NNX that stands at two places. Nothing of Flax is imported."""
    if "flax.nnx" not in sys.modules:
        return []
    flat, _ = flatten(tree, _is_variable)
    first: dict[int, str] = {}
    wrong = []
    for path, value in flat:
        if _is_variable(value):
            here = shown(path_text(path))
            there = first.setdefault(id(value), here)
            if there != here:
                wrong.append(
                    f"{here}: the same variable as {there}, and two would come back. Pass "
                    "nnx.state(model), which holds it once, then nnx.update(model, state)."
                )
    return wrong


def _is_variable(node: Any) -> bool:
    kind: Any = type(node)
    return _is_variable_type(kind)


@functools.cache
def _is_variable_type(kind: Any) -> bool:
    return any(
        base.__name__ == "Variable" and base.__module__.startswith("flax.nnx")
        for base in kind.__mro__
    )
