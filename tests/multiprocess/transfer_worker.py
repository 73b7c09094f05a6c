"""One process of several: moves arrays by one transport, prints what came out as JSON."""

import contextlib
import faulthandler
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joining import TIMEOUT, start, tell
from shards import mesh, on, pattern, refused, wrong, wrong_values

import meshwright as mw
from meshwright import _compat
from meshwright.transfers import connection

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "uint8", "complex64", "float64")
SHAPE = (8, 16)
FEW = ("bfloat16", "int4")


def layouts() -> dict[str, tuple[Mesh, P, Mesh, P]]:
    """From and to. Devices 0 to 3 are the first half of the processes', 4 to 7 the second's."""
    first, last, everything = mesh(range(4)), mesh(range(4, 8)), mesh(range(8))
    square, other = mesh(range(4), 2, 2), mesh(range(4, 8), 2, 2)
    return {
        "same split": (first, P("a"), last, P("a")),
        "same split, other names": (
            square,
            P("a", "b"),
            mesh(range(4, 8), 2, 2, names="yz"),
            P("y", "z"),
        ),
        "transposed split": (first, P("a"), last, P(None, "a")),
        "four to two": (first, P("a"), mesh((5, 6)), P("a")),
        "two to four": (mesh((2, 1)), P("a"), last, P(None, "a")),
        "sharded to replicated": (first, P("a"), last, P()),
        "replicated to sharded": (first, P(), last, P(None, "a")),
        "replicated to replicated": (first, P(), last, P()),
        "half replicated": (square, P("b"), other, P(None, "a")),
        "back again": (other, P("b", "a"), first, P("a")),
        "one to one": (mesh((2,)), P(), mesh((7,)), P()),
        "all to the last": (everything, P("a"), last, P("a")),
        "the first to all": (first, P("a"), everything, P("a")),
        "overlapping": (mesh((0, 2, 4, 6)), P("a"), mesh((6, 3, 1, 4), 2, 2), P("b", "a")),
        "inside the first": (mesh((0, 1)), P("a"), mesh((1, 0)), P(None, "a")),
        "all, transposed": (mesh(range(8), 4, 2), P("a", "b"), mesh(range(8), 2, 4), P("b", "a")),
    }


def moved(
    link: mw.transfers.Link, dtypes, source: Mesh, source_spec: P, target: Mesh, spec: P
) -> list[str]:
    """Some dtypes, a key, an array without elements and a scalar in one tree."""
    values = {name: pattern(seed, SHAPE, name) for seed, name in enumerate(dtypes)}
    values["empty"] = np.zeros((0, 16), np.float32)
    tree = {name: on(value, source, source_spec) for name, value in values.items()}
    key = pattern(3, (8, 2), "uint32")
    tree["key"] = jax.random.wrap_key_data(on(key, source, P(*source_spec[:1])))
    tree["scalar"] = on(np.asarray(np.float32(-0.0)), source, P())
    targets = {name: NamedSharding(target, spec) for name in values}
    targets["key"] = NamedSharding(target, P(*spec[:1]))
    targets["scalar"] = NamedSharding(target, P())
    route = mw.transfers.route(tree, targets)
    faults = []
    for turn in range(2):
        result = link.move(route, "x", tree)
        faults += [
            f"{name}, {turn}: {fault}"
            for name, value in values.items()
            for fault in wrong(result[name], value, target, spec)
        ]
        faults += [f"key: {one}" for one in wrong_values(jax.random.key_data(result["key"]), key)]
        faults += wrong(result["scalar"], np.asarray(np.float32(-0.0)), target, P())
    faults += [
        f"source {name}: {fault}"
        for name, value in values.items()
        for fault in wrong_values(tree[name], value)
    ]
    return faults


def both_ways() -> tuple[mw.transfers.Route, mw.transfers.Route, Mesh, Mesh]:
    """A route from the first half to the second with another split, and one back."""
    first, last = mesh(range(4)), mesh(range(4, 8), 2, 2)
    there = jax.ShapeDtypeStruct(SHAPE, "float32", sharding=NamedSharding(first, P("a")))
    back = jax.ShapeDtypeStruct(SHAPE, "float32", sharding=NamedSharding(last, P("a", "b")))
    return (
        mw.transfers.route(there, NamedSharding(last, P("a", "b"))),
        mw.transfers.route(back, NamedSharding(first, P("a"))),
        first,
        last,
    )


def out_of_order(link: mw.transfers.Link) -> list[str]:
    """Both halves send to each other at once; keys are received in another order than sent."""
    there, back, first, last = both_ways()
    mine, theirs, at, spec = (
        (there, back, first, P("a"))
        if jax.process_index() in there.senders
        else (back, there, last, P("a", "b"))
    )
    if there.joins_on_arrival or back.joins_on_arrival:
        return ["these routes must not compute on arrival"]
    count, results = 20, {}
    values = [pattern(seed, SHAPE, "float32") for seed in range(count)]
    for key in range(0, count, 2):  # before anybody sends
        results[key] = link.receive(theirs, (key, "m"))
    for key in reversed(range(count)):
        # What was sent is dropped at once.
        link.send(mine, (key, "m"), on(values[key], at, spec))
    for key in reversed(range(1, count, 2)):
        results[key] = link.receive(theirs, (key, "m"))
    return [
        f"key {key}: {fault}"
        for key, result in results.items()
        for fault in wrong(result, values[key], at, spec)
    ]


def one_key(link: mw.transfers.Link) -> list[str]:
    """A key used 100 times, sends and receives far apart, whole shards and small ones."""
    first, last = mesh(range(4)), mesh(range(4, 8))
    route = mw.transfers.route(
        jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(first, P("a"))),
        NamedSharding(last, P("a")),
    )
    values = [np.arange(4, dtype=np.float32) + 4 * turn for turn in range(100)]
    if jax.process_index() in route.senders:
        for value in values:
            link.send(route, 7, on(value, first, P("a")))
        return []
    results = [link.receive(route, 7) for _ in values]
    return [
        f"turn {turn}: {fault}"
        for turn, (result, value) in enumerate(zip(results, values, strict=True))
        for fault in wrong(result, value, last, P("a"))
    ]


def many_puts(link: mw.transfers.Link) -> list[str]:
    """A hundred moves in both directions, in the order that all keep."""
    there, back, first, _ = both_ways()
    values, faults = pattern(1, SHAPE, "float32"), []
    array = on(values, first, P("a"))
    for _ in range(50):
        array = link.move(back, 0, link.move(there, 0, array))
    faults += wrong(array, values, first, P("a"))
    return faults


def large(link: mw.transfers.Link) -> list[str]:
    values = pattern(5, (1024, 1024, 4), "float32")
    at, spec = mesh((4, 7, 5, 6), 2, 2), P(None, ("b", "a"))
    array = on(values, mesh(range(4), 2, 2), P("a", "b"))
    return wrong(
        link.move(mw.transfers.route(array, NamedSharding(at, spec)), 0, array), values, at, spec
    )


def under_a_mesh(link: mw.transfers.Link) -> list[str]:
    """A mesh that the caller has set changes nothing."""
    with jax.set_mesh(mesh(range(8), 2, 4)):
        return moved(link, ("float16",), *layouts()["half replicated"])


def late(transport: str) -> list[str]:
    """What was asked for before closing still arrives; what never was sent or pulled waits not."""
    link = mw.transfers.connect(transport=transport)
    there, _, first, last = both_ways()
    values = pattern(2, SHAPE, "float32")
    client = _compat.coordination_client()
    begun = time.monotonic()
    if jax.process_index() in there.senders:
        array = on(values, first, P("a"))
        link.send(there, "late", array)
        link.send(there, "never fetched", array)
        link.close()
        faults = []
    else:
        client.wait_at_barrier("meshwright/test/closed", 1000 * TIMEOUT, sorted(there.receivers))
        result = link.receive(there, "late")
        link.receive(there, "never sent")
        link.close()
        faults = wrong(result, values, last, P("a", "b"))
    took = time.monotonic() - begun
    faults += [] if took < TIMEOUT / 2 else [f"closing took {took:.1f} s"]
    return faults


def listening() -> list[str]:
    """The addresses on which this process listens, in hexadecimal."""
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            kind, _, number = link.readlink().name.partition(":")
            if kind == "socket":
                sockets.add(number.strip("[]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].split(":")[0])
    return sorted(found)


def listening_after(before: list[str]) -> list[str]:
    """Those addresses, once they are fewer: a server's own threads close its ports."""
    deadline = time.monotonic() + TIMEOUT / 4
    while len(now := listening()) >= len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def nobody_there() -> None:
    """An address where nobody listens."""
    server = connection.serve("127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{closed.getsockname()[1]}"
        connection.greet(server, {1: server.connect(at)}, {1: at}, 0.3)


def refusals(link: mw.transfers.Link) -> dict[str, str]:
    there, _, first, _ = both_ways()
    array = on(pattern(1, SHAPE, "float32"), first, P("a"))
    me = jax.process_index()
    found = {
        "donate": refused(lambda: link.move(there, 0, array, donate=True)),
        "local": refused(lambda: mw.transfers.connect(transport="local")),
        "not a member": refused(lambda: mw.transfers.connect([1 - me % 2])),
        "no such process": refused(lambda: mw.transfers.connect([0, 9])),
        "send": refused(lambda: link.send(there, 0, array)) if me not in there.senders else "",
        "receive": refused(lambda: link.receive(there, 0)) if me not in there.receivers else "",
        "address": refused(lambda: mw.transfers.connect(transport="pull", address="192.0.2.1")),
        "some put": refused(lambda: mw.transfers.connect([me], transport="put")),
    }
    if link.transport == "pull":
        found["put"] = refused(lambda: mw.transfers.connect(transport="put"))
        with mw.transfers.connect([me], transport="pull") as small:
            found["strangers"] = refused(lambda: small.move(there, 0, array))
        if me == 0:  # and the others do not come, or are not there
            found["absent"] = refused(lambda: mw.transfers.connect([0, 1], timeout=0.3))
            found["wrong place"] = refused(nobody_there)
    else:
        found["after start"] = refused(mw.transfers.allow_puts)
    return found


def report(transport: str) -> dict:
    with mw.transfers.connect(transport=transport) as link:
        found = {
            name: moved(link, DTYPES if "split" in name else FEW, *layout)
            for name, layout in layouts().items()
        }
        found |= {"large": large(link), "under a mesh": under_a_mesh(link)}
        if transport == "pull":
            found |= {"out of order": out_of_order(link), "one key": one_key(link)}
        else:
            found["many puts"] = many_puts(link)
        found |= {"refusals": refusals(link), "listening": listening()}
        found["after"] = moved(link, FEW, *layouts()["overlapping"])
        client = _compat.coordination_client()
        client.wait_at_barrier("meshwright/test/done", 1000 * TIMEOUT)
    if transport == "pull":
        found["late"] = late(transport)
        client.wait_at_barrier("meshwright/test/late", 1000 * TIMEOUT)
        found["listening after"] = listening_after(found["listening"])
    return found


if __name__ == "__main__":
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    if sys.argv[5] == "put":
        mw.transfers.allow_puts()
    start(*map(int, sys.argv[1:5]))
    tell(lambda: report(sys.argv[5]))
