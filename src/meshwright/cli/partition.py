"""`meshwright partition module:function`: the sharding table of a tree of yours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import AbstractMesh

from meshwright._html import page
from meshwright.cli.terminal import call
from meshwright.errors import PartitionError, short
from meshwright.meshes.build import abstract_mesh
from meshwright.meshes.devices import live_devices
from meshwright.partitioning.report import PartitionReport, explain_tree
from meshwright.spec.mesh_spec import MeshSpec


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
    unmatched: Literal["error", "replicate", "shape"] = "error"
    """What to do with an array that no rule matches: keep it whole, or go by its shape."""
    unused: Literal["error", "allow"] = "error"
    """What to do with a rule that matches nothing."""
    uneven: Literal["error", "replicate"] = "error"
    """What to do with an axis that does not divide its dim: replicate drops it."""
    min_shard_bytes: int | None = None
    """By shape, smaller arrays stay whole. Default: 65536."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write the table with drawings to this file."""

    def run(self) -> None:
        report = self._report()
        if self.html is not None:
            text = page(self.source, report._repr_html_())
            self.html.write_text(text, encoding="utf-8")
        print(json.dumps(report.to_json(), indent=2) if self.json else report)

    def _report(self) -> PartitionReport:
        mesh, options = self._mesh(), self._options()
        tree = call(self.source)
        report = explain_tree(tree, mesh, **options)
        if not report.rows:
            raise PartitionError(
                f"{self.source} returned {short(tree)}, which holds no arrays. Return a tree of "
                "arrays or of jax.ShapeDtypeStruct."
            )
        return report

    def _mesh(self) -> AbstractMesh:
        spec = MeshSpec.parse(self.mesh)
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
