"""`Rehearsal`: everything that is known about a step before it runs; `Comparison` of two."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, duration, write_text
from meshwright.errors import RehearsalError, short
from meshwright.hlo.instructions import Source
from meshwright.hlo.program import Program
from meshwright.partitioning.report import PartitionReport
from meshwright.placement.placement import Placement
from meshwright.rehearsal.advice import AdviceList, find_advice
from meshwright.rehearsal.avoidable_costs import AvoidableCosts, find_costs
from meshwright.rehearsal.callbacks import Callback
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.types import CAUSES, Collectives, read_conflicts
from meshwright.rehearsal.compiler import Outcome
from meshwright.rehearsal.host_memory import HostMemory
from meshwright.rehearsal.host_transfers import HostTransfers, find_host_transfers
from meshwright.rehearsal.memory import Memory

# `advice`, `avoidable_costs`, `remedies` and `rendering` know this file's classes as types alone,
# so that no import is in a function.
from meshwright.rehearsal.mesh_remedies import data_rows
from meshwright.rehearsal.remedies import find_remedies, token_length
from meshwright.rehearsal.remedy_table import Remedies
from meshwright.rehearsal.rendering import as_html, as_json, as_page, as_text, provenance
from meshwright.rehearsal.repeated_work import find_repeated_work
from meshwright.rehearsal.request import Request, batch_shape
from meshwright.rehearsal.step_arguments import array_types
from meshwright.rehearsal.step_time import StepTime, step_time


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rehearsal:
    """What the compiler made of a step. Prints itself; HTML in a notebook; `to_json()`.

    `memory` is the verdict. What else the program tells is read off it when first asked for:
    `collectives`, `time`, `host_transfers`. `stand_in`: compiled for simulated CPU devices instead
    of the hardware. `outcome` is what the compiler left, `results` the shapes of what the step
    returns. `callbacks` to the host were left out of the program: each with its `kind` and `source`
    line. `host_memory` is what offloading keeps on the hosts, if anything; `offloads` are the lines
    that ask for it. `estimate` is the step compiled for simulated CPU devices, where the hardware's
    compiler ran out of memory and says nothing of the buffers.
    """

    request: Request
    placement: Placement
    arguments: PartitionReport
    memory: Memory
    outcome: Outcome
    stand_in: bool
    from_cache: bool
    results: tuple[Any, ...] = ()
    callbacks: tuple[Callback, ...] = ()
    host_memory: HostMemory | None = None
    offloads: tuple[Source | None, ...] = ()
    estimate: Rehearsal | None = None

    @property
    def name(self) -> str:
        """What the step is called: `name` of `rehearse`, or the function's name."""
        return self.request.name

    @property
    def array_types(self) -> tuple[str, ...]:
        """The shapes and dtypes of the arrays that the step takes, sorted."""
        return array_types(self.request.args)

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory of a device and, where it is known, of a host."""
        return self.memory.fits and (self.host_memory is None or self.host_memory.fits is not False)

    @property
    def offload_lost(self) -> bool:
        """Whether the step offloads arrays, and the compiled program keeps them on the device."""
        return bool(self.offloads) and self.program is not None and self.host_transfers is None

    @property
    def margin(self) -> int:
        """Bytes to spare on a device; negative when it does not fit."""
        return self.memory.margin

    # Not in `rehearse`: a trial of a remedy asks for the verdict alone, and reading a large program
    # for the rest takes as long again as reading its memory.
    @property
    def program(self) -> Program | None:
        """The optimised HLO as data; `None` where the compiler ran out of memory."""
        return self.outcome.program

    @functools.cached_property
    def collectives(self) -> Collectives:
        """Every collective with its cause and cost; none where there is no program."""
        if self.program is None:
            return Collectives(())
        conflicts = read_conflicts(self.outcome.notes)
        return analyze(self.program, self.placement, conflicts, self.request.batch)

    @functools.cached_property
    def time(self) -> StepTime | None:
        """The modelled time of a step, part by part; `None` where there is no program."""
        if self.program is None:
            return None
        repeated = find_repeated_work(self.program, self.placement, self.arguments.rows)
        chip, scheduled = self.placement.topology.chip, self.outcome.scheduled
        time = step_time(self.program, self.collectives, chip, repeated, scheduled)
        return dataclasses.replace(time, cpu_estimate=self.stand_in)

    @functools.cached_property
    def host_transfers(self) -> HostTransfers | None:
        """What offloading moves between a device and its host; `None` if nothing."""
        chip = self.placement.topology.chip
        return None if self.program is None else find_host_transfers(self.program, chip)

    @property
    def text(self) -> str:
        """The optimised HLO itself; empty where the compiler ran out of memory."""
        return self.outcome.text

    @property
    def compiler(self) -> str:
        """The compiler and its version."""
        return self.outcome.compiler

    @property
    def compile_seconds(self) -> float:
        """How long the compiler took, now or when the answer was kept."""
        return self.outcome.seconds

    @property
    def flops(self) -> float | None:
        """Operations of all multiplications on one device."""
        return None if self.time is None else self.time.flops

    @property
    def bytes(self) -> float | None:
        """Bytes the kernels read and write of a device's memory."""
        return None if self.time is None else self.time.bytes

    @property
    def examples_per_second(self) -> float | None:
        """Rows of the data in a second, on all devices; `None` without rows or a time."""
        rows = data_rows(self.request.args, self.request.data)
        return rows / self.time.total if rows and self.time and self.time.total else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens in a second, on all devices; `None` where the data are no rows of tokens."""
        request = self.request
        model = request.model is not None
        length = batch_shape(request)[1] if model else token_length(request)
        rate = self.examples_per_second
        return None if rate is None or length is None else rate * length

    @property
    def model_flops(self) -> float | None:
        """Operations a device needs for the model: nothing that is repeated or computed again.

        Of this package's models by their formula, `Model.flops`; else counted in the program.
        """
        if self.time is None or self.request.model is None:
            return None if self.time is None else self.time.model_flops
        whole = self.request.model.flops(*batch_shape(self.request))
        return whole / self.placement.topology.num_devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the part of the chip's peak that `model_flops` take."""
        if self.time is None or self.model_flops is None or not self.time.total:
            return None
        return self.model_flops / self.time.peak_flops / self.time.total

    def advice(self, *, check: bool = False) -> AdviceList:
        """List what to do next, each with what it brings as a number and what to write.

        With `check` also compile the remedies, or the changes that would save time.

        >>> import jax, meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> w, x = (jax.ShapeDtypeStruct((512, 512), "float32") for _ in range(2))
        >>> options = {"mesh": "dp:2, tp:4", "on": "cpu:8", "in_shardings": [P(), P("dp")]}
        >>> first = mw.rehearse(lambda w, x: x @ w, w, x, **options).advice()[0]
        >>> first.brings
        'up to 1.44 ms of a step of 1.92 ms (75%)'
        >>> first.change
        'shard w over tp, too: P(None, "tp"), by a rule or in_shardings.'
        """
        if not check:
            return self._advice
        remedies = () if self.fits else self.remedies(check=True)
        return find_advice(self, remedies, self.costs(check=self.fits))

    @functools.cached_property
    def _advice(self) -> AdviceList:
        return find_advice(self)

    def save(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the report to a file, one page that works offline; JSON where it ends in `.json`.

        `mw.report.page` makes the page with a comparison, a pipeline or losses beside it. Raises
        `RehearsalError` for another ending or a folder that does not exist.

        >>> import tempfile, meshwright as mw
        >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
        >>> r.save(f"{tempfile.mkdtemp()}/tiny.html").name
        'tiny.html'
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise RehearsalError(
                f"save: {short(path.name)} ends in neither .html nor .json.", option="path"
            )
        if not path.parent.is_dir():
            raise RehearsalError(f"save: there is no folder {path.parent}.", option="path")
        if path.suffix == ".html":
            text = as_page(self, title=title)
        else:
            text = json.dumps({**self.to_json(), "provenance": provenance(self)}, indent=2)
        try:
            write_text(path, text)
        except OSError as error:
            raise RehearsalError(f"save: {path}: {error.strerror}.", option="path") from error
        return path

    def remedies(self, *, check: bool = False) -> Remedies:
        """List ways to need less memory, cheapest first; with `check` compile each as well.

        They print as a table: what to change, how (an option, a line of code; of a model the
        whole command), the peak to expect, what that saves, and what a trial said.

        >>> import jax, meshwright as mw
        >>> w = jax.ShapeDtypeStruct((512, 512), "float32")
        >>> r = mw.rehearse(lambda w: w + 1, w, mesh="dp:8", on="cpu:8")
        >>> [remedy.how for remedy in r.remedies()]
        ['donate_argnums=0', "mesh='fsdp:8'"]
        """
        return find_remedies(self, check=True) if check else self._remedies

    # Cached: text, HTML and JSON list them, and a large program takes seconds to walk.
    @functools.cached_property
    def _remedies(self) -> Remedies:
        return find_remedies(self, check=False)

    def costs(self, *, check: bool = False) -> AvoidableCosts:
        """List what another sharding would save, largest first, each with what to write.

        With `check` also compile the largest, where the change can be made from here, and the
        constraints together.

        >>> import jax, meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> w, x = (jax.ShapeDtypeStruct((512, 512), "float32") for _ in range(2))
        >>> options = {"mesh": "dp:2, tp:4", "on": "cpu:8", "in_shardings": [P(), P("dp")]}
        >>> r = mw.rehearse(lambda w, x: x @ w, w, x, **options)
        >>> [(cost.kind, cost.what, cost.over) for cost in r.costs()]
        [('repeated work', '4 times', 'tp')]
        >>> r.costs()[0].write
        'shard w over tp, too: P(None, "tp"), by a rule or in_shardings.'
        """
        return find_costs(self, check=True) if check else self._costs

    @functools.cached_property
    def _costs(self) -> AvoidableCosts:
        return find_costs(self, check=False)

    def compare(self, other: Any) -> Any:
        """Set this rehearsal and another side by side; a `Measurement` shows this one's promises.

        Returns a `Comparison` of two rehearsals, or the measurement with one column more.
        """
        if hasattr(other, "kernel_seconds"):  # of a room below this one
            return other.compare(self)
        if not isinstance(other, Rehearsal):
            raise RehearsalError(f"compare: {short(other)} is not a rehearsal.")
        return Comparison(self, other)

    def __repr__(self) -> str:
        placed = self.placement
        verdict = "fits" if self.fits else "does not fit"
        words = f"of {self.name}: {placed.spec} on {placed.topology.name}, {verdict}"
        return short_repr(self, words)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the HLO text as plain data."""
        return as_json(self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """What differs between two rehearsals. Prints itself; HTML in a notebook; `to_json()`."""

    first: Rehearsal
    second: Rehearsal

    def rows(self) -> Iterator[tuple[str, Any, Any, str]]:
        """What is compared, both values, and the kind of value: bytes, seconds or a word."""
        first, second = self.first, self.second
        yield "mesh", str(first.placement.spec), str(second.placement.spec), "word"
        yield "on", first.placement.topology.name, second.placement.topology.name, "word"
        yield "fits", _yes(first.fits), _yes(second.fits), "word"
        yield "peak memory", first.memory.peak, second.memory.peak, "bytes"
        yield "arguments", first.memory.arguments, second.memory.arguments, "bytes"
        yield "temporaries", first.memory.temporaries, second.memory.temporaries, "bytes"
        yield "margin", first.margin, second.margin, "bytes"
        for cause in CAUSES:
            yield f"{cause}, moved", _moved(first, cause), _moved(second, cause), "bytes"
        yield from self._times()

    def _times(self) -> Iterator[tuple[str, Any, Any, str]]:
        first, second = self.first.time, self.second.time
        for name in ("compute", "memory", "exposed", "host_exposed", "total"):
            label = "modelled step" if name == "total" else f"step: {name}"
            yield (
                label,
                None if first is None else getattr(first, name),
                None if second is None else getattr(second, name),
                "seconds",
            )

    def __repr__(self) -> str:
        return short_repr(self, f"of {self.first!r} and {self.second!r}")

    def __str__(self) -> str:
        return self._table().text()

    def _sheet(self) -> Sheet:
        return Sheet(f"{self.first.name} and {self.second.name}", [self._table()])

    def _table(self) -> Table:
        heading, *rows = self._cells()
        return Table(heading, rows, [False, True, True, True])

    def _cells(self) -> list[list[str]]:
        cells = [["", self.first.name, self.second.name, "ratio"]]
        for label, first, second, kind in self.rows():
            if first or second:
                cells.append(
                    [label, _word(first, kind), _word(second, kind), _ratio(first, second)]
                )
        return cells

    def to_json(self) -> dict[str, Any]:
        """Return `{what: [first, second]}`."""
        return {label: [first, second] for label, first, second, _ in self.rows()}


def _moved(result: Rehearsal, cause: str) -> int:
    return sum(entry.total_moved for entry in result.collectives if entry.cause == cause)


def _word(value: Any, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "bytes":
        return amount(value)
    return duration(value) if kind == "seconds" else str(value)


def _ratio(first: Any, second: Any) -> str:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)) and first > 0:
        return f"{second / first:.2f}" if second >= 0 else ""
    return ""


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
