"""From a function and shapes to a program in the compiler's own language, without any device."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.errors import RehearsalError
from meshwright.rehearsal.compiler.jobs import Platform


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program, and which of its results have no sharding yet."""

    code: bytes
    free_outputs: tuple[bool, ...]


def lower(
    function: Callable[..., Any],
    shapes: tuple[Any, ...],
    mesh: AbstractMesh,
    platform: Platform,
    donate: tuple[int, ...],
    out: Any,
) -> Lowered:
    """Trace and lower. What the function itself raises comes through as it is.

    `out` is a tree of specs, or a part of one, for the results; the compiler chooses the rest.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(function, donate_argnums=donate, out_shardings=_shardings(out, mesh))
        traced = step.trace(*shapes)
        lowered = traced.lower(lowering_platforms=(platform,))
    code = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(code)
    return Lowered(code.getvalue(), _free(out, traced.out_info))


def _shardings(out: Any, mesh: AbstractMesh) -> Any:
    def on_mesh(spec: Any) -> Any:
        if spec is None or isinstance(spec, jax.sharding.Sharding):
            return spec
        if not isinstance(spec, PartitionSpec):
            raise RehearsalError(f"out: {spec!r} is neither a PartitionSpec nor None.")
        return NamedSharding(mesh, spec)

    return jax.tree.map(on_mesh, out, is_leaf=_is_spec)


def _free(out: Any, results: Any) -> tuple[bool, ...]:
    every = jax.tree.broadcast(out, results, is_leaf=_is_spec)
    return tuple(spec is None for spec in jax.tree.leaves(every, is_leaf=_is_spec))


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)
