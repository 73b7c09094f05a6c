"""Fit the speeds of TPU kernels to published step times.

python benchmarks/_fit_speeds.py [parts.json]

A row of `parts.json` is a published run as `published.py --parts FILE` writes it: the seconds that
its parts take at unit speed. The step is modelled as

    products / PRODUCTS[side of the multipliers] + multiplied + vectors * OPERATIONS + rest

with `part cycles` and `attention operations` of the chips' files as unknowns; `rest` is all that
has a source of its own (memory, wires, the bus to the host, launches). The unknowns are those of
the least relative squares, held near what is likely (`EXPECTED`) where rows say little: ten rows
are few. A row far off counts less (Huber): it may not be the program that was run. Each row is also
modelled by a fit to the others (leave-one-out).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.hardware.chips import Chip
from meshwright.hlo.program import Program
from meshwright.rehearsal.kernel_speeds import TPU_MULTIPLIER, speeds
from meshwright.rehearsal.kernels import kernels, running
from meshwright.rehearsal.step_time import StepTime

PARTS = Path(__file__).parent / "data" / "tpu_parts.json"

# What is likely before any row is seen, and how far off that may well be. Products: as the compiler
# expects; their inverse is the unknown. Operations for each exponential of attention: forward about
# ten by its program (maximum, difference, two scalings, two sums, mask, conversion), backward more.
EXPECTED = {"products": (1.0, 0.15), "operations": (12.0, 6.0)}
# How far off a row may be: what one measurement and one reconstruction are worth.
_ROW = 0.05
_ROUNDS = 30  # of weighing the rows anew

Row = Mapping[str, Any]
ROW = ("name", "chip", "published", "parts")  # what a row has


def parts_of(program: Program, time: StepTime, chip: Chip) -> dict[str, float]:
    """Return the parts of a modelled step at unit speed, as the fit needs them."""
    speed, table = speeds(chip), chip.speeds
    products = _product_cycles(program, chip) / table["clock"]
    multiplied = sum(speed.compute(kernel.flops, "bf16") for kernel in time.custom)
    in_kernels = sum(kernel.seconds for kernel in time.custom)
    vectors = max(0.0, in_kernels - multiplied) / table["attention operations"]
    rest = time.total - products / table["part cycles"] - in_kernels
    return {"products": products, "multiplied": multiplied, "vectors": vectors, "rest": rest}


def _product_cycles(program: Program, chip: Chip) -> float:
    """Cycles of all kernels with products, as the compiler expects them, or would (`EXPECTED`)."""
    flops = chip.tflops * 1e12 / chip.cores / chip.speeds["clock"]  # in a cycle
    return sum(
        (kernel.cycles or chip.speeds["expected cycles"] * kernel.flops / flops)
        * program.run_count(computation.name).count
        for computation in running(program)
        for kernel in kernels(program, computation)
        if kernel.flops and kernel.custom is None
    )


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return `{"128": PRODUCTS[128], ..., "operations": OPERATIONS}`."""
    sides = sorted({_side(row) for row in rows})
    unknowns = [*sides, "operations"]
    trust = [1.0] * len(rows)
    for _ in range(_ROUNDS):
        values = _least_squares(rows, unknowns, trust)
        constants = {name: 1 / values[name] for name in sides}
        constants["operations"] = values["operations"]
        errors = (abs(modelled(row, constants) / row["published"] - 1) for row in rows)
        trust = [min(1.0, _ROW / max(error, 1e-9)) for error in errors]
    return constants


def _least_squares(
    rows: Sequence[Row], unknowns: Sequence[str], trust: Sequence[float]
) -> dict[str, float]:
    """Solve for the inverse of each speed of products, and for the operations."""
    equations, results = [], []
    for row, weight in zip(rows, trust, strict=True):
        scale = weight**0.5 / (_ROW * row["published"])
        parts = {_side(row): row["parts"]["products"], "operations": row["parts"]["vectors"]}
        known = row["parts"]["multiplied"] + row["parts"]["rest"]
        equations.append([scale * parts.get(name, 0.0) for name in unknowns])
        results.append(scale * (row["published"] - known))
    for number, name in enumerate(unknowns):
        likely, spread = EXPECTED.get(name, EXPECTED["products"])
        equations.append([1 / spread if at == number else 0.0 for at in range(len(unknowns))])
        results.append(likely / spread)
    solution = np.linalg.lstsq(np.array(equations), np.array(results), rcond=None)[0]
    return dict(zip(unknowns, map(float, solution), strict=True))


def _side(row: Row) -> str:
    return str(TPU_MULTIPLIER[row["chip"]])


def modelled(row: Row, constants: Mapping[str, float]) -> float:
    """Seconds of a step with these constants; multipliers without one have the expected speed."""
    parts = row["parts"]
    products = parts["products"] / constants.get(_side(row), EXPECTED["products"][0])
    vectors = parts["vectors"] * constants["operations"]
    return float(products + vectors + parts["multiplied"] + parts["rest"])


def leave_one_out(rows: Sequence[Row]) -> list[float]:
    """Return the error of each row, modelled by a fit to all others."""
    errors = []
    for number, row in enumerate(rows):
        constants = fit([*rows[:number], *rows[number + 1 :]])
        errors.append(modelled(row, constants) / row["published"] - 1)
    return errors


def report(rows: Sequence[Row]) -> str:
    """Say what the fit finds, and what its errors are with and without each row."""
    constants = fit(rows)
    lines = ["fitted: " + ", ".join(f"{name} {value:.3f}" for name, value in constants.items())]
    left_out = leave_one_out(rows)
    errors = [modelled(row, constants) / row["published"] - 1 for row in rows]
    for row, error, without in zip(rows, errors, left_out, strict=True):
        lines.append(f"{row['name'][:30]:30} {error:+7.1%} fitted {without:+7.1%} left out")
    mean, mean_without = (statistics.mean(map(abs, each)) for each in (errors, left_out))
    lines.append(f"Mean error {mean:.1%} fitted, {mean_without:.1%} by leave-one-out.")
    return "\n".join(lines)


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else PARTS
    print(report(json.loads(source.read_text(encoding="utf-8"))["rows"]))
