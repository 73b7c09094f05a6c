"""`with_constraints`: a step with sharding constraints at lines of the user's, to see what they do.

The step is traced as it is written. In the program, every array that an operation of such a line
reads or makes and that holds all rows of the batch is constrained to have them cut over some axes,
forward and backward, as `with_sharding_constraint` on the line's operands and result would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright._compat import Atom, Eqn, Jaxpr
from meshwright._compat_lowering import source_frames
from meshwright.errors import RehearsalError
from meshwright.hlo.instructions import Source
from meshwright.rehearsal.collectives.causes import Batch
from meshwright.trees.split import split_arrays
from meshwright.trees.walk import is_array, variables_of


@dataclasses.dataclass(frozen=True)
class RowConstraint:
    """At a line, the rows of the batch are to be cut over `axes`."""

    source: Source
    batch: Batch
    axes: tuple[str, ...]

    def spec(self, dims: Sequence[int], sizes: dict[str, int]) -> PartitionSpec | None:
        """The spec for an array, other dims left open; `None` for one without rows in front."""
        at = self.batch.dim(dims)
        if at != 0 or dims[at] % math.prod(sizes[axis] for axis in self.axes):
            return None
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(dims)
        entries[at] = self.axes if len(self.axes) > 1 else self.axes[0]
        return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def with_constraints(
    function: Callable[..., Any], constraints: Sequence[RowConstraint]
) -> Callable[..., Any]:
    """Return a step that computes the same, with constraints at some of its lines.

    Raises `RehearsalError` when it is called with modules that are updated in place, or has no
    operation at the lines.
    """

    def step(*args: Any) -> Any:
        if variables_of(args):
            raise RehearsalError("modules that the step updates in place: write it to try it.")
        parts = [split_arrays(arg) for arg in args]

        def of_arrays(*groups: Any) -> Any:
            rebuilt = [part.rebuild(arrays) for part, arrays in zip(parts, groups, strict=True)]
            return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, function(*rebuilt))

        arrays = [list(part.arrays) for part in parts]
        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        inserter = _Inserter(constraints, jax.sharding.get_abstract_mesh())
        program = inserter.program(closed)
        if not inserter.count:
            raise RehearsalError("no array of that line holds all rows: write it to try it.")
        results = _compat.jaxprs().jaxpr_as_fun(program)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    step.__name__ = getattr(function, "__name__", "step")
    return step


# In: a jaxpr. Out: one that computes the same, with `sharding_constraint` equations around those of
# the lines. Invariant: variables at both ends of it stay. Example, for a line with the rows in both
# `x` and `y`:
#     y = dot_general x w
# becomes
#     a = sharding_constraint x;  b = dot_general a w;  y = sharding_constraint b
class _Inserter:
    """Rewrites programs and those inside of them; `count` says how many arrays it constrained."""

    def __init__(self, constraints: Sequence[RowConstraint], mesh: AbstractMesh) -> None:
        self.constraints, self.mesh = constraints, mesh
        self.sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        self.count = 0
        # A function that is called often is one jaxpr object, and stays one.
        self.programs: dict[int, tuple[Any, Any]] = {}

    def program(self, program: Any) -> Any:
        """Rewrite a jaxpr, closed or open."""
        if id(program) not in self.programs:
            opened = getattr(program, "jaxpr", program)
            eqns = [new for eqn in opened.eqns for new in self.equations(eqn)]
            new: Jaxpr = opened.replace(eqns=eqns)
            closed = program.replace(jaxpr=new) if hasattr(program, "jaxpr") else new
            self.programs[id(program)] = program, closed  # the first is kept for its id
        return self.programs[id(program)][1]

    def equations(self, eqn: Eqn) -> list[Eqn]:
        inner = {name: value for name, value in eqn.params.items() if _holds_programs(value)}
        if inner or eqn.primitive.name in ("shard_map", "pallas_call"):
            # What is manual has no sharding to constrain, and kernels are no programs.
            if eqn.primitive.name in ("shard_map", "pallas_call"):
                return [eqn]
            rewritten = {name: self.parameter(value) for name, value in inner.items()}
            return [eqn.replace(params={**eqn.params, **rewritten})]
        constraint = self.constraint_of(eqn)
        if constraint is None:
            return [eqn]
        before, after = [], []
        reads, makes = list(eqn.invars), list(eqn.outvars)
        for number, atom in enumerate(reads):
            template = None if _compat.is_literal(atom) else self.template(constraint, atom)
            if template is not None:
                before.append(template.replace(invars=[atom]))
                reads[number] = template.outvars[0]
        for number, var in enumerate(makes):
            template = self.template(constraint, var)
            if template is not None:
                after.append(template.replace(outvars=[var]))
                makes[number] = template.invars[0]
        return [*before, eqn.replace(invars=reads, outvars=makes), *after]

    def parameter(self, value: Any) -> Any:
        return tuple(map(self.program, value)) if isinstance(value, tuple) else self.program(value)

    def constraint_of(self, eqn: Eqn) -> RowConstraint | None:
        """The constraint for the line that an equation is from."""
        frames = [Source(file, line) for file, line in source_frames(eqn)]
        own = next((frame for frame in frames if not frame.in_library), None)
        for constraint in self.constraints:
            place = constraint.source
            if own is not None and (own.file, own.line) == (place.file, place.line):
                return constraint
        return None

    def template(self, constraint: RowConstraint, atom: Atom) -> Eqn | None:
        """An equation that constrains an array like this one, with variables of its own."""
        shape = getattr(atom.aval, "shape", ())
        spec = constraint.spec(shape, self.sizes)
        if spec is None:
            return None
        self.count += 1
        sharding = NamedSharding(self.mesh, spec)

        def constrain(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]

        like = jax.ShapeDtypeStruct(shape, atom.aval.dtype)  # type: ignore[no-untyped-call]
        return jax.make_jaxpr(constrain)(like).jaxpr.eqns[-1]


def _holds_programs(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return bool(values) and all(hasattr(getattr(one, "jaxpr", one), "eqns") for one in values)
