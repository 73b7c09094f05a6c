"""`meshwright rehearse MODEL`: what the compiler makes of a step on hardware you do not have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshwright.cli.terminal import call, explained
from meshwright.errors import RehearsalError, short
from meshwright.models.presets import model
from meshwright.rehearsal.api import rehearse, rehearse_model
from meshwright.rehearsal.remedy_table import Remedies
from meshwright.rehearsal.rendering import as_text
from meshwright.rehearsal.result import Rehearsal
from meshwright.report import page

DOES_NOT_FIT = 3  # exit code


@dataclasses.dataclass
class RehearseCommand:
    """Compile a train step for named hardware: does it fit, what does it move, how long does it
    take. No accelerator is needed. The exit code is 3 where it does not fit."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A model (tiny, llama3-8b, mixtral-8x7b, ...), or module:function for a step of your own. The
    function takes nothing and returns (step, arguments...), or a dict of rehearse's arguments with
    step and args in it."""
    mesh: str
    """The mesh, e.g. "fsdp:-1, tp:4"."""
    on: str | None = None
    """Hardware by name, e.g. v5e:16x16, h100:8x4. Default: the live devices."""
    slices: int = 1
    """How many of them, joined by the slow network."""
    dcn: str | None = None
    """How much of each axis crosses the slow network, e.g. "dp:2". Default: worked out."""
    batch: int | None = None
    """Rows of the whole batch, over all devices (models only)."""
    seq: int | None = None
    """Length of a row. Default: the model's own (models only)."""
    set: tuple[str, ...] = ()
    """Changes to the model: layers=4, attention=dot (auto, flash), remat=minimal (none, full, dots,
    save_qkv), moments=bfloat16, products=int8 (fp8), tiles=4, ... docs/models.md has them all."""
    compiler: Literal["vendor", "cpu"] = "vendor"
    """Whose compiler: the hardware's, or cpu for simulated devices."""
    timeout: float = 900.0
    """Seconds after which the compiler is ended."""
    codegen: bool = True
    """Let a TPU's compiler generate code; without, the answer comes in seconds, from the scheduled
    program."""
    try_: Annotated[bool, tyro.conf.arg(name="try")] = False
    """Where it does not fit, compile each way out, too; where it does, what would save time."""
    cache: bool = True
    """Take an answer that is known from before; without, compile in any case."""
    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """Also write a report to this file."""

    def run(self) -> int:
        if self.html is not None and not self.html.parent.is_dir():
            raise RehearsalError(f"--html {self.html}: there is no folder {self.html.parent}.")
        result = self._rehearsed()
        ways = result.remedies(check=True) if self.try_ and not result.fits else ()
        costs = result.costs(check=self.try_ and result.fits)
        if self.html is not None:
            text = page(result, remedies=ways, costs=costs)
            self.html.write_text(text, encoding="utf-8")
        if self.json:
            data = result.to_json()
            if self.try_:
                data["tried"] = [str(way) for way in ways]
                data["costs"] = costs.to_json()
            if isinstance(ways, Remedies):
                data["remedies"] = ways.to_json()
            print(json.dumps(data, indent=2))
        else:
            print(as_text(result, ways, costs))
        return 0 if result.fits else DOES_NOT_FIT

    def _rehearsed(self) -> Rehearsal:
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "on": self.on,
            "slices": self.slices,
            "dcn": self.dcn,
            "compiler": self.compiler,
            "timeout": self.timeout,
            "codegen": self.codegen,
            "cache": self.cache,
        }
        if ":" not in self.source:
            if self.batch is None:
                raise RehearsalError("--batch is missing: rows of the whole batch, e.g. 256.")
            chosen = model(self.source, **dict(map(_change, self.set)))
            return rehearse_model(chosen, batch=self.batch, seq=self.seq, **options)
        if self.batch is not None or self.seq is not None or self.set:
            raise RehearsalError(
                "--batch, --seq and --set go with a model; your function says its own."
            )
        step, args, own = _own_step(self.source, call(self.source))
        twice = [name for name in own if options.get(name) not in (_UNSET.get(name), own[name])]
        if twice:
            raise RehearsalError(
                f"{self.source} says {twice[0]}={short(own[twice[0]])} itself, and the command "
                f"line says {short(options[twice[0]])}. Say it once."
            )
        with explained(f"{self.source}: its step failed"):
            return rehearse(step, *args, **{**options, **own})


_UNSET = {"slices": 1, "compiler": "vendor", "timeout": 900.0, "codegen": True, "cache": True}


def _change(words: str) -> tuple[str, Any]:
    """`layers=4` as a name and a value."""
    name, equals, value = words.partition("=")
    if not (name and equals and value):
        raise RehearsalError(f"--set {short(words)}: write NAME=VALUE, e.g. layers=4.")
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, tuple(read) if isinstance(read, list) else read  # settings with several values


def _own_step(source: str, returned: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the step, its arguments and options, from what a user's function returned."""
    if isinstance(returned, dict) and callable(returned.get("step")) and "args" in returned:
        rest = {name: value for name, value in returned.items() if name not in ("step", "args")}
        return returned["step"], tuple(returned["args"]), rest
    if isinstance(returned, tuple) and len(returned) > 1 and callable(returned[0]):
        return returned[0], returned[1:], {}
    raise RehearsalError(
        f"{source} returned {short(returned)}. Return (step, arguments...), or a dict with step, "
        "args and more of rehearse's arguments."
    )
