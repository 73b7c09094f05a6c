"""What one process does in a transfer: its steps, as programs and copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright.mpmd.transfers.items import Device, Item
from meshwright.mpmd.transfers.programs import Program
from meshwright.mpmd.transfers.routes import Route

# Arrays by the number of their lot in the plan.
Store = dict[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class Run:
    """A program on one device: the lots it takes, and those it makes."""

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Copies:
    """Lots that are copied between devices of this process, in one call."""

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    devices: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """The steps of this process, for arrays that do not travel whole."""

    route: Route
    shards: Mapping[int, tuple[tuple[int, int], ...]]  # item: positions of shards, and their lots
    cut: tuple[Run, ...]
    gather: Copies
    pack: tuple[Run, ...]
    inside: Copies
    stay: tuple[int, ...]  # lots that already lie where they are needed
    join: tuple[Run, ...]
    copy: Copies
    arrays: Mapping[int, tuple[int, ...]]  # item: the lots that are its new shards here

    @property
    def near(self) -> bool:
        """Whether this process gives something to itself."""
        return bool(self.stay or self.inside.takes)

    def give(self, data: Sequence[Any]) -> Store:
        """What the devices of this process give, made of the arrays."""
        store: Store = {}
        for item, places in self.shards.items():
            # Not `addressable_data`: of a replicated array it always returns the first shard.
            shards = data[item].addressable_shards
            for place, lot in places:
                store[lot] = shards[place].data
        _run(self.cut, store)
        _copy(self.gather, store)
        _run(self.pack, store)
        return store

    def keep(self, store: Store) -> Store:
        """Of what this process gives, that which it takes itself, on the devices that take it."""
        kept = {lot: store[lot] for lot in self.stay}
        if self.inside.takes:
            _copy(self.inside, store)
            kept.update({lot: store[lot] for lot in self.inside.makes})
        return kept

    def take(self, store: Store) -> dict[int, jax.Array]:
        """The arrays, by item, made of all that this process takes."""
        _run(self.join, store)
        _copy(self.copy, store)
        items = self.route.items
        return {
            item: _array(items[item], [store[lot] for lot in lots])
            for item, lots in self.arrays.items()
        }


def _run(runs: Iterable[Run], store: Store) -> None:
    for run in runs:
        made = run.program(*[store[lot] for lot in run.takes])
        store.update(zip(run.makes, made, strict=True))


def _copy(copies: Copies, store: Store) -> None:
    if copies.takes:
        values = [store[lot] for lot in copies.takes]
        store.update(zip(copies.makes, jax.device_put(values, list(copies.devices)), strict=True))


def _array(item: Item, shards: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
        item.shape, item.target, list(shards), dtype=item.dtype
    )


def empty(item: Item, end: Sharding) -> jax.Array:
    """An array as a process sees it that holds none of it, or one without elements."""
    if item.bytes or not end.has_addressable_devices:
        return jax.make_array_from_single_device_arrays(item.shape, end, [], dtype=item.dtype)
    return jax.make_array_from_callback(
        item.shape, end, functools.partial(_nothing, item), dtype=item.dtype
    )


def _nothing(item: Item, index: Any) -> Any:
    return np.zeros(item.shape, item.dtype)[index]
