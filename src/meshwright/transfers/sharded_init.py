"""`init`: run an initialiser so that no array ever exists whole on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.errors import PartitionError, listing, near, short
from meshwright.partitioning.decide import Options, PartitionOptions, resolve_specs
from meshwright.transfers.device_put import Narrow, check_narrow, in_native_order, value_problems
from meshwright.trees.specs import check_constrained, mesh_axes, specs_on_mesh
from meshwright.trees.walk import Leaf, Walk, refuse, tie_problems, walk


def init(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    specs: Any = None,
    narrow: Narrow = "error",
    **options: Unpack[PartitionOptions],
) -> Any:
    """Compute `fn(*args)` straight into its shardings.

    The result's shapes are known without running `fn`. Leaves that are not arrays come back as `fn`
    returns them.

    Args:
      fn: what makes the tree: parameters, a module, an optimizer state.
      *args: its arguments. Arrays are traced; all else (sizes, configurations, functions) is handed
        to `fn` as it is.
      mesh: the mesh to compute on.
      specs: a tree of specs for the result; by default `partition` decides, with its `options`.
      narrow: `"convert"` converts 64-bit values of NumPy, as `shard` does; otherwise they are
        refused.

    Raises:
      PartitionError: with every leaf that is wrong, before anything is computed.

    >>> import jax, meshwright as mw
    >>> normal = lambda key: {"w": jax.random.normal(key, (256, 256))}
    >>> w = mw.init(normal, jax.random.key(0), mesh=mw.mesh("fsdp:8"))["w"]
    >>> w.addressable_shards[0].data.shape
    (32, 256)
    """
    initialiser = _trace(fn, args, mesh, specs, narrow, options)
    with _mesh_of_its_own(mesh):
        compute = jax.jit(initialiser.arrays, out_shardings=initialiser.shardings)
        return initialiser.leaves.rebuild(compute(initialiser.values))


def init_shapes(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    specs: Any = None,
    narrow: Narrow = "error",
    **options: Unpack[PartitionOptions],
) -> Any:
    """Return shapes with shardings in place of what `init` would compute; nothing runs."""
    initialiser = _trace(fn, args, mesh, specs, narrow, options)
    pairs = zip(initialiser.shapes, initialiser.shardings, strict=True)
    return initialiser.leaves.rebuild(
        [_shape_struct(shape.shape, shape.dtype, sharding=sharding) for shape, sharding in pairs]
    )


@dataclasses.dataclass(frozen=True)
class _Initialiser:
    """A function that has been traced: its arrays alone, of `values`, their shapes and places.

    `leaves` is the tree that it returns, with shapes for the arrays.
    """

    arrays: Callable[[Sequence[Any]], list[Any]]
    values: list[Any]
    shapes: list[Any]
    leaves: Walk
    shardings: list[NamedSharding]


_shape_struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct


def _trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    specs: Any,
    narrow: Narrow,
    options: PartitionOptions,
) -> _Initialiser:
    """Check everything, and choose shardings for the shapes of the result. Nothing is computed."""
    if not callable(fn):
        raise PartitionError(f"init: {short(fn)} is not a function.")
    check_narrow(narrow)
    _check_options(options)
    mesh_axes(mesh)
    if not isinstance(mesh, Mesh):
        raise PartitionError(
            "init computes: it needs a Mesh of devices, not an AbstractMesh.", option="mesh"
        )
    specs = specs_on_mesh(specs, mesh)
    given = _arrays_of(args)
    refuse("init", list(_argument_problems(given.arrays, mesh, narrow)))
    # What `fn` returned, once for each time it was traced; the first is looked at.
    trees: list[Any] = []

    def arrays(traced: Sequence[Any]) -> list[Any]:
        """Return the arrays alone; the tree they stand in, with shapes for them, goes to `trees`.

        A jitted function returns only arrays, and `fn` may return other leaves beside them.
        """
        tree = fn(*given.rebuild(traced))
        results = walk(tree)
        refuse("init", [*tie_problems(tree), *_result_problems(results.arrays, narrow)])
        shapes = [_shape_struct(leaf.shape, leaf.dtype) for leaf in results.arrays]
        trees.append(results.rebuild(shapes))
        return [in_native_order(leaf.value) for leaf in results.arrays]

    values = [in_native_order(leaf.value) for leaf in given.arrays]
    # `fn` is traced twice: its shapes must be known before shardings can be chosen for them, and
    # jit takes shardings before it traces.
    with _mesh_of_its_own(mesh):
        with _explained():
            shapes = jax.eval_shape(arrays, values)
        leaves = walk(trees[0])
        per_leaf = resolve_specs("init", leaves, trees[0], mesh, specs, options)
        shardings = [NamedSharding(mesh, spec) for spec in per_leaf]
        check_constrained("init", leaves.arrays, shardings)
    return _Initialiser(arrays, values, shapes, leaves, shardings)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options before `fn` is called.

    An argument that was meant for `fn`, by name, would be missed there first.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise PartitionError(
                f"init: no option {name!r}.{near(name, known)} Bind an argument of the function "
                f"with functools.partial(fn, {name}=...). Options: specs, narrow, "
                f"{listing(known, 12)}.",
                option=name,
            )
    Options(**options)


def _arrays_of(args: tuple[Any, ...]) -> Walk:
    """Walk the arguments; only leaves that can be traced count as arrays."""
    given = walk(args)
    traced = [leaf for leaf in given.arrays if isinstance(leaf.value, (jax.Array, np.ndarray))]
    named = tuple(leaf._replace(path=f"argument {leaf.path}") for leaf in traced)
    return dataclasses.replace(given, arrays=named)


def _argument_problems(leaves: Sequence[Leaf], mesh: Mesh, narrow: Narrow) -> Iterator[str]:
    here = [leaf for leaf in leaves if not isinstance(leaf.value, jax.core.Tracer)]
    yield from value_problems(here, narrow, "init")
    for leaf in here:
        value = leaf.value
        if isinstance(value, jax.Array) and not value.is_deleted() and value.committed:
            if not _fits_mesh(value.sharding, mesh):
                devices: set[Any] = value.sharding.device_set
                there = listing(sorted(device.id for device in devices), 4)
                yield (
                    f"{leaf.where}: lies on devices {there}, not on the {mesh.size} of the mesh in "
                    "their order. Move it first: reshard(x, mesh, PartitionSpec())."
                )


def _fits_mesh(sharding: Any, mesh: Mesh) -> bool:
    """Whether a program on the mesh takes an array: the same devices, in the same order."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh == mesh or _same_devices(sharding.mesh, mesh)
    return bool(sharding.device_set == set(mesh.devices.flat))


def _same_devices(first: Mesh, second: Mesh) -> bool:
    return np.array_equal(first.devices.ravel(), second.devices.ravel())


def _result_problems(leaves: Sequence[Leaf], narrow: Narrow) -> Iterator[str]:
    """Yield what is wrong with results that are no tracers: constants, and what is no array."""
    others = [leaf for leaf in leaves if not isinstance(leaf.value, jax.core.Tracer)]
    arrays = [
        leaf for leaf in others if isinstance(leaf.value, (jax.Array, np.ndarray, np.generic))
    ]
    yield from value_problems(arrays, narrow, "init")
    for leaf in others:
        if not isinstance(leaf.value, (jax.Array, np.ndarray, np.generic)):
            yield f"{leaf.where}: {type(leaf.value).__name__} holds no values. Return an array."


@contextlib.contextmanager
def _mesh_of_its_own(mesh: Mesh) -> Iterator[None]:
    """Set `mesh`, if the caller has set one of other devices: jit would take that for its own."""
    try:
        around = jax.sharding.get_mesh()
    except ValueError:  # under jit, where none can be set
        yield
        return
    if around.empty or _same_devices(around, mesh):
        yield
    else:
        with jax.set_mesh(mesh):
            yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add words to errors of the caller's function that only tracing it can raise."""
    try:
        yield
    except PartitionError:
        raise
    except ValueError as error:
        text = str(error)
        if "flax" in sys.modules and ("out_sharding" in text or "Resource axis" in text):
            raise PartitionError(
                "init: Flax NNX takes the names of a variable for axes of a mesh "
                f"({short(text, 120)}). They are logical: call init within "
                "nnx.use_eager_sharding(False)."
            ) from error
        raise
    except TypeError as error:  # JAX's errors about tracers are such
        error.add_note(
            "meshwright.init traces the function: arrays among its arguments have no values yet. "
            "Pass sizes as Python numbers, or bind them with functools.partial."
        )
        raise
