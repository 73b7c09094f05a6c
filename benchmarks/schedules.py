"""Schedules: the time to build and check them, and what they cost, side by side.

python benchmarks/schedules.py              # times and the table
python benchmarks/schedules.py --markdown   # the table of docs/schedules.md
python benchmarks/schedules.py --write      # puts it there
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import meshwright as mw
from meshwright._text import duration, table
from meshwright.schedules.named import NAMED

SIZES = ((4, 8), (4, 32), (8, 64))
LATENCIES = (0.0, 0.25)
PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"
BEGIN = "<!-- made by benchmarks/schedules.py --write -->\n"
END = "<!-- end -->\n"


def main(words: list[str]) -> None:
    if words == ["--write"]:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + markdown() + END + after, encoding="utf-8")
    elif words == ["--markdown"]:
        print(markdown(), end="")
    else:
        times()
        print(markdown(), end="")


def times() -> None:
    """16 groups x 512 microbatches built and checked; Auto for 8 x 64."""
    rows = [["16 groups x 512 microbatches", "tasks", "build", "check", "simulate"]]
    for name in NAMED:
        start = time.perf_counter()
        built = mw.schedules.schedule(name, groups=16, microbatches=512)
        after_build = time.perf_counter()
        mw.schedules.check(built)
        after_check = time.perf_counter()
        mw.schedules.simulate(built)
        end = time.perf_counter()
        steps = (after_build - start, after_check - after_build, end - after_check)
        rows.append([name, f"{sum(built.counts.values()):,}", *map(duration, steps)])
    print(table(rows, [False, True, True, True, True]), "\n")
    rows = [["Auto, 8 groups x 64 microbatches", "time", "makespan", "found"]]
    for latency, memory in ((0.0, None), (0.25, None), (0.25, 8.0), (0.25, 6.0)):
        start = time.perf_counter()
        found = mw.schedules.Auto(latency=latency, memory=memory).build(8, 64)
        taken = time.perf_counter() - start
        makespan = mw.schedules.simulate(found, latency=latency).makespan
        limit = "no limit" if memory is None else f"at most {memory:g} held"
        name = f"latency {latency:g}, {limit}"
        rows.append([name, duration(taken), f"{makespan:g}", found.name])
    print(table(rows, [False, True, True, False]), "\n")


def markdown() -> str:
    """Idle share and microbatches held, for every schedule over sizes and latencies."""
    columns = [
        (f"p={groups}, m={microbatches}, latency {latency:g}", groups, microbatches, latency)
        for groups, microbatches in SIZES
        for latency in LATENCIES
    ]
    cells: dict[str, list[str]] = {}
    for _, groups, microbatches, latency in columns:
        for row in mw.schedules.compare_schedules(groups, microbatches, latency=latency).rows:
            cells.setdefault(row.name, []).append(_cell(row.timeline))
    lines = [["schedule", *(name for name, *_ in columns)], ["---"] * (1 + len(columns))]
    lines += [[name, *cells[name]] for name in [*cells] if name != "auto"]
    lines[2:] = sorted(lines[2:], key=lambda line: list(NAMED).index(line[0]))
    lines.append(["auto", *cells["auto"]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(timeline: mw.schedules.Timeline | None) -> str:
    if timeline is None:
        return "-"
    return f"{100 * timeline.idle:.1f} %, {max(timeline.memory):g}"


if __name__ == "__main__":
    main(sys.argv[1:])
