"""Cut a flat program into stages: every equation gets a home in some stage's F or B.

Program order decides (`ordering`): what stands between two marks belongs to the stage between
them, forwards and backwards. In the last stage the forward is what the results come from. The
exceptions, each for a reason:

- What depends only on parameters, constants and random keys is *free*: every task that needs it
  computes it again. Else "cast all parameters first" would tie everything to stage 0.
- A backward equation that touches one stage only goes back to that stage, however late it comes:
  the cast of a gradient, at the very end, belongs where the gradient is made.
- A mark that a remat passes again ends no stage: behind it stands the value that was handed over
  the first time. Where one trace was passed several times (a function called twice), nobody can
  say which that was, and what is computed again goes on.
- What depends only on the batch, before the first mark, moves to the stage that needs it (labels).
- What nobody needs is dropped, unless it has effects. What a remat computes again goes to the
  backward that needs it (`moving`).
- What is computed only to be carried on stays in the stage that uses what is carried, and a
  carried value that is made earlier is copied into that stage.
- A result that is free, or an operand as it came, is copied by the forward of the first stage by
  which all that it comes from has been used. Truths that are to be summed are copied as whole
  numbers (`settling`).
- A gradient that is a sum over stages stays in parts, one per stage; so does a cast, a transpose
  and the like of such a sum. A gradient that is free is copied by one stage's backward
  (`gradients`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.mpmd.pipelines.bench import FREE, Home, equations, lay_out, stage_names, vars_of
from meshwright.mpmd.pipelines.gradients import Parts, split_gradients
from meshwright.mpmd.pipelines.inlining import flat
from meshwright.mpmd.pipelines.moving import drop_and_delay, move_to_users
from meshwright.mpmd.pipelines.ordering import read_in_order
from meshwright.mpmd.pipelines.regions import Region
from meshwright.mpmd.pipelines.settling import settle_results

__all__ = ["FREE", "Cut", "Home", "cut", "vars_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A region's equations by home, in program order, with marks taken out.

    `free` maps a variable to the equation that every user computes again. `outs` are the
    region's results, `grads` the partial sums of each parameter's gradient: (home, variable).
    `names` are the stages', None where the user gave none.
    """

    region: Region
    stages: int
    invars: tuple[Any, ...]
    consts: dict[Any, Any]
    eqns: dict[Home, list[Any]]
    free: dict[Any, Any]
    outs: tuple[Any, ...]
    grads: tuple[Parts, ...]
    names: tuple[str | None, ...]

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
    bench = lay_out(region, closed.jaxpr)
    read_in_order(bench)
    move_to_users(bench)
    drop_and_delay(bench)
    settle_results(bench)
    grads = split_gradients(bench)
    return Cut(
        region,
        bench.stages,
        tuple(closed.jaxpr.invars),
        dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
        equations(bench),
        bench.free,
        tuple(bench.outs),
        grads,
        stage_names(closed.jaxpr),
    )
