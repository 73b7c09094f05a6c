"""`meshwright schedule NAME`: draw a pipeline schedule, or compare all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright._html import ink, page
from meshwright._text import tidy, write_text
from meshwright.cli.options import Command, flag, option, positional
from meshwright.cli.terminal import show, show_pieces, tell_written
from meshwright.errors import ScheduleError
from meshwright.schedules.auto import Auto
from meshwright.schedules.compare import Comparison, compare_schedules, memory_excess, memory_limit
from meshwright.schedules.files import read_schedule, write_schedule
from meshwright.schedules.named import NAMED, schedule
from meshwright.schedules.svg_plot import fill
from meshwright.schedules.text_plot import draw_lines
from meshwright.schedules.timeline import Timeline, simulate
from meshwright.schedules.types import KINDS, Schedule


@dataclasses.dataclass(kw_only=True)
class ScheduleCommand(Command):
    """Draw a pipeline schedule with its bubble and memory, or compare all that fit.

    Tasks are F, the forward; B, the gradient of the input; W, the gradient of the weights; and
    BW, the whole backward, which costs B + W.
    """

    command = "schedule"
    examples = (
        "meshwright schedule zb-h1 --groups 4 --microbatches 16",
        "meshwright schedule --compare --groups 4 --microbatches 16 --memory 6",
    )

    name: str | None = positional(
        f"{', '.join(NAMED)}, auto (the best one found), or a .csv or .json file.",
        metavar="NAME|FILE",
        required=False,
        suggested=(*NAMED, "auto"),
    )
    groups: int | None = option("How many groups run it.", int)
    microbatches: int | None = option("How many microbatches a step has.", int)
    stages: int | None = option(
        "Stages of the whole model. Without it: one per group, or as many as the schedule has.", int
    )
    costs: str = option(
        "Time of one microbatch through one group's share of the model, in any unit.",
        default="F=1,B=1,W=1",
        metavar="COSTS",
    )
    latency: float = option(
        "Time a result takes from one group to another, in the same unit.", float, default=0.0
    )
    memory: float | None = option("The most microbatches a group may hold activations of.", float)
    compare: bool = flag("Show all schedules for these sizes as one table, fastest first.")
    svg: Path | None = option("Also write the picture to this file.", Path, ending=".svg")
    trace: Path | None = option(
        "Also write a trace to this file, for Perfetto or chrome://tracing.", Path
    )
    html: Path | None = option(
        "Also write a page with the picture, or with the table, to this file.",
        Path,
        ending=".html",
    )
    save: Path | None = option("Also write the schedule to this file, .csv or .json.", Path)
    notation: Literal["meshwright", "torch"] = option(
        "Whose letters CSV files are read and written in; in PyTorch's, I is B and B is BW.",
        default="meshwright",
        choices=("meshwright", "torch"),
    )
    json: bool = flag("Print JSON.")

    @classmethod
    def also_missing(cls, values: Mapping[str, Any]) -> list[str]:
        """A schedule by name needs its sizes; a file has them."""
        name = values.get("name") or ""
        has_sizes = _is_file(name) or not (name or values.get("compare"))
        return [] if has_sizes else ["groups", "microbatches"]

    def run(self) -> None:
        chosen = None if self.name is None else self._find(self.name)
        if self.compare:
            self._show_table(chosen)
        elif chosen is None:
            raise ScheduleError(
                f"name a schedule, or pass --compare. There are {', '.join(NAMED)}, auto, and "
                "files that end in .csv or .json."
            )
        else:
            self._show_one(chosen)
        tell_written(self.svg, self.trace, self.save, self.html)

    def _show_one(self, chosen: Schedule) -> None:
        timeline = simulate(chosen, self.costs, self.latency)
        if excess := memory_excess(timeline, memory_limit(self.memory)):
            raise ScheduleError(f"{chosen.name}: {excess}. {self._fitting(chosen)}")
        self._write(timeline)
        if self.html is not None:
            write_text(self.html, page(chosen.name, timeline._repr_html_()))
        if self.json:
            print(json.dumps(timeline.to_json(), indent=2))
        else:
            show_timeline(timeline)

    def _show_table(self, chosen: Schedule | None) -> None:
        groups, microbatches = self._sizes(chosen)
        if chosen is not None:
            self._write(simulate(chosen, self.costs, self.latency))
        elif self.svg or self.trace or self.save:
            raise ScheduleError("--svg, --trace and --save take one schedule: name it.")
        own = []
        if chosen is not None and self.name is not None and _is_file(self.name):
            own = [dataclasses.replace(chosen, name=Path(self.name).name)]
        table = self._comparison(groups, microbatches, own)
        if self.html is not None:
            write_text(self.html, page("schedules", table._repr_html_()))
        if self.json:
            print(json.dumps(table.to_json(), indent=2))
        else:
            show_comparison(table)

    def _find(self, name: str) -> Schedule:
        if _is_file(name):
            chosen = read_schedule(name, notation=self.notation)
            self._sizes(chosen)
            return chosen
        groups, microbatches = self._sizes(None)
        if name.lower() == "auto":
            return Auto(self.costs, self.latency, self.memory).build(
                groups, microbatches, self.stages
            )
        return schedule(name, groups=groups, microbatches=microbatches, stages=self.stages)

    def _sizes(self, chosen: Schedule | None) -> tuple[int, int]:
        """Return groups and microbatches, of the command line or the schedule; both must agree."""
        if chosen is not None:
            for what in ("groups", "microbatches", "stages"):
                asked, has = getattr(self, what), getattr(chosen, what)
                if asked not in (None, has):
                    raise ScheduleError(f"{self.name} has {has} {what}, not {asked}.")
            return chosen.groups, chosen.microbatches
        return self.groups or 0, self.microbatches or 0  # `also_missing` has asked for both

    def _comparison(self, groups: int, microbatches: int, own: list[Schedule]) -> Comparison:
        return compare_schedules(
            groups,
            microbatches,
            costs=self.costs,
            latency=self.latency,
            memory=self.memory,
            stages=self.stages,
            also=own,
        )

    def _fitting(self, chosen: Schedule) -> str:
        rows = self._comparison(chosen.groups, chosen.microbatches, []).rows
        names = [
            f"{row.name} (makespan {tidy(row.timeline.makespan)})"
            for row in rows
            if row.fits and row.timeline is not None
        ]
        return f"These fit: {', '.join(names)}." if names else "None fits."

    def _write(self, timeline: Timeline) -> None:
        if self.svg is not None:
            write_text(self.svg, timeline.svg())
        if self.trace is not None:
            write_text(self.trace, json.dumps(timeline.trace()) + "\n")
        if self.save is not None:
            write_schedule(timeline.schedule, self.save, notation=self.notation)


def _is_file(name: str) -> bool:
    return name.lower().endswith((".csv", ".json"))


# Schedules on a terminal: the plain text, with the kinds of task in their colours.

_STYLES = {kind: f"{ink(fill(kind))} on {fill(kind)}" for kind in KINDS}


def show_timeline(timeline: Timeline) -> None:
    show_pieces(
        [(piece, _STYLES.get(kind, "bold" if kind else "")) for piece, kind in line]
        for line in draw_lines(timeline)
    )


def show_comparison(table: Comparison) -> None:
    head, columns, *rows = str(table).splitlines()
    lines = [(head, "bold"), (columns, "dim")]
    for line, row in zip(rows, table.rows, strict=True):
        lines.append((line, "" if row.fits else "dim"))
    show(lines)
