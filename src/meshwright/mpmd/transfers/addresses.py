"""Where a process listens: loopback, or an address that was given. Never all interfaces."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright.errors import TransferError, listing, short

LOOPBACK = "127.0.0.1"


def checked(address: Any) -> str:
    """An IP address, as JAX's servers want it.

    They listen on all interfaces when they do not understand an address: 'localhost' and
    '256.1.1.1' become 0.0.0.0 (jax 0.10 to 0.12). So only what is surely one passes.

    >>> checked("127.0.0.1"), checked("::1")
    ('127.0.0.1', '[::1]')
    """
    try:
        if not isinstance(address, str):
            raise ValueError
        found = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        raise TransferError(
            f"address {short(address)}: not an IP address. Use '{LOOPBACK}' inside a machine, or "
            "that of a network interface, such as '10.0.0.3'; the port is chosen."
        ) from None
    if found.is_unspecified or found.is_multicast:
        raise TransferError(
            f"address {address!r}: names no interface that others could reach. Use that of one, "
            f"or '{LOOPBACK}' inside a machine."
        )
    return f"[{found}]" if found.version == 6 else str(found)


def allow_puts(address: str = LOOPBACK) -> None:
    """Let `jax.device_put` cross processes, listening on `address` only; for `way="put"`.

    Called before `jax.distributed.initialize`, in every process. It sets JAX's own options
    `jax_cross_host_transfer_socket_address`, with a free port, since JAX tells others the port it
    was given, and `jax_cross_host_transport_addresses`, by default on all interfaces.
    """
    host = checked(address)
    if _compat.backends_started():
        raise TransferError(
            "allow_puts: JAX has already started its devices. Call it before "
            "jax.distributed.initialize and before any device is used."
        )
    options = {
        "jax_cross_host_transfer_socket_address": f"{host}:{_free_port(host)}",
        "jax_cross_host_transport_addresses": ",".join(_transports(host)),
    }
    for name, value in options.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _transports(host: str) -> list[str]:
    """Sockets for the data: inside a machine two carry as much as four, and wake fewer threads."""
    inside = ipaddress.ip_address(host.strip("[]")).is_loopback
    return [f"{host}:0"] * (2 if inside else 4)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host.strip("[]"), 0))
        except OSError as error:
            raise TransferError(
                f"address {host!r}: this machine has no such interface ({error.strerror}). "
                f"Use one that it has, or '{LOOPBACK}'."
            ) from None
        return int(probe.getsockname()[1])


def puts_problem() -> str:
    """Why `jax.device_put` would not cross processes here; nothing if it would."""
    address = _compat.cross_host_address()
    if address and not address.endswith(":0"):
        return ""
    if address:
        return f"jax_cross_host_transfer_socket_address is {address!r}; with port 0 nobody arrives"
    if _compat.puts_by_itself():
        return ""
    return "jax_cross_host_transfer_socket_address is not set"


def serve(address: str) -> Any:
    """A transfer server on this address, at a free port."""
    host = checked(address)
    _free_port(host)
    return _compat.transfer_server(f"{host}:0", _transports(host))


def exchange(
    client: Any, room: str, processes: Sequence[int], address: str, patience: float
) -> Mapping[int, str]:
    """The addresses of the other processes, once all have told theirs."""
    me = jax.process_index()
    client.key_value_set(f"{room}/{me}", address, allow_overwrite=True)
    end = time.monotonic() + patience
    found = {other: _get(client, f"{room}/{other}", end) for other in processes if other != me}
    absent = [process for process, there in found.items() if there is None]
    if absent:
        client.key_value_delete(f"{room}/{me}")
        raise TransferError(
            f"connect: process {listing(absent)} did not connect within {patience:g} s. Every "
            f"process of the link ({listing(processes)}) must, in the same order."
        )
    return {process: there for process, there in found.items() if there is not None}


def _get(client: Any, key: str, end: float) -> str | None:
    wait = max(200, int(1000 * (end - time.monotonic())))
    try:
        return str(client.blocking_key_value_get(key, wait))
    except jax.errors.JaxRuntimeError:
        return None
