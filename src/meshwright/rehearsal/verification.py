"""`Verification`: the results of one device and of many, array by array, and how far apart."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import plural
from meshwright.errors import listing

# How far apart two results may be, as part of the largest value of an array, by the bytes of its
# elements: sums in another order differ by some hundred roundings. Other types must be equal.
_TOLERANCES = {8: 1e-9, 4: 1e-3, 2: 5e-2, 1: 0.2}
# An array whose values are this much smaller than those of the other arrays is held against theirs
# instead: a gradient that is zero but for rounding (of a key's bias, say) has no digits to compare.
_NOISE = 1e-3
_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True, repr=False)
class Compared:
    """One array of the results: its largest difference, as part of its largest value.

    `one` and `sharded` are the values where the two differ most. `finite`: one device's values are.
    `rounding`: on one device it changes as much with the last bits of the arguments.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    one: float
    sharded: float
    difference: float
    tolerance: float
    finite: bool = True
    rounding: bool = False

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance, or no more than rounding."""
        return self.difference <= self.tolerance or self.rounding  # NaN is not

    def __repr__(self) -> str:
        words = f"differs by {self.difference:.2g}, {self.tolerance:.2g} allowed: {self.path}"
        return short_repr(self, words)


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What `verify` saw. Prints itself; HTML in a notebook; `to_json()`."""

    mesh: str
    where: str
    rows: tuple[Compared, ...]

    @property
    def ok(self) -> bool:
        """Whether all results agree."""
        return all(row.ok for row in self.rows)

    @property
    def first(self) -> Compared | None:
        """The first array that differs, or `None`."""
        return next((row for row in self.rows if not row.ok), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for scripts."""
        rows = [{**dataclasses.asdict(row), "ok": row.ok} for row in self.rows]
        return {"mesh": self.mesh, "where": self.where, "ok": self.ok, "arrays": rows}

    def _notes(self) -> list[str]:
        """Say what the comparison could not judge."""
        notes = []
        broken = [row.path for row in self.rows if not row.finite]
        if broken:
            notes.append(
                f"NaN or infinity on one device already, in {listing(broken, 3)}: that both agree "
                "there proves little. Verify where the step is finite."
            )
        loose = [row.path for row in self.rows if row.rounding]
        if loose:
            notes.append(
                f"Not judged: {listing(loose, 3)}. Changing the last bits of the arguments changes "
                "these as much on one device, as where Adam divides a gradient that is zero but "
                "for rounding."
            )
        return notes

    def _sheet(self) -> Sheet:
        count = plural(len(self.rows), "array")
        if self.first is None:
            judged = [row for row in self.rows if not row.rounding] or self.rows
            worst = max(judged, key=lambda row: row.difference)
            return Sheet(
                f"{self.mesh} agrees with one device ({self.where}): {count}, the largest "
                f"difference {worst.difference:.1e} in {worst.path}",
                self._notes(),
            )
        wrong = [row for row in self.rows if not row.ok]
        cells = [
            [
                row.path,
                f"{row.dtype}{list(row.shape)}",
                f"{row.one:.6g}",
                f"{row.sharded:.6g}",
                f"{row.difference:.1e}",
                f"{row.tolerance:.0e}",
            ]
            for row in wrong[:_MOST_ROWS]
        ]
        heading = ["path", "array", "one device", "sharded", "apart", "allowed"]
        more = len(wrong) - len(cells)
        table = Table(
            heading,
            cells,
            [False, False, True, True, True, True],
            f"... and {more} more" if more else "",
        )
        return Sheet(
            f"{self.mesh} DIFFERS from one device ({self.where}): {len(wrong)} of {count}, the "
            f"first {self.first.path}",
            [table, _ADVICE, *self._notes()],
        )


_ADVICE = (
    "If both are right on their own, the partitioner may be at fault: shard the arrays near the "
    "first difference in another way, and verify again."
)


def compare(
    paths: Sequence[str], one: Sequence[Any], many: Sequence[Any], tolerance: float | None
) -> tuple[Compared, ...]:
    # Of results the median counts, not the largest: a mask among them would hide all the others.
    sizes: dict[str, list[float]] = {}  # of the results, and of the gradient
    for path, values in zip(paths, one, strict=True):
        if _is_inexact(values.dtype):
            sizes.setdefault(path.partition("/")[0], []).append(_largest(values))
    noise = {
        tree: _NOISE * (max(some) if tree == "gradient" else statistics.median_low(some))
        for tree, some in sizes.items()
    }
    return tuple(
        _compare_one(path, a, b, noise.get(path.partition("/")[0], 0.0), tolerance)
        for path, a, b in zip(paths, one, many, strict=True)
    )


def judge_rounding(
    rows: Sequence[Compared], paths: Sequence[str], one: Sequence[Any], nudged: Sequence[Any]
) -> tuple[Compared, ...]:
    """Mark what differs no more than `nudged`, one device's results for arguments nearly the same.

    A quarter as much counts: both differences are single draws.
    """
    by_rounding = compare(paths, one, nudged, None)
    return tuple(
        dataclasses.replace(row, rounding=True)
        if not row.ok and noise.difference >= row.difference / 4
        else row
        for row, noise in zip(rows, by_rounding, strict=True)
    )


def _compare_one(path: str, one: Any, many: Any, noise: float, tolerance: float | None) -> Compared:
    kind = str(one.dtype)
    if not _is_inexact(one.dtype):
        differ = np.flatnonzero(one.ravel() != many.ravel())
        worst = int(differ[0]) if differ.size else 0
        a, b = (int(x.ravel()[worst]) if x.size else 0 for x in (one, many))
        apart = abs(a - b) / max(1, abs(a)) if differ.size else 0.0
        return Compared(path, one.shape, kind, float(a), float(b), apart, 0.0)
    is_complex = np.issubdtype(one.dtype, np.complexfloating)
    allowed = tolerance or _TOLERANCES[one.dtype.itemsize // (2 if is_complex else 1)]
    if not one.size:
        return Compared(path, one.shape, kind, 0.0, 0.0, 0.0, allowed)
    wide = np.complex128 if is_complex else np.float64
    first, second = (values.astype(wide).ravel() for values in (one, many))
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):  # of two infinities of one sign
        apart_by = np.where(same, 0.0, np.abs(first - second))
    worst = int(np.argmax(np.nan_to_num(apart_by, nan=np.inf)))
    difference = float(apart_by[worst] / (max(_largest(one), noise) or 1.0))
    a, b = (abs(x[worst]) if is_complex else x[worst] for x in (first, second))
    finite = bool(np.isfinite(first).all())
    return Compared(path, one.shape, kind, float(a), float(b), difference, allowed, finite)


def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _largest(values: Any) -> float:
    wide = np.complex128 if np.issubdtype(values.dtype, np.complexfloating) else np.float64
    sizes = np.abs(values.astype(wide).ravel())
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
