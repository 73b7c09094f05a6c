"""`route(...)`: everything about a transfer that can be known before it happens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import html
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from meshwright._html import html_table
from meshwright._text import amount, table
from meshwright.errors import TransferError, listing, short
from meshwright.partitioning.report import array_type
from meshwright.transfers.boxes import Box, box_shape
from meshwright.transfers.transfer_plan import (
    Device,
    Item,
    Lot,
    Plan,
    is_key,
    item,
    plan,
    process_of,
)
from meshwright.trees.specs import mesh_axes, spec_problems
from meshwright.trees.walk import Leaf, Walk, walk

Pair = tuple[int, int]  # sending process, receiving process


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """Arrays, where they lie and where they go, piece by piece. Made by `route`, used by a `Link`.

    `name` is the same in every process that made the same route. Prints itself; HTML in a
    notebook; `to_json()` for scripts.
    """

    name: str
    items: tuple[Item, ...]
    plan: Plan
    treedef: Any

    @functools.cached_property
    def senders(self) -> frozenset[int]:
        """The processes that hold a part of the arrays."""
        return frozenset(process_of(device) for one in self.items for device in one.held)

    @functools.cached_property
    def receivers(self) -> frozenset[int]:
        """The processes that shall hold a part of them."""
        return frozenset(process_of(device) for one in self.items for device in one.wanted)

    @property
    def bytes(self) -> int:
        """What the arrays weigh, each counted once."""
        return sum(one.bytes for one in self.items)

    @functools.cached_property
    def joins_on_arrival(self) -> bool:
        """Whether some shard comes from several processes, and is joined where it arrives.

        Devices work in order: a program sent to one after such a `receive` waits until all of it
        has come. So receive it when its turn has come, not ahead; others may be received ahead.
        """
        came = {step.made for step in self.plan.send if len(set(self.plan.pair(step))) > 1}
        return any(lot in came for step in self.plan.join for lot in step.of)

    @functools.cached_property
    def traffic(self) -> dict[Pair, int]:
        """Bytes sent from process to process, those that stay inside one included."""
        found: dict[Pair, int] = {}
        for step in self.plan.send:
            lot, pair = self.plan.lots[step.made], self.plan.pair(step)
            found[pair] = found.get(pair, 0) + self.items[lot.item].bytes_of(box_shape(lot.box))
        return found

    def lot(self, item: int, device: Device) -> int:
        """The number of the lot that is an array's new shard on a device."""
        return self._numbers[Lot(item, device, self.items[item].wanted[device])]

    @functools.cached_property
    def _numbers(self) -> dict[Lot, int]:
        return {lot: number for number, lot in enumerate(self.plan.lots)}

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        return as_json(self)


def route(arrays: Any, target: Any, *, source: Any = None) -> Route:
    """Plan the transfer of a tree of arrays to the shardings `target`. Moves nothing.

    `arrays` are arrays, or shapes that name their sharding; `source` gives the shardings where
    they do not. `target` and `source` are trees of shardings, a prefix of one, or one for all.
    Any split and number of devices may go to any other. Every process makes the same route, of
    shapes where it holds none of the arrays, once; it then serves for every transfer.

    >>> import jax, meshwright as mw
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> first = NamedSharding(mw.mesh("tp:4", devices=jax.devices()[:4]), P("tp"))
    >>> last = NamedSharding(mw.mesh("tp:2", devices=jax.devices()[4:6]), P(None, "tp"))
    >>> way = mw.transfers.route(jax.ShapeDtypeStruct((8, 8), "float32", sharding=first), last)
    >>> print(way)
    1 array, 256 B: 4 devices to 2, 8 pieces, inside process 0
    path         array           from          to  pieces
    (the array)  f32[8,8]  4 of [2,8]  2 of [8,4]       8
    """
    found = walk(arrays)
    sources = _ends("source", source, arrays, found)
    targets = _ends("target", target, arrays, found)
    refuse("route", list(_problems(found, sources, targets)))
    items = tuple(map(item, found.arrays, sources, targets))
    return Route(_name(items), items, plan(items), found.treedef)


def _ends(end: str, given: Any, tree: Any, found: Walk) -> Sequence[Any]:
    """A sharding per array."""
    if given is None and end == "source":
        return [getattr(leaf.value, "sharding", None) for leaf in found.arrays]
    if isinstance(given, Sharding):
        return [given] * len(found.arrays)
    try:
        full = jax.tree.broadcast(given, tree, is_leaf=_is_end)
    except ValueError as error:
        raise TransferError(
            f"route: {end}: {short(given)} is not a sharding, nor a tree of them like the arrays'."
            " Pass NamedSharding(mesh, spec), or one for each array."
        ) from error
    return jax.tree.leaves(full, is_leaf=_is_end)


def _is_end(value: Any) -> bool:
    return isinstance(value, Sharding) or value is None


def _problems(found: Walk, sources: Sequence[Any], targets: Sequence[Any]) -> Iterator[str]:
    if len(found.arrays) != len(found.leaves):
        places = {leaf.position for leaf in found.arrays}
        odd = next(value for place, value in enumerate(found.leaves) if place not in places)
        yield f"{short(odd)} is no array or shape. Only arrays travel: leave it out."
        return
    if not found.arrays:
        yield "no arrays. Pass at least one."
    for leaf, source, target in zip(found.arrays, sources, targets, strict=True):
        wrong = [*_source_problems(leaf, source), *end_problems(leaf, "target", target)]
        yield from wrong or pair_problems(leaf, source, target)


def _source_problems(leaf: Leaf, source: Any) -> Iterator[str]:
    if isinstance(leaf.value, jax.core.Tracer):
        yield f"{leaf.where}: a tracer. Transfers happen outside jit."
    elif source is None:
        yield (
            f"{leaf.where}: does not say where it lies. Pass source=, or "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
    else:
        yield from end_problems(leaf, "source", source)


def _name(items: Sequence[Item]) -> str:
    """The same in every process for the same arrays, splits and devices; told apart from others."""
    digest = hashlib.blake2b(digest_size=8)
    for one in items:
        ends = [[(device.id, box) for device, box in end.items()] for end in (one.held, one.wanted)]
        digest.update(repr((one.where, one.shape, one.dtype.name, str(one.kind), ends)).encode())
    return digest.hexdigest()


# A route as text, HTML and JSON.


HEADING = ["path", "array", "from", "to", "pieces"]
RIGHT = [False, False, True, True, True]
MOST_ROWS = 50
_MOST_PAIRS = 8
_WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]


def as_text(route: Route) -> str:
    shown = _rows(route)
    left = len(route.items) - (len(shown) - 1)
    more = [f"... and {left:,} more arrays"] if left else []
    return "\n".join([headline(route), table(shown, RIGHT), *more, *_pairs(route)])


def headline(route: Route) -> str:
    """One line: how much, from and to how many devices."""
    count, pieces = len(route.items), len(route.plan.send)
    ends = [
        len({device for item in route.items for device in getattr(item, end)})
        for end in ("held", "wanted")
    ]
    processes = sorted(route.senders | route.receivers)
    inside = f", inside process {processes[0]}" if len(processes) == 1 else ""
    joined = ", joined on arrival" if route.joins_on_arrival else ""
    return (
        f"{count:,} array{'' if count == 1 else 's'}, {amount(route.bytes)}: {ends[0]:,} "
        f"device{'' if ends[0] == 1 else 's'} to {ends[1]:,}, "
        f"{pieces:,} piece{'' if pieces == 1 else 's'}{inside}{joined}"
    )


def _rows(route: Route) -> list[list[str]]:
    count = _pieces(route)
    rows = [
        [item.where, _typed(item), _end(item.held), _end(item.wanted), f"{count[number]:,}"]
        for number, item in enumerate(route.items[:MOST_ROWS])
    ]
    return [HEADING, *rows]


def _pieces(route: Route) -> collections.Counter[int]:
    """How many pieces of each array are sent from device to device."""
    lots = route.plan.lots
    return collections.Counter(lots[step.made].item for step in route.plan.send)


def _typed(item: Item) -> str:
    return array_type(item.shape, item.dtype, _WHOLE)


def _end(where: dict[Device, Box]) -> str:
    box = next(iter(where.values()))
    return f"{len(where):,} of [{','.join(map(str, box_shape(box)))}]"


def _pairs(route: Route) -> list[str]:
    """Who sends how much to whom, where more than one process takes part."""
    across = {pair: size for pair, size in route.traffic.items() if pair[0] != pair[1]}
    heavy = sorted(across, key=lambda pair: (-across[pair], pair))
    lines = [
        f"process {sender} to {receiver}: {amount(across[sender, receiver])}"
        for sender, receiver in heavy[:_MOST_PAIRS]
    ]
    left = len(heavy) - len(lines)
    return [*lines, f"... and {left:,} more pairs of processes"] if left else lines


def as_html(route: Route) -> str:
    notes = "".join(f"<br>{html.escape(line)}" for line in _pairs(route))
    return (
        f'<div style="font-family:system-ui,sans-serif"><b>{html.escape(headline(route))}</b>'
        f'<div style="overflow-x:auto">{html_table(_rows(route), RIGHT)}</div>{notes}</div>'
    )


def as_json(route: Route) -> dict[str, Any]:
    count = _pieces(route)
    return {
        "name": route.name,
        "bytes": route.bytes,
        "pieces": len(route.plan.send),
        "copies": len(route.plan.gather) + len(route.plan.copy),
        "joins_on_arrival": route.joins_on_arrival,
        "senders": sorted(route.senders),
        "receivers": sorted(route.receivers),
        "traffic": [
            {"from": sender, "to": receiver, "bytes": size}
            for (sender, receiver), size in sorted(route.traffic.items())
        ],
        "arrays": [
            {
                "path": item.where,
                "shape": list(item.shape),
                "dtype": item.dtype.name,
                "bytes": item.bytes,
                "from_devices": [device.id for device in item.held],
                "to_devices": [device.id for device in item.wanted],
                "pieces": count[number],
            }
            for number, item in enumerate(route.items)
        ],
    }


# What speaks against a route, and what is wrong with arrays that are to travel on one.


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise one error for all problems, or return when there are none."""
    if problems:
        shown = listing((f"\n  {problem}" for problem in problems), 6).replace(", \n", "\n")
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise TransferError(f"{what}: {count}, nothing was moved.{shown}")


def end_problems(leaf: Leaf, end: str, sharding: Any) -> Iterator[str]:
    """Why an array cannot lie as one end of a route says."""
    where = f"{leaf.where}: {end}"
    if not isinstance(sharding, Sharding):
        yield f"{where}: {short(sharding)} is not a sharding. Pass NamedSharding(mesh, spec)."
    elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        yield f"{where}: an AbstractMesh has no devices. Use a mesh of devices."
    else:
        yield from _split_problems(leaf, where, sharding)
        yield from _memory_problems(where, sharding)


def _split_problems(leaf: Leaf, where: str, sharding: Sharding) -> Iterator[str]:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        if spec.unreduced or spec.reduced:
            yield f"{where}: {spec} asks for more than a split. Reduce the sum first."
            return
        if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            yield f"{where}: {spec} leaves a dim open. Say how to split it, or None for whole."
        yield from spec_problems(where, leaf.shape, spec, mesh_axes(sharding.mesh))
        return
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        yield f"{where}: {short(str(error), 200)}"


def _memory_problems(where: str, sharding: Sharding) -> Iterator[str]:
    device: Any = next(iter(sharding.device_set))
    try:
        usual = device.default_memory().kind
    except (AttributeError, RuntimeError, jax.errors.JaxRuntimeError):  # only for the compiler
        return
    if sharding.memory_kind not in (None, usual):
        yield (
            f"{where}: memory kind {sharding.memory_kind!r} does not travel. Use {usual!r}, and "
            "jax.device_put before or after."
        )


def pair_problems(leaf: Leaf, source: Sharding, target: Sharding) -> Iterator[str]:
    """Why an array cannot go from one sharding to the other."""
    sides: list[set[Any]] = [source.device_set, target.device_set]
    ends = [{device.platform for device in side} for side in sides]
    if ends[0] != ends[1]:
        names = [listing(sorted(end)) for end in ends]
        yield (
            f"{leaf.where}: from {names[0]} to {names[1]}. A route stays on one platform; "
            "meshwright.reshard goes from one to another."
        )


def fits(array: Any, item: Item) -> bool:
    """Whether an array is the one that a route was made for. Asked for every transfer: quick."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return False
    if item.kind is None:
        alike = array.shape == item.shape and array.dtype == item.dtype
    else:
        alike = _is_such_a_key(array, item)
    return (
        alike
        and not array.is_deleted()
        and (
            array.sharding == item.source
            or array.sharding.is_equivalent_to(item.source, array.ndim)
        )
    )


def misfit(array: Any, item: Item) -> str:
    """What is wrong with an array that does not fit; the route stays as it is."""
    where = item.where
    if isinstance(array, jax.core.Tracer):
        return f"{where}: a tracer. Transfers happen outside jit."
    if not isinstance(array, jax.Array):
        return f"{where}: {short(array)} is not a jax.Array. Place it with meshwright.shard."
    if array.is_deleted():
        return f"{where}: the array was deleted or donated. Use the one it went into."
    if item.kind is not None and not is_key(array.dtype):
        return f"{where}: {array.dtype}{list(array.shape)}, the route carries random keys."
    if item.kind is None and (array.shape != item.shape or array.dtype != item.dtype):
        return (
            f"{where}: {array.dtype}{list(array.shape)}, the route carries "
            f"{item.dtype}{list(item.shape)}. Make a route for it."
        )
    if item.kind is not None and not _is_such_a_key(array, item):
        return f"{where}: other keys or another shape than the route carries. Make one for them."
    return (
        f"{where}: lies as {short(array.sharding, 120)}, the route starts at "
        f"{short(item.source, 120)}. Move it there with jax.device_put, or make a route from it."
    )


def _is_such_a_key(array: jax.Array, item: Item) -> bool:
    return (
        is_key(array.dtype)
        and jax.random.key_impl(array) == item.kind
        and array.shape == item.shape[: array.ndim]
    )
