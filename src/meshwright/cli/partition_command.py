"""`meshwright partition module:function`: the sharding table of a tree somebody's code makes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from jax.sharding import AbstractMesh

from meshwright.cli import screen
from meshwright.errors import PartitionError, near, short
from meshwright.meshes import abstract_mesh
from meshwright.meshes.targets import live_devices
from meshwright.partitioning import describe
from meshwright.spec import MeshSpec


@dataclasses.dataclass
class PartitionCommand:
    """Show how a tree of arrays or shapes is sharded on a mesh."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """module:function; the function takes nothing and returns a tree of arrays or shapes."""
    mesh: str
    """The mesh, e.g. "fsdp:8, tp:4"."""
    on: str | None = None
    """Hardware by name, to fill a -1, e.g. v5p:4x4x4. Default: the live devices."""
    slices: int = 1
    """How many of them, joined by the slow network."""
    rules: Path | None = None
    """A JSON file of [pattern, spec] pairs, e.g. [["mlp/*", ["fsdp", "tp"]], ["**", null]]."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write the table with drawings to this file."""

    def run(self) -> None:
        mesh = self._mesh()
        options = {} if self.rules is None else {"rules": _read_rules(self.rules)}
        report = describe(_call(self.source), mesh, **options)
        if self.html is not None:
            page = screen.page(self.source, report._repr_html_())
            self.html.write_text(page, encoding="utf-8")
        print(json.dumps(report.to_json(), indent=2) if self.json else report)

    def _mesh(self) -> AbstractMesh:
        spec = MeshSpec.parse(self.mesh)
        if self.on is None and spec.size is None:
            spec = spec.resolve(len(live_devices()))
        return abstract_mesh(spec, on=self.on, slices=self.slices)


def _read_rules(file: Path) -> Any:
    """Plain JSON; nothing in it is evaluated."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PartitionError(f"{file}: not JSON ({error}).") from error


def _call(source: str) -> Any:
    name, colon, function = source.partition(":")
    if not (name and colon and function):
        raise PartitionError(f"{short(source)} is not module:function, e.g. my_model:init_shapes.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise PartitionError(f"cannot import {short(name)}: {error}.") from error
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if not callable(found):
        hint = near(function, [n for n in vars(module) if callable(getattr(module, n))])
        raise PartitionError(f"{name} has no function {short(function)}.{hint}")
    return found()
