"""Fit the constants of `predict_run` to published runs, and judge it on sources that were left out.

python benchmarks/_fit_described.py [rows.csv]

Prints the constants to write into `meshwright.planning.run_prediction.Reached`, with the mean error
of each publisher's rows by the fit to all rows, and by a fit to all other publishers' rows. Each
constant is held near what is likely before any row is seen (`EXPECTED`); a row far off counts by
its distance, not by its square. A publisher with n rows weighs as much as its root says: one source
has 1,440 of 1,850 rows. Takes some minutes; needs scipy.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _described_rows import Described, read_described, text
from scipy.optimize import least_squares

from meshwright.planning.run_prediction import Reached, predict_run

ROWS = Path(__file__).parent / "data" / "published_plans.csv"

# What is likely, and by what factor it may well be off. Products on GPUs: the best of MAMF (stas00/
# ml-engineering) and one H200 held down by power; on TPUs what rehearsals take. Attention of 2023:
# Triton's on one H200. Starting a layer: some 60 kernels, 10 us each. The rest: guesses.
EXPECTED = {
    "a100": (0.87, 1.1),
    "h100": (0.72, 1.1),
    "early_h100": (0.65, 1.15),
    "b200": (0.75, 1.1),
    "b300": (0.75, 1.15),
    "mxu128": (0.9, 1.1),
    "mxu256": (0.78, 1.1),
    "fp8": (1.77, 1.15),
    "nvfp4": (3.5, 1.3),
    "flash_ampere": (0.32, 1.3),
    "flash_hopper": (0.32, 1.5),
    "experts": (1.5, 1.5),
    "experts_tpu": (1.25, 1.3),
    "start": (0.6e-3, 1.6),
    "wait_tp": (0.2e-3, 2.0),
    "start_unfused": (0.2e-3, 2.0),
    "sharpness": (4.0, 1.5),
    "hidden": (0.6, 1.4),
    "hidden_inside": (0.3, 1.5),
    "hidden_ici": (0.7, 1.3),
}
_MANY = 400  # rows of a table
_NEAR = 0.04  # errors below count by their square


def publisher(row: Described) -> str:
    """Who published a row: tables of one series are one publisher."""
    words = text(row.row, "source")
    for name in ("vTrain", "MosaicML", "Megatron-Bridge", "tpu-recipes", "JAX-Toolbox"):
        if name in words:
            return name
    return words


def fit(rows: Sequence[Described]) -> Reached:
    """Return the constants of the least weighted errors."""
    rows = _thinned(rows)
    counts = collections.Counter(map(_weighed_as, rows))
    weights = np.array([counts[_weighed_as(row)] ** -0.25 for row in rows])
    names = [field.name for field in dataclasses.fields(Reached)]

    def constants(logs: np.ndarray) -> Reached:
        values = {n: EXPECTED[n][0] * math.exp(v) for n, v in zip(names, logs, strict=True)}
        hidden = {n: min(v, 1.0) for n, v in values.items() if n.startswith("hidden")}
        return Reached(**values | hidden)

    def errors(logs: np.ndarray) -> np.ndarray:
        reached = constants(logs)
        off = np.array([math.log(predict_run(r.run, reached).seconds / r.seconds) for r in rows])
        roots = np.sign(off) * np.sqrt(2 * _NEAR * (np.hypot(off, _NEAR) - _NEAR)) / _NEAR
        unlikely = [v / math.log(EXPECTED[n][1]) for n, v in zip(names, logs, strict=True)]
        return np.concatenate([weights * roots, unlikely])

    found = least_squares(errors, np.zeros(len(names)), diff_step=1e-3, max_nfev=25)
    return constants(found.x)


def _thinned(rows: Sequence[Described]) -> list[Described]:
    """Leave out three of four rows of tables that have hundreds: they say the same again."""
    counts = collections.Counter(map(_weighed_as, rows))
    return [row for at, row in enumerate(rows) if at % 4 == 0 or counts[_weighed_as(row)] < _MANY]


def _weighed_as(row: Described) -> str:
    return text(row.row, "source") + text(row.row, "source_ref")


def mean_error(rows: Sequence[Described], reached: Reached) -> float:
    return statistics.mean(
        abs(predict_run(row.run, reached).seconds / row.seconds - 1) for row in rows
    )


def main() -> None:
    rows, _ = read_described(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
    reached = fit(rows)
    for name, value in dataclasses.asdict(reached).items():
        print(f"    {name}: float = {value:.3g}")
    by = collections.defaultdict(list)
    for row in rows:
        by[publisher(row)].append(row)
    print(f"\n{'publisher':60} {'rows':>5} {'fitted':>7} {'left out':>9}", flush=True)
    left_out = []
    for name, own in by.items():
        others = fit([row for row in rows if publisher(row) != name])
        left_out += [(len(own), mean_error(own, others))]
        print(
            f"{name[:60]:60} {len(own):5} {mean_error(own, reached):7.1%} {left_out[-1][1]:9.1%}",
            flush=True,
        )
    every = sum(count * error for count, error in left_out) / len(rows)
    by_publisher = statistics.mean(error for _, error in left_out)
    fitted = statistics.mean(mean_error(own, reached) for own in by.values())
    print(f"{'all rows':60} {len(rows):5} {mean_error(rows, reached):7.1%} {every:9.1%}")
    print(f"{'mean of publishers':60} {len(by):5} {fitted:7.1%} {by_publisher:9.1%}")


if __name__ == "__main__":
    main()
