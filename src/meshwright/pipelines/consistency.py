"""The pipelines of this process among those of the others: one watch and one link for them all.

A program has several pipelines as often as not, one to train and one to evaluate. With one watch a
fault is told once, and steps are counted together, so that pipelines called in another order are
seen at once.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshwright.errors import PipelineError, listing
from meshwright.transfers.connection import connect
from meshwright.trees.split import Split, as_shape
from meshwright.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan


class ProcessContext:
    """What the pipelines share while at least one of them is open."""

    def __init__(self) -> None:
        self.link = connect()
        try:
            self.watch = Watchdog(name="pipeline").start()
        except BaseException:
            self.link.close()
            raise
        self._steps = 0
        self._pipelines = 0  # ever made; they are numbered alike in every process
        self._limits: dict[int, float] = {}  # of those that are open

    def enter(self, limit: float) -> int:
        """One more pipeline; returns its number."""
        number, self._pipelines = self._pipelines, self._pipelines + 1
        self._limits[number] = limit
        self.watch.timeout = max(self._limits.values())
        return number

    def leave(self, number: int) -> None:
        """The last one waits until the others are done, too."""
        global _process_context
        del self._limits[number]
        if self._limits:
            return
        _process_context = None if _process_context is self else _process_context
        try:
            if not self.watch.closed:
                self.watch.close()
        finally:
            self.link.close()

    def begin(self, number: int, plan: str) -> None:
        """A step of a pipeline, whose limit holds until that of another one begins. Whatever
        becomes of it, the next one has another number."""
        self.watch.timeout = self._limits[number]
        self.watch.enter(self._steps, plan)
        self._steps += 1

    @contextlib.contextmanager
    def without_timeout(self, doing: str) -> Iterator[None]:
        """Tracing and compiling take what they take; others wait for us meanwhile."""
        before, self.watch.timeout, self.watch.doing = self.watch.timeout, math.inf, doing
        try:
            yield
        finally:
            self.watch.timeout, self.watch.doing = before, ""


_process_context: ProcessContext | None = None


def process_context() -> ProcessContext:
    """That of this process; made for its first pipeline."""
    global _process_context
    if _process_context is None:
        _process_context = ProcessContext()
    return _process_context


# Every process must run the same step: its plan in words, compared before it first runs.


_NAMED = 16  # arrays of an argument
_SAMPLE = 2**16  # elements of an array
_VALUES = "values"


class PlanConsistency:
    """A pipeline's plans that all processes have agreed on, with names that tell them apart."""

    def __init__(self, process_context: ProcessContext, number: int) -> None:
        self.process_context, self.number = process_context, number
        self._names: dict[Hashable, str] = {}
        self._agreed: set[Hashable] = set()
        self._first: Mapping[str, str] = {}

    def enter(self, kind: Hashable, parts: Split, why: str = "") -> None:
        """Begin a step with arguments of a kind. Others hear of a new kind before it is compiled,
        which may take long."""
        if kind not in self._names:
            words = _arguments(parts.paths, map(_short, parts.arrays))
            self._first = self._first or words
            whose = f" of pipeline {self.number}" if self.number else ""
            self._names[kind] = f"plan {len(self._names)}{whose}{_beside(words, self._first)}"
        self.process_context.begin(self.number, self._names[kind] + why)

    def agree(self, kind: Hashable, plan: Plan, parts: Split) -> None:
        """Before the first step with a plan, compare it with that of the others."""
        if kind not in self._agreed:
            words = plan_summary(plan) | values_summary(parts)
            wrong = self.process_context.watch.confer("the plan", json.dumps(words), _compared)
            if wrong:
                raise PipelineError(f"the processes do not run the same step: {wrong}.")
            self._agreed.add(kind)


def plan_summary(plan: Plan) -> dict[str, str]:
    """What must be the same everywhere, part by part; of long parts a checksum."""
    builder, schedule = plan.assembled.builder, plan.proof.schedule
    found = {
        "schedule": f"{schedule.name} of {schedule.groups} groups, {schedule.stages} stages and "
        f"{schedule.microbatches} microbatches"
    }
    found |= _arguments(plan.paths, [var.aval.str_short() for var in plan.traced.invars])
    for program in sorted(plan.programs.values(), key=lambda p: (p.stage, p.kind != "F")):
        names = [eqn.primitive.name for eqn in program.eqns]
        counts = [f"{count} {name}" for name, count in collections.Counter(names).items()]
        found[f"task {program.name}"] = ", ".join([*counts, f"checksum {_checksum(names)}"])
    sent = [
        (
            o.name,
            *(
                (builder.avals[slot].str_short(), str(builder.slot_shardings[slot]))
                for slot in o.outs
            ),
        )
        for o in builder.operations
        if o.source is not None
    ]
    found["transfers"] = f"{len(sent)}, checksum {_checksum(sent)}"
    return found


def values_summary(parts: Split) -> dict[str, str]:
    """Checksums of what every process passes from its host: inputs and labels of other rows would
    train on wrong pairs. Arrays on devices are not read."""
    return {
        f"{_VALUES} of argument {path} (all pass the same)": _checksum([_sample(value).tobytes()])
        for path, value in zip(parts.paths, parts.arrays, strict=True)
        if isinstance(value, np.ndarray)
    }


def _sample(value: np.ndarray) -> np.ndarray:
    """Some of an array's elements, as JAX would hold them."""
    flat = value.reshape(-1)
    flat = flat[:: max(1, flat.size // _SAMPLE)]
    return flat.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _arguments(paths: Sequence[str], kinds: Iterable[str]) -> dict[str, str]:
    arguments: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, kind in zip(paths, kinds, strict=True):
        arguments[path.partition("/")[0]][f"argument {path}"] = kind
    found: dict[str, str] = {}
    for number, arrays in arguments.items():
        many = f"{len(arrays)} arrays, checksum {_checksum(arrays.items())}"
        found |= arrays if len(arrays) <= _NAMED else {f"argument {number}": many}
    return found


def _short(value: Any) -> str:
    """A type and a shape, as JAX writes them."""
    return str(jax.typeof(as_shape(value)).str_short())


def difference(told: Sequence[Mapping[str, str]]) -> str:
    """The first part in which the processes differ; nothing if all say the same.

    >>> difference([{"schedule": "1f1b"}, {"schedule": "1f1b"}, {"schedule": "gpipe"}])
    'schedule: 1f1b in process 0, 1; gpipe in process 2'
    """
    for part in _differing(told):
        said: dict[str, list[int]] = {}
        for process, words in enumerate(told):
            said.setdefault(words.get(part, "nothing"), []).append(process)
        texts = _own(list(said)) if part.startswith("task ") else list(said)
        parts = [
            f"{text} in process {listing(who)}"
            for text, who in zip(texts, said.values(), strict=True)
        ]
        return f"{part}: {'; '.join(parts[:_NAMED])}"
    return ""


def _own(tasks: Sequence[str]) -> list[str]:
    """Of what tasks consist of, that which not all have; the checksums where the order differs.

    >>> _own(["2 mul, 1 tanh, checksum 5f", "2 mul, 1 sin, checksum 07", "2 mul, checksum 3c"])
    ['1 tanh', '1 sin', 'nothing more']
    """
    items = [task.split(", ") for task in tasks]
    own = [[item for item in task if any(item not in other for other in items)] for task in items]
    counts = [[item for item in task if not item.startswith("checksum ")] for task in own]
    return [listing(task) or "nothing more" for task in (counts if any(counts) else own)]


def _beside(words: Mapping[str, str], first: Mapping[str, str]) -> str:
    """What tells the arguments of a plan from those of the first one."""
    for part in _differing([words, first]):
        return f" ({part}: {words.get(part, 'nothing')})"
    return ""


def _differing(told: Sequence[Mapping[str, str]]) -> list[str]:
    """Parts that are not the same. Values are compared where all pass them from their hosts."""
    parts = dict.fromkeys(part for words in told for part in words)
    known = [p for p in parts if not p.startswith(_VALUES) or all(p in words for words in told)]
    return [part for part in known if len({words.get(part) for words in told}) > 1]


def _compared(texts: Sequence[str]) -> str:
    return difference([json.loads(text) for text in texts])


def _checksum(parts: Iterable[Any]) -> str:
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=4).hexdigest()
