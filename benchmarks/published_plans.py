"""Published training runs, predicted from their description alone: step time and best mesh.

python benchmarks/published_plans.py [rows.csv] [--worst N] [--json FILE]

Every row of the file is a run: a model's sizes, a mesh, a microbatch, remat, hardware, and a
published time. `meshwright.planning` predicts the time; its constants are fixed, and nothing is
fitted to the file. Prints the mean error (MAPE) of each source, and in groups of rows that differ
in nothing but parallelism, what the choice of the row that is predicted to be the fastest costs:
its published time over the fastest published time, less one (regret). Groups are made twice: with
equal microbatches, and with microbatches as a part of the choice. Rows that cannot be described are
counted with the reason.

`_fit_described.py` made the constants, and says how they do on sources that were left out.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from _described_rows import Described, number, read_described, text

from meshwright.errors import MeshwrightError
from meshwright.planning.run_prediction import predict_run

DEFAULT = Path(__file__).parent / "data" / "published_plans.csv"
AXES = ("fsdp", "tp", "pp", "vp", "cp", "ep")
# What is the same in all rows of a group.
SAME = (
    *("source", "framework", "model", "params_b", "layers", "hidden", "ffn", "heads", "kv_heads"),
    *("seq", "vocab", "experts", "global_batch", "hardware", "chips", "precision", "remat"),
)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A row with its predicted seconds and their parts."""

    described: Described
    seconds: float
    parts: dict[str, float]

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def published(self) -> float:
        return self.described.seconds

    @property
    def error(self) -> float:
        return self.seconds / self.published - 1

    @property
    def mesh(self) -> tuple[int, ...]:
        return tuple(getattr(self.described.run, axis) for axis in AXES)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A group of runs that differ in parallelism: the one predicted fastest, and the fastest."""

    rows: int
    chosen: Predicted
    best: Predicted

    @property
    def regret(self) -> float:
        return self.chosen.published / self.best.published - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--worst", type=int, default=8, help="rows and groups to list")
    parser.add_argument("--json", type=Path, help="also write every prediction to this file")
    options = parser.parse_args()
    predicted, skipped = predict_rows(options.rows)
    print_sources(predicted)
    print_skipped(skipped)
    if predicted:
        print(f"\nThe {options.worst} rows furthest off:")
        for each in sorted(predicted, key=lambda p: -abs(p.error))[: options.worst]:
            print(row_line(each))
        print_choices(predicted, options.worst)
    if options.json is not None:
        rows = [
            {"row": dict(p.described.row), "predicted_s": p.seconds, "parts_s": p.parts}
            for p in predicted
        ]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def predict_rows(path: Path) -> tuple[list[Predicted], list[tuple[str, str]]]:
    """Predict all rows of a file; also return source and reason of those that have no time."""
    described, refused = read_described(path)
    predicted, skipped = [], [(text(row, "source"), why) for row, why in refused]
    for each in described:
        try:
            time = predict_run(each.run)
        except MeshwrightError as error:
            skipped.append((text(each.row, "source"), str(error).splitlines()[0]))
        else:
            predicted.append(Predicted(each, time.seconds, time.parts))
    return predicted, skipped


def choices(predicted: Iterable[Predicted], same: Sequence[str]) -> list[Choice]:
    """Return a choice for each group of rows that agree in these columns, with several meshes."""
    groups = collections.defaultdict(list)
    for each in predicted:
        row = each.described.row
        groups[tuple(number(row, c) or text(row, c) for c in same)].append(each)
    return [
        Choice(
            len(rows),
            min(rows, key=lambda p: p.seconds),
            min(rows, key=lambda p: p.published),
        )
        for rows in groups.values()
        if len({each.mesh for each in rows}) > 1
    ]


def mean_error(predicted: Iterable[Predicted]) -> float:
    return statistics.mean(abs(each.error) for each in predicted)


def print_sources(predicted: Sequence[Predicted]) -> None:
    by = collections.defaultdict(list)
    for each in predicted:
        by[text(each.described.row, "source")].append(each)
    print(f"{'source':64} {'rows':>5} {'MAPE':>7} {'signed':>7}")
    for source, rows in by.items():
        signed = statistics.mean(each.error for each in rows)
        print(f"{source[:64]:64} {len(rows):5} {mean_error(rows):7.1%} {signed:+7.1%}")
    if predicted:
        signed = statistics.mean(each.error for each in predicted)
        every = mean_error(predicted)
        print(f"{'all rows':64} {len(predicted):5} {every:7.1%} {signed:+7.1%}")
        sources = statistics.mean(mean_error(rows) for rows in by.values())
        print(f"{'mean of sources':64} {len(by):5} {sources:7.1%}")


def print_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    for (source, why), count in collections.Counter(skipped).items():
        print(f"left out: {count} of {source[:50]}: {why}")


def print_choices(predicted: Sequence[Predicted], worst: int) -> None:
    titles = {"equal microbatches": (*SAME, "micro_batch"), "microbatches chosen too": SAME}
    for title, same in titles.items():
        groups = choices(predicted, same)
        if not groups:
            print(f"\nNo groups of rows that differ in parallelism alone ({title}).")
            continue
        regrets = [each.regret for each in groups]
        best = sum(regret == 0 for regret in regrets)
        print(
            f"\nChoosing a mesh, {title}: {len(groups)} groups, mean regret "
            f"{statistics.mean(regrets):.2%}, largest {max(regrets):.1%}, the best one chosen in "
            f"{best}."
        )
        for each in sorted(groups, key=lambda c: -c.regret)[:worst]:
            if each.regret:
                print(f"  {each.regret:6.1%} of {each.rows:2} rows, chosen {each.chosen.name}")
                print(f"{'':16} fastest {each.best.name}")


def row_line(each: Predicted) -> str:
    largest = sorted(each.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {seconds / each.seconds:.0%}" for name, seconds in largest)
    return (
        f"  {each.error:+7.1%} {each.published:8.3f} s, predicted {each.seconds:8.3f} "
        f"({parts}): {each.described.name}"
    )


if __name__ == "__main__":
    main()
