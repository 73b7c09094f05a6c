"""Collectives between GPUs: modelled against published times, row by row.

    python benchmarks/collectives.py [FILE]

A row of the file (`benchmarks/data/collectives.json`) is a collective of some bytes over GPUs of
some nodes, with its time or the bus bandwidth that NCCL's tests print, and where it was published.
Rows marked `"in_mean": false` are of another algorithm than the one NCCL takes by itself, or do not
state their size; they are printed, and not in the mean.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from meshwright._text import amount, duration
from meshwright.hardware.chips import CHIPS
from meshwright.rehearsal.collectives.costs import Group, collective_seconds, copy_seconds

ROWS = Path(__file__).parent / "data" / "collectives.json"


def published(row: dict[str, Any]) -> float:
    """Seconds, from what NCCL's tests call the bus bandwidth where that is what is stated."""
    if "microseconds" in row:
        return float(row["microseconds"]) * 1e-6
    n = row["gpus"]
    passes = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
    moved = row["bytes"] * passes.get(row["kind"], (n - 1) / n)
    return float(moved / (row["bus_gb_per_s"] * 1e9))


def modelled(row: dict[str, Any]) -> float:
    chip, nodes = CHIPS[row["chip"]], row["nodes"]
    if row["kind"] == "collective-permute":
        speed = chip.network if nodes > 1 else chip.link
        return copy_seconds(row["bytes"], speed, nodes > 1, chip.speeds)
    group = Group(chip.name, row["gpus"] // nodes, nodes, chip.link, chip.network)
    return collective_seconds(row["kind"], row["bytes"], group)


def main(file: str = str(ROWS)) -> None:
    errors = []
    print(
        f"{'chip':<7}{'GPUs':>5}{'nodes':>6}  {'collective':<20}{'bytes':>9}"
        f"{'modelled':>10}{'published':>11}{'ratio':>7}  source"
    )
    for row in json.loads(Path(file).read_text()):
        head = f"{row['chip']:<7}{row['gpus']:>5}{row['nodes']:>6}  {row['kind']:<20}"
        note = "; ".join(filter(None, (row["source"], row.get("note"), row.get("algorithm"))))
        if row["bytes"] is None:
            print(f"{head}{'?':>9}{'':>10}{row['bus_gb_per_s']:>6} GB/s{'':>7}  {note}")
            continue
        model, real = modelled(row), published(row)
        if row.get("in_mean", True):
            errors.append(abs(model / real - 1))
        print(
            f"{head}{amount(row['bytes']):>9}{duration(model):>10}{duration(real):>11}"
            f"{model / real:>7.2f}{'' if row.get('in_mean', True) else '*':<2}{note}"
        )
    print(
        f"mean error of {len(errors)} rows: {statistics.mean(errors):.1%}, largest "
        f"{max(errors):.0%}; rows with * are not in it"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
