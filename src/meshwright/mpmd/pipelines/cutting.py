"""Cut a flat program into stages: every equation gets a home in some stage's F or B.

Program order decides: what stands between two marks belongs to the stage between them, forwards
and backwards. The exceptions, each for a reason:

- What depends only on parameters, constants and random keys is *free*: every task that needs it
  computes it again. Else "cast all parameters first" would tie everything to stage 0.
- What depends only on the batch, before the first mark, moves to the stage that needs it (labels).
- A backward equation that touches one stage only goes back to that stage, however late it comes:
  the cast of a gradient, at the very end, belongs where the gradient is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.mpmd.pipelines.inlining import flat
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
        marks = [e for e in jaxpr.eqns if e.primitive is mark() and not e.params["backward"]]
        self.stages = len(marks) + 1
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
        self.results, self.gradients = jaxpr.outvars[:values], jaxpr.outvars[values:]

    def vars_in(self, eqn: Any) -> list[Any]:
        return [v for v in eqn.invars if not isinstance(v, self.jc.Literal)]

    def look(self, var: Any) -> Any:
        return var if isinstance(var, self.jc.Literal) else self.alias.get(var, var)

    def read_in_order(self) -> None:
        """Homes by program order; free equations and marks are taken out on the way."""
        here: Home = ("F", 0)
        opened: dict[int, list[int]] = {}  # a mark traced once may be passed several times
        passed, forwards = 0, self._needed_forwards()
        for n, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive is mark():
                number = eqn.params["number"]
                if eqn.params["backward"]:
                    stage = opened[number].pop()
                    here = ("B", stage) if here[0] == "F" or stage < here[1] else here
                else:
                    opened.setdefault(number, []).append(passed)
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
        if isinstance(var, self.jc.Literal) or var in self.free or var in self.roots:
            return [(FREE, var)]
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


_LINEAR = ("convert_element_type", "transpose", "reshape", "neg", "squeeze", "copy")


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


def vars_of(eqns: Sequence[Any]) -> list[Any]:
    """Every variable that equations read, once, in order."""
    jc = _compat.jaxprs()
    return list(dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, jc.Literal)))
