"""Cut a flat program into stages: every equation gets a home in some stage's F or B.

Program order decides: what stands between two marks belongs to the stage between them, forwards
and backwards. The exceptions, each for a reason:

- What depends only on parameters, constants and random keys is *free*: every task that needs it
  computes it again. Else "cast all parameters first" would tie everything to stage 0.
- What depends only on the batch, before the first mark, moves to the stage that needs it (labels).
- A backward equation that touches one stage only goes back to that stage, however late it comes:
  the cast of a gradient, at the very end, belongs where the gradient is made.
- What a remat computes again goes to the backward that needs it, and starts from the value that
  was handed over at the mark.
- What is computed only to be carried on stays in the stage that uses what is carried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import PipelineError
from meshwright.mpmd.pipelines.inlining import flat, is_again
from meshwright.mpmd.pipelines.marks import mark
from meshwright.mpmd.pipelines.regions import Region

FREE = ("free", -1)
Home = tuple[str, int]  # ("F" or "B", stage)


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A region's equations by home, in program order, with marks taken out.

    `free` maps a variable to the equation that every user computes again. `outs` are the
    region's results, `grads` the partial sums of each parameter's gradient: (home, variable).
    """

    region: Region
    stages: int
    invars: tuple[Any, ...]
    consts: dict[Any, Any]
    eqns: dict[Home, list[Any]]
    free: dict[Any, Any]
    outs: tuple[Any, ...]
    grads: tuple[tuple[tuple[Home, Any], ...], ...]

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The variables that stand for trained parameters."""
        return tuple(
            var
            for var, role in zip(self.invars, self.region.roles, strict=True)
            if role == "params"
        )


def cut(region: Region) -> Cut:
    """Cut a region at its marks."""
    closed = flat(region.jaxpr, open_remat=True)
    jaxpr = closed.jaxpr
    work = _Work(region, jaxpr)
    work.read_in_order()
    work.move_to_users()
    work.drop_and_delay()
    work.settle_results()
    grads = tuple(tuple(work.parts(var)) for var in work.grads)
    eqns: dict[Home, list[Any]] = {}
    for eqn, home in zip(work.eqns, work.homes, strict=True):
        if home is not None and home != FREE:
            eqns.setdefault(home, []).append(eqn)
    for home, extra in work.added.items():
        eqns.setdefault(home, []).extend(extra)
    return Cut(
        region,
        work.stages,
        tuple(jaxpr.invars),
        dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        eqns,
        work.free,
        tuple(work.outs),
        grads,
    )


class _Work:
    """The program on the table while it is cut."""

    def __init__(self, region: Region, jaxpr: Any):
        self.jc = _compat.jaxprs()
        self.adds = _compat.known_primitives()["add"]
        self.jaxpr = jaxpr
        self.stages = sum(map(_ends_a_stage, jaxpr.eqns)) + 1
        values = len(region.reductions)
        self.alias: dict[Any, Any] = {}
        self.eqns: list[Any] = []
        self.homes: list[Home | None] = []
        self.home_of: dict[Any, Home] = {}  # of a variable as its users see it: past the mark
        self.free: dict[Any, Any] = {}
        self.roots = set(jaxpr.constvars) | {
            var
            for var, role in zip(jaxpr.invars, region.roles, strict=True)
            if role in ("whole", "params") or _is_key(var)
        }
        self.pinned: set[Any] = set()  # what is handed over at a mark
        self.added: dict[Home, list[Any]] = {}
        roles = zip(jaxpr.invars, region.roles, strict=True)
        self.state = [var for var, role in roles if role == "carry"]
        self.reductions = region.reductions
        self.results, self.gradients = jaxpr.outvars[:values], jaxpr.outvars[values:]

    def vars_in(self, eqn: Any) -> list[Any]:
        return [v for v in eqn.invars if not isinstance(v, self.jc.Literal)]

    def look(self, var: Any) -> Any:
        return var if isinstance(var, self.jc.Literal) else self.alias.get(var, var)

    def read_in_order(self) -> None:
        """Homes by program order; free equations and marks are taken out on the way."""
        here: Home = ("F", 0)
        opened: dict[int, list[int]] = {}  # a mark traced once may be passed several times
        ends: dict[int, list[Any]] = {}
        passed, forwards = 0, self._needed_forwards()
        for n, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive is mark():
                number = eqn.params["number"]
                if _is_recomputed(eqn):
                    self._pass_again(eqn, ends[number], here)
                    continue
                self._refuse_inner_gradient(eqn, here, opened)
                if eqn.params["backward"]:
                    stage = opened[number].pop()
                    here = ("B", stage) if here[0] == "F" or stage < here[1] else here
                else:
                    opened.setdefault(number, []).append(passed)
                    ends.setdefault(number, []).append(eqn)
                    passed += 1
                    here = ("F", passed)
                for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                    origin = self.look(before)
                    self.alias[after] = origin
                    self.home_of[after] = here
                    if not isinstance(origin, self.jc.Literal):
                        self.pinned.add(origin)
                continue
            ended = here == ("F", self.stages - 1) and self.gradients and n not in forwards
            self._place(eqn, ("B", here[1]) if ended else here)
        self.outs = [self.look(var) for var in self.results]
        self.grads = [self.look(var) for var in self.gradients]

    def _refuse_inner_gradient(self, eqn: Any, here: Home, opened: dict[int, list[int]]) -> None:
        """All marks are passed forwards, then all backwards, unless there are two gradients."""
        back = eqn.params["backward"]
        if (back and self.gradients and opened.get(eqn.params["number"])) or (
            not back and here[0] == "F"
        ):
            return
        raise PipelineError(
            f"stage(...) at {eqn.params['where']} is inside of a gradient that the function itself "
            "takes, which cannot be cut. Move the mark outside of it."
        )

    def _pass_again(self, eqn: Any, ends: Sequence[Any], here: Home) -> None:
        """A mark in what a remat computes again: the stage has its value from the first time."""
        for n, (before, after) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
            only = ends[0].outvars[n] if len(ends) == 1 else None
            self.alias[after] = self.look(before if only is None else only)
            self.home_of[after] = here if only is None else self.home_of[only]

    def _place(self, eqn: Any, here: Home) -> None:
        seen = self.vars_in(eqn)
        plain = eqn.replace(invars=[self.look(var) for var in eqn.invars])
        used = self.vars_in(plain)
        if all(var in self.free or var in self.roots for var in used) and not eqn.effects:
            for var in eqn.outvars:
                self.free[var] = plain
            return
        if here[0] == "B":
            touched = {self.home_of[var] for var in seen if var in self.home_of}
            stages = {stage for _, stage in touched}
            if len(stages) == 1 and any(kind == "B" for kind, _ in touched):
                here = ("B", stages.pop())
        self.eqns.append(plain)
        self.homes.append(here)
        for var in eqn.outvars:
            self.home_of[var] = here

    def move_to_users(self) -> None:
        """What nobody hands over at the first mark goes to the first stage that needs it."""
        needed: dict[Any, int] = {}
        kept = {var for var in self.outs if not isinstance(var, self.jc.Literal)}
        for n in reversed(range(len(self.eqns))):
            eqn, home = self.eqns[n], self.homes[n]
            made = [var for var in eqn.outvars if not isinstance(var, self.jc.DropVar)]
            stage = home[1] if home is not None else 0
            if home == ("F", 0) and not any(var in self.pinned or var in kept for var in made):
                users = [needed[var] for var in made if var in needed]
                stage = min(users, default=0)
                self.homes[n] = ("F", stage)
            for var in self.vars_in(eqn):
                needed[var] = min(stage, needed.get(var, stage))

    def drop_and_delay(self) -> None:
        """Drop what nobody needs; what only later backwards need is computed there.

        The latter is what a remat computes again, for several stages at once.
        """
        results = {var for var in (*self.outs, *self.grads) if not self._is_literal(var)}
        fixed = results | self.pinned | self._cotangents()
        users: dict[Any, set[Home]] = {}
        for n in reversed(range(len(self.eqns))):
            eqn, home = self.eqns[n], self.homes[n]
            needed = any(var in results or var in users for var in eqn.outvars)
            if home is None or not (needed or eqn.effects):
                self.homes[n] = None
                continue
            if home[0] == "B" and not any(var in fixed for var in eqn.outvars):
                stages = [at[1] for var in eqn.outvars for at in users.get(var, ())]
                home = self.homes[n] = ("B", min(home[1], max(stages, default=home[1])))
            for var in self.vars_in(eqn):
                users.setdefault(var, set()).add(home)

    def _cotangents(self) -> set[Any]:
        """What the backward makes, but for what a remat computes again from the forward."""
        found: set[Any] = set()
        for eqn, home in zip(self.eqns, self.homes, strict=True):
            if home is not None and home[0] == "B":
                if not is_again(eqn) or any(var in found for var in self.vars_in(eqn)):
                    found.update(eqn.outvars)
        return found

    def settle_results(self) -> None:
        """Give every result an equation in the forward of a stage, the right one where carried."""
        used = self._first_uses()
        alone = self._for_state_only()
        at = {
            var: home[1]
            for eqn, home in zip(self.eqns, self.homes, strict=True)
            if home is not None and home[0] == "F"
            for var in eqn.outvars
        }
        at.update({var: used.get(var, 0) for var in self.state})
        for n in alone:
            stage = max((at.get(var, 0) for var in self.vars_in(self.eqns[n])), default=0)
            self.homes[n] = ("F", stage)
            at.update(dict.fromkeys(self.eqns[n].outvars, stage))
        carried = iter(self.state)
        made = {var for eqn in self.eqns for var in eqn.outvars}
        for n, (var, how) in enumerate(zip(self.outs, self.reductions, strict=True)):
            user = next(carried) if how == "carry" else None
            stage = used.get(user, 0) if user is not None else 0
            if self._is_literal(var) or var not in made:
                roots = [] if self._is_literal(var) else self._roots(var)
                stage = max(stage, *(used.get(root, 0) for root in roots), 0)
                self.outs[n] = self._copied(var, ("F", stage))
            elif user is not None and at[var] < stage:
                self.outs[n] = self._copied(var, ("F", stage))
            elif how in ("sum", "mean") and var.aval.dtype == jnp.bool_:
                self.outs[n] = self._copied(var, ("F", at[var]), lambda x: x.astype(jnp.int32))

    def _first_uses(self) -> dict[Any, int]:
        """The first stage whose forward uses an operand or a constant."""
        alone, found = set(self._for_state_only()), dict[Any, int]()
        for n, (eqn, home) in enumerate(zip(self.eqns, self.homes, strict=True)):
            if n in alone or home is None or home[0] != "F":
                continue
            for root in {root for var in self.vars_in(eqn) for root in self._roots(var)}:
                found[root] = min(home[1], found.get(root, home[1]))
        return found

    def _for_state_only(self) -> list[int]:
        """Forward equations that make nothing but what is carried on to the next microbatch."""
        outs = zip(self.outs, self.reductions, strict=True)
        state = {var for var, how in outs if how == "carry" and not self._is_literal(var)}
        outs = zip(self.outs, self.reductions, strict=True)
        others = {var for var, how in outs if how != "carry" and not self._is_literal(var)}
        others |= {var for var in self.grads if not self._is_literal(var)}
        found = []
        for n in reversed(range(len(self.eqns))):
            eqn, home = self.eqns[n], self.homes[n]
            if home is None:
                continue
            if home[0] == "B" or eqn.effects or any(var in others for var in eqn.outvars):
                others.update(self.vars_in(eqn))
            elif any(var in state for var in eqn.outvars):
                state.update(self.vars_in(eqn))
                found.append(n)
        return found[::-1]

    def _roots(self, var: Any) -> frozenset[Any]:
        """What a free variable comes from; any other comes from itself."""
        known = self.__dict__.setdefault("_root_of", {})
        if var not in known:
            eqn = self.free.get(var)
            inner = [] if eqn is None else [self._roots(v) for v in self.vars_in(eqn)]
            known[var] = frozenset([var]) if eqn is None else frozenset().union(*inner)
        found: frozenset[Any] = known[var]
        return found

    def _copied(self, var: Any, home: Home, how: Callable[[Any], Any] = jnp.copy) -> Any:
        """A variable that an equation of this stage makes of another."""
        shape = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)  # type: ignore[no-untyped-call]
        # A function of its own each time: JAX remembers traces, with their variables.
        (eqn,) = jax.make_jaxpr(lambda x: how(x))(shape).jaxpr.eqns
        self.added.setdefault(home, []).append(eqn.replace(invars=[var]))
        return eqn.outvars[0]

    def _is_literal(self, var: Any) -> bool:
        return isinstance(var, self.jc.Literal)

    def _needed_forwards(self) -> set[int]:
        """Equations that the results come from: the last stage's forward; the rest is backward."""
        needed = {var for var in self.results if not isinstance(var, self.jc.Literal)}
        found = set()
        for n in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[n]
            if eqn.effects or any(var in needed for var in eqn.outvars):
                found.add(n)
                needed.update(self.vars_in(eqn))
        return found

    def parts(self, var: Any) -> Iterable[tuple[Home, Any]]:
        """A gradient as sums that stay within their stages, to be added once per step.

        A sum over stages is taken apart; so is a cast, a transpose and the like of such a sum.
        """
        if self._is_literal(var):
            return [(FREE, var)]
        if var in self.free or var in self.roots:
            roots = self._roots(var)
            if not roots:
                return [(FREE, var)]
            # The same for every microbatch, as the gradient of a weight decay is.
            last = ("B", max(self._first_uses().get(root, 0) for root in roots))
            return [(last, self._copied(var, last))]
        if var not in self._makers():
            return [(("B", 0), var)]  # the batch itself
        n = self._makers()[var]
        eqn, home = self.eqns[n], self.homes[n]
        if home is None:
            return [(FREE, var)]
        used = self.vars_in(eqn)
        if eqn.primitive is self.adds and self._users(var) <= 1:
            pieces = [part for side in used for part in self.parts(side)]
            if len({at[1] for at, _ in pieces}) > 1:
                self.homes[n] = None
                return pieces
        elif eqn.primitive.name in _LINEAR and len(used) == 1 and self._users(var) <= 1:
            pieces = list(self.parts(used[0]))
            if len({at[1] for at, _ in pieces}) > 1:
                self.homes[n] = None
                return [(at, self._again(eqn, at, piece)) for at, piece in pieces]
        return [(home, var)]

    def _again(self, eqn: Any, home: Home, operand: Any) -> Any:
        """The same equation of another operand, in another stage; returns its variable."""
        aval = eqn.outvars[0].aval
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # type: ignore[no-untyped-call]
        (fresh,) = jax.make_jaxpr(lambda x: x)(shape).jaxpr.invars
        self.added.setdefault(home, []).append(eqn.replace(invars=[operand], outvars=[fresh]))
        return fresh

    def _makers(self) -> dict[Any, int]:
        if not hasattr(self, "_made"):
            self._made = {var: n for n, eqn in enumerate(self.eqns) for var in eqn.outvars}
            self._uses: dict[Any, int] = {}
            for eqn in self.eqns:
                for var in self.vars_in(eqn):
                    self._uses[var] = self._uses.get(var, 0) + 1
            for var in (*self.outs, *self.grads):
                if not isinstance(var, self.jc.Literal):
                    self._uses[var] = self._uses.get(var, 0) + 1
        return self._made

    def _users(self, var: Any) -> int:
        self._makers()
        return self._uses.get(var, 0)


def _ends_a_stage(eqn: Any) -> bool:
    return eqn.primitive is mark() and not eqn.params["backward"] and not _is_recomputed(eqn)


def _is_recomputed(eqn: Any) -> bool:
    return is_again(eqn) and not eqn.params["backward"]


_LINEAR = ("convert_element_type", "transpose", "reshape", "neg", "squeeze", "copy")


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


def vars_of(eqns: Sequence[Any]) -> list[Any]:
    """Every variable that equations read, once, in order."""
    jc = _compat.jaxprs()
    return list(dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, jc.Literal)))
