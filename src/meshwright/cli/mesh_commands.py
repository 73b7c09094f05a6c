"""`meshwright mesh`, `partition`, `devices` and `hardware`: meshes, shardings, machines.

Hardware by name needs no JAX. What does is imported in the functions that need it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright._html import page
from meshwright._text import table, write_text
from meshwright.cli import terminal
from meshwright.cli.options import Command, flag, option, positional
from meshwright.errors import MeshwrightError, PartitionError, near, short
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.hardware.named import ALIASES, machine_names, slice_names
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.placement.placer import placement_of, warn_idle, warn_names
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from meshwright.partitioning.report import PartitionReport


def on_option(example: str) -> Any:
    """Declare `--on`, as most commands have it."""
    return option(
        f"Hardware by name, e.g. {example}; `meshwright hardware` lists all. Without it: the live "
        "devices.",
        metavar="HARDWARE",
        suggested=tuple(CHIPS),
    )


def slices_option() -> Any:
    return option("How many of them, joined by DCN.", int, default=1)


def dcn_option() -> Any:
    return option(
        'How much of each axis crosses DCN, e.g. "dp:2". Without it: worked out.',
        metavar="AXES",
    )


def speeds_option() -> Any:
    return option(
        "A file of `meshwright calibrate`: measured speeds in place of the table's; `default` is "
        "your own, which it writes without --out.",
        metavar="FILE.json",
    )


@dataclasses.dataclass(kw_only=True)
class DevicesCommand(Command):
    """Show the devices that are here, or a machine by its name."""

    command = "devices"
    examples = ("meshwright devices", "meshwright devices --on v5p:4x4x4 --json")

    on: str | None = on_option("v5p:4x4x4, h100:8x4, cpu:8")
    slices: int = slices_option()
    speeds: str | None = speeds_option()
    json: bool = flag("Print JSON.")

    def run(self) -> None:
        _show_machine(_hardware(self.on, self.slices, self.speeds), self.json)


@dataclasses.dataclass(kw_only=True)
class HardwareCommand(Command):
    """List the hardware that has a name, or show a chip or a machine."""

    command = "hardware"
    examples = ("meshwright hardware", "meshwright hardware h200 --figures")

    chip: str | None = positional(
        "A chip (v5e, h100), or a machine as --on takes it (v5e:4x4, a3-megagpu-8g).",
        metavar="NAME",
        required=False,
        suggested=tuple(CHIPS),
    )
    figures: bool = flag("Show every figure of its table: speeds, spreads, sources.")
    json: bool = flag("Print JSON.")

    def run(self) -> None:
        word = (self.chip or "").strip().lower()
        chosen = CHIPS.get(ALIASES.get(word, word))
        if self.chip is None:
            self._show_chips(list(CHIPS.values()))
        elif chosen is not None and self.figures:
            _show_speeds(chosen, self.json)
        elif chosen is not None:
            self._show_chips([chosen])
        elif word.isalnum():  # a slip in the name of a chip, not in that of a machine
            known = [*CHIPS, *ALIASES]
            raise MeshwrightError(
                f"no chip {short(self.chip)}.{near(word, known)} Chips: {', '.join(CHIPS)}."
            )
        elif self.figures:
            _show_speeds(_hardware(self.chip, 1).chip, self.json)
        else:
            _show_machine(_hardware(self.chip, 1), self.json)

    def _show_chips(self, chips: list[Chip]) -> None:
        if self.json:
            figures = [dataclasses.asdict(chip) for chip in chips]
            for each in figures:
                del each["measured"], each["given"], each["like"]  # a table has none
            print(json.dumps(figures, indent=2))
            return
        heading = ["chip", "GB", "TB/s", "TFLOP/s", "inside", "GB/s", "out, GB/s", "write"]
        rows = [_chip_cells(chip) for chip in chips]
        right = [False, True, True, True, False, True, True, False]
        first, *rest = table([heading, *rows], right).splitlines()
        terminal.show([(first, "dim"), *((line, "") for line in rest)])
        notes = _about(chips[0]) if len(chips) == 1 else _ABOUT_ALL
        terminal.show((terminal.wrapped(line), "") for line in notes)


def _show_speeds(chip: Chip, as_json: bool) -> None:
    print(json.dumps(chip.speeds.to_json(), indent=2) if as_json else chip.speeds)


_ABOUT_ALL = (
    "GB and TB/s are of a chip's own memory, TFLOP/s its bf16 peak. GB/s are one way: of a link of "
    "a torus, or of a GPU into its switch; out: of a chip over DCN.",
    "Names of the clouds work too: v5p-128, v5litepod-16, 8xh100, p5.48xlarge. `meshwright "
    "hardware NAME` has the shapes and machine types of a chip.",
)


def _about(chip: Chip) -> list[str]:
    """What a chip comes in, and under which other names."""
    lines = []
    if chip.family == "tpu":
        more = " and others of whole 4x4x4 cubes" if chip.torus == 3 else ""
        slices = ", ".join(slice_names(chip))
        lines.append(f"slices: {slices}{more}, up to {chip.pod:,} chips")
    elif chip.family == "gpu":
        lines.append(f"{chip.name}:GPUSxDOMAINS, up to {chip.domain} GPUs in an NVLink domain")
    else:
        lines.append("cpu:DEVICESxHOSTS; its figures are rough assumptions")
    others = [alias for alias, name in ALIASES.items() if name == chip.name]
    if others:
        lines.append(f"also called {', '.join(others)}")
    if machines := machine_names(chip):
        lines.append(f"machine types: {', '.join(machines)}")
    return lines


def _chip_cells(chip: Chip) -> list[str]:
    if chip.family == "tpu":
        inside, example = f"{chip.torus}D torus", "4x4x4" if chip.torus == 3 else "4x4"
    elif chip.family == "gpu":
        inside, example = f"NVLink of {chip.domain}", f"{chip.domain}x4"
    else:
        inside, example = "shared memory", "8"
    sizes = [f"{value:g}" for value in (chip.memory_gb, chip.memory_tbps, chip.tflops)]
    return [
        chip.name,
        *sizes,
        inside,
        f"{chip.link:g}",
        f"{chip.network:.4g}",
        f"{chip.name}:{example}",
    ]


@dataclasses.dataclass(kw_only=True)
class MeshCommand(Command):
    """Place a mesh on hardware, explain what each axis costs there, and draw it."""

    command = "mesh"
    examples = (
        'meshwright mesh "fsdp:-1, tp:4" --on v5e:16x16',
        'meshwright mesh "dp:2, fsdp:-1, tp:8" --on v5p:4x4x4 --slices 2 --html mesh.html',
    )

    spec: str = positional('The mesh, e.g. "dp:2, fsdp:-1, tp:4".', metavar="SPEC")
    on: str | None = on_option("v5p:8x8x8, v5p-128, h100:8x4, cpu:8")
    slices: int = slices_option()
    dcn: str | None = dcn_option()
    speeds: str | None = speeds_option()
    json: bool = flag("Print JSON.")
    html: Path | None = option(
        "Also write the explanation with its drawings to this file.", Path, ending=".html"
    )

    def run(self) -> None:
        spec = MeshSpec.parse(self.spec)
        hardware = _hardware(self.on, self.slices, self.speeds)
        warn_names(spec)
        placed = placement_of(spec, hardware, self.dcn)
        warn_idle(placed.spec, placed.topology, hardware)
        if self.html is not None:
            write_text(self.html, page(str(placed.spec), placed._repr_html_()))
        if self.json:
            print(json.dumps(placed.to_json(), indent=2))
        else:
            terminal.show_placement(placed)
        terminal.tell_written(self.html)


def _hardware(on: str | None, slices: int, speeds: str | None = None) -> Topology:
    """The machine of a name, which needs no JAX, or of the live devices."""
    if on is not None:
        return read_topology(on, slices=slices, speeds=speeds)
    from meshwright.meshes.devices import target_topology

    return read_topology(target_topology(None, None, slices), speeds=speeds)


def _show_machine(hardware: Topology, as_json: bool) -> None:
    if as_json:
        print(json.dumps(hardware.to_json(), indent=2))
    else:
        terminal.show_topology(hardware)


@dataclasses.dataclass(kw_only=True)
class PartitionCommand(Command):
    """Show how a tree of arrays or shapes is sharded on a mesh."""

    command = "partition"
    examples = (
        'meshwright partition my_model:shapes --mesh "fsdp:8, tp:4"',
        'meshwright partition my_model:shapes --mesh "fsdp:-1" --on v5p:4x4x4 --rules rules.json',
    )

    source: str = positional(
        "module:function of yours; it takes nothing and returns a tree of arrays or shapes.",
        metavar="SOURCE",
    )
    mesh: str = option('The mesh, e.g. "fsdp:8, tp:4".', required=True, metavar="SPEC")
    on: str | None = on_option("v5p:4x4x4")
    slices: int = slices_option()
    rules: Path | None = option(
        'A JSON file of [pattern, spec] pairs, e.g. [["mlp/*", ["fsdp", "tp"]], ["**", null]].',
        Path,
    )
    unmatched: str = option(
        "What to do with an array that no rule matches: replicate it, or go by its shape.",
        default="error",
        choices=("error", "replicate", "shape"),
    )
    unused: str = option(
        "What to do with a rule that matches nothing.", default="error", choices=("error", "allow")
    )
    uneven: str = option(
        "What to do with an axis that does not divide its dim: replicate drops it.",
        default="error",
        choices=("error", "replicate"),
    )
    min_shard_bytes: int | None = option(
        "By shape, smaller arrays are replicated. Without it: 65536.", int
    )
    json: bool = flag("Print JSON.")
    html: Path | None = option(
        "Also write the table with drawings to this file.", Path, ending=".html"
    )

    def run(self) -> None:
        report = self._report()
        if self.html is not None:
            write_text(self.html, page(self.source, report._repr_html_()))
        print(json.dumps(report.to_json(), indent=2) if self.json else report)
        terminal.tell_written(self.html)

    def _report(self) -> PartitionReport:
        from meshwright.partitioning.report import explain_tree

        mesh, options = self._mesh(), self._options()
        tree = terminal.call(self.source)
        report = explain_tree(tree, mesh, **options)
        if not report.rows:
            raise PartitionError(
                f"{self.source} returned {short(tree)}, which holds no arrays. Return a tree of "
                "arrays or of jax.ShapeDtypeStruct."
            )
        return report

    def _mesh(self) -> AbstractMesh:
        spec = MeshSpec.parse(self.mesh)
        if self.on is not None:
            _hardware(self.on, self.slices)  # a mistake in its name is told before JAX is loaded
        from meshwright.meshes.build import abstract_mesh
        from meshwright.meshes.devices import live_devices

        if self.on is None and spec.size is None:
            spec = spec.resolve(len(live_devices()))
        return abstract_mesh(spec, on=self.on, slices=self.slices)

    def _options(self) -> dict[str, Any]:
        """Return the options of `explain_tree` that were given."""
        words = {"unmatched": self.unmatched, "unused": self.unused, "uneven": self.uneven}
        options: dict[str, Any] = {name: word for name, word in words.items() if word != "error"}
        if self.rules is not None:
            options["rules"] = _read_rules(self.rules)
        if self.min_shard_bytes is not None:
            options["min_shard_bytes"] = self.min_shard_bytes
        return options


def _read_rules(file: Path) -> Any:
    """Plain JSON; nothing in it is evaluated."""
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except PartitionError as error:
        raise PartitionError(f"{file}: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PartitionError(f"{file}: not JSON ({error}).") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for pattern, spec in pairs:
        if pattern in rules:
            raise PartitionError(f"the rule {short(pattern)} is there twice. Keep one.")
        rules[pattern] = spec
    return rules
