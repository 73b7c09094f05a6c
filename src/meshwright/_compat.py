"""The only door to private or experimental JAX. Each entry says why, and for which versions."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax

# What libtpu wants to hear before it describes hardware that is not there (libtpu 0.0.42 to
# 0.0.50): no metadata server, no worker list, no lock on the chip, and some accelerator (which
# one does not matter; without any it complains on stderr).
_LIBTPU_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


def compiler_installed(family: str) -> bool:
    """Whether the vendor's compiler can describe hardware of this family here."""
    modules = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
    try:
        return importlib.util.find_spec(modules[family]) is not None
    except (KeyError, ModuleNotFoundError):
        return False


def compile_only_devices(platform: str, name: str, **options: Any) -> list[Any]:
    """Devices of hardware that is not there, good for compiling.

    `jax.experimental.topologies` is experimental in jax 0.10 to 0.12 and has no public twin.
    """
    from jax.experimental import topologies

    with _environment(_LIBTPU_WITHOUT_TPU if platform == "tpu" else {}):
        return list(topologies.get_topology_desc(name, platform, **options).devices)


def is_compile_only(device: Any) -> bool:
    """Whether a device only exists for the compiler.

    The client's class is private (`CompileOnlyPyClient`, jax 0.10 to 0.12); its name is the
    only mark it carries.
    """
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


def client_of(backend: str | None) -> Any:
    """The client behind a backend: one object for the life of a backend, cheap to ask for.

    `jax.extend.backend` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import backend as extend_backend

    return extend_backend.get_backend(backend)


def make_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], types: tuple[Any, ...], devices: list[Any]
) -> jax.sharding.Mesh:
    """`jax.make_mesh`, whose first argument changed its name in 0.11.1: passed by position."""
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set what is unset, and take it back."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` starts, or None without it.

    Its key-value store has no public door in jax 0.10 to 0.12. Used to compare notes between
    processes without touching a device.
    """
    from jax._src import distributed

    return distributed.global_state.client
