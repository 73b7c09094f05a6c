"""`connect(...)`: a link of processes, by one of the ways."""

from __future__ import annotations

import collections
import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshwright import _compat
from meshwright.errors import TransferError, listing, near, short
from meshwright.transfers.cross_process_links import PullLink, PutLink
from meshwright.transfers.links import Link, LocalLink, message_number

# Where a process listens: loopback, or an address that was given. Never all interfaces.


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


WAYS = ("auto", "local", "pull", "put")
# How often these processes have connected: the n-th call of one meets the n-th of the others.
_calls: collections.Counter[tuple[int, ...]] = collections.Counter()


def connect(
    processes: Iterable[int] | None = None,
    *,
    way: str = "auto",
    address: str = LOOPBACK,
    patience: float = 60.0,
) -> Link:
    """Open a link between `processes`, by default all; each of them calls this, in one order.

    `way`: "local" inside one process, where nothing is opened; "pull", where receivers fetch by
    key, from a server in each process that listens on `address` only; "put", where all processes
    call `move` in one order (see `allow_puts`). "auto" is "local" in one process and "pull" in
    several. Waits at most `patience` seconds for the others.

    >>> import jax, numpy as np, meshwright as mw
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> first, last = (mw.mesh("tp:4", devices=jax.devices()[at:at + 4]) for at in (0, 4))
    >>> x = jax.device_put(np.ones((8, 8)), NamedSharding(first, P("tp")))
    >>> way = mw.transfers.route(x, NamedSharding(last, P(None, "tp")))
    >>> with mw.transfers.connect() as link:
    ...     link.send(way, (0, 1), x)
    ...     y = link.receive(way, (0, 1))
    >>> link.way, y.sharding.shard_shape((8, 8))
    ('local', (8, 2))
    """
    members = _members(processes)
    if way not in WAYS:
        hint = near(way, WAYS) if isinstance(way, str) else ""
        raise TransferError(f"way {short(way)}: use one of {listing(WAYS)}.{hint}")
    host = checked(address)
    if way == "auto":
        way = "pull" if len(members) > 1 else "local"
    if way == "local":
        return _local(members)
    client = _compat.coordination_client()
    if way == "put":
        return _put(members)
    if client is None:
        raise TransferError(
            "way='pull' needs processes that know of one another. Call "
            "jax.distributed.initialize first, or use way='local' inside one process."
        )
    return _pull(client, members, host, patience)


def _members(processes: Iterable[int] | None) -> tuple[int, ...]:
    count, me = jax.process_count(), jax.process_index()
    try:
        members = tuple(sorted(set(range(count) if processes is None else processes)))
    except TypeError:
        members = ()
    strange = [member for member in members if member not in range(count)]
    if not members or strange:
        raise TransferError(
            f"connect: processes {short(processes)}: use numbers from 0 to {count - 1}."
        )
    if me not in members:
        raise TransferError(
            f"connect: process {me} is none of {listing(members)}. Only they call connect."
        )
    return members


def _local(members: Sequence[int]) -> Link:
    if len(members) > 1:
        raise TransferError(
            f"way='local' stays inside a process, this link is of {listing(members)}. Use "
            "way='pull', or processes=[jax.process_index()]."
        )
    return LocalLink()


def _put(members: tuple[int, ...]) -> Link:
    if len(members) != jax.process_count():
        raise TransferError(
            f"way='put' needs all {jax.process_count()} processes to take part, not only "
            f"{listing(members)}. Use way='pull'."
        )
    wrong = puts_problem() if len(members) > 1 else ""
    if wrong:
        raise TransferError(
            f"way='put': {wrong}. Call meshwright.transfers.allow_puts() before "
            "jax.distributed.initialize."
        )
    return PutLink(members)


def _pull(client: Any, members: tuple[int, ...], host: str, patience: float) -> Link:
    server = serve(host)
    room = f"meshwright/transfers/{'-'.join(map(str, members))}/{_calls[members]}"
    there = exchange(client, room, members, server.address(), patience)
    _calls[members] += 1
    peers = {peer: server.connect(at) for peer, at in there.items()}
    greet(room, server, peers, there, patience)
    return PullLink(members, server, peers)


# A byte from each process to each, when a link is made: all can be reached, and stay connected.
#
# A pull from an address where nobody listens would wait for ever, and one over a connection that
# is still being made is lost when the other side closes.


_PAUSE = 0.001


def greet(
    room: str, server: Any, peers: Mapping[int, Any], there: Mapping[int, str], patience: float
) -> None:
    me, device = jax.process_index(), jax.local_devices()[0]
    byte = jax.device_put(np.zeros(1, np.uint8), device)
    shape = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (1,), np.uint8, sharding=SingleDeviceSharding(device)
    )
    for peer in peers:
        server.await_pull(message_number("greeting", room, 0, me, peer), [byte])
    answers = {
        peer: peers[peer].pull(message_number("greeting", room, 0, peer, me), [shape])[0]
        for peer in peers
    }
    end = time.monotonic() + patience
    silent = [peer for peer, answer in answers.items() if not _arrives(answer, end)]
    if silent:
        shown = listing(f"{peer} at {there[peer]}" for peer in silent)
        raise TransferError(
            f"connect: process {shown} cannot be reached, or did not answer within "
            f"{patience:g} s. Give each process the address= of an interface that the others "
            "can reach."
        )


def _arrives(answer: Any, end: float) -> bool:
    while not answer.is_ready():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    try:
        answer.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True
