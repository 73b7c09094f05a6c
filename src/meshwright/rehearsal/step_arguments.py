"""The arguments of a step as shapes with shardings: given ones kept, the others decided.

The first argument, those that are donated, and those that look like state are state (`is_state`):
the first is sharded as `partition` says, and the others follow it as `partition_like` says. All
other arguments are data: their first dim is sharded over the data axes. A sharding that an argument
already has, or that `in_shardings` gives, wins.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright.axes import role
from meshwright.errors import PartitionError, RehearsalError, short
from meshwright.partitioning.decide import partition, read_options, resolve_specs
from meshwright.partitioning.optimizer_state import partition_like
from meshwright.partitioning.report import LeafRow, PartitionReport, explain_tree
from meshwright.trees.specs import check_specs, make_spec, match_specs, spec_on_axes
from meshwright.trees.split import is_number
from meshwright.trees.walk import (
    Leaf,
    flatten,
    is_array,
    path_text,
    refuse,
    retie,
    shown_path,
    unflatten,
    variables_of,
    walk,
)

_DATA_ROLES = ("data", "fsdp")


# In: the arguments, the mesh, and what the user said of each. Out: per argument a tree of specs of
# its structure. Invariant: arrays keep a sharding they have on a mesh of these axes, whatever is
# decided for their neighbours; one on other axes is an error. Example, mesh fsdp:8: (params, adam
# state, batch, key) becomes (by shape, like params, P("fsdp"), P()).
def decide_specs(
    args: Sequence[Any],
    names: Sequence[str],
    mesh: AbstractMesh,
    in_shardings: Sequence[Any] | None,
    data: tuple[int, ...],
    options: Mapping[str, Any],
) -> list[Any]:
    """Decide a tree of specs for every argument; `options` are those of `partition`."""
    if in_shardings is not None and (
        not isinstance(in_shardings, (tuple, list)) or len(in_shardings) != len(args)
    ):
        raise RehearsalError(
            f"in_shardings: one entry for each of the {len(args)} arguments is needed, None where "
            f"it shall be decided, not {short(in_shardings)}.",
            option="in_shardings",
        )
    read_options(options)  # checked although no argument may be left to decide about
    specs: list[Any] = [None] * len(args)
    params: int | None = None  # the first argument that is state: others follow it
    for i, arg in enumerate(args):
        given = None if in_shardings is None else in_shardings[i]
        if given is not None:
            specs[i] = _given_specs(arg, given, mesh, f"in_shardings[{i}], of {names[i]}")
        elif i in data:
            by_rows = functools.partial(data_specs, mesh=mesh, name=f"argument {i} ({names[i]})")
            specs[i] = _keep_or_decide(arg, mesh, by_rows, names[i])
        elif params is None:
            decide = functools.partial(partition, mesh=mesh, **options)
            specs[i] = _keep_or_decide(arg, mesh, decide, names[i])
        else:
            follow = functools.partial(partition_like, params=args[params], specs=specs[params])
            specs[i] = _keep_or_decide(arg, mesh, follow, names[i])
        if params is None and i not in data:
            params = i
    if options and (params is None or (in_shardings and in_shardings[params] is not None)):
        raise RehearsalError(
            f"{', '.join(options)}: options of partition, but in_shardings and data= leave it no "
            "argument to decide about. Drop them, or give None for the argument.",
            option=next(iter(options)),
        )
    return specs


def _given_specs(arg: Any, given: Any, mesh: AbstractMesh, where: str) -> Any:
    """Read what `in_shardings` has for an argument: one spec for all its arrays, or a tree."""
    arrays = walk(arg)
    try:
        if isinstance(given, (PartitionSpec, NamedSharding)):
            per_leaf = [_spec_on_device(given, mesh)] * len(arrays.arrays)
        else:
            per_leaf = match_specs(arrays, _read_shardings(given, mesh))
        check_specs("", arrays.arrays, per_leaf, mesh)
    except PartitionError as error:
        text = str(error).removeprefix("specs: ").removeprefix(": ")
        raise RehearsalError(f"{where}: {text}", option="in_shardings") from error
    return arrays.rebuild(per_leaf)


def _read_shardings(specs: Any, mesh: AbstractMesh) -> Any:
    """Return a tree of specs with each `NamedSharding` read on this mesh."""
    flat, treedef = flatten(specs, lambda value: isinstance(value, (PartitionSpec, NamedSharding)))
    problems: list[str] = []
    read = []
    for path, value in flat:
        try:
            sharding = isinstance(value, NamedSharding)
            read.append(_spec_on_device(value, mesh) if sharding else value)
        except PartitionError as error:
            problems.append(f"{shown_path(path_text(path))}: {error}")
    refuse("specs", problems)
    return unflatten(treedef, read)


def _spec_on_device(given: PartitionSpec | NamedSharding, mesh: AbstractMesh) -> PartitionSpec:
    """The spec of a sharding in the device's memory; arrays on the host say so themselves."""
    if isinstance(given, NamedSharding) and given.memory_kind == ON_HOST:
        raise PartitionError(
            f"a sharding in memory {ON_HOST!r}, but in_shardings only say how arrays are sharded. "
            "Give the argument itself that sharding: "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
    return spec_on_axes(given, mesh)


def data_specs(arg: Any, mesh: AbstractMesh, name: str = "data") -> Any:
    """Shard every array along its first dim, over the axes that split data; keys are replicated."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    axes = tuple(axis for axis in sizes if role(axis).name in _DATA_ROLES and sizes[axis] > 1)
    spec = make_spec([axes if len(axes) > 1 else axes[0]] if axes else ())
    shards = math.prod(sizes[axis] for axis in axes)
    arrays = walk(arg)
    replicated = [not has_rows(leaf) for leaf in arrays.arrays]
    for leaf, whole in zip(arrays.arrays, replicated, strict=True):
        if not whole and leaf.shape[0] % shards:
            where = name if leaf.where == "(the array)" else f"{name}, {leaf.where}"
            raise RehearsalError(
                f"{where}: {leaf.shape[0]} rows cannot be sharded over {shards} devices "
                f"({', '.join(axes)}). Data are sharded along their first dim: take a multiple of "
                f"{shards}, or say how it is sharded: in_shardings=[..., PartitionSpec(), ...], an "
                "entry for each argument, None where it shall be decided.",
                option="in_shardings",
            )
    return arrays.rebuild([make_spec() if whole else spec for whole in replicated])


def has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows to shard: numbers and random keys have none."""
    shape = np.shape(leaf) if not hasattr(leaf, "shape") else tuple(leaf.shape)
    # `jax.random.PRNGKey` makes a plain uint32[2]; keys of the new kind have no dims.
    return bool(shape) and not (shape == (2,) and str(getattr(leaf, "dtype", "")) == "uint32")


def array_types(args: Sequence[Any]) -> tuple[str, ...]:
    """The shapes and dtypes of all arrays with rows, in no order that names or trees matter for.

    Numbers and random keys are left out: they come as Python's own, or in two kinds.

    >>> array_types([{"b": np.ones(3), "a": np.ones((2, 4), "int8")}, 0.5])
    ('float32[3]', 'int8[2,4]')
    """
    leaves = [leaf for arg in args for leaf in walk(arg).arrays if has_rows(leaf)]
    return tuple(
        sorted(f"{_canonical(leaf.dtype)}[{','.join(map(str, leaf.shape))}]" for leaf in leaves)
    )


def _canonical(dtype: Any) -> Any:
    """As `jit` would: float64 of NumPy is float32 unless jax_enable_x64 is set."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def is_state(arg: Any, params: Any) -> bool:
    """Whether an argument looks like state: NNX variables, or an optimizer's state of `params`.

    Of an optimizer's state every array that has dims stands at a path that ends with a parameter's
    and has its shape; ends that are numbers alone, as of lists, say nothing.
    """
    if variables_of(arg):
        return True
    by_path = {leaf.path: leaf.shape for leaf in walk(params).arrays}
    arrays = [leaf for leaf in walk(arg).arrays if leaf.shape]
    return bool(arrays) and all(_follows(leaf, by_path) for leaf in arrays)


def _follows(leaf: Leaf, by_path: Mapping[str, tuple[int, ...]]) -> bool:
    words = leaf.path.split("/")
    for start in range(len(words)):
        says_something = not "".join(words[start:]).isdecimal() and leaf.path
        if says_something and by_path.get("/".join(words[start:])) == leaf.shape:
            return True
    return False


def _keep_or_decide(arg: Any, mesh: AbstractMesh, decide: Callable[[Any], Any], name: str) -> Any:
    """Keep the specs that arrays bring with them from a mesh of these axes; decide the others."""
    arrays = walk(arg)
    own = [_own_spec(leaf, mesh, name) for leaf in arrays.arrays]
    # Deciding may refuse (uneven dims, unmatched rules), so it is not asked where nothing is open.
    if None not in own:
        return arrays.rebuild(own)
    decided = match_specs(arrays, decide(arg))
    return arrays.rebuild(
        [new if kept is None else kept for kept, new in zip(own, decided, strict=True)]
    )


def _own_spec(leaf: Leaf, mesh: AbstractMesh, name: str) -> PartitionSpec | None:
    sharding: Any = getattr(leaf.value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    try:
        return spec_on_axes(sharding, mesh)
    except PartitionError as error:
        where = "/".join(filter(None, (name, leaf.path)))
        text = str(error).removesuffix(" Pass a spec for this mesh.")
        raise RehearsalError(
            f"{shown_path(where)}: {text} Say how it shall be sharded with in_shardings=, or pass "
            "shapes without a sharding.",
            option="in_shardings",
        ) from error


def _is_on(sharding: Any, mesh: AbstractMesh) -> bool:
    """Whether a sharding is on a mesh of the same axes, whatever its devices."""
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape)


def as_shapes(
    args: Sequence[Any], specs: Sequence[Any], mesh: AbstractMesh, keep_on_host: bool = False
) -> tuple[Any, ...]:
    """Return the arguments without values: each array a `ShapeDtypeStruct` with its sharding.

    With `keep_on_host`, those whose own sharding is in the host's memory stay there.
    """
    shapes = tuple(
        _shapes(arg, spec, mesh, keep_on_host) for arg, spec in zip(args, specs, strict=True)
    )
    tied: tuple[Any, ...] = retie(shapes, tuple(args))
    return tied


ON_HOST = "pinned_host"  # the memory kind that JAX offloads to


def _shapes(arg: Any, specs: Any, mesh: AbstractMesh, keep_on_host: bool) -> Any:
    arrays = walk(arg)
    per_leaf = resolve_specs("rehearse", arrays, arg, mesh, specs, {})
    return arrays.rebuild(
        [
            jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                leaf.shape,
                _canonical(leaf.value.dtype),
                sharding=NamedSharding(mesh, spec, memory_kind=_memory_kind(leaf, keep_on_host)),
            )
            for leaf, spec in zip(arrays.arrays, per_leaf, strict=True)
        ]
    )


def _memory_kind(leaf: Leaf, keep_on_host: bool) -> str | None:
    return ON_HOST if keep_on_host and _is_on_host(leaf) else None


def _is_on_host(leaf: Leaf) -> bool:
    return getattr(getattr(leaf.value, "sharding", None), "memory_kind", None) == ON_HOST


def count_on_host(args: Sequence[Any]) -> int:
    """Count the arrays of the arguments whose own sharding is in the host's memory."""
    return sum(_is_on_host(leaf) for arg in args for leaf in walk(arg).arrays)


def with_jit_shardings(
    shapes: tuple[Any, ...], jit_shardings: Sequence[Any], mesh: AbstractMesh
) -> tuple[Any, ...]:
    """Replace shardings by those that the step's own `jit` gives its flat arguments, which win."""
    leaves, treedef = jax.tree.flatten(shapes)
    if len(jit_shardings) != len(leaves):
        return shapes  # static arguments are not among them
    replaced = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec)
        )
        if hasattr(leaf, "sharding") and _is_on(sharding, mesh)
        else leaf
        for leaf, sharding in zip(leaves, jit_shardings, strict=True)
    ]
    tree: tuple[Any, ...] = jax.tree.unflatten(treedef, replaced)
    return tree


def sharding_table(
    names: Sequence[str], shapes: Sequence[Any], mesh: AbstractMesh
) -> PartitionReport:
    """Report how all arguments are sharded, in one table."""
    walks = [walk(shape) for shape in shapes]
    specs = [each.rebuild([leaf.value.sharding.spec for leaf in each.arrays]) for each in walks]
    return explain_tree(
        dict(zip(names, shapes, strict=True)), mesh, dict(zip(names, specs, strict=True))
    )


_VARIABLE = re.compile(r'(?<=op_name=")([^"]+?)\.states\[(\d+)\]\[(\d+)\](?=")')
_PARAMETER = re.compile(rf"= \w+\[([\d,]*)\]\S* parameter\(\d+\)[^\n]*{_VARIABLE.pattern}")


# In: compiled HLO in which `nnx.jit` has numbered the variables of an argument,
# `model.states[0][5]`. Out: the same text with their paths, `model.layers[0].up.kernel.value`.
# Invariant: an argument is named only where every parameter that is numbered has the shape of the
# array with that number, in the order of the table; others stay as they are.
def name_variables(text: str, rows: Sequence[LeafRow]) -> str:
    """Give variables of NNX modules the paths that the table of shardings has for them."""
    if ".states[" not in text:
        return text
    numbered: dict[str, list[tuple[str, int, int]]] = {}
    for dims, argument, state, number in _PARAMETER.findall(text):
        numbered.setdefault(argument, []).append((dims, int(state), int(number)))
    named: dict[str, list[LeafRow]] = {}
    for argument, parameters in numbered.items():
        own = [row for row in rows if row.path.startswith(f"{argument_path(argument)}/")]
        if all(
            state == 0 and number < len(own) and _has_dims(own[number], dims)
            for dims, state, number in parameters
        ):
            named[argument] = own

    def path(match: re.Match[str]) -> str:
        argument, _, number = match.groups()
        if argument not in named:
            return match[0]
        below = named[argument][int(number)].path.removeprefix(f"{argument_path(argument)}/")
        words = (f"[{word}]" if word.isdecimal() else f".{word}" for word in below.split("/"))
        return argument + "".join(words)

    return _VARIABLE.sub(path, text) if named else text


def _has_dims(row: LeafRow, dims: str) -> bool:
    # A random key is an array of words in a program, with a dim more.
    return ",".join(map(str, row.local)) == dims or "key<" in row.text


def argument_path(name: str) -> str:
    """The path of an argument in the table of shardings, by its name in a program.

    >>> argument_path("state.params['mlp'][0]")
    'state/params/mlp/0'
    """
    return "/".join(re.findall(r"[^\[\].'\"\\]+", name))


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters, `argument 3` where there is none."""
    try:
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # builtins and odd callables have no signature
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]


# Steps that are jitted already: what their own `jit` says of the arguments.


def is_jitted(function: Callable[..., Any]) -> bool:
    """Whether a function is a `jit` already; the types of all three wrappers are private."""
    return traces_itself(unbound(function)) or is_filter_jit(unbound(function))


def unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose arguments a `functools.partial` binds; any other as it is."""
    return function.func if isinstance(function, functools.partial) else function


def donated_beside_bound(
    function: Callable[..., Any], traced: Any, count: int
) -> tuple[int, ...] | None:
    """Return what a jitted step donates of `count` arguments, if a partial binds data beside them.

    Its trace has the bound data as further arguments, which they are not here, and is no use then.
    `None` where nothing is bound, or static arguments alone, as `train=True` mostly is.
    """
    if not isinstance(function, functools.partial):
        return None
    positional, named = traced.args_info
    first = len(function.args)
    data = [leaf for leaf in jax.tree.leaves(function.args) if is_array(leaf) or is_number(leaf)]
    if not data and not jax.tree.leaves(named):
        return None
    donated = [any(leaf.donated for leaf in jax.tree.leaves(entry)) for entry in positional]
    if any(donated) and len(positional) != first + count:  # static ones are not among them
        raise RehearsalError(
            "the step binds data by functools.partial, and its jit has static arguments by number "
            "and donates others. Name the static ones, static_argnames=, or say donate_argnums "
            "here.",
            option="function",
        )
    return tuple(n - first for n, gone in enumerate(donated) if gone and n >= first)


def traces_itself(function: Callable[..., Any]) -> bool:
    """Whether a function is a `jax.jit` or an `nnx.jit`."""
    return hasattr(function, "trace") and hasattr(function, "lower")


def is_filter_jit(function: Callable[..., Any]) -> bool:
    """Whether a function is an `eqx.filter_jit`, whose `lower` refuses shapes."""
    return all(hasattr(function, name) for name in ("lower", "donate_first", "donate_rest"))
