"""`TaskCompiler`: lowers and compiles the tasks of a pipeline for groups that are not here."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from meshwright import _compat
from meshwright.errors import RehearsalError
from meshwright.hlo.instructions import Source
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.step_graph import Operation, TaskFunction
from meshwright.rehearsal.callbacks import Callback
from meshwright.rehearsal.compiler import PLATFORMS, Job, Outcome, Site, compile_or_load
from meshwright.rehearsal.lowering import Lowered, lower_trace
from meshwright.rehearsal.memory import Memory, as_refused
from meshwright.rehearsal.step_arguments import ON_HOST
from meshwright.rehearsal.tpu_slices import slice_for


class Exhausted(RehearsalError):
    """Raised for a task at which the compiler ran out of memory, with its group and memory."""

    def __init__(self, task: str, group: int, memory: Memory):
        super().__init__(f"{task}: the compiler ran out of memory. The group {memory.verdict()}.")
        self.task, self.group, self.memory = task, group, memory


# In: lowered programs, from the threads in which a plan compiles its tasks. Out: what the compiling
# process made of each. Invariant: one process per program, also where several threads ask for it;
# stages of a transformer are mostly one program.
class TaskCompiler:
    """Compiles the programs of groups that are not here, equal ones only once."""

    def __init__(self, groups: Groups, timeout: float, folder: Path | None):
        self.groups, self.timeout, self.folder = groups, timeout, folder
        self.callbacks: dict[Callback, None] = {}  # that were left out, each line once
        self.offloads: dict[Source | None, None] = {}  # lines that move arrays to the host
        self._outcomes: dict[str, concurrent.futures.Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def lower(
        self, function: TaskFunction, operation: Operation, jitted: Any, shapes: Sequence[Any]
    ) -> Lowered:
        """Lower a task as `rehearse` lowers a step: callbacks are left out, and noted here."""
        site, mesh = self._site(operation.group), self.groups.meshes[operation.group]
        free = tuple(out is None for out in function.out_shardings)
        try:
            lowered = lower_trace(jitted.trace(*shapes), free, mesh, site.platform, site.topology)
        except RehearsalError as error:
            raise RehearsalError(f"{_name(function, operation)}: {error}") from error
        self.callbacks |= dict.fromkeys(lowered.callbacks)
        self.offloads |= dict.fromkeys(lowered.offloads)
        return lowered

    def __call__(
        self, function: TaskFunction, operation: Operation, lowered: Lowered
    ) -> CompiledTask:
        """Compile a lowered program with the vendor's compiler."""
        job = lowered.job(_name(function, operation), self._site(operation.group))
        outcome = self._outcome(job)
        if outcome.verdict == "exhausted":
            memory = as_refused(outcome.reason, (), job.site.topology.chip)
            raise Exhausted(job.name, operation.group, memory)
        mesh = self.groups.meshes[operation.group]
        shardings = _compat.named_shardings(outcome.shardings, mesh)
        # What a task leaves on the host the next one takes from there.
        on_host = zip(shardings, lowered.host_results, strict=True)
        return CompiledTask(
            outcome, [each.with_memory_kind(ON_HOST) if host else each for each, host in on_host]
        )

    def stop(self) -> None:
        """End the compilers that are still at work."""
        self._stopped.set()

    def _site(self, group: int) -> Site:
        hardware, positions = slice_for(self.groups.meshes[group])
        return Site(PLATFORMS[hardware.chip.family], hardware, positions)

    def _outcome(self, job: Job) -> Outcome:
        """Return the outcome of a job, or the one that another thread is already compiling."""
        with self._lock:
            first = job.key not in self._outcomes
            outcome = self._outcomes.setdefault(job.key, concurrent.futures.Future())
        if first:
            try:
                outcome.set_result(compile_or_load(job, self.folder, self.timeout, self._tick)[0])
            except BaseException as error:  # for the threads that wait for it too
                outcome.set_exception(error)
        return outcome.result()

    def _tick(self, _: float) -> None:
        if self._stopped.is_set():
            raise RehearsalError("the rehearsal of this pipeline has ended.")


def _name(function: TaskFunction, operation: Operation) -> str:
    task = operation.task
    return (
        function.name if task is None else f"group {operation.group}: task {task.stage}{task.kind}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTask:
    """A task compiled in another process: reads as `jax.stages.Compiled`, but cannot be called."""

    outcome: Outcome
    output_shardings: Sequence[NamedSharding]

    def as_text(self) -> str:
        return self.outcome.text

    def memory_analysis(self) -> Any:
        sizes = {f"{part}_size_in_bytes": size for part, size in self.outcome.memory.items()}
        return types.SimpleNamespace(**sizes)

    def cost_analysis(self) -> dict[str, float]:
        return self.outcome.cost
