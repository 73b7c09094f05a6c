"""`connect`: open a link of processes, by one of the transports.

Where a process listens: on loopback, or on the address it was given; never on all interfaces.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright import _compat
from meshwright._checks import check_seconds
from meshwright._processes import gather_texts
from meshwright.errors import TransferError, listing, near, short
from meshwright.transfers.cross_process_links import PullLink, PutLink
from meshwright.transfers.links import Link, LocalLink, message_number

Transport = Literal["auto", "local", "pull", "put"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
LOOPBACK = "127.0.0.1"
# Seconds between looks at whether a greeting has come: JAX offers no wait with a timeout.
_POLL_INTERVAL = 0.001


def connect(
    processes: Iterable[int] | None = None,
    *,
    transport: Transport = "auto",
    address: str = LOOPBACK,
    timeout: float = 60.0,
) -> Link:
    """Open a link between `processes`, by default all; each of them calls this, in one order.

    Args:
      processes: numbers of those that take part.
      transport: "local" inside one process, where nothing is opened; "pull", where receivers fetch
        by key, from a server in each process; "put", where all processes call `move` in one order
        (see `allow_puts`). "auto" is "local" in one process and "pull" in several.
      address: the only one that this process's server listens on.
      timeout: seconds to wait for the others.

    Raises:
      TransferError: if they do not come in time.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> first, last = (mw.mesh("tp:4", devices=jax.devices()[at:at + 4]) for at in (0, 4))
    >>> x = jax.device_put(np.ones((8, 8)), NamedSharding(first, P("tp")))
    >>> route = mw.transfers.route(x, NamedSharding(last, P(None, "tp")))
    >>> with mw.transfers.connect() as link:
    ...     link.send(route, (0, 1), x)
    ...     y = link.receive(route, (0, 1))
    >>> link.transport, y.sharding.shard_shape((8, 8))
    ('local', (8, 2))
    """
    members = _members(processes)
    if transport not in TRANSPORTS:
        hint = near(transport, TRANSPORTS) if isinstance(transport, str) else ""
        raise TransferError(
            f"transport {short(transport)}: use one of {listing(TRANSPORTS)}.{hint}",
            option="transport",
        )
    host = checked_address(address)
    timeout = check_seconds("connect: timeout", timeout, error=TransferError)
    if transport == "auto":
        transport = "pull" if len(members) > 1 else "local"
    if transport == "local":
        return _local(members)
    if transport == "put":
        return _put(members)
    return _pull(members, host, timeout)


def _members(processes: Iterable[int] | None) -> tuple[int, ...]:
    count, me = jax.process_count(), jax.process_index()
    try:
        members = tuple(sorted(set(range(count) if processes is None else processes)))
    except TypeError:
        members = ()
    strangers = [member for member in members if member not in range(count)]
    if not members or strangers:
        raise TransferError(
            f"connect: processes {short(processes)}: use numbers from 0 to {count - 1}.",
            option="processes",
        )
    if me not in members:
        raise TransferError(
            f"connect: process {me} is none of {listing(members)}. Only they call connect.",
            option="processes",
        )
    return members


def _local(members: Sequence[int]) -> Link:
    if len(members) > 1:
        raise TransferError(
            f"transport='local' stays inside a process, this link is of {listing(members)}. Use "
            "transport='pull', or processes=[jax.process_index()].",
            option="transport",
        )
    return LocalLink()


def _put(members: tuple[int, ...]) -> Link:
    if len(members) != jax.process_count():
        raise TransferError(
            f"transport='put' needs all {jax.process_count()} processes to take part, not only "
            f"{listing(members)}. Use transport='pull'.",
            option="transport",
        )
    problem = puts_problem() if len(members) > 1 else ""
    if problem:
        raise TransferError(
            f"transport='put': {problem}. Call meshwright.transfers.allow_puts() before "
            "jax.distributed.initialize.",
            option="transport",
        )
    return PutLink(members)


def _pull(members: tuple[int, ...], host: str, timeout: float) -> Link:
    if _compat.coordination_client() is None:
        raise TransferError(
            "transport='pull' needs processes that know of one another. Call "
            "jax.distributed.initialize first, or use transport='local' inside one process.",
            option="transport",
        )
    server = serve(host)
    addresses = _gather_addresses(members, server.address(), timeout)
    me = jax.process_index()
    peers = {peer: server.connect(at) for peer, at in addresses.items() if peer != me}
    greet(server, peers, addresses, timeout)
    return PullLink(members, server, peers)


def _gather_addresses(members: Sequence[int], address: str, timeout: float) -> Mapping[int, str]:
    """Return the address of every member, this process too, once all have published theirs."""
    texts = gather_texts("transfers", address, members, timeout=timeout)
    absent = [process for process, text in texts.items() if text is None]
    if absent:
        raise TransferError(
            f"connect: process {listing(absent)} did not connect within {timeout:g} s. Every "
            f"process of the link ({listing(members)}) must, in the same order."
        )
    return {process: text for process, text in texts.items() if text is not None}


# A byte from each process to each, when a link is made: all can be reached, and stay connected.
#
# A pull from an address without a listener would wait for ever, and one over a connection that
# is still being made is lost when the other side closes.


def greet(
    server: Any, peers: Mapping[int, Any], addresses: Mapping[int, str], timeout: float
) -> None:
    """Pull a byte from every peer; raise if one does not come within `timeout` seconds."""
    me, device = jax.process_index(), jax.local_devices()[0]
    # Both ends know all addresses. Their ports are new for every link, and so is this name.
    link = ",".join(addresses[process] for process in sorted(addresses))
    byte = jax.device_put(np.zeros(1, np.uint8), device)
    shape = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (1,), np.uint8, sharding=SingleDeviceSharding(device)
    )
    for peer in peers:
        server.await_pull(message_number("greeting", link, 0, me, peer), [byte])
    answers = {
        peer: peers[peer].pull(message_number("greeting", link, 0, peer, me), [shape])[0]
        for peer in peers
    }
    deadline = time.monotonic() + timeout
    silent = [peer for peer, answer in answers.items() if not _arrives(answer, deadline)]
    if silent:
        shown = listing(f"{peer} at {addresses[peer]}" for peer in silent)
        raise TransferError(
            f"connect: process {shown} cannot be reached, or did not answer within "
            f"{timeout:g} s. Give each process the address= of an interface that the others "
            "can reach.",
            option="address",
        )


def _arrives(answer: Any, deadline: float) -> bool:
    while not answer.is_ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL)
    try:
        answer.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


# Servers and addresses.


def checked_address(address: Any) -> str:
    """Return an IP address as JAX's servers want it.

    They listen on all interfaces when they do not understand an address: 'localhost' and
    '256.1.1.1' become 0.0.0.0 (jax 0.10 to 0.12). So only what is surely one passes.

    >>> checked_address("127.0.0.1"), checked_address("::1")
    ('127.0.0.1', '[::1]')
    """
    try:
        if not isinstance(address, str):
            raise ValueError
        parsed = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        raise TransferError(
            f"address {short(address)}: not an IP address. Use '{LOOPBACK}' inside a machine, or "
            "that of a network interface, such as '10.0.0.3'; the port is chosen.",
            option="address",
        ) from None
    if parsed.is_unspecified or parsed.is_multicast:
        raise TransferError(
            f"address {address!r}: names no interface that others could reach. Use that of one, "
            f"or '{LOOPBACK}' inside a machine.",
            option="address",
        )
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)


def allow_puts(address: str = LOOPBACK) -> None:
    """Let `jax.device_put` cross processes, listening on `address` only; for `transport="put"`.

    Called before `jax.distributed.initialize`, in every process; raises `TransferError` once JAX
    has started its devices. It sets JAX's own options `jax_cross_host_transfer_socket_address`,
    with a free port, since JAX tells others the port it was given, and
    `jax_cross_host_transport_addresses`, by default on all interfaces.

    >>> mw.transfers.allow_puts("10.0.0.3")  # doctest: +SKIP
    >>> jax.distributed.initialize()  # doctest: +SKIP
    >>> link = mw.transfers.connect(transport="put")  # doctest: +SKIP
    """
    host = checked_address(address)
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
    """Return sockets for the data: inside a machine two carry as much as four, in fewer threads."""
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
                f"Use one that it has, or '{LOOPBACK}'.",
                option="address",
            ) from None
        return int(probe.getsockname()[1])


def puts_problem() -> str:
    """Say why `jax.device_put` would not cross processes here; nothing if it would."""
    address = _compat.cross_host_address()
    if address and not address.endswith(":0"):
        return ""
    if address:
        return f"jax_cross_host_transfer_socket_address is {address!r}; others cannot reach port 0"
    if _compat.puts_by_itself():
        return ""
    return "jax_cross_host_transfer_socket_address is not set"


def serve(address: str) -> Any:
    """Start a transfer server on this address, at a free port."""
    host = checked_address(address)
    _free_port(host)  # raises, in words, if no interface has the address
    return _compat.transfer_server(f"{host}:0", _transports(host))
