"""`TaskCompiler`: lowers and compiles the tasks of a pipeline for groups that are not here.

Also the memory that the groups need for them, on their devices and on their hosts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import threading
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from meshwright import _compat, _compat_lowering
from meshwright.errors import RehearsalError
from meshwright.hardware.chips import Chip
from meshwright.hlo.instructions import Source
from meshwright.hlo.program import Program, read_program
from meshwright.mpmd.groups import Groups
from meshwright.pipelines.step_graph import Operation, StepBuilder, TaskFunction
from meshwright.rehearsal.callbacks import Callback
from meshwright.rehearsal.compiler import PLATFORMS, Job, Outcome, Site, compile_or_load
from meshwright.rehearsal.lowering import Lowered, lower_trace
from meshwright.rehearsal.memory import Memory, as_refused, available
from meshwright.rehearsal.peak import workspace_at_peak
from meshwright.rehearsal.step_arguments import ON_HOST
from meshwright.rehearsal.tpu_slices import slice_for
from meshwright.trees.walk import bits


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


# What the groups of a pipeline hold at most over a step: on their devices, and on their hosts.


# In: the operations of all groups in the order in which they run. Out: the most that one group
# holds at once, and what of it lives between tasks then. Arguments stay unless a program is donated
# them, for the caller holds them too; results live until their last use, and each program adds its
# own temporaries. Example, 1F1B with two stages: group 0 holds the activations of two microbatches
# when its first backward begins.
def group_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int, chip: Chip
) -> tuple[Memory, int]:
    """Follow a group's memory through its operations: its peak, and what is held between tasks.

    `operations` are those of all groups: what is sent away is dropped by the group that takes it.
    """
    own = [operation for operation in operations if operation.group == group]
    given = {argument.slot for argument in builder.placed if argument.group == group}
    given |= {slot for slot in builder.constants if builder.group_of_slot[slot] == group}

    def total(slots: Iterable[int]) -> int:
        return sum(bytes_on_device(builder, slot) for slot in slots)

    arguments = total(given)
    alive = set(given)
    peak, held = arguments, 0
    functions = {id(each.function): each.function for each in own if each.function is not None}
    needs = {number: _working(function, chip) for number, function in functions.items()}
    for operation in operations:
        if operation.group != group:
            alive -= set(operation.drop) - given
            continue
        between = total(alive - given)
        function = operation.function
        working = total(operation.outs) if function is None else needs[id(function)]
        if total(alive & given) + between + working > peak:
            peak, held = total(alive & given) + between + working, between
        alive |= set(operation.outs)
        alive -= set(operation.drop) - given
        alive -= set() if function is None else {operation.ins[n] for n in function.donate_argnums}
    programs = sum(
        each.compiled.memory_analysis().generated_code_size_in_bytes for each in functions.values()
    )
    rest = max(0, peak - arguments)
    return Memory(arguments, 0, 0, rest, programs, available(chip), chip.name, chip.family), held


def group_host_memory(
    builder: StepBuilder, operations: Sequence[Operation], group: int
) -> tuple[int, int]:
    """Follow what a group has on its hosts: bytes of arguments, and at the peak, per device."""
    given = {argument.slot for argument in builder.placed if argument.group == group}

    def total(slots: Iterable[int]) -> int:
        return sum(
            _bytes(builder, n) for n in slots if _compat_lowering.is_on_host(builder.avals[n])
        )

    alive, peak = set(given), total(given)
    for operation in operations:
        if operation.group == group:
            alive |= set(operation.outs)
            code = operation.function
            sizes = None if code is None else code.compiled.memory_analysis()
            peak = max(peak, total(alive) + getattr(sizes, "host_temp_size_in_bytes", 0))
        alive -= set(operation.drop) - given
    return total(given), peak


def _working(function: TaskFunction, chip: Chip) -> int:
    """Bytes that a program needs besides its arguments."""
    report = function.compiled.memory_analysis()
    new = report.output_size_in_bytes - report.alias_size_in_bytes
    if chip.family != "gpu":  # reading a program takes a while
        return int(report.temp_size_in_bytes + new)
    return int(new) + task_temporaries(function.compiled, task_program(function.compiled), chip)


def bytes_on_device(builder: StepBuilder, slot: int) -> int:
    """Bytes that a device holds of the value in a slot; those of its host's memory are no part."""
    return 0 if _compat_lowering.is_on_host(builder.avals[slot]) else _bytes(builder, slot)


def _bytes(builder: StepBuilder, slot: int) -> int:
    aval, sharding = builder.avals[slot], builder.slot_shardings[slot]
    shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
    return math.ceil(math.prod(shape) * bits(aval.dtype) / 8)


def task_program(compiled: Any) -> Program:
    """Read what a task was compiled to, here or in another process."""
    tables = compiled.outcome.constants if isinstance(compiled, CompiledTask) else {}
    return read_program(compiled.as_text(), tables)


def task_temporaries(compiled: Any, program: Program, chip: Chip) -> int:
    """Bytes of a task's temporaries, with what libraries need for themselves on a GPU."""
    sizes = compiled.memory_analysis()
    allocated = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    allocated += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    return int(sizes.temp_size_in_bytes) + workspace_at_peak(program, chip, int(allocated))
