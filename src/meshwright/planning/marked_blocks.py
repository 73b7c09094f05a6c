"""Blocks of layers that the user marks, and what the backward pass keeps of each.

`block` marks a function; while a step is traced under a `Chooser`, every call of a marked function
is numbered, has its policy of remat, and may end a stage of a pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import jax

from meshwright.errors import PlanningError, short
from meshwright.pipelines.trace_marks import stage_end
from meshwright.trees.split import Split, split_arrays
from meshwright.trees.walk import variables_of

Function = TypeVar("Function", bound=Callable[..., Any])

# From what is fastest to what needs least memory; "as written" leaves the user's own.
POLICIES = ("everything", "dots", "dots without batch", "nothing")
OFFLOAD, WRITTEN = "offload", "as written"
# The name scope of a block's call, with its number: AD keeps it in the backward pass.
BLOCK_SCOPE = "mw_block_"

Segments = tuple[tuple[str, int], ...]  # policies of a block, each with so many of its runs
Assignment = tuple[Segments, ...]  # of every block


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a step whose remat can be chosen: where it is, and how often it runs.

    `splits`: whether its runs may have different policies. `names`: of its values, for offloading.
    """

    name: str
    runs: int
    splits: bool = False
    names: tuple[str, ...] = ()
    written: bool = False  # has a `jax.checkpoint` of its own


# Marked blocks. A user's context is in the keys of JAX's caches: a function that was traced without
# a choice is traced again with one.
_CHOOSER: Any = jax.make_user_context(None)  # type: ignore[no-untyped-call]


def block(function: Function) -> Function:
    """Mark a function as a block of layers, for `plan` to choose what its backward pass keeps.

    Anywhere else the function does what it always did. Its arguments may be any trees.

    >>> import jax, jax.numpy as jnp, meshwright as mw
    >>> @mw.block
    ... def layer(x, w):
    ...     return jnp.tanh(x @ w)
    >>> layer(jnp.ones((2, 2)), jnp.zeros((2, 2))).sum()
    Array(0., dtype=float32)
    """
    if not callable(function):
        raise PlanningError(f"block: {short(function)} is no function; mark a layer's function.")

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        chooser = _CHOOSER.value
        if chooser is None:
            return function(*args, **kwargs)
        return chooser.call(function, args, kwargs)

    return marked  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Mark:
    """The policy of a block in the trace of a loss, where it is found by it.

    `line`: that of its function; JAX knows that of the call alone, which is in this file.
    """

    line: str

    def __call__(self, *_: Any, **__: Any) -> bool:
        return True


def _line_of(function: Callable[..., Any]) -> str:
    """The file, line and name of a function, of a partial that of what it calls."""
    while isinstance(function, functools.partial):
        function = function.func
    bare = inspect.unwrap(function)
    name = getattr(bare, "__qualname__", type(bare).__qualname__).rpartition("<locals>.")[2]
    code = getattr(bare if hasattr(bare, "__code__") else type(bare).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({name})" if code is not None else name


class Chooser:
    """Gives the blocks that are called while it is set their policies, in the order of calls.

    `ends`: the numbers of calls after which a stage of a pipeline ends.
    """

    def __init__(
        self,
        assignment: Assignment | None = None,
        find: bool = False,
        ends: Collection[int] = (),
    ):
        self.assignment, self.find, self.ends = assignment, find, ends
        self.blocks: list[Block] = []
        self._flat: dict[Any, Callable[..., Any]] = {}

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = len(self.blocks)
        self.blocks.append(Block(getattr(function, "__name__", "block"), 1))
        if self.find:
            parts = split_arrays((args, kwargs))
            return jax.checkpoint(_flat(function, parts), policy=Mark(_line_of(function)))(
                *parts.arrays
            )
        with block_scope(number):
            out = self._run(number, function, args, kwargs)
        # A function may be traced a second time, with all of its blocks.
        at = number % len(self.assignment) if self.assignment else number
        return end_stage(out, at) if at in self.ends else out

    def _run(self, number: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # JAX may trace a body more often than before: what is beyond the end has the last policy.
        policy = self.assignment[min(number, len(self.assignment) - 1)] if self.assignment else ()
        name = policy[0][0] if policy else "everything"
        if name in ("everything", WRITTEN):
            return function(*args, **kwargs)
        parts = split_arrays((args, kwargs))
        return jax.checkpoint(self._once(function, parts), policy=policy_of(name))(*parts.arrays)

    # JAX traces and differentiates what is under a checkpoint once for all calls of one function
    # with the same shapes. So layers that are alike must be one function of their arrays; not those
    # that take anything from around them, which may be another thing in every call.
    def _once(self, function: Callable[..., Any], parts: Split) -> Callable[..., Any]:
        """The function over the arrays of its arguments, the same one for calls that are alike."""
        alone = isinstance(function, types.FunctionType) and function.__closure__ is None
        if not alone or variables_of(parts.rebuild(parts.arrays)):
            return _flat(function, parts)
        key = function, parts.treedef, parts.positions, parts.static
        try:
            return self._flat.setdefault(key, _flat(function, parts))
        except TypeError:  # a leaf or a module that cannot be hashed
            return _flat(function, parts)


def block_scope(number: int) -> Any:
    """The name scope by which a block's operations are found, in the forward and the backward."""
    return jax.named_scope(f"{BLOCK_SCOPE}{number}")


def end_stage(out: Any, number: int) -> Any:
    """End a stage after a block: its arrays go on to the next one, what is no array around it."""
    parts = split_arrays(out)
    arrays = stage_end(list(parts.arrays), f"up to block {number + 1}")
    return parts.rebuild(arrays)


def _flat(function: Callable[..., Any], parts: Split) -> Callable[..., Any]:
    """A function of any trees over the arrays among its arguments."""

    def flat(*arrays: Any) -> Any:
        positional, named = parts.rebuild(arrays)
        return function(*positional, **named)

    known: Any = renamed(flat, function)
    known.__wrapped__ = function  # its line, where JAX says what is traced
    known.__signature__ = inspect.Signature(
        [inspect.Parameter("arrays", inspect.Parameter.VAR_POSITIONAL)]
    )
    return flat


@contextlib.contextmanager
def choosing(chooser: Chooser) -> Iterator[Chooser]:
    """Let a chooser give policies to the blocks that are traced meanwhile."""
    with _CHOOSER(chooser):
        yield chooser


def policy_of(name: str, names: Sequence[str] = ()) -> Any:
    """Return JAX's policy of this name; `names` are those of values that can be offloaded."""
    policies = jax.checkpoint_policies
    if name == "dots":
        return policies.dots_saveable
    if name == "dots without batch":
        return policies.dots_with_no_batch_dims_saveable
    if name == OFFLOAD and names:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if name == OFFLOAD:
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return None


@dataclasses.dataclass(frozen=True)
class MarkedStep:
    """A step with functions that were marked by `block`."""

    step: Callable[..., Any]
    blocks: tuple[Block, ...]

    def function(self, assignment: Assignment, ends: Collection[int] = ()) -> Callable[..., Any]:
        """Return the step with a policy for every block, and stages that end after some."""
        return renamed(_under(self.step, assignment, ends), self.step)


def _under(
    step: Callable[..., Any], assignment: Assignment, ends: Collection[int]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with choosing(Chooser(assignment, ends=ends)):
            return step(*args)

    return run


def renamed(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = getattr(like, "__name__", "step")
    return function
