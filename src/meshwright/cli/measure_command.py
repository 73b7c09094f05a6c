"""`meshwright measure MODEL`: run a train step on the devices that are here, part by part.

The package's front door looks names up when they are used, so that help and mistakes answer
without JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright._lazy import later
from meshwright._text import write_text
from meshwright.cli import terminal
from meshwright.cli.mesh_commands import speeds_option
from meshwright.cli.options import Command, flag, option, positional
from meshwright.cli.rehearse import own_step
from meshwright.errors import CalibrationError, MeshwrightError, near, short
from meshwright.models.presets import check_model, names
from meshwright.spec.mesh_spec import MeshSpec

_find_mesh = later("meshwright.calibration.measure", "find_mesh")  # it comes with JAX


@dataclasses.dataclass(kw_only=True)
class MeasureCommand(Command):
    """Run a train step on the devices that are here, under the profiler: what every class of
    kernels and every collective takes, beside what the model of time says."""

    command = "measure"
    examples = (
        'meshwright measure tiny --mesh "fsdp:-1" --batch 16',
        "meshwright measure my_model:job --rehearse --html measured.html",
    )

    source: str = positional(
        "A model (`meshwright models` lists them), or module:function for a step of your own. The "
        "function takes nothing and returns (step, arguments...), arrays on the devices, or a dict "
        "with step, args and mesh.",
        metavar="MODEL",
        suggested=names(),
    )
    mesh: str | None = option(
        'The mesh of a model, e.g. "fsdp:-1, tp:4". Arrays of your own have theirs.', metavar="SPEC"
    )
    batch: int | None = option("Rows of the global batch, over all devices. Models need it.", int)
    seq: int | None = option("Length of a row. Without it: the model's own.", int)
    steps: int = option("Steps in each round of timing and under the profiler.", int, default=5)
    rehearse: bool = flag("Also rehearse the step for these devices, and show both.")
    speeds: str | None = speeds_option()
    trace: Path | None = option(
        "Keep the profiler's own files in this folder, for xprof or Perfetto.",
        Path,
        metavar="FOLDER",
    )
    json: bool = flag("Print JSON.")
    html: Path | None = option("Also write a page to this file.", Path, ending=".html")

    @classmethod
    def also_missing(cls, values: Mapping[str, Any]) -> list[str]:
        """A model needs a mesh and a batch; a function has its own."""
        return ["mesh", "batch"] if values.get("source") in names() else []

    def run(self) -> None:
        self._check()
        with self._step() as (step, args, mesh):
            options: dict[str, Any] = {"steps": self.steps, "trace": self.trace, "mesh": mesh}
            options |= {"name": self.source, "speeds": self.speeds}
            with terminal.explained(f"{self.source}: its step failed"), self._keys_named():
                rehearsal = self._rehearsed(step, args, mesh) if self.rehearse else None
                measured = mw.measure(step, *args, rehearsal=rehearsal, **options)
        if self.json:
            print(json.dumps(measured.to_json(), indent=2))
        else:
            lines = str(measured).splitlines()
            terminal.show((line, "bold" if not number else "") for number, line in enumerate(lines))
        if self.html is not None:
            write_text(self.html, measured.page())
        terminal.tell_written(self.html)

    def _check(self) -> None:
        """Refuse what can be refused without JAX."""
        if self.html is not None and not self.html.parent.is_dir():
            raise CalibrationError(f"--html {self.html}: there is no folder {self.html.parent}.")
        if ":" not in self.source:
            check_model(self.source)
            MeshSpec.parse(self.mesh or "")
        elif self.mesh is not None or self.batch is not None or self.seq is not None:
            raise CalibrationError(
                "--mesh, --batch and --seq go with a model; your function's arrays have their own."
            )

    def _own_mesh(self, own: Mapping[str, Any]) -> Any:
        """The mesh that the function's dict has, if it has one; refuse other keys."""
        for key in own:
            if key != "mesh":
                raise CalibrationError(
                    f"{self.source} returned {short(key)}, which measure does not take. A dict has "
                    f"step, args and mesh.{near(str(key), ('step', 'args', 'mesh'))}"
                )
        mesh = own.get("mesh")
        if mesh is not None and not hasattr(mesh, "devices"):
            raise CalibrationError(
                f"{self.source} returned mesh={short(mesh)}, which is not a jax.sharding.Mesh of "
                "devices that are here. mw.mesh(spec) makes one; without it the arrays' own is "
                "taken."
            )
        return mesh

    def _rehearsed(self, step: Any, args: tuple[Any, ...], mesh: Any) -> Any:
        """The step rehearsed for the devices that it runs on, under the name it is measured by."""
        if hasattr(step, "plan_of"):  # a pipeline's
            rehearsed = mw.rehearse_pipeline(step, *args, speeds=self.speeds)
            return dataclasses.replace(rehearsed, name=self.source)
        if mesh is None:
            mesh = _find_mesh(step, args)
        return mw.rehearse(step, *args, mesh=mesh, speeds=self.speeds, name=self.source)

    @contextlib.contextmanager
    def _keys_named(self) -> Iterator[None]:
        """Name the function in what is wrong with its own mesh: that is no option here."""
        try:
            yield
        except MeshwrightError as error:
            if ":" not in self.source or error.option != "mesh":
                raise
            raise CalibrationError(f"{self.source}: {error}") from error

    @contextlib.contextmanager
    def _step(self) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
        """The step, its arguments, and the mesh that they are on."""
        if ":" in self.source:
            step, args, own = own_step(self.source, terminal.call(self.source))
            yield step, args, self._own_mesh(own)
            return
        import jax

        mesh: Any = mw.mesh(self.mesh or "")
        chosen = mw.models.model(self.source)
        rows = chosen.example(self.batch or 0, self.seq)  # 0 is refused there
        state = mw.init(chosen.state, jax.random.key(0), mesh=mesh, rules=chosen.rules(mesh))
        batch = mw.shard(rows, mesh, chosen.batch_spec(mesh))
        with jax.set_mesh(mesh):
            yield jax.jit(chosen.train_step, donate_argnums=0), (state, batch), mesh
