"""`PlanCache`: the plans of a step, one per kind of arguments, and a warning when they pile up.

A plan is made, and compiled, for shapes, dtypes and settings. A step whose settings change at every
call would be compiled at every call: that is told, with the argument that differs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright._text import plural
from meshwright.errors import PipelineError, RecompilationWarning, listing, short, warn
from meshwright.pipelines.plan import Plan
from meshwright.trees.split import Split, is_number, split_arrays
from meshwright.trees.walk import path_text

MOST_PLANS = 16  # of one step; the one that was used least recently is dropped
WARN_AT = 3  # recompilations; a few are usual: another batch at the end, one for evaluation


@dataclasses.dataclass(eq=False)
class PlanCache:
    """The plans of one step by their keys, that of the last call last."""

    fn: Callable[..., Any]
    plans: collections.OrderedDict[Hashable, Plan] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    made: int = 0
    # What the arguments of each plan were, leaf by leaf, for the warning.
    _arguments: dict[Hashable, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    # A structure of arguments, and the positions of its numbers that the step changes: a list, for
    # few steps have more than one.
    _numbers: list[tuple[Any, frozenset[int]]] = dataclasses.field(default_factory=list)

    def split(self, args: tuple[Any, ...]) -> Split:
        """Separate the arrays of a call's arguments from its settings.

        Python numbers that an earlier call returned changed (`TrainState.step`) are data.
        """
        structure = jax.tree.structure(args) if self._numbers else None
        for treedef, numbers in self._numbers:
            if treedef == structure:
                return split_arrays(args, 1, numbers)
        return split_arrays(args, 1)

    def get(self, parts: Split, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the plan for arguments like these; made the first time."""
        if key in self.plans:
            self.plans.move_to_end(key)
            return self.plans[key]
        self._warn_of_recompilation(parts)
        plan = make()
        self.made += 1
        if plan.numbers:
            # First in the list, since it includes those that were known before.
            self._numbers.insert(0, (parts.treedef, plan.numbers.union(parts.positions)))
            del self._numbers[MOST_PLANS:]
            parts = self.split(parts.rebuild(parts.arrays))
            key = plan_key(parts)
        self._keep(plan, key, parts)
        return plan

    def _keep(self, plan: Plan, key: Hashable, parts: Split) -> None:
        self.plans[key] = plan
        self._arguments[key] = _describe(parts)
        while len(self.plans) > MOST_PLANS:
            oldest, _ = self.plans.popitem(last=False)
            del self._arguments[oldest]

    def restore(self, plan: Plan, key: Hashable, args: tuple[Any, ...]) -> None:
        """Put a plan back that a caller has held, for arguments of its kind; refuse others."""
        parts = self.split(args)
        if plan_key(parts) != key:
            kinds = [_array_text(value) for value in parts.arrays]
            raise PipelineError(
                f"the step was compiled for arguments of another kind than {listing(kinds)}. Call "
                "the pipeline itself, which compiles for them, or lower(...) with them."
            )
        if key not in self.plans:
            self._keep(plan, key, parts)

    def last(self) -> Plan:
        """Return the plan of the last call."""
        if not self.plans:
            raise PipelineError("explain() before the first call: pass the step's arguments.")
        return next(reversed(self.plans.values()))

    def _warn_of_recompilation(self, parts: Split) -> None:
        """Say at the third recompilation which argument differs from the nearest plan's."""
        if self.made != WARN_AT:
            return
        now = _describe(parts)
        differences = [
            [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
            for before in self._arguments.values()
        ]
        names, before = min(
            zip(differences, self._arguments.values(), strict=True), key=lambda pair: len(pair[0])
        )
        texts = [
            f"{name}: {before.get(name, 'nothing')} before, {now.get(name, 'nothing')} now"
            for name in names
        ]
        what = listing(texts, 3) or "the structure of the arguments (static fields of a node)"
        warn(
            f"the pipeline of {getattr(self.fn, '__name__', 'a function')} is compiled for the "
            f"{self.made + 1}th time, since its arguments differ in {what}. Numbers, flags and "
            "functions inside of an argument are settings, compiled into the step: pass what "
            f"changes as an array. {plural(MOST_PLANS, 'plan')} are kept.",
            RecompilationWarning,
        )


def plan_key(parts: Split) -> Hashable:
    """Return what distinguishes arguments that need plans of their own."""
    kinds = tuple(map(_kind, parts.arrays))
    # With their types: 1 == True, and a function may do other things with a flag.
    settings = tuple((type(leaf), leaf) for leaf in parts.static)
    key = (parts.treedef, parts.positions, settings, kinds)
    try:
        hash(key)
    except TypeError as error:
        raise PipelineError(
            f"an argument holds a leaf that is neither an array nor hashable: {error}. Pass "
            "it by closure."
        ) from error
    return key


def _kind(value: Any) -> tuple[tuple[int, ...], Any, bool]:
    if is_number(value):
        # As the array of it that a step returns: the next call is like the first.
        return (), jnp.result_type(type(value)), True
    return np.shape(value), value.dtype, bool(getattr(value, "weak_type", False))


def _describe(parts: Split) -> dict[str, str]:
    """Say what every leaf of the arguments is: the value of a setting, the type of an array."""
    described = {}
    arrays = dict(zip(parts.positions, parts.arrays, strict=True))
    indices = jax.tree.unflatten(parts.treedef, range(len(parts.static)))
    for path, n in jax.tree_util.tree_leaves_with_path(indices):
        name = f"argument {path_text(path)}"
        described[name] = _array_text(arrays[n]) if n in arrays else short(parts.static[n], 40)
    return described


def _array_text(value: Any) -> str:
    shape, dtype, weak = _kind(value)
    return f"{dtype}[{','.join(map(str, shape))}]{' (weakly typed)' if weak else ''}"
