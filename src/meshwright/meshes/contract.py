"""`create_mesh` and `parse_mesh_from_string`: the interface of an older library, kept exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright import _compat
from meshwright.errors import MeshError, SpecError, listing, near, short
from meshwright.meshes.build import (
    AXIS_TYPES,
    from_placement,
    placement_of,
    prepare,
    warn_idle,
)
from meshwright.meshes.targets import live_devices, target
from meshwright.spec import MeshSpec
from meshwright.spec.checks import check_distinct, check_flag, check_list, check_name

DEFAULT_DIMS = (1, -1, 1, 1, 1)
DEFAULT_NAMES = ("dp", "fsdp", "ep", "tp", "sp")
BACKENDS = ("cpu", "gpu", "tpu")

_MOST_MESHES = 256
_meshes: dict[Any, Mesh] = {}


def create_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS,
    axis_names: Sequence[str] = DEFAULT_NAMES,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: Any = None,
) -> Mesh:
    """A mesh over all devices of a backend; the same request gives the same mesh object.

    -1 takes the devices that are left. `dcn_mesh_dims` says how each axis is spread over the
    slow network (worked out when missing), `use_jax` builds the meshes of a single host with
    `jax.make_mesh`. `mesh(...)` is the modern spelling.

    >>> import meshwright as mw
    >>> dict(mw.create_mesh((2, -1), ("dp", "tp")).shape)
    {'dp': 2, 'tp': 4}
    """
    _check_backend(backend)
    sort_slices = check_flag("should_sort_granules_by_key", should_sort_granules_by_key)
    allow_split = check_flag("allow_split_physical_axes", allow_split_physical_axes)
    use_jax = check_flag("use_jax", use_jax)
    dims, names = check_list("axis_dims", axis_dims), check_list("axis_names", axis_names)
    dcn = None if dcn_mesh_dims is None else check_list("dcn_mesh_dims", dcn_mesh_dims)
    try:
        key = (
            _compat.client_of(backend),
            tuple(dims),
            tuple(names),
            None if dcn is None else tuple(dcn),
            sort_slices,
            allow_split,
            use_jax,
            tuple(axis_types) if isinstance(axis_types, list) else axis_types,
        )
        found = _meshes.get(key)
    except (TypeError, RuntimeError, ValueError):  # unhashable or unknown: the checks below say
        key, found = None, None
    if found is not None and _exactly_ints(dims, dcn):
        return found
    spec = MeshSpec.parse(dims, names=names).with_types(axis_types)
    hardware = target(None, live_devices(backend), 1, sort_slices)
    if use_jax and hardware.num_slices == 1 and hardware.num_hosts == 1:
        resolved, part = prepare(spec, hardware, dcn)
        warn_idle(resolved, part, hardware)
        devices = hardware.devices or ()
        built = _with_jax(resolved, [devices[i] for i in sorted(part.index.flat)])
    else:
        placed = placement_of(spec, hardware, dcn, allow_split=allow_split)
        warn_idle(placed.spec, placed.topology, hardware)
        built = from_placement(placed)
    if key is not None and built.size == hardware.num_devices:  # a part warns every time
        if len(_meshes) >= _MOST_MESHES:
            _meshes.clear()
        _meshes[key] = built
    return built


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """A mesh from `"dp:2,tp:4"` (named) or `"2,4"` (positional, in the order of `names`).

    >>> import meshwright as mw
    >>> mw.parse_mesh_from_string("2,4", ["data", "model"]).axis_names
    ('data', 'model')
    """
    if not isinstance(axis_dims, str):
        raise SpecError(f"axis_dims: {short(axis_dims)} is not a string such as '2,4'.")
    names = [check_name(name) for name in check_list("names", names)]
    check_distinct(names)
    if ":" in axis_dims or "=" in axis_dims:
        spec = MeshSpec.parse(axis_dims)
        for name in spec.names:
            if name not in names:
                known = listing(short(n, 20) for n in names)
                raise SpecError(
                    f"unknown axis {name!r} in {short(axis_dims)}: names are {known}."
                    f"{near(name, names)}"
                )
        missing = [name for name in names if name not in spec.names]
        if missing:
            raise SpecError(
                f"{short(axis_dims)} lacks {listing(short(n, 20) for n in missing)}. "
                "Give every name a size."
            )
    else:
        spec = MeshSpec.parse(axis_dims, names=names)
    dims: list[Any] = [a.fast if a.slow is None else (a.slow, a.fast) for a in spec.axes]
    return create_mesh(dims, spec.names, axis_types=spec.types)


def _exactly_ints(*values: Sequence[Any] | None) -> bool:
    """`True == 1 == 1.0` as a cache key; only integers may use it."""
    return all(type(size) is int for sizes in values if sizes is not None for size in sizes)


def _check_backend(backend: object) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        hint = near(backend, BACKENDS) if isinstance(backend, str) else ""
        raise MeshError(f"backend: {short(backend)} is not one of {', '.join(BACKENDS)}.{hint}")


def _with_jax(spec: MeshSpec, devices: list[Any]) -> Mesh:
    types = tuple(AXIS_TYPES[kind] for kind in spec.types)
    try:
        return _compat.make_mesh(spec.sizes, spec.names, types, devices)
    except Exception as error:
        reason = str(error).split("\n")[0][:200]
        raise MeshError(
            f"jax.make_mesh cannot build '{spec}' ({type(error).__name__}: {reason}). "
            "Leave use_jax out to place it here."
        ) from error
