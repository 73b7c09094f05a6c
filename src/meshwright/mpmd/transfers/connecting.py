"""`connect(...)`: a link of processes, by one of the ways."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from meshwright import _compat
from meshwright.errors import TransferError, listing, near, short
from meshwright.mpmd.transfers.addresses import (
    LOOPBACK,
    checked,
    exchange,
    puts_problem,
    serve,
)
from meshwright.mpmd.transfers.greeting import greet
from meshwright.mpmd.transfers.links import Link
from meshwright.mpmd.transfers.local import LocalLink
from meshwright.mpmd.transfers.pulling import PullLink
from meshwright.mpmd.transfers.putting import PutLink

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
    >>> way = mw.route(x, NamedSharding(last, P(None, "tp")))
    >>> with mw.connect() as link:
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
            f"way='put': {wrong}. Call meshwright.allow_puts() before jax.distributed.initialize."
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
