"""A route as one process works it off: arrays in, checked; arrays out, as a tree."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshwright.errors import TransferError, short
from meshwright.mpmd.transfers.assigning import work
from meshwright.mpmd.transfers.checks import fits, misfit, refuse
from meshwright.mpmd.transfers.items import process_of
from meshwright.mpmd.transfers.routes import Route
from meshwright.mpmd.transfers.work import Work, empty


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The part of one process in a route. `whole` items are not cut: JAX takes them as they are."""

    route: Route
    whole: frozenset[int]
    work: Work
    gives: tuple[bool, ...]  # per item: whether this process holds a part of it
    wide: bool  # whether some arrays have 64 bits
    load: Any = None  # what else the way of the link has planned

    def check(self, arrays: Any) -> list[Any]:
        """The arrays of a tree as they travel, refused if they are not those of the route."""
        leaves, treedef = jax.tree.flatten(arrays)
        if treedef != self.route.treedef:
            raise TransferError(
                f"send: the tree {short(treedef, 200)} is not that of the route, "
                f"{short(self.route.treedef, 200)}. Pass the same tree, or make a route for it."
            )
        known = list(zip(leaves, self.route.items, self.gives, strict=True))
        if not all(fits(leaf, item) for leaf, item, gives in known if gives):
            wrong = [(leaf, item) for leaf, item, gives in known if gives and not fits(leaf, item)]
            refuse("send", [misfit(leaf, item) for leaf, item in wrong])
        return [
            jax.random.key_data(leaf) if gives and item.kind is not None else leaf
            for leaf, item, gives in known
        ]

    def finish(self, arrays: Mapping[int, jax.Array]) -> Any:
        """The tree; arrays without elements, or of which nothing comes here, are made here."""
        with self.as_asked():
            return jax.tree.unflatten(self.route.treedef, self._finished(arrays))

    def _finished(self, arrays: Mapping[int, jax.Array]) -> Sequence[Any]:
        finished = []
        for number, item in enumerate(self.route.items):
            array = arrays[number] if number in arrays else empty(item, item.target)
            if item.kind is not None:
                array = jax.random.wrap_key_data(array, impl=item.kind)
            finished.append(array)
        return finished

    def as_asked(self) -> contextlib.AbstractContextManager[Any]:
        """64-bit arrays stay so whatever JAX is set to."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()


def job(route: Route, process: int, whole: frozenset[int], load: Any = None) -> Job:
    wide = any(item.dtype.itemsize >= 8 for item in route.items)
    gives = tuple(
        any(process_of(device) == process for device in item.held) for item in route.items
    )
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return Job(route, whole, work(route, process, whole), gives, wide, load)
