"""`shard` and `shard_like`: place a tree by its specs in one batched transfer, checked first."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from meshwright._checks import check_flag
from meshwright._show import short_repr
from meshwright.errors import PartitionError, short
from meshwright.partitioning.decide import PartitionOptions, resolve_specs
from meshwright.partitioning.optimizer_state import follow_params, unplaced_problem
from meshwright.transfers.boxes import Box, box_at
from meshwright.transfers.resharding import reshard
from meshwright.trees.specs import (
    AnyMesh,
    check_constrained,
    check_specs,
    entry_axes,
    match_specs,
    mesh_axes,
    shard_count,
    spec_problems,
    specs_on_mesh,
)
from meshwright.trees.walk import (
    Leaf,
    Walk,
    for_distinct,
    is_key,
    is_shape,
    refuse,
    tie_problems,
    walk,
)


def shard(
    tree: Any,
    mesh: AnyMesh,
    specs: Any = None,
    *,
    narrow: Narrow = "error",
    local: bool = False,
    **options: Unpack[PartitionOptions],
) -> Any:
    """Place every array of a tree on the mesh; other leaves pass through.

    Args:
      tree: host or device arrays, `FromCallback`s, or `ShapeDtypeStruct`s, which come back with
        their sharding. An array that the tree holds twice is placed once, and stays one.
      specs: a tree of `PartitionSpec`s (or of `NamedSharding`s on this mesh), or one for all; by
        default `partition` decides, with its `options`.
      narrow: `"convert"` for 64-bit values that JAX would narrow, integers if they fit.
      local: in several processes host arrays must be the same everywhere; True says that they are
        this process's part instead.

    Raises `PartitionError`, with the path of every leaf that is wrong, before anything is placed.

    >>> import numpy as np, meshwright as mw
    >>> placed = mw.shard({"w": np.ones((512, 512), "float32")}, mw.mesh("fsdp:4, tp:2"))
    >>> placed["w"].sharding.spec
    P('fsdp', 'tp')
    """
    check_narrow(narrow)
    local = check_flag("local", local)
    leaves = walk(tree)
    refuse("shard", [*tie_problems(tree), *value_problems(leaves.arrays, narrow, "shard")])
    per_leaf = _specs(leaves, tree, mesh, specs, options, local)
    shardings = [NamedSharding(mesh, spec) for spec in per_leaf]
    return leaves.rebuild(put(leaves.arrays, shardings, local))


def _specs(
    leaves: Walk, tree: Any, mesh: AnyMesh, specs: Any, options: Mapping[str, Any], local: bool
) -> list[PartitionSpec]:
    specs = specs_on_mesh(specs, mesh)
    if not local:
        return resolve_specs("shard", leaves, tree, mesh, specs, options)
    if specs is None or options:
        raise PartitionError(
            "local=True needs specs: a part does not tell the whole shape.", option="local"
        )
    per_leaf = match_specs(leaves, specs)
    check_parts("shard", leaves.arrays, per_leaf, mesh)
    return per_leaf


def shard_like(
    state: Any, params: Any, mesh: AnyMesh | None = None, *, unmatched: str = "error"
) -> Any:
    """Place optimizer state beside the parameters it follows, as `partition_like` decides.

    The parameters must be placed already; `mesh` is theirs unless it is given. Leaves that look
    like parameters but follow none are refused, or replicated with `unmatched="replicate"`. Under
    `jit`, where nothing is placed, use `partition_like`. Raises `PartitionError` as `shard` does.

    >>> import jax, optax, meshwright as mw
    >>> params = mw.shard({"w": jax.numpy.ones((64, 64))}, mw.mesh("fsdp:8"))
    >>> state = mw.shard_like(optax.adam(1e-3).init(params), params)
    >>> state[0].mu["w"].sharding == params["w"].sharding
    True
    """
    state_leaves, param_leaves = walk(state), walk(params)
    refuse("shard_like", tie_problems(state))
    refuse("shard_like", [text for leaf in param_leaves.arrays if (text := unplaced_problem(leaf))])
    specs = [leaf.value.sharding.spec for leaf in param_leaves.arrays]
    meshes = [leaf.value.sharding.mesh for leaf in param_leaves.arrays]
    if not meshes and mesh is None:
        raise PartitionError("the parameters hold no arrays, so there is nothing to follow.")
    if any(other != meshes[0] for other in meshes):
        raise PartitionError("the parameters stand on several meshes; call shard_like for each.")
    target = meshes[0] if mesh is None else mesh
    per_leaf = follow_params(state_leaves.arrays, param_leaves.arrays, specs, unmatched)
    check_specs("shard_like", state_leaves.arrays, per_leaf, target)
    check_values(state_leaves.arrays, what="shard_like")
    shardings = [NamedSharding(target, spec) for spec in per_leaf]
    return state_leaves.rebuild(put(state_leaves.arrays, shardings, what="shard_like"))


def put(
    leaves: Sequence[Leaf],
    shardings: Sequence[NamedSharding],
    local: bool = False,
    what: str = "shard",
) -> list[Any]:
    """Place checked leaves: one call for all that a single process holds."""
    check_constrained(what, leaves, shardings)
    # By identity: an array that the tree holds twice is placed once, and stays one.
    pairs = list(zip(leaves, shardings, strict=True))
    keys = [(id(leaf.value), sharding) for leaf, sharding in pairs]
    return for_distinct(keys, pairs, lambda distinct: _place_each(distinct, local))


def _place_each(pairs: Sequence[tuple[Leaf, NamedSharding]], local: bool) -> list[Any]:
    if pairs and isinstance(pairs[0][1].mesh, AbstractMesh):
        return [_abstract(leaf, sharding) for leaf, sharding in pairs]
    results: list[Any] = [None] * len(pairs)
    # One call of `device_put` for many arrays takes a fraction of a call for each.
    together = []
    for place, (leaf, sharding) in enumerate(pairs):
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            results[place] = _abstract(leaf, sharding)
        elif isinstance(leaf.value, FromCallback):
            results[place] = make_from_callback(leaf, sharding)
        elif local:
            results[place] = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
                sharding, in_native_order(leaf.value)
            )
        elif not sharding.is_fully_addressable:
            results[place] = _across(leaf, sharding)
        else:
            together.append(place)
    shardings = [pairs[place][1] for place in together]
    values = [_source(pairs[place][0].value, pairs[place][1]) for place in together]
    for place, value in zip(together, jax.device_put(values, shardings), strict=True):
        results[place] = value
    return results


def _source(value: Any, sharding: NamedSharding) -> Any:
    """Return the value to pass to `device_put`; for an array on one CPU device, its host memory.

    JAX cuts an array on a device by a program per array, three times slower than slicing; and
    what it does not cut it shares, so that donating one array would delete the other.
    """
    if not isinstance(value, jax.Array):
        return in_native_order(value)
    if is_key(value.dtype):
        return value
    here: set[Any] = value.sharding.device_set
    if len(here) > 1 or here == sharding.device_set:
        return value
    (device,) = here
    return np.asarray(value) if device.platform == "cpu" else value


def _abstract(leaf: Leaf, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        leaf.shape, kept_dtype(leaf), sharding=sharding
    )


def _across(leaf: Leaf, sharding: NamedSharding) -> Any:
    """Make a global array from one that every process has whole."""
    value = leaf.value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return reshard(value, sharding.mesh, sharding.spec)
    keys = isinstance(value, jax.Array) and is_key(leaf.dtype)
    host = value if keys else in_native_order(np.asarray(value))
    # The dtype is for processes that hold no piece and so have nothing to read it from.
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: host[index], dtype=kept_dtype(leaf)
    )


# Arrays from `FromCallback`s: the function is called for what this process holds, and checked.


def make_from_callback(leaf: Leaf, sharding: NamedSharding) -> Any:
    """Make the array, its pieces checked as they come; a piece of several devices only once."""
    local, kept = sharding.shard_shape(leaf.shape), kept_dtype(leaf)
    pieces: dict[Box, Any] = {}

    def piece(index: Any) -> Any:
        box = box_at(index, leaf.shape)
        if box not in pieces:
            pieces[box] = _call_and_check(leaf, index, local, kept)
        return pieces[box]

    return jax.make_array_from_callback(leaf.shape, sharding, piece, dtype=kept)


def _call_and_check(leaf: Leaf, index: Any, local: tuple[int, ...], kept: Any) -> Any:
    try:
        piece = leaf.value.fn(index)
    except Exception as error:
        error.add_note(f"{leaf.where}: raised by the function for the piece at {short(index)}.")
        raise
    shape, dtype = getattr(piece, "shape", None), getattr(piece, "dtype", None)
    if shape != local or native(dtype) not in (kept, native(leaf.dtype)):
        raise PartitionError(
            f"{leaf.where}: the function gave {dtype} {shape} for the piece at {short(index)}, "
            f"which is {leaf.dtype} {local}. Return that part of the array."
        )
    outside = does_not_fit(piece, kept)
    if outside:
        raise PartitionError(f"{leaf.where}: the piece at {short(index)} {outside}")
    return in_native_order(piece)


# `FromCallback`: an array that a function makes piece by piece, where the pieces are needed.


@dataclasses.dataclass(frozen=True, repr=False)
class FromCallback:
    """An array that is only made where it is needed: `fn(index)` gives the piece at `index`.

    Stands in a tree like an array; `shard` calls `fn` for the pieces of this process alone, once
    for each. `index` is a tuple of slices, one per dim.

    >>> import jax, numpy as np, meshwright as mw
    >>> rows = np.arange(64.0, dtype="float32").reshape(16, 4)
    >>> lazy = mw.FromCallback(rows.shape, rows.dtype, lambda index: rows[index])
    >>> mw.shard(lazy, mw.mesh("fsdp:8"), jax.P("fsdp")).addressable_shards[1].data[0]
    Array([ 8.,  9., 10., 11.], dtype=float32)
    """

    shape: tuple[int, ...]
    dtype: Any
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not is_shape(self.shape):
            raise PartitionError(
                f"FromCallback: {short(self.shape)} is not a shape, e.g. (1024, 4096)."
            )
        if not callable(self.fn):
            raise PartitionError(
                f"FromCallback: {short(self.fn)} is not a function. Pass one that takes an index "
                "and returns that part of the array."
            )
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))
        object.__setattr__(self, "dtype", _read_dtype(self.dtype))

    def __repr__(self) -> str:
        return short_repr(self, f"{self.dtype}{list(self.shape)}")


def _read_dtype(dtype: Any) -> Any:
    try:
        if dtype is not None:
            return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    except TypeError:
        pass
    raise PartitionError(f"FromCallback: {short(dtype)} is not a dtype, e.g. 'float32'.")


# `local=True`: every process passes its part of an array, which must divide into equal pieces.


def check_parts(
    what: str, leaves: Sequence[Leaf], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> None:
    """Refuse parts that cannot be cut as their specs say; names every one of this process."""
    sizes = mesh_axes(mesh)
    pairs = zip(leaves, specs, strict=True)
    refuse(what, [text for leaf, spec in pairs for text in _problems(leaf, spec, mesh, sizes)])


def _problems(
    leaf: Leaf, spec: PartitionSpec, mesh: AnyMesh, sizes: Mapping[str, int]
) -> Iterator[str]:
    if not isinstance(leaf.value, (jax.Array, np.ndarray, np.generic)):  # it tells its whole shape
        yield from spec_problems(leaf.path, leaf.shape, spec, sizes)
        return
    # A part says nothing of the whole dims, which is what must divide there: zero always does.
    wrong = list(spec_problems(leaf.path, (0,) * len(leaf.shape), spec, sizes))
    yield from wrong
    if wrong or isinstance(mesh, AbstractMesh) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        return
    for dim, (size, entry) in enumerate(zip(leaf.shape, spec, strict=False)):
        pieces = _pieces_here(mesh, entry)
        axes = ", ".join(entry_axes(entry))
        if pieces is None:
            yield (
                f"{leaf.where}: dim {dim}: axes {axes} do not give every process an equal part of "
                "its own. Put them first in the mesh, or pass the whole array without local=True."
            )
        elif pieces and size % pieces:
            yield (
                f"{leaf.where}: dim {dim}: this process's part has size {size}, not divisible by "
                f"the {pieces} pieces it holds (axes {axes}). Pad it to "
                f"{-(-size // pieces) * pieces}, or drop the last batch."
            )


@functools.lru_cache(maxsize=256)
def _pieces_here(mesh: Any, entry: Any) -> int | None:
    """Return how many pieces of a dim this process holds, or None, as `share` says."""
    count = shard_count(entry, mesh_axes(mesh))
    # Where a dim of as many elements as pieces would lie, one piece each.
    held: dict[int, set[int]] = collections.defaultdict(set)
    cut = NamedSharding(mesh, PartitionSpec(entry))  # type: ignore[no-untyped-call]
    indices: dict[Any, Any] = dict(cut.devices_indices_map((count,)))
    for device, (side,) in indices.items():
        held[device.process_index].add(side.start or 0)
    return share(held, count, jax.process_index())


def share(held: Mapping[int, Collection[int]], count: int, process: int) -> int | None:
    """Return how many of `count` pieces a process holds; None if parts overlap or are not equal.

    >>> share({0: {0, 1}, 1: {2, 3}}, 4, process=0), share({0: {0, 1}, 1: {1, 2}}, 3, process=0)
    (2, None)
    """
    parts = {frozenset(pieces) for pieces in held.values()}
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != count:
        return None
    return len(held.get(process, ()))


# Can these values be placed as they are? Tracers, deleted arrays and narrowing are refused.

Narrow = Literal["error", "convert"]
# The functions with an option `narrow`, and how it is given; messages of others do not name it.
_HELPERS = dict.fromkeys(("shard_array", "auto_shard_pytree"), "make the helper with")
_NARROWING = {"shard": "pass", "init": "pass", **_HELPERS}


def check_narrow(narrow: object) -> None:
    if not isinstance(narrow, str) or narrow not in ("error", "convert"):
        raise PartitionError(
            f"narrow: {short(narrow)} is not 'error' or 'convert'.", option="narrow"
        )


def check_values(leaves: Sequence[Leaf], narrow: Narrow = "error", what: str = "shard") -> None:
    """Refuse what cannot be placed, all at once; `what` is the function that was called."""
    refuse(what, value_problems(leaves, narrow, what))


def value_problems(leaves: Sequence[Leaf], narrow: Narrow, what: str) -> list[str]:
    """Say which leaves are tracers, deleted arrays, no arrays, or would be narrowed by JAX."""
    checked = ((leaf, _problem(leaf, narrow, what)) for leaf in leaves)
    return [f"{leaf.where}: {problem}" for leaf, problem in checked if problem]


def _problem(leaf: Leaf, narrow: Narrow, what: str) -> str:
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        return (
            "a tracer. Under jit use jax.lax.with_sharding_constraint with the specs of "
            "partition, or jit's in_shardings."
        )
    if isinstance(value, jax.Array):
        gone = value.is_deleted()
        return "the array was deleted or donated. Use the one it went into." if gone else ""
    if isinstance(value, jax.ShapeDtypeStruct):
        return ""
    if not isinstance(value, (np.ndarray, np.generic, FromCallback)):
        return (
            f"{type(value).__name__} has a shape but is no array. Read it with numpy.asarray(x), "
            "or in pieces with FromCallback(x.shape, x.dtype, lambda index: x[index]); a shape "
            "alone is a jax.ShapeDtypeStruct."
        )
    kept = kept_dtype(leaf)
    if kept is None:
        return (
            f"{type(value).__name__} of {leaf.dtype} cannot be placed. "
            "Make it an array of numbers first."
        )
    if kept == native(leaf.dtype):
        return ""
    if narrow == "convert":
        return does_not_fit(value, kept)
    hint = f", or {_NARROWING[what]} narrow='convert'" if what in _NARROWING else ""
    convert = "Convert it, enable" if hint else "Convert it, or enable"
    return f"{leaf.dtype} would become {kept}. {convert} jax_enable_x64{hint}."


def kept_dtype(leaf: Leaf) -> Any:
    """Return the dtype a leaf has once placed; None for text, objects and masked arrays."""
    if isinstance(leaf.value, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf.dtype
    # JAX refuses masked arrays one at a time; here they are named with all other bad leaves.
    if not _holds_numbers(leaf.dtype) or isinstance(leaf.value, np.ma.MaskedArray):
        return None
    return jax.dtypes.canonicalize_dtype(native(leaf.dtype), allow_extended_dtype=True)


@functools.lru_cache(maxsize=256)
def _holds_numbers(dtype: Any) -> bool:
    kinds = (np.number, np.bool_, jax.dtypes.prng_key)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def does_not_fit(value: Any, kept: Any) -> str:
    """Say what is lost when integers of numpy become `kept`, which has fewer bits; or nothing."""
    # JAX wraps integers around without a word; floats only lose digits, as was asked for.
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "iu":
        return ""
    if native(value.dtype) == kept or not value.size:
        return ""
    low, high, room = int(value.min()), int(value.max()), np.iinfo(kept)
    if room.min <= low and high <= room.max:
        return ""
    return (
        f"holds integers from {low} to {high}, and {kept} only those from {room.min} to "
        f"{room.max}. Enable jax_enable_x64, or take others."
    )


def native(dtype: Any) -> Any:
    """Return a dtype in the byte order of this machine."""
    return dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("=")


def in_native_order(value: Any) -> Any:
    """Return numpy's arrays in the byte order of this machine, which is all that JAX takes."""
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative:
        return np.asarray(value, native(value.dtype))
    return value
