"""The planned step, jitted: `jax.jit` with the plan's shardings, for any arguments of the user's.

`jax.jit` takes arrays alone, and what a traced function does to an NNX module stays in its trace.
Where the arguments have other leaves, or are updated in place, `PlannedStep` stands around it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._compat import source_line
from meshwright._compat_lowering import equations
from meshwright._show import short_repr
from meshwright.errors import PlanningError
from meshwright.hardware.topology import Topology
from meshwright.planning.apply_plan import (
    check_arguments,
    planned_function,
    planned_results,
    update_in_place,
)
from meshwright.planning.plan_layouts import Layouts
from meshwright.planning.traced_step import TracedStep, arrays_at
from meshwright.trees.split import Split, as_shape
from meshwright.trees.walk import variables_of


class PlannedStep:
    """A step with its plan, as `jax.jit` would give it: call it, `lower` it, `trace` it.

    Leaves of the arguments that are no arrays are a part of the program, and must be those that
    were planned for. Modules of NNX are updated in place.
    """

    def __init__(
        self, step: TracedStep, layouts: Layouts, mesh: Mesh | AbstractMesh, hardware: Topology
    ):
        self.step, self.mesh, self.hardware = step, mesh, hardware

        @functools.wraps(step.function, updated=())
        def flat(*operands: Any) -> tuple[list[Any], list[Any]]:
            pairs = zip(step.arguments, operands, strict=True)
            args = [part.rebuild(jax.tree.leaves(operand)) for part, operand in pairs]
            return planned_results(step, layouts, mesh, args)

        self.name = flat.__name__ = getattr(step.function, "__name__", "step")
        count = len(step.returned.positions)
        results = [NamedSharding(mesh, layouts.of_result(step, n)) for n in range(count)]
        changed = [
            NamedSharding(mesh, layouts.of_result(step, count + n))
            for n in range(len(step.in_place))
        ]
        self._jitted = jax.jit(
            flat,
            in_shardings=tuple(
                on_mesh(specs, mesh) for specs in specs_of_arguments(step, layouts, other=None)
            ),
            out_shardings=(results, changed),
            donate_argnums=step.donate_argnums,
        )

    def _operands(self, args: Sequence[Any], shapes: bool = False) -> list[Any]:
        """The arguments with `None` for what is no array; as shapes, where no device is meant."""
        check_arguments(self.step, args)
        read = as_shape if shapes else lambda array: array
        return [
            part.rebuild([read(array) for array in arrays_at(part, arg)], other=None)
            for part, arg in zip(self.step.arguments, args, strict=True)
        ]

    def __call__(self, *args: Any) -> Any:
        if isinstance(self.mesh, AbstractMesh):
            raise PlanningError(
                f"the step was planned for {self.hardware.name}, which is not here, so it cannot "
                "run. Where it is, pass its mesh: p.jit(mw.mesh(p.spec)). Lower it or rehearse it "
                "here."
            )
        results, changed = self._jitted(*self._operands(args))
        update_in_place(self.step, args, changed)
        return self.step.returned.rebuild(results)

    def lower(self, *args: Any) -> Any:
        """Lower the planned step for these arguments, arrays or shapes, as `jax.jit` does."""
        if not isinstance(self.mesh, AbstractMesh):
            return self._jitted.lower(*self._operands(args))
        family = self.hardware.chip.family
        return self.trace(*args).lower(lowering_platforms=({"gpu": "cuda"}.get(family, family),))

    def trace(self, *args: Any) -> Any:
        """Trace the planned step for these arguments, as `jax.jit` does."""
        return self._jitted.trace(*self._operands(args, isinstance(self.mesh, AbstractMesh)))

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name} on {self.hardware.name}")


def jit_step(
    step: TracedStep, layouts: Layouts, mesh: Mesh | AbstractMesh, hardware: Topology
) -> Any:
    """Return the planned step, jitted: a plain `jax.jit` where its arguments are arrays alone."""
    _check_own_meshes(step, mesh)
    parts = (*step.arguments, step.returned)
    if (
        isinstance(mesh, AbstractMesh)
        or not all(_arrays_alone(part) for part in parts)
        or variables_of([part.rebuild(part.arrays) for part in step.arguments])
    ):
        return PlannedStep(step, layouts, mesh, hardware)
    return jax.jit(
        planned_function(step, layouts, mesh),
        in_shardings=tuple(on_mesh(specs, mesh) for specs in specs_of_arguments(step, layouts)),
        out_shardings=on_mesh(specs_of_results(step, layouts), mesh),
        donate_argnums=step.donate_argnums,
    )


def _check_own_meshes(step: TracedStep, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a step whose own `shard_map` is over other devices, or the same in another order."""
    if isinstance(mesh, AbstractMesh):
        return
    for eqn, *_ in equations(step.closed):
        own = eqn.params["mesh"] if eqn.primitive.name == "shard_map" else None
        if isinstance(own, Mesh) and own.devices.tolist() != mesh.devices.tolist():
            raise PlanningError(
                f"{source_line(eqn)}: a shard_map over a mesh of its own, whose devices are not "
                "those of the plan's mesh, or in another order, so they cannot be in one program. "
                "Pass that mesh, p.jit(mesh), or leave mesh= out of the shard_map: it takes the "
                "plan's then.",
                option="mesh",
            )


def _arrays_alone(part: Split) -> bool:
    return len(part.positions) == len(part.static)


def specs_of_arguments(step: TracedStep, layouts: Layouts, other: Any = None) -> tuple[Any, ...]:
    """A tree of specs for every argument, with `other` for what is no array."""
    values = iter(layouts.costs.program.arguments)
    return tuple(
        part.rebuild([layouts.of_value(next(values)) for _ in part.positions], other=other)
        for part in step.arguments
    )


def specs_of_results(step: TracedStep, layouts: Layouts) -> Any:
    """A tree of specs for what the step returns."""
    count = len(step.returned.positions)
    specs = [layouts.of_result(step, number) for number in range(count)]
    return step.returned.rebuild(specs, other=None)


def on_mesh(specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return a tree of specs as shardings on a mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
