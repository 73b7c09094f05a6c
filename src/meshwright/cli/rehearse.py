"""`meshwright rehearse MODEL`: what the compiler makes of a step on hardware you do not have.

With it `models`, what there is to rehearse, `cache`, what was compiled before, and `calibrate`, the
speeds to rehearse with. What is wrong with the words is told before JAX is loaded, which takes
seconds: hence the imports in functions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import meshwright as mw  # loads nothing until a name of it is used
from meshwright._text import amount, plural, table, write_text
from meshwright.cli import terminal
from meshwright.cli.mesh_commands import dcn_option, on_option, slices_option, speeds_option
from meshwright.cli.options import Command, flag, option, positional, words
from meshwright.errors import CalibrationError, RehearsalError, short
from meshwright.hardware.calibration_file import Calibration, default_file, load
from meshwright.hardware.topology import topology
from meshwright.models.presets import check_model, model, names
from meshwright.rehearsal.compiler import MOST_BYTES, cached, clear, default_folder
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:
    from meshwright.rehearsal.result import Rehearsal

DOES_NOT_FIT, INTERRUPTED = 3, 130  # exit codes


@dataclasses.dataclass(kw_only=True)
class RehearseCommand(Command):
    """Compile a train step for named hardware: does it fit, what does it move, how long does it
    take. No accelerator is needed. The exit code is 3 where it does not fit."""

    command = "rehearse"
    examples = (
        'meshwright rehearse llama3-8b --mesh "fsdp:-1, tp:4" --on v5e:16x16 --batch 256',
        'meshwright rehearse my_model:job --mesh "fsdp:8" --on h100:8 --html report.html',
    )

    source: str = positional(
        "A model (`meshwright models` lists them), or module:function for a step of your own. The "
        "function takes nothing and returns (step, arguments...), or a dict of rehearse's "
        "arguments with step and args in it.",
        metavar="MODEL",
        suggested=names(),
    )
    mesh: str = option('The mesh, e.g. "fsdp:-1, tp:4".', required=True, metavar="SPEC")
    on: str | None = on_option("v5e:16x16, h100:8x4")
    slices: int = slices_option()
    dcn: str | None = dcn_option()
    batch: int | None = option(
        "Rows of the global batch, over all devices, e.g. 256. Models need it.", int
    )
    seq: int | None = option("Length of a row. Without it: the model's own.", int)
    set: tuple[str, ...] = words(
        "Changes to the model: layers=4, attention=dot (auto, flash), remat=minimal (none, full, "
        "dots, save_qkv), moments=bfloat16, products=int8 (fp8), ... `meshwright models NAME` "
        "lists them.",
        metavar="NAME=VALUE ...",
    )
    compiler: Literal["vendor", "cpu"] = option(
        "Whose compiler: vendor, the hardware's own, or cpu, for simulated devices.",
        default="vendor",
        choices=("vendor", "cpu"),
    )
    timeout: float = option(
        "Seconds after which the compiler is ended.", float, default=900.0, metavar="SECONDS"
    )
    codegen: bool = flag(
        "End a TPU's compiler when it has scheduled the program, before it generates code: an "
        "answer in seconds.",
        default=True,
    )
    try_: bool = flag(
        "Where it does not fit, compile each way out, too; where it does, what would save time."
    )
    cache: bool = flag("Compile in any case: neither read the cache nor write it.", default=True)
    speeds: str | None = speeds_option()
    json: bool = flag("Print JSON.")
    html: Path | None = option("Also write a report to this file.", Path, ending=".html")

    @classmethod
    def also_missing(cls, values: Mapping[str, Any]) -> list[str]:
        """A model needs a batch; a function has its own, and what is neither is told first."""
        return ["batch"] if values.get("source") in names() else []

    def run(self) -> int:
        self._check()
        from meshwright.report import page

        result = self._rehearsed()
        ways = result.remedies(check=True) if self.try_ and not result.fits else ()
        costs = result.costs(check=self.try_ and result.fits)
        if self.json:
            data = result.to_json()
            if self.try_:
                data["tried"] = [str(way) for way in ways]
                data["costs"] = costs.to_json()
                data["remedies"] = result.remedies().to_json() if not ways else ways.to_json()
            print(json.dumps(data, indent=2))
        else:
            terminal.show_rehearsal(result, ways, costs)
        if self.html is not None:
            write_text(self.html, page(result, remedies=ways, costs=costs))
        terminal.tell_written(self.html)
        return 0 if result.fits else DOES_NOT_FIT

    def _check(self) -> None:
        """Refuse what can be refused without JAX."""
        if self.html is not None and not self.html.parent.is_dir():
            raise RehearsalError(f"--html {self.html}: there is no folder {self.html.parent}.")
        if ":" in self.source:
            if self.batch is not None or self.seq is not None or self.set:
                raise RehearsalError(
                    "--batch, --seq and --set go with a model; your function says its own."
                )
        else:
            check_model(self.source)
        MeshSpec.parse(self.mesh)
        for change in self.set:
            read_change(change)
        if self.on is not None:
            topology(self.on, slices=self.slices, speeds=self.speeds)

    def _rehearsed(self) -> Rehearsal:
        from meshwright.rehearsal.api import rehearse, rehearse_model

        options: dict[str, Any] = {
            "mesh": self.mesh,
            "on": self.on,
            "slices": self.slices,
            "dcn": self.dcn,
            "compiler": self.compiler,
            "timeout": self.timeout,
            "codegen": self.codegen,
            "cache": self.cache,
            "speeds": self.speeds,
        }
        if self.batch is not None:
            chosen = model(self.source, **dict(map(read_change, self.set)))
            return rehearse_model(chosen, batch=self.batch, seq=self.seq, **options)
        step, args, own = own_step(self.source, terminal.call(self.source))
        twice = [name for name in own if options.get(name) not in (_UNSET.get(name), own[name])]
        if twice:
            raise RehearsalError(
                f"{self.source} says {twice[0]}={short(own[twice[0]])} itself, and the command "
                f"line says {short(options[twice[0]])}. Say it once."
            )
        with terminal.explained(f"{self.source}: its step failed"):
            return rehearse(step, *args, **{**options, **own})


_UNSET = {"slices": 1, "compiler": "vendor", "timeout": 900.0, "codegen": True, "cache": True}


def read_change(words: str) -> tuple[str, Any]:
    """`layers=4` as a name and a value."""
    name, equals, value = words.partition("=")
    if not (name and equals and value):
        raise RehearsalError(f"--set {short(words)}: write NAME=VALUE, e.g. layers=4.")
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(read) if isinstance(read, list) else read  # settings with several values


def own_step(
    source: str, returned: Any, command: str = "rehearse"
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the step, its arguments and options, from what a user's function returned."""
    if isinstance(returned, dict) and callable(returned.get("step")) and "args" in returned:
        rest = {name: value for name, value in returned.items() if name not in ("step", "args")}
        return returned["step"], tuple(returned["args"]), rest
    if isinstance(returned, tuple) and len(returned) > 1 and callable(returned[0]):
        return returned[0], returned[1:], {}
    raise RehearsalError(
        f"{source} returned {short(returned)}. Return (step, arguments...), or a dict with step, "
        f"args and more of {command}'s arguments."
    )


@dataclasses.dataclass(kw_only=True)
class ModelsCommand(Command):
    """List the models there are to rehearse, or the settings of one."""

    command = "models"
    examples = ("meshwright models", "meshwright models llama3-8b")

    source: str | None = positional(
        "A model, to list its settings, which `rehearse --set` changes.",
        metavar="NAME",
        required=False,
        suggested=names(),
    )
    json: bool = flag("Print JSON.")

    def run(self) -> None:
        if self.source is None:
            self._show_all()
        else:
            check_model(self.source)
            self._show_one(self.source)

    def _show_all(self) -> None:
        chosen = [model(name) for name in names()]
        if self.json:
            data = [{"name": each.name, "parameters": each.parameters} for each in chosen]
            print(json.dumps(data, indent=2))
            return
        heading = ["model", "parameters", "for a token", "layers", "embed", "row", "kind"]
        rows = [heading]
        for each in chosen:
            sizes = [str(getattr(each.config, name, "")) for name in ("layers", "embed", "seq")]
            counts = [f"{count:,}" for count in (each.parameters, each.active_parameters)]
            rows.append([each.name, *counts, *sizes, type(each).__name__])
        first, *rest = table(rows, [False, True, True, True, True, True, False]).splitlines()
        terminal.show([(first, "dim"), *((line, "") for line in rest)])

    def _show_one(self, name: str) -> None:
        chosen = model(name)
        settings = dataclasses.asdict(chosen.config)
        if self.json:
            data = {"name": name, "parameters": chosen.parameters, "settings": settings}
            print(json.dumps(data, indent=2))
            return
        rows = [[each, _written(value)] for each, value in settings.items()]
        title = f"{name}: {type(chosen).__name__}, {chosen.parameters:,} parameters"
        lines = table([["setting", "value"], *rows], [False, False]).splitlines()
        terminal.show([(title, "bold"), (lines[0], "dim"), *((line, "") for line in lines[1:])])


def _written(value: Any) -> str:
    """A setting as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclasses.dataclass(kw_only=True)
class CacheCommand(Command):
    """Show the cache of compiled programs, or clear it."""

    command = "cache"
    examples = ("meshwright cache", "meshwright cache --clear")

    clear: bool = flag("Remove all of it.")
    json: bool = flag("Print JSON.")

    def run(self) -> None:
        folder = default_folder()
        entries = cached(folder)
        size = sum(stat.st_size for _, stat in entries)
        if self.clear:
            clear(folder)
        if self.json:
            data = {"folder": str(folder), "programs": len(entries), "bytes": size}
            data |= {"limit": MOST_BYTES, "cleared": self.clear}
            print(json.dumps(data, indent=2))
            return
        kept = f"{plural(len(entries), 'compiled program')}, {amount(size)}"
        if self.clear:
            print(f"removed {kept}, from {folder}")
        else:
            print(f"{kept} of at most {amount(MOST_BYTES)}, in {folder}")


@dataclasses.dataclass(kw_only=True)
class CalibrateCommand(Command):
    """Measure what the devices that are here do: products, memory, functions, sorts, collectives.
    `--speeds` of other commands takes the file. After Ctrl-C it has what was measured until then;
    a file that has more is kept, and FILE.partial.json is written. The exit code is then 130."""

    command = "calibrate"
    examples = (
        "meshwright calibrate --out cluster.json",
        "meshwright calibrate --compare today.json monday.json",
    )

    others: str | None = positional(
        "With --compare, the file to compare with; `table` is meshwright's own of the chip, as "
        "without this word.",
        metavar="FILE.json",
        required=False,
    )
    out: Path | None = option(
        "Where to write it. Without it: your own file for this kind of chip, which `--speeds "
        "default` reads.",
        Path,
        ending=".json",
    )
    quick: bool = flag("Fewer sizes and kinds, in less than a minute.")
    only: tuple[str, ...] = words(
        "Parts to measure: products, memory, launches, functions, irregular, eight-bit, attention, "
        "host, collectives. Without it: all.",
        metavar="PART ...",
    )
    mesh: str | None = option(
        'The mesh over whose axes collectives are measured, e.g. "dp:2, tp:4". Without it: what '
        "joins the devices of a host, and the network.",
        metavar="SPEC",
    )
    distributed: bool = flag("Join the other processes of a job: jax.distributed.initialize().")
    compare: Path | None = option(
        "Measure nothing: list what is slower in this file than in the other, what is slower in "
        "the other, and the devices and processes of each that are slower than the rest of it.",
        Path,
        metavar="FILE.json",
    )
    json: bool = flag("Print JSON.")

    def run(self) -> int | None:
        if self.compare is not None:
            self._compare(self.compare)
            return None
        if self.others is not None:
            raise CalibrationError(f"{self.others}: a file goes with --compare.")
        if self.mesh is not None and self.only and "collectives" not in self.only:
            raise CalibrationError(
                f"--mesh is for collectives, and --only {' '.join(self.only)} measures none. Leave "
                "out --mesh, or add collectives to --only."
            )
        if self.out is not None and not self.out.parent.is_dir():
            raise CalibrationError(f"--out {self.out}: there is no folder {self.out.parent}.")
        return self._measure()

    def _compare(self, path: Path) -> None:
        names = ("out", "quick", "only", "mesh", "distributed")
        if given := [f"--{name}" for name in names if getattr(self, name)]:
            raise CalibrationError(
                f"--compare measures nothing and writes no file: leave out {', '.join(given)}."
            )
        with_table = self.others in (None, "table")
        told = mw.compare_calibrations(path, None if with_table else self.others)
        print(json.dumps(told.to_json(), indent=2) if self.json else told)

    def _measure(self) -> int | None:
        import jax

        if self.distributed:
            jax.distributed.initialize()
        asked = None if self.mesh is None else mw.mesh(self.mesh)
        measured = mw.calibrate(asked, quick=self.quick, only=self.only or None)  # type: ignore[arg-type]
        ended = INTERRUPTED if measured.interrupted else None
        if jax.process_index():
            if ended and measured.left_out:
                print(f"{measured.left_out[-1]}; process 0 has the rest.", file=sys.stderr)
            return ended
        wanted = self.out or default_file(measured.chip)
        if not measured.count:
            return _tell_nothing_measured(measured, wanted)
        path = _replaceable(measured, wanted)
        if path is not None:
            measured.save(path)
        print(json.dumps(measured.to_json(), indent=2) if self.json else measured)
        if path != wanted:
            print(f"interrupted: {wanted} has more, and is kept.", file=sys.stderr)
        if path is not None:
            terminal.tell_written(path)
        return ended


def _tell_nothing_measured(measured: Calibration, wanted: Path) -> int:
    """Say why there is nothing to write; returns the exit code."""
    kept = f"{wanted} is as it was" if wanted.exists() else f"{wanted} is not written"
    if measured.interrupted:
        print(f"interrupted before anything was measured: {kept}.", file=sys.stderr)
        return INTERRUPTED
    reasons = "; ".join(measured.left_out[:3]) or "no program ran"
    raise CalibrationError(f"nothing was measured: {reasons}. {kept}.")


# A whole run replaces what is there. An interrupted one replaces what was interrupted earlier.
def _replaceable(measured: Calibration, wanted: Path) -> Path | None:
    """The file to write: the one asked for, the `.partial.json` beside it, or none."""
    if not measured.interrupted:
        return wanted
    for path in (wanted, wanted.with_suffix(".partial.json")):
        if not path.exists():
            return path
        try:
            before = load(path)
        except CalibrationError:  # not a calibration: somebody's, all the same
            continue
        if before.interrupted and before.count <= measured.count:
            return path
    return None
