"""How to decide: the options that `partition` and everything built on it share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.errors import PartitionError, listing, near, short

MIN_SHARD_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """See `partition`. Checked when made."""

    rules: Any = None
    logical: Any = None
    names: Any = None
    axes: Sequence[str] | None = None
    min_shard_size: int = MIN_SHARD_SIZE
    uneven: str = "error"
    unmatched: str = "error"
    unused: str = "error"
    stacked: Any = None

    def __post_init__(self) -> None:
        _check_word("uneven", self.uneven, ("error", "replicate"))
        _check_word("unmatched", self.unmatched, ("error", "replicate", "shape"))
        _check_word("unused", self.unused, ("error", "allow"))
        if self.rules is not None and self.logical is not None:
            raise PartitionError("pass rules or logical, not both.")
        if self.names is not None and self.logical is None:
            raise PartitionError("names go with logical={name: mesh axes}.")
        self._check_by_shape()
        size = self.min_shard_size
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise PartitionError(f"min_shard_size: {short(size)} is not a count of elements.")
        if size < 0:
            raise PartitionError(f"min_shard_size: {size} is less than 0. Use 0 to cut all arrays.")

    @property
    def by_shape(self) -> bool:
        """Whether shapes decide, about all leaves or those that are left."""
        return (self.rules is None and self.logical is None) or self.unmatched == "shape"

    def _check_by_shape(self) -> None:
        """Whether options that say how to decide by shape are obeyed by anything."""
        if self.by_shape:
            return
        given = "rules" if self.rules is not None else "logical"
        for option, value in (("axes", self.axes), ("stacked", self.stacked)):
            if value is not None:
                raise PartitionError(
                    f"{option}: is for deciding by shape, but {given}= decides. Drop it, or pass "
                    "unmatched='shape' to decide so about the leaves that are left."
                )

    def check_axes(self, sizes: Mapping[str, int]) -> None:
        """Whether `axes` are axes of this mesh, once each."""
        if self.axes is not None and not isinstance(self.axes, (list, tuple)):
            raise PartitionError(
                f"axes: {short(self.axes)} is not a list of mesh axes, e.g. ['fsdp']."
            )
        for place, axis in enumerate(self.axes or ()):
            if axis not in sizes:
                hint = near(axis, sizes) if isinstance(axis, str) else ""
                raise PartitionError(f"axes: no mesh axis {short(axis)} in {listing(sizes)}.{hint}")
            if axis in (self.axes or ())[:place]:
                raise PartitionError(f"axes: {axis!r} appears twice. Name it once.")


def read_options(options: Mapping[str, Any]) -> Options:
    """Options by name; a misspelt one is named, with the near one."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise PartitionError(
                f"no option {name!r}.{near(name, known)} Known: {listing(known, 10)}."
            )
    return Options(**options)


def _check_word(option: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise PartitionError(f"{option}: {short(value)} is not one of {', '.join(known)}.")
