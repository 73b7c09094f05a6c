"""Which values of each block of layers a step keeps for its backward pass, chosen with its plan.

The step is traced once per policy: the jaxpr has what is computed again, so every trace is costed
as it is, and the fastest that fits is taken. Where a faster policy fits for some layers only, the
last of them get it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from meshwright._compat_lowering import moves_to_host
from meshwright._text import amount, duration, plural
from meshwright.planning.dim_groups import DimGroups
from meshwright.planning.marked_blocks import (
    OFFLOAD,
    POLICIES,
    WRITTEN,
    Assignment,
    Block,
    MarkedStep,
    Segments,
)
from meshwright.planning.plan_costs import Lists, PlanCosts, Totals
from meshwright.planning.plan_search import Candidate, Hardware, search_lists, speeds_on
from meshwright.planning.remat_blocks import LossStep
from meshwright.planning.traced_program import TracedProgram
from meshwright.planning.traced_step import TracedStep

_WORDS = {
    "everything": "everything saved",
    "dots": "products saved",
    "dots without batch": "products without batch dims saved",
    "nothing": "only inputs saved",
    OFFLOAD: "kept on the host",
    WRITTEN: "as written",
}
# Parts of a step's kernels beside which transfers to the host, and back, can run.
_FORWARD, _BACKWARD = 0.3, 0.6
# What memory up to the limit counts as time, so that of equals the smaller one is taken; and what
# leaning on the bus to the host does.
_MEMORY, _HOST = 0.01, 0.03


@dataclasses.dataclass(frozen=True)
class RematOption:
    """One way to rematerialise: its policies in words, predicted seconds and bytes, if it fits."""

    policy: str
    seconds: float
    bytes: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """What was chosen for the blocks of a step, and what else would have cost what.

    `policy` is the chosen one in words; `options` has all that were tried, this one among them,
    fastest first. `blocks` says what the policies are of.
    """

    policy: str
    blocks: tuple[Block, ...]
    options: tuple[RematOption, ...]

    def lines(self) -> list[str]:
        """Say it in lines: what was chosen, and the others."""
        runs = sum(block.runs for block in self.blocks)
        alike = len({block.name for block in self.blocks}) == 1
        where = self.blocks[0].name + ("" if alike else " and others")
        told = [f"Remat: {self.policy}, of {plural(runs, 'block')} ({where})."]
        others = [
            f"{each.policy} {duration(each.seconds)}, {amount(each.bytes)}"
            + ("" if each.fits else " (too much)")
            for each in self.options
            if each.policy != self.policy
        ]
        return told + ([f"Other policies: {'; '.join(others)}."] if others else [])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step, traced and ready to be costed.

    `staged`: makes it with stages of a pipeline that end after some of its blocks, by number.
    """

    step: TracedStep
    program: TracedProgram
    groups: DimGroups
    names: tuple[str, ...]
    costs: PlanCosts
    staged: Callable[[Collection[int]], Callable[..., Any]] | None = None


Prepare = Callable[[Assignment], Variant]
Search = Callable[[Variant], list[Candidate]]
Refine = Callable[[Variant, list[Candidate]], list[Candidate]]


# In: a step with blocks, how to trace and search, and the hardware. Out: the variant that was
# chosen, the plans found for it, and what the others would have cost. Lists are searched for the
# variant that needs least memory; the others are costed with what was found there, and the lists
# of the one that is chosen are searched again from those.
def choose_remat(
    source: MarkedStep | LossStep,
    prepare: Prepare,
    search: Search,
    refine: Refine,
    hardware: Hardware,
    scatters: bool,
    told: Callable[[str], None],
) -> tuple[Variant, list[Candidate], RematChoice | None]:
    """Choose a policy for every block of a step, so that it fits and is fastest."""
    blocks = source.blocks
    if not blocks:
        variant = prepare(())
        return variant, search(variant), None

    def variant_of(assignment: Assignment) -> Variant:
        staged = functools.partial(source.function, assignment)
        return dataclasses.replace(prepare(assignment), staged=staged)

    base = variant_of(_all(blocks, "nothing"))
    found = search(base)
    tried = {_all(blocks, "nothing"): (base, found)}

    def cost(assignment: Assignment) -> None:
        if assignment not in tried:
            told(f"remat: {_words(assignment)}")
            variant = variant_of(assignment)
            tried[assignment] = variant, recost(variant, base, found, hardware, scatters)

    if any(block.written for block in blocks):
        cost(_all(blocks, WRITTEN))
    for name in POLICIES:
        cost(_all(blocks, name))
    if base.costs.topology.chip.bus:
        cost(_all(blocks, OFFLOAD))

    def rank(assignment: Assignment) -> tuple[bool, float]:
        variant, candidates = tried[assignment]
        totals = candidates[0].totals
        fits = totals.bytes <= variant.costs.limit
        if not fits:
            return True, totals.bytes
        extra = _MEMORY * totals.bytes / variant.costs.limit
        extra += _HOST * any(name == OFFLOAD for each in assignment for name, _ in each)
        return False, totals.seconds * (1 + extra)

    best = min(tried, key=rank)
    mixed = _mixtures(blocks, tried, best, base.costs.limit)
    for assignment in mixed:
        cost(assignment)
        if not rank(assignment)[0]:
            break
    best = min(tried, key=rank)
    variant, candidates = tried[best]
    options = [
        RematOption(
            _words(assignment),
            option[0].totals.seconds,
            option[0].totals.bytes,
            not rank(assignment)[0],
        )
        for assignment, (_, option) in tried.items()
    ]
    choice = RematChoice(_words(best), blocks, tuple(sorted(options, key=lambda o: o.seconds)))
    return variant, candidates if variant is base else refine(variant, candidates), choice


def _all(blocks: Sequence[Block], name: str) -> Assignment:
    return tuple(
        ((name if name != WRITTEN or block.written else "everything", block.runs),)
        for block in blocks
    )


def _words(assignment: Assignment) -> str:
    """Say an assignment in words: "products saved", or so for the last layers only."""
    counts: dict[str, int] = {}
    for segments in assignment:
        for name, runs in segments:
            counts[name] = counts.get(name, 0) + runs
    if len(counts) == 1:
        return _WORDS[next(iter(counts))]
    return ", ".join(f"{_WORDS[name]} in {runs}" for name, runs in counts.items())


def _mixtures(
    blocks: Sequence[Block],
    tried: Mapping[Assignment, tuple[Variant, list[Candidate]]],
    best: Assignment,
    limit: float,
) -> list[Assignment]:
    """Assignments where the last runs have a faster policy that does not fit for all of them."""
    here = tried[best][1][0].totals
    if here.bytes > limit or any(len(segments) > 1 for segments in best):
        return []
    faster = [
        (candidates[0].totals.seconds, assignment)
        for assignment, (_, candidates) in tried.items()
        if candidates[0].totals.bytes > limit and candidates[0].totals.seconds < here.seconds
    ]
    total = sum(block.runs for block in blocks)
    result = []
    for _, assignment in sorted(faster)[:1]:
        more = tried[assignment][1][0].totals.bytes - here.bytes
        # Memory grows about evenly with the layers; the second guess is for where it does not.
        for part in (1.0, 0.75):
            last = math.floor(part * total * (limit - here.bytes) / more)
            mixed = _last(blocks, best, assignment, last)
            if mixed not in (best, assignment) and mixed not in result:
                result.append(mixed)
    return result


def _last(blocks: Sequence[Block], first: Assignment, second: Assignment, last: int) -> Assignment:
    """The policies of `first`, but of `second` for the last runs, as far as blocks can be split."""
    result: list[Segments] = []
    for block, slow, fast in zip(reversed(blocks), reversed(first), reversed(second), strict=True):
        here = min(last, block.runs)
        last -= here
        if here == block.runs:
            result.append(fast)
        elif not here or not block.splits:
            result.append(slow)
        else:
            result.append(((slow[0][0], block.runs - here), (fast[0][0], here)))
    return tuple(reversed(result))


def recost(
    variant: Variant,
    base: Variant,
    found: Sequence[Candidate],
    hardware: Hardware,
    scatters: bool,
) -> list[Candidate]:
    """Cost the plans that were found for one variant of a step in another, best first."""
    kinds = _same_kinds(base, variant)
    result = []
    for candidate in found:
        variant.costs.on(speeds_on(candidate.sizes, hardware, candidate.intensity, scatters))
        lists = tuple(
            tuple(dict.fromkeys(kinds[kind] for kind in order if kind in kinds))
            for order in candidate.lists
        )
        result.append(_costed(variant, candidate, lists))
    return sorted(result, key=lambda each: each.rank)


def _costed(variant: Variant, like: Candidate, lists: Lists) -> Candidate:
    """Cost lists on the mesh of another candidate, where the variant's costs are set to be."""
    totals = variant.costs.totals(lists)
    waited = _host_seconds(variant, lists, totals, variant.costs.topology.chip.bus)
    objective = variant.costs.objective(lists) * (1 + waited / (totals.seconds or 1.0))
    if waited:
        totals = dataclasses.replace(totals, exchange=totals.exchange + waited)
    return dataclasses.replace(like, lists=lists, objective=objective, totals=totals)


def refine(
    variant: Variant,
    candidates: Sequence[Candidate],
    hardware: Hardware,
    scatters: bool,
    kept: Mapping[int, int],
) -> list[Candidate]:
    """Search on from the best plan of a variant, on its mesh; return all plans, best first."""
    best = candidates[0]
    variant.costs.on(speeds_on(best.sizes, hardware, best.intensity, scatters))
    seeds = [each.lists for each in candidates if each.sizes == best.sizes]
    found = [
        _costed(variant, best, lists) for _, lists in search_lists(variant.costs, seeds, kept)[:4]
    ]
    others = [each for each in candidates if each.sizes != best.sizes]
    return sorted([*found, *others], key=lambda each: each.rank)


def _same_kinds(base: Variant, other: Variant) -> dict[int, int]:
    """Kinds of a trace and those of another that are the same: by arguments' dims, by name."""
    same = {
        kind: other.names.index(name) for kind, name in enumerate(base.names) if name in other.names
    }
    for old, new in zip(base.program.arguments, other.program.arguments, strict=True):
        pairs = zip(base.groups.layout[old], other.groups.layout[new], strict=True)
        same.update((a, b) for (a, _), (b, _) in pairs if a >= 0 and b >= 0)
    return same


def _host_seconds(variant: Variant, lists: Lists, totals: Totals, bus: float) -> float:
    """Seconds that a step waits for arrays that go to the host and come back."""
    if not bus:
        return 0.0
    costs, moved = variant.costs, 0.0
    for operation in variant.program.operations:
        if operation.primitive == "device_put" and moves_to_host(operation.eqn):
            value = operation.inputs[0]
            ways = math.prod(
                costs.sizes[axis] for axis in costs.cut(variant.groups.layout[value], lists)
            )
            moved += operation.times * variant.program.bytes[value] / ways
    each_way = moved / (bus * 1e9)
    return max(0.0, each_way - _FORWARD * totals.compute) + max(
        0.0, each_way - _BACKWARD * totals.compute
    )
