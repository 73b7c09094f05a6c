"""Find what to build a mesh on: live devices, a device list, or hardware that is not there.

Named hardware gets the vendor compiler's own devices (compile-only: programs can be compiled for
them, not run) when that compiler is installed, and no devices otherwise. A name such as `cpu:8`
gets live CPU devices if there are enough.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright._checks import check_list, is_single_slice
from meshwright.errors import BackendError, MeshError, short
from meshwright.hardware.chips import gpu_target_config
from meshwright.hardware.live import check_devices
from meshwright.hardware.named import check_count
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology


def target_topology(on: Any, devices: Any, slices: int, sort_slices: bool = True) -> Topology:
    """Return the topology to build on, with devices whenever there are any to be had."""
    if on is not None and devices is not None:
        raise MeshError(
            "pass the devices once: either on=... or devices=..., not both.", option="devices"
        )
    if isinstance(devices, str):
        raise MeshError(
            f"devices: {short(devices)} is a name, not a list of devices. Pass it as on=...",
            option="devices",
        )
    on = devices if on is None else on
    if isinstance(on, str):
        named = read_topology(on, slices=check_count("slices", slices))
        return _with_cpu_devices(named) if named.chip.family == "cpu" else _named(on, int(slices))
    if isinstance(on, Topology):
        if not is_single_slice(slices):
            raise MeshError(
                f"{on.name} says its slices itself: topology(name, slices=...).", option="slices"
            )
        check_current(on.devices or ())
        return on if on.devices is not None else _with_compiler(on)
    if not is_single_slice(slices):
        raise MeshError(
            "slices goes with a hardware name; devices know their slices themselves.",
            option="slices",
        )
    if on is not None and (not hasattr(on, "__iter__") or isinstance(on, dict)):
        return read_topology(on)  # raises: its message says what can be read
    live = check_list("devices", live_devices() if on is None else on)
    check_devices(live)
    check_current(live)
    return _live(tuple(live), sort_slices)


def live_devices(backend: str | None = None) -> list[Any]:
    """Return `jax.devices(backend)`; raise `BackendError` when there is no such backend."""
    try:
        return list(jax.devices(backend))
    except (RuntimeError, AssertionError) as error:
        # jax 0.10 asserts where JAX_PLATFORMS names a platform that has no plugin.
        asked = getattr(jax.config, "jax_platforms", None)
        reason = str(error).split("\n")[0][:200] or f"JAX_PLATFORMS={asked}"
        which = "JAX" if backend is None else f"backend {backend!r}"
        raise BackendError(
            f"{which} has no devices here ({reason}). Use backend 'cpu', or set JAX_PLATFORMS=cpu "
            "before JAX starts.",
            option=None if backend is None else "backend",
        ) from error


def check_current(devices: Sequence[Any]) -> None:
    """Refuse devices of a backend that is gone; looking at one is enough, they share a client."""
    first = devices[0] if devices else None
    if first is None or not hasattr(first, "client") or _compat.is_compile_only(first):
        return
    if first.client is not _current_client(first.platform):
        raise MeshError(
            f"these {len(devices)} {first.platform} devices belong to a backend that was reset. "
            "Ask jax.devices() again and build the mesh from those."
        )


def _current_client(platform: str) -> Any:
    try:
        return _compat.client_of(platform)
    except RuntimeError:  # the platform itself is gone
        return None


# Cached, so that equal requests meet the same `Topology` object: placements are cached by it.


@functools.lru_cache(maxsize=64)
def _live(devices: tuple[Any, ...], sort_slices: bool) -> Topology:
    return read_topology(devices, sort_slices=sort_slices)


@functools.lru_cache(maxsize=64)
def _named(name: str, slices: int) -> Topology:
    return _with_compiler(read_topology(name, slices=slices))


def _with_compiler(topology: Topology) -> Topology:
    """Give a topology devices: the compiler's, or simulated ones for a CPU."""
    chip = topology.chip
    if chip.family == "cpu":
        return _with_cpu_devices(topology)
    if not _compat.compiler_installed(chip.family):
        return topology
    try:
        devices = _tpu_devices(topology) if chip.family == "tpu" else _gpu_devices(topology)
    except Exception as error:  # whatever a vendor's plugin raises
        reason = str(error).strip().split("\n")[0][:300]
        raise MeshError(
            f"{topology.name}: the {chip.family} compiler is installed but cannot describe this "
            f"hardware ({type(error).__name__}: {reason}). Use abstract_mesh(...), which asks no "
            "compiler."
        ) from error
    return attach(topology, devices)


def attach(topology: Topology, devices: Sequence[Any]) -> Topology:
    """Put devices into a named topology; the links are the name's, the order is the devices'.

    Devices do not say everything that a name does: whether a torus is twisted, for instance.
    """
    live = read_topology(devices)
    if live.shape != topology.shape or live.chip.name != topology.chip.name:
        raise MeshError(
            f"the devices form {live.name} {live.shape}, not {topology.name} {topology.shape}."
        )
    return dataclasses.replace(topology, index=live.index, host=live.host, devices=live.devices)


def _with_cpu_devices(topology: Topology) -> Topology:
    devices = live_devices("cpu")
    if len(devices) < topology.num_devices:
        return topology
    live = read_topology(devices[: topology.num_devices])
    # `cpu:4x2` means two hosts: eight devices of one process are no such machine.
    return live if live.shape == topology.shape else topology


def _tpu_devices(topology: Topology) -> list[Any]:
    slices = topology.num_slices
    sides = [axis.size for axis in topology.axes if axis.kind == "torus"]
    twisted = any(axis.twisted for axis in topology.axes)
    name = f"{topology.chip.name}:{'x'.join(map(str, sides))}" + ("_twisted" if twisted else "")
    options: dict[str, Any] = {"chips_per_host_bounds": _host_bounds(topology)}
    wraps = [axis.wraps for axis in topology.axes if axis.kind == "torus"]
    if len(sides) == 3 and all(wraps):
        options["wrap"] = (True, True, True)  # whole cubes: every side is a ring
    if slices > 1:
        options["num_slices"] = slices
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as JAX runs v4
    return _compat.compile_only_devices("tpu", name, **options)


def _host_bounds(topology: Topology) -> tuple[int, ...]:
    """Return the box of the first host, read off the grid, always with three sides."""
    torus = [d for d, axis in enumerate(topology.axes) if axis.kind == "torus"]
    at = tuple(slice(None) if d in torus else 0 for d in range(len(topology.shape)))
    first_host = topology.host[at] == topology.host.ravel()[0]
    sides = [
        int(first_host.any(axis=tuple(other for other in range(len(torus)) if other != d)).sum())
        for d in range(len(torus))
    ]
    return tuple(sides + [1] * (3 - len(sides)))


def _gpu_devices(topology: Topology) -> list[Any]:
    domains = topology.num_slices
    hosts = topology.num_hosts // domains
    per_host = topology.num_devices // topology.num_hosts
    return _compat.compile_only_devices(
        "cuda",
        "topology",
        target_config=gpu_target_config(topology.chip),
        topology=f"{domains}x{hosts}x{per_host}",
    )
