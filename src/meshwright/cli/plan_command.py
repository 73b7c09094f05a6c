"""`meshwright plan MODEL`: a mesh and shardings for a train step, found in its own jaxpr.

The package's front door looks names up when they are used, so that help and mistakes answer
without JAX.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import meshwright as mw
from meshwright._text import write_text
from meshwright.cli import terminal
from meshwright.cli.mesh_commands import on_option, slices_option, speeds_option
from meshwright.cli.options import Command, flag, option, positional, words
from meshwright.cli.rehearse import DOES_NOT_FIT, own_step, read_change
from meshwright.errors import PlanningError, short
from meshwright.hardware.topology import topology
from meshwright.models.presets import check_model, names
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:
    from meshwright.planning.step_plan import Plan

# What a user's own function may say beside its step and arguments.
_OWN = ("on", "slices", "donate_argnums", "keep", "mesh", "memory", "max_axes", "name", "compiler")


@dataclasses.dataclass(kw_only=True)
class PlanCommand(Command):
    """Find a mesh, and what each of its axes shards, for a train step on named hardware. The best
    plans are compiled, and the best of them that fits is shown. The exit code is 3 where none
    fits."""

    command = "plan"
    examples = (
        "meshwright plan llama3-8b --on v5e:16x16 --batch 256 --html plan.html",
        'meshwright plan my_model:job --on h100:8 --mesh "dp:2, tp:4" --keep batch=dp',
    )

    source: str = positional(
        "A model (`meshwright models` lists them), or module:function for a step of your own. The "
        "function takes nothing and returns (step, arguments...), or a dict of plan's arguments "
        "with step and args in it.",
        metavar="MODEL",
        suggested=names(),
    )
    on: str | None = on_option("v5e:16x16, h100:8x4")
    slices: int = slices_option()
    batch: int | None = option(
        "Rows of the global batch, over all devices, e.g. 256. Models need it.", int
    )
    seq: int | None = option("Length of a row. Without it: the model's own.", int)
    set: tuple[str, ...] = words(
        "Changes to the model, as `rehearse` takes them: layers=4, remat=full, ... Attention is "
        "planned as products (attention=dot) unless it is said here.",
        metavar="NAME=VALUE ...",
    )
    mesh: str | None = option(
        'A mesh to plan for, e.g. "fsdp:-1, tp:4": only what its axes shard is chosen. Without '
        "it: every mesh is tried.",
        metavar="SPEC",
    )
    keep: tuple[str, ...] = words(
        "Groups of dims, and the axis of --mesh that each must take: batch=dp.",
        metavar="GROUP=AXIS ...",
    )
    check: int = option(
        "Compile the best this many plans, and choose among them. 0 trusts the prediction.",
        int,
        default=3,
    )
    memory: float = option(
        "The part of a device's memory that a plan may be predicted to need.", float, default=0.9
    )
    max_axes: int = option("The most axes of a mesh.", int, default=3)
    compiler: Literal["vendor", "cpu"] = option(
        "Whose compiler: vendor, the hardware's own, or cpu, for simulated devices.",
        default="vendor",
        choices=("vendor", "cpu"),
    )
    speeds: str | None = speeds_option()
    rules: bool = flag("Print the plan as rules and constraints, to be written down.")
    json: bool = flag("Print JSON.")
    html: Path | None = option("Also write a page to this file.", Path, ending=".html")
    save: Path | None = option(
        "Also write the plan to this file, for plan(..., saved=FILE).", Path, ending=".json"
    )

    @classmethod
    def also_missing(cls, values: Mapping[str, Any]) -> list[str]:
        """A model needs a batch; a function has its own."""
        return ["batch"] if values.get("source") in names() else []

    def run(self) -> int:
        self._check()
        plan = self._planned()
        # Files first: who reads what is printed may close the pipe.
        if self.html is not None:
            write_text(self.html, plan.page())
        if self.save is not None:
            plan.save(self.save)
        shown: Any = plan.rules() if self.rules else plan
        if self.json:
            print(json.dumps(shown.to_json(), indent=2))
        else:
            lines = str(shown).splitlines()
            terminal.show((line, _style(line, number)) for number, line in enumerate(lines))
        terminal.tell_written(self.html, self.save)
        return 0 if plan.fits else DOES_NOT_FIT

    def _check(self) -> None:
        """Refuse what can be refused without JAX."""
        for name, file in (("html", self.html), ("save", self.save)):
            if file is not None and not file.parent.is_dir():
                raise PlanningError(f"--{name} {file}: there is no folder {file.parent}.")
            if file is not None and file.is_dir():
                raise PlanningError(f"--{name} {file}: is a folder. Name a file.")
        if ":" in self.source:
            if self.batch is not None or self.seq is not None or self.set:
                raise PlanningError(
                    "--batch, --seq and --set go with a model; your function says its own."
                )
        else:
            check_model(self.source)
        if self.mesh is not None:
            MeshSpec.parse(self.mesh)
        for change in self.set:
            read_change(change)
        self._kept()
        if self.on is not None:
            topology(self.on, slices=self.slices, speeds=self.speeds)

    def _kept(self) -> dict[str, str] | None:
        """`batch=dp` as a dict."""
        kept = {}
        for each in self.keep:
            group, equals, axis = each.rpartition("=")
            if not (group and equals and axis):
                raise PlanningError(f"--keep {short(each)}: write GROUP=AXIS, e.g. batch=dp.")
            kept[group] = axis
        return kept or None

    def _planned(self) -> Plan:
        options: dict[str, Any] = {
            "on": self.on,
            "slices": self.slices,
            "check": self.check,
            "keep": self._kept(),
            "mesh": self.mesh,
            "memory": self.memory,
            "max_axes": self.max_axes,
            "compiler": self.compiler,
            "speeds": self.speeds,
        }
        if ":" in self.source:
            step, args, own = own_step(self.source, terminal.call(self.source), "plan")
            self._check_own(own, options)
            with terminal.explained(f"{self.source}: its step failed"):
                return mw.plan(step, *args, **{**options, **own})
        changes = dict(map(read_change, self.set))
        chosen = mw.models.model(self.source, **changes)
        # The planner's model knows products; a kernel of its own would hide what is in it.
        as_products = "attention" not in changes and hasattr(chosen.config, "attention")
        if as_products:
            chosen = mw.models.model(self.source, attention="dot", **changes)
        rows = chosen.batch(self.batch or 0, self.seq)  # 0 is refused there
        result = mw.plan(
            chosen.train_step,
            chosen.shapes(),
            rows,
            donate_argnums=0,
            name=self.source,
            **options,
        )
        if not as_products:
            return result
        note = "Planned with attention written as products (--set attention=... for another)."
        return dataclasses.replace(result, notes=(note, *result.notes))

    def _check_own(self, own: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Refuse what the function cannot say, and what is said twice."""
        for name, value in own.items():
            if name not in _OWN:
                raise PlanningError(
                    f"{self.source} returned {name}=..., which plan does not take. It takes step, "
                    f"args, {', '.join(_OWN)}."
                )
            said = options.get(name)
            default = type(self).__dataclass_fields__.get(name)
            if said not in (None, value, default.default if default else None):
                raise PlanningError(
                    f"{self.source} says {name}={short(value)} itself, and the command line says "
                    f"{short(said)}. Say it once."
                )


def _style(line: str, number: int) -> str:
    if line.startswith(("fits: ", "fits, ")):
        return "bold green"
    if line.startswith("does NOT fit"):
        return "bold red"
    return "bold" if number == 0 else ""
