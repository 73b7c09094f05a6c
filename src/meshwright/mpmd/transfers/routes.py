"""`route(...)`: everything about a transfer that can be known before it happens."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from meshwright.errors import TransferError, short
from meshwright.mpmd.transfers.checks import end_problems, pair_problems, refuse
from meshwright.mpmd.transfers.items import Device, Item, item, process_of
from meshwright.mpmd.transfers.planning import plan
from meshwright.mpmd.transfers.steps import Lot, Plan
from meshwright.partitioning.leaves import Leaf, Walk, walk
from meshwright.partitioning.moving.boxes import box_shape

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
        from meshwright.mpmd.transfers.show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from meshwright.mpmd.transfers.show import as_html

        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        from meshwright.mpmd.transfers.show import as_json

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
    >>> way = mw.route(jax.ShapeDtypeStruct((8, 8), "float32", sharding=first), last)
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
        places = {leaf.place for leaf in found.arrays}
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
