"""`create_mesh`, CPU meshes, host shares and `DeviceMeshManager`: older libraries' interfaces.

Names, signatures, defaults and error types are those of the older libraries, so that their users
change an import and nothing else. The meshes are built by `meshwright.meshes`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshwright import _compat
from meshwright._checks import check_distinct, check_flag, check_integer, check_list, check_name
from meshwright._text import plural
from meshwright.errors import BackendError, MeshError, SpecError, listing, near, short
from meshwright.meshes.build import AXIS_TYPES, AxisTypesLike, build_mesh
from meshwright.meshes.devices import live_devices, target_topology
from meshwright.placement.placer import (
    more_devices_hint,
    placement_of,
    resolve_on,
    warn_idle,
    warn_names,
)
from meshwright.spec.mesh_spec import MeshSpec

DEFAULT_DIMS = (1, -1, 1, 1, 1)
DEFAULT_NAMES = ("dp", "fsdp", "ep", "tp", "sp")
BACKENDS = ("cpu", "gpu", "tpu")

# Meshes by request: the contract promises the same object for the same request on the same
# devices. Cleared when full; JAX interns meshes, so the objects stay the same even then.
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
    axis_types: AxisTypesLike = None,
) -> Mesh:
    """Create a mesh over all devices of a backend; equal requests give the same mesh object.

    `mesh(...)` says the same in one string.

    Args:
      axis_dims: a size for each axis; -1, at most once, takes the devices that are left.
      axis_names: a name for each axis.
      dcn_mesh_dims: how each axis is spread over DCN; searched when missing.
      should_sort_granules_by_key: the same order of slices or hosts in every process.
      allow_split_physical_axes: one torus direction may serve several mesh axes.
      backend: `"cpu"`, `"gpu"`, `"tpu"`, or `None` for JAX's default.
      use_jax: build the meshes of a single host with `jax.make_mesh`.
      axis_types: a word (`"auto"`, `"explicit"`, `"manual"`) or an `AxisType` for all axes, alone
        or in a list, or a list of one per axis.

    Raises:
      SpecError: for a request that is wrong; this and the others are `ValueError`s.
      BackendError: for a backend that is not here; a `RuntimeError` too.
      PlacementError: where no layout exists.

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
    if isinstance(axis_types, (list, tuple)) and len(axis_types) == 1:
        axis_types = axis_types[0]
    key: tuple[Any, ...] | None
    try:
        key = (
            _compat.client_of(backend),  # stands for the devices: new after a backend reset
            tuple(dims),
            tuple(names),
            None if dcn is None else tuple(dcn),
            sort_slices,
            allow_split,
            use_jax,
            tuple(axis_types) if isinstance(axis_types, list) else axis_types,
        )
        cached = _meshes.get(key)
    except (TypeError, RuntimeError, ValueError):  # unhashable or unknown: the checks below say
        key, cached = None, None
    if cached is not None and _exactly_ints(dims, dcn):
        return cached
    spec = MeshSpec.parse(dims, names=names).with_types(axis_types)
    warn_names(spec)
    hardware = target_topology(None, live_devices(backend), 1, sort_slices)
    if use_jax and hardware.num_slices == 1 and hardware.num_hosts == 1:
        resolved, part = resolve_on(spec, hardware, dcn)
        devices = hardware.devices or ()
        built = _with_jax(resolved, [devices[i] for i in sorted(part.index.flat)])
    else:
        placed = placement_of(spec, hardware, dcn, allow_split=allow_split)
        resolved, part = placed.spec, placed.topology
        built = build_mesh(placed)
    warn_idle(resolved, part, hardware)
    if key is not None and built.size == hardware.num_devices:  # a part warns every time
        if len(_meshes) >= _MOST_MESHES:
            _meshes.clear()
        _meshes[key] = built
    return built


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Create a mesh from a string of sizes.

    `axis_dims` is `"dp:2,tp:4"` (named) or `"2,4"` (positional, in the order of `names`).

    Raises `SpecError`, a `ValueError`, when a name is unknown or missing, or the counts differ.

    >>> import meshwright as mw
    >>> mw.parse_mesh_from_string("2,4", ["data", "model"]).axis_names
    ('data', 'model')
    """
    if not isinstance(axis_dims, str):
        raise SpecError(
            f"axis_dims: {short(axis_dims)} is not a string such as '2,4'.", option="axis_dims"
        )
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
    """Whether a cache hit can be trusted: `True == 1 == 1.0`, but only integers are sizes."""
    return all(type(size) is int for sizes in values if sizes is not None for size in sizes)


def _check_backend(backend: object) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        hint = near(backend, BACKENDS) if isinstance(backend, str) else ""
        raise MeshError(
            f"backend: {short(backend)} is not one of {', '.join(BACKENDS)}.{hint}",
            option="backend",
        )


def _with_jax(spec: MeshSpec, devices: list[Any]) -> Mesh:
    types = tuple(AXIS_TYPES[kind] for kind in spec.types)
    try:
        return _compat.make_mesh(spec.sizes, spec.names, types, devices)
    except Exception as error:  # ValueError or NotImplementedError, depending on the hardware
        reason = str(error).split("\n")[0][:200]
        raise MeshError(
            f"jax.make_mesh cannot build '{spec}' ({type(error).__name__}: {reason}). "
            "Leave use_jax out to place it here.",
            option="use_jax",
        ) from error


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS, axis_names: Sequence[str] = DEFAULT_NAMES
) -> Mesh:
    """Create a mesh over all CPU devices of this host, whatever accelerator is present.

    `axis_dims` has a size for each of `axis_names`; -1, at most once, takes the devices that are
    left. Raises `BackendError`, a `RuntimeError` and a `ValueError`, where JAX has no CPU backend.

    >>> import meshwright as mw
    >>> mw.create_cpu_mesh().shape["fsdp"]
    8
    """
    dims, names = check_list("axis_dims", axis_dims), check_list("axis_names", axis_names)
    spec = MeshSpec.parse(dims, names=names)
    warn_names(spec)
    hardware = target_topology(None, _cpu_devices(), 1)
    placed = placement_of(spec, hardware)
    warn_idle(placed.spec, placed.topology, hardware)
    return build_mesh(placed)


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """Make the CPU the default device inside the context; yields it. Errors restore it too.

    >>> import meshwright as mw
    >>> with mw.force_cpu() as device:
    ...     device.platform
    'cpu'
    """
    device = _cpu_devices()[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """Make the CPU the default device and a CPU mesh the current one; yields the mesh.

    The mesh is current as under `with mesh:`: specs without a mesh mean its axes, in `jit` and
    out of it, and arrays made inside are on one CPU device and free to go to others. A mesh of
    `jax.set_mesh` is put aside until the end.

    >>> import jax, jax.numpy as jnp
    >>> import meshwright as mw
    >>> with mw.cpu_context() as mesh:
    ...     ones = jax.lax.with_sharding_constraint(jnp.ones(16), jax.P("fsdp"))
    >>> ones.sharding.mesh == mesh
    True
    """
    built = create_cpu_mesh()
    with force_cpu(), _without_set_mesh(), _compat.old_ambient_mesh(built):
        yield built


@contextlib.contextmanager
def _without_set_mesh() -> Iterator[None]:
    """Put aside the mesh of `jax.set_mesh`: where there is one, JAX looks at no other."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    # Apart from the `with` below, so that a ValueError of the caller's code stays itself.
    try:
        nothing = jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError as error:
        raise MeshError(
            f"cpu_context cannot put aside the mesh of jax.set_mesh here ({error}) "
            "Enter it around the jitted call."
        ) from error
    with nothing:
        yield


def _cpu_devices() -> list[Any]:
    try:
        return list(jax.local_devices(backend="cpu"))
    except RuntimeError as error:
        raise BackendError(
            "JAX runs without its CPU backend here. Add cpu to JAX_PLATFORMS, e.g. 'tpu,cpu', "
            "or leave it unset."
        ) from error


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int],
    total_devices: int | None = None,
    num_processes: int | None = None,
) -> tuple[int, ...]:
    """Compute the part of `global_mesh_shape` that one host holds; leading axes are split first.

    `total_devices` are the devices of this host, `num_processes` the number of hosts; JAX is asked
    for those that are left out. Raises `ValueError` when the mesh does not match the two.

    >>> calculate_host_mesh_shape((2, 4), total_devices=4, num_processes=2)
    (1, 4)
    >>> calculate_host_mesh_shape((3, 4), total_devices=6, num_processes=2)
    (3, 2)
    """
    shape = check_list("global_mesh_shape", global_mesh_shape)
    sizes = MeshSpec.parse(shape, names=[f"dim{d}" for d in range(len(shape))]).sizes
    local = _local_devices() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    local = check_integer("total_devices", local)
    processes = check_integer("num_processes", processes)
    if -1 in sizes:
        raise MeshError(
            f"mesh {sizes}: sizes must be known here, not -1.", option="global_mesh_shape"
        )
    if math.prod(sizes) != local * processes:
        raise MeshError(
            f"mesh {sizes} has {math.prod(sizes)} devices, but {processes} processes with {local} "
            f"local devices each have {local * processes}. Make the two equal.",
            option="global_mesh_shape",
        )
    # Leading axes take as many hosts as they can. The products match, so all hosts find a place.
    share, left = [], processes
    for size in sizes:
        hosts = math.gcd(size, left)
        share.append(size // hosts)
        left //= hosts
    return tuple(share)


def _local_devices() -> int:
    # As `jax.local_device_count()`, with an error of ours where JAX has no backend.
    this_process = jax.process_index()
    return sum(device.process_index == this_process for device in live_devices())


class DeviceMeshManager:
    """Meshes over a fixed set of devices, by default all of them.

    >>> import meshwright as mw
    >>> manager = mw.DeviceMeshManager()
    >>> manager.get_mesh_info(manager.create_device_mesh({"data": 2, "model": 4}))
    {'total_devices': 8, 'axes': {'data': 2, 'model': 4}}
    """

    def __repr__(self) -> str:
        return f"<DeviceMeshManager of {plural(self.num_devices, 'device')}>"

    def __init__(self, devices: Sequence[Any] | None = None):
        self.devices: list[Any] = (
            live_devices() if devices is None else check_list("devices", devices)
        )
        target_topology(None, self.devices, 1)  # refuse bad devices here, not at the first mesh

    @property
    def num_devices(self) -> int:
        """The number of its devices."""
        return len(self.devices)

    def create_device_mesh(
        self,
        mesh_shape: Mapping[str, int] | Sequence[tuple[str, int]],
        devices: Sequence[Any] | None = None,
    ) -> Mesh:
        """Create a mesh from `{"data": 2, "model": 1}` or pairs, on `devices` or its own.

        Fewer devices than there are is fine: a compact, host-aligned part is used. Raises
        `ValueError` ("Not enough devices ...") for more.
        """
        if isinstance(mesh_shape, str) or not isinstance(mesh_shape, (Mapping, list, tuple)):
            raise MeshError(
                f"mesh_shape: {short(mesh_shape)} is not a dict or a list of pairs.",
                option="mesh_shape",
            )
        spec = MeshSpec.parse(mesh_shape)
        chosen = self.devices if devices is None else check_list("devices", devices)
        hardware = target_topology(None, chosen, 1)
        warn_names(spec)
        known, here = math.prod(size for size in spec.sizes if size != -1), hardware.num_devices
        if known > here:
            least = "" if spec.size is not None else "at least "
            are = "is 1" if here == 1 else f"are {here}"
            raise MeshError(
                f"Not enough devices: '{spec}' needs {least}{known}, there {are}."
                f"{more_devices_hint(spec, hardware)}",
                option="mesh_shape",
            )
        return build_mesh(placement_of(spec, hardware))

    def create_data_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "data"
    ) -> Mesh:
        """Create a mesh of one axis over `num_devices`, or all."""
        return self.create_device_mesh([(axis_name, -1 if num_devices is None else num_devices)])

    def create_model_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "model"
    ) -> Mesh:
        """Create a mesh of one axis over `num_devices`, or all."""
        return self.create_device_mesh([(axis_name, -1 if num_devices is None else num_devices)])

    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Create a mesh of two axes, data outside and model inside."""
        return self.create_device_mesh(
            [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        )

    def get_mesh_info(self, mesh: Mesh) -> dict[str, Any]:
        """Return `{"total_devices": n, "axes": {name: size}}`."""
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise MeshError(f"{short(mesh)} is not a mesh.")
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}
