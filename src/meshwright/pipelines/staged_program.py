"""`StagedProgram`: the flat program and, for every equation, the stage it is assigned to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.pipelines.microbatching import Region
from meshwright.pipelines.stage_mark import mark
from meshwright.pipelines.tracing import is_again

StageKey = tuple[str, int]  # ("F" or "B", stage)
FREE: StageKey = ("free", -1)


@dataclasses.dataclass(frozen=True, eq=False)
class StagedProgram:
    """A flat program while it is split into stages; each pass fills and changes its tables.

    `roots` are what free equations start from, `state` the operands that are carried from
    microbatch to microbatch. `outs` and `grads` are the results, `reductions` say how the former
    leave the microbatches. `stage_of_eqn` stands beside `eqns`, None for one that is dropped;
    `added` holds equations that the jaxpr does not have, and `free` those without a stage.
    """

    jaxpr: Any
    stages: int
    roots: frozenset[Any]
    state: tuple[Any, ...]
    reductions: tuple[str, ...]
    outs: list[Any]
    grads: list[Any]
    eqns: list[Any] = dataclasses.field(default_factory=list)
    stage_of_eqn: list[StageKey | None] = dataclasses.field(default_factory=list)
    added: dict[StageKey, list[Any]] = dataclasses.field(default_factory=dict)
    free: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # What a variable is called before all marks, and what is handed over at one.
    alias: dict[Any, Any] = dataclasses.field(default_factory=dict)
    pinned: set[Any] = dataclasses.field(default_factory=set)
    # The home of a variable as its users see it: past the mark.
    home_of: dict[Any, StageKey] = dataclasses.field(default_factory=dict)
    known_sources: dict[Any, frozenset[Any]] = dataclasses.field(default_factory=dict)


def make_staged_program(region: Region, jaxpr: Any) -> StagedProgram:
    """A region's flat program, before anything is cut."""
    roles = list(zip(jaxpr.invars, region.roles, strict=True))
    fixed = {var for var, role in roles if role in ("whole", "params") or _is_key(var)}
    values = len(region.reductions)
    return StagedProgram(
        jaxpr,
        sum(map(_ends_a_stage, jaxpr.eqns)) + 1,
        frozenset(jaxpr.constvars) | fixed,
        tuple(var for var, role in roles if role == "carry"),
        region.reductions,
        list(jaxpr.outvars[:values]),
        list(jaxpr.outvars[values:]),
    )


def stage_names(jaxpr: Any) -> tuple[str | None, ...]:
    """What marks call the stages that they end; the last has none."""
    return (*(eqn.params["name"] for eqn in jaxpr.eqns if _ends_a_stage(eqn)), None)


def equations(program: StagedProgram) -> dict[StageKey, list[Any]]:
    """What has a home, by home: in program order, then what was added."""
    found: dict[StageKey, list[Any]] = {}
    for eqn, home in zip(program.eqns, program.stage_of_eqn, strict=True):
        if home is not None:
            found.setdefault(home, []).append(eqn)
    for home, extra in program.added.items():
        found.setdefault(home, []).extend(extra)
    return found


def look(program: StagedProgram, var: Any) -> Any:
    """A variable as it was before all marks, which only hand it over."""
    return var if is_literal(var) else program.alias.get(var, var)


def sources(program: StagedProgram, var: Any) -> frozenset[Any]:
    """What a free variable comes from; any other comes from itself."""
    if var not in program.known_sources:
        eqn = program.free.get(var)
        inner = [] if eqn is None else [sources(program, v) for v in variables(eqn.invars)]
        program.known_sources[var] = frozenset([var]) if eqn is None else frozenset().union(*inner)
    return program.known_sources[var]


def variables(operands: Iterable[Any]) -> list[Any]:
    """The operands that are not literals, as often as they stand there."""
    return [var for var in operands if not is_literal(var)]


def vars_of(eqns: Sequence[Any]) -> list[Any]:
    """Every variable that equations read, once, in order."""
    return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars)))


def is_literal(var: Any) -> bool:
    return isinstance(var, _compat.jaxprs().Literal)


def is_recomputed(eqn: Any) -> bool:
    """Whether a mark stands in what a remat computes again."""
    return is_again(eqn) and not eqn.params["backward"]


def _ends_a_stage(eqn: Any) -> bool:
    return eqn.primitive is mark() and not eqn.params["backward"] and not is_recomputed(eqn)


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))
