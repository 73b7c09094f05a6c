"""From a function and shapes to a program in the compiler's own language, without any device."""

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

_FILE = re.compile(r'loc\("([^"]+)":\d+')


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program, the shapes of its results, and which of those have no sharding yet.

    `inputs` are the shardings that the function's own `jit` gives its arguments, flat.

    `identity` is the same for the same program from the same source files, the caller's included:
    its lines are named in what the compiler makes.
    """

    code: bytes
    identity: str
    results: tuple[Any, ...]
    free_outputs: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    inputs: tuple[Any, ...]


def lower(
    function: Callable[..., Any],
    shapes: tuple[Any, ...],
    mesh: AbstractMesh,
    platform: Platform,
    donate: tuple[int, ...],
    out: Any,
) -> Lowered:
    """Trace and lower. What the function itself raises comes through as it is.

    `out` is a tree of specs, or a part of one, for the results; the compiler chooses the rest. A
    function that is jitted already keeps what its `jit` was told, unless told otherwise here.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        step: Any = function
        if not is_jitted(function) or donate or out is not None:
            step = jax.jit(function, donate_argnums=donate, out_shardings=_shardings(out, mesh))
        traced = _traced(step, shapes, wrapped=step is not function and is_jitted(function))
        try:
            lowered = traced.lower(lowering_platforms=(platform,))
        except Exception as error:
            raise RehearsalError(_cannot(platform, error)) from error
    module = lowered.compiler_ir("stablehlo").operation
    code = io.BytesIO()
    module.write_bytecode(code)
    results = tuple(jax.tree.leaves(traced.out_info))
    return Lowered(
        code.getvalue(),
        identity_of(module),
        results,
        _free(out, traced.out_info),
        _compat.compiler_options(lowered),
        _compat.jit_shardings(traced),
    )


def _traced(step: Any, shapes: tuple[Any, ...], wrapped: bool) -> Any:
    """`wrapped`: a `jit` around the user's own, to which static arguments are no longer static."""
    try:
        return step.trace(*shapes)
    except (TypeError, ValueError) as error:
        if wrapped and "static arg" in str(error).lower():
            raise RehearsalError(
                "the step is jitted with static arguments, and donate= or out= was given here as "
                "well. Give donate_argnums and out_shardings to its own jit instead."
            ) from error
        raise


def identity_of(module: Any) -> str:
    """The program without its source lines, and the files that those are in."""
    found = hashlib.sha256(module.get_asm(enable_debug_info=False).encode())
    for name in sorted(set(_FILE.findall(module.get_asm(enable_debug_info=True)))):
        found.update(name.encode())
        with contextlib.suppress(OSError):
            found.update(Path(name).read_bytes())
    return found.hexdigest()


def is_jitted(function: Callable[..., Any]) -> bool:
    return hasattr(function, "trace") and hasattr(function, "lower")


def _cannot(platform: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return (
        f"the step cannot be made into a program for {platform} without its devices "
        f"({type(error).__name__}: {lines[0][:200]}). Callbacks need live devices: take "
        "jax.debug.print, pure_callback and io_callback out, and name meshes by their axes."
    )


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
