"""`route`: plan a transfer of arrays once, and show what of it is known before it happens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from meshwright._show import Sheet, Shown, Table
from meshwright._text import amount, plural
from meshwright.errors import TransferError, listing, short
from meshwright.partitioning.report import array_type
from meshwright.transfers.boxes import Box, box_shape, box_size
from meshwright.transfers.message_plan import Device, Pair, process_of
from meshwright.transfers.transfer_plan import Chunk, Item, TransferPlan, make_item, plan_transfer
from meshwright.trees.specs import mesh_axes, spec_problems
from meshwright.trees.walk import Leaf, Walk, is_key, walk

# How much of a long route is shown.
_MOST_ROWS = 50
_MOST_PAIRS = 8
_WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Route(Shown):
    """A planned transfer: arrays, and which part of each goes where. Made by `route`, for a `Link`.

    `name` is the same in every process that made the same route. Prints itself; HTML in a
    notebook; `to_json()` for scripts.
    """

    name: str
    items: tuple[Item, ...]
    plan: TransferPlan
    treedef: Any

    @functools.cached_property
    def senders(self) -> frozenset[int]:
        """The processes that hold a part of the arrays."""
        return frozenset(process_of(device) for item in self.items for device in item.source_boxes)

    @functools.cached_property
    def receivers(self) -> frozenset[int]:
        """The processes that shall hold a part of them."""
        return frozenset(process_of(device) for item in self.items for device in item.target_boxes)

    @property
    def bytes(self) -> int:
        """The size of the arrays, each counted once."""
        return sum(item.bytes for item in self.items)

    @functools.cached_property
    def joins_on_arrival(self) -> bool:
        """Whether some shard comes from several processes, and is joined where it arrives.

        Devices work in order: a program sent to one after such a `receive` waits until all of it
        has come. So receive it when its turn has come, not ahead; others may be received ahead.
        """
        crossed = {step.output for step in self.plan.send if len(set(self.plan.pair(step))) > 1}
        return any(chunk in crossed for step in self.plan.join for chunk in step.inputs)

    @functools.cached_property
    def traffic(self) -> dict[Pair, int]:
        """Bytes sent from process to process, those that stay inside one included."""
        traffic: dict[Pair, int] = collections.defaultdict(int)
        for step in self.plan.send:
            chunk = self.plan.chunks[step.output]
            size = self.items[chunk.item].bytes_of(box_size(chunk.box))
            traffic[self.plan.pair(step)] += size
        return dict(traffic)

    def target_chunk(self, item: int, device: Device) -> int:
        """Return the number of the chunk that is an array's new shard on a device."""
        return self._chunk_numbers[Chunk(item, device, self.items[item].target_boxes[device])]

    @functools.cached_property
    def _chunk_numbers(self) -> dict[Chunk, int]:
        return {chunk: number for number, chunk in enumerate(self.plan.chunks)}

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the transfer as plain data."""
        count = _count_pieces(self)
        return {
            "name": self.name,
            "bytes": self.bytes,
            "pieces": len(self.plan.send),
            "copies": len(self.plan.gather) + len(self.plan.copy),
            "joins_on_arrival": self.joins_on_arrival,
            "senders": sorted(self.senders),
            "receivers": sorted(self.receivers),
            "traffic": [
                {"from": sender, "to": receiver, "bytes": size}
                for (sender, receiver), size in sorted(self.traffic.items())
            ],
            "arrays": [
                {
                    "path": item.where,
                    "shape": list(item.shape),
                    "dtype": item.dtype.name,
                    "bytes": item.bytes,
                    "from_devices": [device.id for device in item.source_boxes],
                    "to_devices": [device.id for device in item.target_boxes],
                    "pieces": count[number],
                }
                for number, item in enumerate(self.items)
            ],
        }

    def _sheet(self) -> Sheet:
        count = _count_pieces(self)
        rows = [
            [
                item.where,
                array_type(item.shape, item.dtype, _WHOLE),
                _describe_end(item.source_boxes),
                _describe_end(item.target_boxes),
                f"{count[number]:,}",
            ]
            for number, item in enumerate(self.items[:_MOST_ROWS])
        ]
        left = len(self.items) - len(rows)
        return Sheet(
            _headline(self),
            [
                Table(
                    ["path", "array", "from", "to", "pieces"],
                    rows,
                    right=[False, False, True, True, True],
                    left_out=f"... and {left:,} more arrays" if left else "",
                ),
                *_describe_pairs(self),
            ],
        )


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
    >>> plan = mw.transfers.route(jax.ShapeDtypeStruct((8, 8), "float32", sharding=first), last)
    >>> print(plan)
    1 array, 256 B: 4 devices to 2, 8 pieces, inside process 0
    path         array           from          to  pieces
    (the array)  f32[8,8]  4 of [2,8]  2 of [8,4]       8
    """
    leaves = walk(arrays)
    if not leaves.leaves:
        raise TransferError(
            f"route: {short(arrays)} holds no arrays. Pass at least one.", option="arrays"
        )
    sources = _shardings("source", source, arrays, leaves)
    targets = _shardings("target", target, arrays, leaves)
    refuse("route", list(_problems(leaves, sources, targets)))
    items = tuple(map(make_item, leaves.arrays, sources, targets))
    return Route(_name(items), items, plan_transfer(items), leaves.treedef)


def _shardings(end: str, given: Any, tree: Any, leaves: Walk) -> Sequence[Any]:
    """Return a sharding per array: its own, the one given for all, or those of a tree."""
    if given is None and end == "source":
        return [getattr(leaf.value, "sharding", None) for leaf in leaves.arrays]
    if isinstance(given, Sharding):
        return [given] * len(leaves.arrays)
    try:
        full = jax.tree.broadcast(given, tree, is_leaf=_is_sharding)
    except ValueError as error:
        raise TransferError(
            f"route: {end}: {short(given)} is not a sharding, nor a tree of them like the arrays'."
            " Pass NamedSharding(mesh, spec), or one for each array.",
            option=end,
        ) from error
    return jax.tree.leaves(full, is_leaf=_is_sharding)


def _is_sharding(value: Any) -> bool:
    return isinstance(value, Sharding) or value is None


def _problems(leaves: Walk, sources: Sequence[Any], targets: Sequence[Any]) -> Iterator[str]:
    if len(leaves.arrays) != len(leaves.leaves):
        places = {leaf.position for leaf in leaves.arrays}
        odd = next(value for place, value in enumerate(leaves.leaves) if place not in places)
        yield f"{short(odd)} is no array or shape. Only arrays travel: leave it out."
        return
    for leaf, source, target in zip(leaves.arrays, sources, targets, strict=True):
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
    """Return a checksum of arrays, splits and devices: the same for the same in every process."""
    # Not `hash`: Python salts that of strings in every process.
    digest = hashlib.blake2b(digest_size=8)
    for item in items:
        ends = [
            [(device.id, box) for device, box in boxes.items()]
            for boxes in (item.source_boxes, item.target_boxes)
        ]
        what = (item.where, item.shape, item.dtype.name, str(item.key_impl), ends)
        digest.update(repr(what).encode())
    return digest.hexdigest()


# Reasons to refuse a route, and arrays that do not fit one.


def refuse(what: str, problems: Sequence[str]) -> None:
    """Raise one error for all problems, or return when there are none."""
    if problems:
        shown = listing((f"\n  {problem}" for problem in problems), 6).replace(", \n", "\n")
        raise TransferError(
            f"{what}: {plural(len(problems), 'problem')}, nothing was moved.{shown}"
        )


def end_problems(leaf: Leaf, end: str, sharding: Any) -> Iterator[str]:
    """Yield why an array cannot lie as one end of a route says."""
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
            yield f"{where}: {spec} leaves a dim open. Say how to split it, or None not to."
        yield from spec_problems(where, leaf.shape, spec, mesh_axes(sharding.mesh))
        return
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        yield f"{where}: {short(str(error), 200)}"


# Chunks are made and sent by programs that work in a device's default memory.
def _memory_problems(where: str, sharding: Sharding) -> Iterator[str]:
    device: Any = next(iter(sharding.device_set))
    try:
        usual = device.default_memory().kind
    except (AttributeError, RuntimeError, jax.errors.JaxRuntimeError):  # only for the compiler
        return
    if sharding.memory_kind not in (None, usual):
        yield (
            f"{where}: memory kind {sharding.memory_kind!r} cannot be sent. Use {usual!r}, and "
            "jax.device_put before or after."
        )


def pair_problems(leaf: Leaf, source: Sharding, target: Sharding) -> Iterator[str]:
    """Yield why an array cannot go from one sharding to the other."""
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
    if item.key_impl is None:
        same_type = array.shape == item.shape and array.dtype == item.dtype
    else:
        same_type = _has_such_keys(array, item)
    return (
        same_type
        and not array.is_deleted()
        # Nearly always equal, which is found out sooner than whether two splits are equivalent.
        and (
            array.sharding == item.source
            or array.sharding.is_equivalent_to(item.source, array.ndim)
        )
    )


def misfit(array: Any, item: Item) -> str:
    """Say what is wrong with an array that does not fit; the route stays as it is."""
    where = item.where
    if isinstance(array, jax.core.Tracer):
        return f"{where}: a tracer. Transfers happen outside jit."
    if not isinstance(array, jax.Array):
        return f"{where}: {short(array)} is not a jax.Array. Place it with meshwright.shard."
    if array.is_deleted():
        return f"{where}: the array was deleted or donated. Use the one it went into."
    if item.key_impl is not None and not is_key(array.dtype):
        return f"{where}: {array.dtype}{list(array.shape)}, the route carries random keys."
    if item.key_impl is None and (array.shape != item.shape or array.dtype != item.dtype):
        return (
            f"{where}: {array.dtype}{list(array.shape)}, the route carries "
            f"{item.dtype}{list(item.shape)}. Make a route for it."
        )
    if item.key_impl is not None and not _has_such_keys(array, item):
        return f"{where}: other keys or another shape than the route carries. Make one for them."
    return (
        f"{where}: is sharded as {short(array.sharding, 120)}, the route starts at "
        f"{short(item.source, 120)}. Move it there with jax.device_put, or make a route from it."
    )


def _has_such_keys(array: jax.Array, item: Item) -> bool:
    return (
        is_key(array.dtype)
        and jax.random.key_impl(array) == item.key_impl
        and array.shape == item.shape[: array.ndim]
    )


# Showing a route.


def _headline(route: Route) -> str:
    """One line: how much, from and to how many devices."""
    sources = {device for item in route.items for device in item.source_boxes}
    targets = {device for item in route.items for device in item.target_boxes}
    processes = sorted(route.senders | route.receivers)
    inside = f", inside process {processes[0]}" if len(processes) == 1 else ""
    joined = ", joined on arrival" if route.joins_on_arrival else ""
    return (
        f"{plural(len(route.items), 'array')}, {amount(route.bytes)}: "
        f"{plural(len(sources), 'device')} to {len(targets):,}, "
        f"{plural(len(route.plan.send), 'piece')}{inside}{joined}"
    )


def _count_pieces(route: Route) -> collections.Counter[int]:
    """Count the pieces of each array that are sent from device to device."""
    chunks = route.plan.chunks
    return collections.Counter(chunks[step.output].item for step in route.plan.send)


def _describe_end(boxes: dict[Device, Box]) -> str:
    box = next(iter(boxes.values()))
    return f"{len(boxes):,} of [{','.join(map(str, box_shape(box)))}]"


def _describe_pairs(route: Route) -> list[str]:
    """Say who sends how much to whom, where more than one process takes part."""
    across = {pair: size for pair, size in route.traffic.items() if pair[0] != pair[1]}
    heaviest = sorted(across, key=lambda pair: (-across[pair], pair))
    lines = [
        f"process {sender} to {receiver}: {amount(across[sender, receiver])}"
        for sender, receiver in heaviest[:_MOST_PAIRS]
    ]
    left = len(heaviest) - len(lines)
    return [*lines, f"... and {left:,} more pairs of processes"] if left else lines
