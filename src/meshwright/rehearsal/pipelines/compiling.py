"""A pipeline's tasks, compiled in processes of their own."""

from __future__ import annotations

import concurrent.futures
import io
import threading
from pathlib import Path
from typing import Any

from meshwright import _compat
from meshwright.errors import RehearsalError
from meshwright.mpmd.groups import Groups
from meshwright.mpmd.pipelines.operations import Code, Operation
from meshwright.rehearsal.compiler.answers import answer
from meshwright.rehearsal.compiler.jobs import PLATFORMS, Job, Outcome, Site
from meshwright.rehearsal.lowering import identity_of
from meshwright.rehearsal.memory.use import Memory, as_refused
from meshwright.rehearsal.pipelines.compiled import CompiledTask
from meshwright.rehearsal.slices import hardware_of


class Exhausted(RehearsalError):
    """A task for which the compiler ran out of memory: of which group, and its verdict."""

    def __init__(self, task: str, group: int, memory: Memory):
        super().__init__(f"{task}: the compiler ran out of memory. The group {memory.verdict()}.")
        self.task, self.group, self.memory = task, group, memory


class TaskCompiler:
    """Compiles the programs of groups that are not here; the same program only once."""

    def __init__(self, groups: Groups, deadline: float, folder: Path | None):
        self.groups, self.deadline, self.folder = groups, deadline, folder
        self._asked: dict[str, concurrent.futures.Future[Outcome]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __call__(self, code: Code, operation: Operation, program: Any) -> CompiledTask:
        """What the vendor's compiler makes of a lowered program."""
        job = self._job(code, operation, program)
        outcome = self._outcome(job)
        if outcome.verdict == "exhausted":
            memory = as_refused(outcome.reason, (), job.site.topology.chip)
            raise Exhausted(job.name, operation.group, memory)
        mesh = self.groups.meshes[operation.group]
        return CompiledTask(outcome, _compat.named_shardings(outcome.shardings, mesh))

    def stop(self) -> None:
        """End the compilers that are still at work."""
        self._stopped.set()

    def _job(self, code: Code, operation: Operation, program: Any) -> Job:
        module = program.compiler_ir("stablehlo").operation
        written = io.BytesIO()
        module.write_bytecode(written)
        hardware, positions = hardware_of(self.groups.meshes[operation.group])
        return Job(
            _name(code, operation),
            written.getvalue(),
            Site(PLATFORMS[hardware.chip.family], hardware, positions),
            tuple(out is None for out in code.outs),
            _compat.uses_shardy(),
            identity_of(module),
        )

    def _outcome(self, job: Job) -> Outcome:
        """Waits for another thread that has asked the same."""
        with self._lock:
            first = job.key not in self._asked
            found = self._asked.setdefault(job.key, concurrent.futures.Future())
        if first:
            try:
                found.set_result(answer(job, self.folder, self.deadline, self._look)[0])
            except BaseException as error:  # those who wait are to hear of it too
                found.set_exception(error)
        return found.result()

    def _look(self, _: float) -> None:
        if self._stopped.is_set():
            raise RehearsalError("the rehearsal of this pipeline has ended.")


def _name(code: Code, operation: Operation) -> str:
    task = operation.task
    return code.name if task is None else f"group {operation.group}: task {task.stage}{task.kind}"
