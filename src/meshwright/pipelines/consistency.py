"""`PlanConsistency`: every process must run the same step, which is checked before it first runs.

`ProcessContext` is what the pipelines of this process share: one watchdog and one link. A program
often has several pipelines, one to train and one to evaluate. With one watchdog a fault is reported
once, and steps are counted together, so that a process that calls the pipelines in another order is
noticed at once.
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
from meshwright.schedules.types import TaskKind
from meshwright.transfers.connection import connect
from meshwright.trees.split import Split, as_shape
from meshwright.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from meshwright.pipelines.plan import Plan

Summary = Mapping[str, str]  # what a process is about to run, part by part

_NAMED = 16  # arrays of an argument that are named one by one
_SAMPLE = 2**16  # elements of an array that are compared
_VALUES = "values"


class ProcessContext:
    """The watchdog and the link of all pipelines of this process, while one of them is open."""

    def __init__(self) -> None:
        self.link = connect()
        try:
            self.watchdog = Watchdog(name="pipeline")
            self.watchdog.enter(None)  # between steps the program may stand still as it likes
            self.watchdog.start()
        except BaseException:
            self.link.close()
            raise
        self._steps = 0
        self._pipelines = 0  # ever registered; they are numbered alike in every process
        self._timeouts: dict[int, float] = {}  # of the open ones, by number

    def register(self, timeout: float) -> int:
        """Add a pipeline; returns its number."""
        number, self._pipelines = self._pipelines, self._pipelines + 1
        self._timeouts[number] = timeout
        self.watchdog.timeout = max(self._timeouts.values())
        return number

    def unregister(self, number: int) -> None:
        """Remove a pipeline. The last one waits for the other processes and closes everything."""
        global _process_context
        del self._timeouts[number]
        if self._timeouts:
            return
        _process_context = None if _process_context is self else _process_context
        try:
            if not self.watchdog.closed:  # it is after an error, which has ended the others too
                self.watchdog.close()
        finally:
            self.link.close()

    def begin_step(self, number: int, plan: str) -> None:
        """Begin a step of a pipeline; its timeout holds until another pipeline begins one."""
        self.watchdog.timeout = self._timeouts[number]
        self.watchdog.enter(self._steps, plan)
        # Counted even if the step fails: all processes that caught the error have the same number.
        self._steps += 1

    @contextlib.contextmanager
    def without_timeout(self, doing: str) -> Iterator[None]:
        """Suspend the timeout: tracing and compiling may take long, and the others wait."""
        before, self.watchdog.timeout, self.watchdog.doing = self.watchdog.timeout, math.inf, doing
        try:
            yield
        finally:
            self.watchdog.timeout, self.watchdog.doing = before, ""


_process_context: ProcessContext | None = None


def process_context() -> ProcessContext:
    """Return the context of this process; made for its first pipeline."""
    global _process_context
    # Not kept after its last pipeline was closed: the next one connects anew, in all processes.
    if _process_context is None:
        _process_context = ProcessContext()
    return _process_context


class PlanConsistency:
    """A pipeline's plans that were compared with those of the other processes.

    Each plan has a name, by which the watchdog sees that all processes are at the same one.
    """

    def __init__(self, process_context: ProcessContext, number: int) -> None:
        self.process_context, self.number = process_context, number
        self._names: dict[Hashable, str] = {}
        self._checked: set[Hashable] = set()
        self._first: Summary = {}  # of the arguments of plan 0

    def begin_step(self, key: Hashable, parts: Split, why: str = "") -> None:
        """Begin a step with the plan of this key.

        The others learn the name of a new plan before it is compiled, which may take long.
        """
        if key not in self._names:
            summary = _summarize_arguments(parts.paths, map(_type_and_shape, parts.arrays))
            self._first = self._first or summary
            # Most programs have one pipeline; its plans need no more than a number.
            whose = f" of pipeline {self.number}" if self.number else ""
            difference = _first_difference(summary, self._first)
            self._names[key] = f"plan {len(self._names)}{whose}{difference}"
        self.process_context.begin_step(self.number, self._names[key] + why)

    def check_plan(self, key: Hashable, plan: Plan, parts: Split) -> None:
        """Before the first step with a plan, compare it with those of the other processes."""
        if key not in self._checked:
            summary = plan_summary(plan) | values_summary(parts)
            watchdog = self.process_context.watchdog
            problem = watchdog.confer("the plan", json.dumps(summary), _compare_texts)
            if problem:
                raise PipelineError(f"the processes do not run the same step: {problem}.")
            self._checked.add(key)


def plan_summary(plan: Plan) -> dict[str, str]:
    """Summarize what must be the same in every process, part by part; long parts by a checksum.

    The message names the first part that differs, so they go from general to particular.
    """
    builder, schedule = plan.assembled.builder, plan.proof.schedule
    summary = {
        "schedule": f"{schedule.name} of {schedule.groups} groups, {schedule.stages} stages and "
        f"{schedule.microbatches} microbatches"
    }
    summary |= _summarize_arguments(plan.paths, [v.aval.str_short() for v in plan.traced.invars])
    in_order = sorted(
        plan.programs.values(),
        key=lambda program: (program.stage, program.kind != TaskKind.FORWARD),
    )
    for program in in_order:
        # Names of primitives, not jaxprs: those print addresses of functions, which differ between
        # processes, and take megabytes for a large model.
        names = [eqn.primitive.name for eqn in program.eqns]
        counts = [f"{count} {name}" for name, count in collections.Counter(names).items()]
        summary[f"task {program.name}"] = ", ".join([*counts, f"checksum {_checksum(names)}"])
    transfers = [
        (
            operation.name,
            *(
                (builder.avals[slot].str_short(), str(builder.slot_shardings[slot]))
                for slot in operation.outs
            ),
        )
        for operation in builder.operations
        if operation.is_transfer
    ]
    summary["transfers"] = f"{len(transfers)}, checksum {_checksum(transfers)}"
    return summary


def values_summary(parts: Split) -> dict[str, str]:
    """Compute checksums of the NumPy arrays that are passed, the same in every process.

    One group reads the inputs and another the labels: rows in another order would train on wrong
    pairs. Arrays on devices are not read, which would wait for them.
    """
    return {
        f"{_VALUES} of argument {path} (all pass the same)": _checksum([_sample(value).tobytes()])
        for path, value in zip(parts.paths, parts.arrays, strict=True)
        if isinstance(value, np.ndarray)
    }


def _sample(value: np.ndarray) -> np.ndarray:
    """Return some of an array's elements, in the dtype that JAX would use."""
    flat = value.reshape(-1)
    # Strided over the whole array: a batch in another order differs in more than its beginning.
    flat = flat[:: max(1, flat.size // _SAMPLE)]
    return flat.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _summarize_arguments(paths: Sequence[str], kinds: Iterable[str]) -> dict[str, str]:
    """List each array with its type; one line for an argument that has many arrays."""
    arguments: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, kind in zip(paths, kinds, strict=True):
        arguments[path.partition("/")[0]][f"argument {path}"] = kind
    summary: dict[str, str] = {}
    for number, arrays in arguments.items():
        many = f"{len(arrays)} arrays, checksum {_checksum(arrays.items())}"
        summary |= arrays if len(arrays) <= _NAMED else {f"argument {number}": many}
    return summary


def _type_and_shape(value: Any) -> str:
    """Return the dtype and shape of an argument as JAX writes them: `float32[8,4]`."""
    return str(jax.typeof(as_shape(value)).str_short())


def difference(summaries: Sequence[Summary]) -> str:
    """Describe the first part in which the processes differ; empty if all are the same.

    >>> difference([{"schedule": "1f1b"}, {"schedule": "1f1b"}, {"schedule": "gpipe"}])
    'schedule: 1f1b in process 0, 1; gpipe in process 2'
    """
    for part in _differing_parts(summaries):
        processes: dict[str, list[int]] = {}
        for process, summary in enumerate(summaries):
            processes.setdefault(summary.get(part, "nothing"), []).append(process)
        texts = list(processes)
        if part.startswith("task "):
            texts = _not_common(texts)
        clauses = [
            f"{text} in process {listing(numbers)}"
            for text, numbers in zip(texts, processes.values(), strict=True)
        ]
        return f"{part}: {'; '.join(clauses[:_NAMED])}"
    return ""


def _not_common(tasks: Sequence[str]) -> list[str]:
    """Return, for each task, the items not common to all; checksums if only the order differs.

    >>> _not_common(["2 mul, 1 tanh, checksum 5f", "2 mul, 1 sin, checksum 07",
    ...              "2 mul, checksum 3c"])
    ['1 tanh', '1 sin', 'nothing more']
    """
    items = [task.split(", ") for task in tasks]
    own = [[item for item in task if any(item not in other for other in items)] for task in items]
    counts = [[item for item in task if not item.startswith("checksum ")] for task in own]
    return [listing(task) or "nothing more" for task in (counts if any(counts) else own)]


def _first_difference(summary: Summary, first: Summary) -> str:
    """Return the argument in which a plan differs from the pipeline's first one, for its name."""
    for part in _differing_parts([summary, first]):
        return f" ({part}: {summary.get(part, 'nothing')})"
    return ""


def _differing_parts(summaries: Sequence[Summary]) -> list[str]:
    """Return the parts that are not the same in all summaries.

    Values are compared only where all processes pass NumPy arrays: one may pass results of the
    last step, another a checkpoint.
    """
    parts = dict.fromkeys(part for summary in summaries for part in summary)
    compared = [
        part
        for part in parts
        if not part.startswith(_VALUES) or all(part in summary for summary in summaries)
    ]
    return [part for part in compared if len({summary.get(part) for summary in summaries}) > 1]


def _compare_texts(texts: Sequence[str]) -> str:
    return difference([json.loads(text) for text in texts])


def _checksum(parts: Iterable[Any]) -> str:
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=4).hexdigest()
