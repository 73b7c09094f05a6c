"""`lower`: from a function and shapes to a StableHLO program, without any device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright.errors import RehearsalError
from meshwright.rehearsal.compiler import Platform

_SOURCE_FILE = re.compile(r'loc\("([^"]+)":\d+')


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A StableHLO program and what is known of it before it is compiled.

    `code` is its bytecode, `identity` its key for the cache (see `identity_of`). `results` are the
    shapes of what it returns, `free_outputs` says which of those the compiler may shard as it
    likes. `options` are its `jit`'s compiler options, `inputs` the shardings that its `jit` gives
    the flat arguments.
    """

    code: bytes
    identity: str
    results: tuple[Any, ...]
    free_outputs: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    inputs: tuple[Any, ...]


# In: the step and `ShapeDtypeStruct`s with shardings on an abstract mesh. Out: bytecode for a
# platform that need not be here. Invariant: what the function itself raises comes through as it
# is, and only a failure to lower becomes a RehearsalError. Example: `lambda w, x: x @ w` with w
# sharded over fsdp:8 becomes a module of one dot_general whose arguments carry sdy.sharding.
def lower(
    function: Callable[..., Any],
    shapes: tuple[Any, ...],
    mesh: AbstractMesh,
    platform: Platform,
    donate_argnums: tuple[int, ...],
    out_shardings: Any,
) -> Lowered:
    """Trace and lower a step.

    `out_shardings` is a tree of specs for the results, or a prefix of one; the compiler chooses
    where it has `None`. A function that is jitted already keeps the options of its own `jit`,
    unless some are given here.
    """
    # `with_sharding_constraint(x, PartitionSpec(...))` in the user's code needs the mesh set.
    with jax.sharding.use_abstract_mesh(mesh):
        step: Any = function
        if not is_jitted(function) or donate_argnums or out_shardings is not None:
            step = jax.jit(
                function,
                donate_argnums=donate_argnums,
                out_shardings=_named_shardings(out_shardings, mesh),
            )
        traced = _trace(step, shapes, wrapped=step is not function and is_jitted(function))
        try:
            lowered = traced.lower(lowering_platforms=(platform,))
        except Exception as error:
            raise RehearsalError(_refusal(platform, error)) from error
    module = lowered.compiler_ir("stablehlo").operation
    code = io.BytesIO()
    module.write_bytecode(code)
    return Lowered(
        code.getvalue(),
        identity_of(module),
        tuple(jax.tree.leaves(traced.out_info)),
        _free_outputs(out_shardings, traced.out_info),
        _compat.compiler_options(lowered),
        _compat.jit_shardings(traced),
    )


def _trace(step: Any, shapes: tuple[Any, ...], wrapped: bool) -> Any:
    """Trace; `wrapped` says that the user's own `jit` is inside of ours."""
    try:
        return step.trace(*shapes)
    except (TypeError, ValueError) as error:
        # Our `jit` makes tracers of what the inner one holds to be static.
        if wrapped and "static arg" in str(error).lower():
            raise RehearsalError(
                "the step is jitted with static arguments, and donate_argnums or out_shardings was "
                "given here as well. Give both to its own jit instead."
            ) from error
        raise


def identity_of(module: Any) -> str:
    """Hash a program without its source lines, together with the source files that it names.

    The bytecode differs with the line that calls the step; this does not, as long as no file has
    changed. Files count because their lines are named in what the compiler makes.
    """
    digest = hashlib.sha256(module.get_asm(enable_debug_info=False).encode())
    for name in sorted(set(_SOURCE_FILE.findall(module.get_asm(enable_debug_info=True)))):
        digest.update(name.encode())
        with contextlib.suppress(OSError):
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def is_jitted(function: Callable[..., Any]) -> bool:
    """Whether a function is a `jit` already; its wrapper's type is private to JAX."""
    return hasattr(function, "trace") and hasattr(function, "lower")


def _refusal(platform: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return (
        f"the step cannot be made into a program for {platform} without its devices "
        f"({type(error).__name__}: {lines[0][:200]}). Callbacks need live devices: take "
        "jax.debug.print, pure_callback and io_callback out, and name meshes by their axes."
    )


def _named_shardings(out_shardings: Any, mesh: AbstractMesh) -> Any:
    def on_mesh(spec: Any) -> Any:
        if spec is None or isinstance(spec, jax.sharding.Sharding):
            return spec
        if not isinstance(spec, PartitionSpec):
            raise RehearsalError(
                f"out_shardings: {spec!r} is neither a PartitionSpec nor None.",
                option="out_shardings",
            )
        return NamedSharding(mesh, spec)

    return jax.tree.map(on_mesh, out_shardings, is_leaf=_is_spec)


def _free_outputs(out_shardings: Any, results: Any) -> tuple[bool, ...]:
    per_result = jax.tree.broadcast(out_shardings, results, is_leaf=_is_spec)
    return tuple(spec is None for spec in jax.tree.leaves(per_result, is_leaf=_is_spec))


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)
