"""`step.lower(...)`: the programs of a step, and the shardings of its arguments and results.

As with `jax.jit`, a `LoweredStep` has the programs as they are handed to the compiler, and its
`compile()` gives a `CompiledStep`, which has them as the compiler made them and can be called.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from meshwright._show import Sheet, Shown, Table, short_repr
from meshwright._text import amount, plural
from meshwright.errors import PipelineError, near, short
from meshwright.pipelines.plan import Plan, lower_function
from meshwright.trees.split import Split
from meshwright.trees.walk import path_text

if TYPE_CHECKING:
    from meshwright.pipelines.step import PipelineStep

_MOST_ROWS = 60
_HEADING = ("program", "group", "stage", "calls", "arguments", "results", "temporary")
_RIGHT = (False, True, True, True, True, True, True)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepProgram:
    """One program of a step: a task of a stage, or what runs before or after the tasks.

    `kind` and `stage` are those of a task ("F", "B", "W" or "BW"), None for others. A step calls
    it `calls` times. `compiled` is JAX's own `jax.stages.Compiled`, with its text, its memory and
    its costs.
    """

    name: str
    group: int
    kind: str | None
    stage: int | None
    calls: int
    compiled: Any
    _lower: Callable[[], Any]

    @property
    def lowered(self) -> Any:
        """JAX's own `jax.stages.Lowered`, made anew each time."""
        return self._lower()

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name} of group {self.group}, {plural(self.calls, 'call')}")

    def bytes(self) -> dict[str, int | None]:
        """Return bytes per device as the compiler counts them; None where it does not say."""
        analysis = self.compiled.memory_analysis()
        return {
            what: None if analysis is None else int(getattr(analysis, f"{field}_size_in_bytes"))
            for what, field in (("arguments", "argument"), ("results", "output"), ("temp", "temp"))
        }


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoweredStep(Shown):
    """The programs of a step for arguments of one kind, by group and stage.

    `in_shardings` is like the arguments, a tuple, and `out_shardings` like what the step returns:
    where each array lies, in the group that takes or gives it; None for what is not an array or is
    not used. In several processes the programs are those of this process's group.
    Text, HTML in a notebook, `to_json()` for scripts.
    """

    step: PipelineStep
    plan: Plan
    key: Hashable
    programs: tuple[StepProgram, ...]
    in_shardings: Any
    out_shardings: Any

    def __getitem__(self, name: str) -> StepProgram:
        """Return a program by its name, such as "F0"."""
        for program in self.programs:
            if program.name == name:
                return program
        names = [program.name for program in self.programs]
        raise PipelineError(f"no program is called {short(name)}.{near(str(name), names)}")

    def as_text(self) -> str:
        """Return all programs as text: StableHLO before they are compiled, optimised HLO after."""
        return "\n\n".join(
            f"// {program.name}, group {program.group}\n{self._text(program)}"
            for program in self.programs
        )

    def compile(self) -> CompiledStep:
        """Return the compiled step. Nothing is compiled twice.

        The programs are compiled when they are lowered: the compiler chooses how values between
        them are sharded, and the next program is lowered for its choice.
        """
        return CompiledStep(
            self.step, self.plan, self.key, self.programs, self.in_shardings, self.out_shardings
        )

    def _text(self, program: StepProgram) -> str:
        return str(program.lowered.as_text())

    def _sheet(self) -> Sheet:
        rows = [_row(program) for program in self.programs[:_MOST_ROWS]]
        left = len(self.programs) - len(rows)
        more = f"... and {left:,} more programs" if left else ""
        schedule = self.plan.proof.schedule
        headline = (
            f"{plural(len(self.programs), 'program')} of {plural(schedule.groups, 'group')}, "
            f"{schedule.name}, {plural(schedule.microbatches, 'microbatch')}; bytes per device"
        )
        return Sheet(headline, [Table(_HEADING, rows, _RIGHT, more)])

    def to_json(self) -> dict[str, Any]:
        """Return plain data: every program, and every array's sharding by its path."""
        return {
            "programs": [
                {
                    "name": program.name,
                    "group": program.group,
                    "kind": program.kind,
                    "stage": program.stage,
                    "calls": program.calls,
                    "bytes": program.bytes(),
                }
                for program in self.programs
            ],
            "in_shardings": _shardings_json(self.in_shardings),
            "out_shardings": _shardings_json(self.out_shardings),
        }


class CompiledStep(LoweredStep):
    """A `LoweredStep` whose text is what the compiler made of it, and that can be called."""

    def _text(self, program: StepProgram) -> str:
        return str(program.compiled.as_text())

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run a step; refuses arguments of another kind than it was compiled for."""
        return self.step.call_compiled(self.plan, self.key, args, keywords)


def lowered_step(step: PipelineStep, plan: Plan, key: Hashable, parts: Split) -> LoweredStep:
    """List the programs of a plan, in the order in which they first run, and its shardings."""
    builder = plan.assembled.builder
    calls = collections.Counter(id(operation.function) for operation in plan.operations)
    programs: dict[int, StepProgram] = {}
    for operation in plan.operations:
        function, task = operation.function, operation.task
        if function is not None and id(function) not in programs:
            programs[id(function)] = StepProgram(
                function.name,
                operation.group,
                None if task is None else str(task.kind),
                None if task is None else task.stage,
                calls[id(function)],
                function.compiled,
                functools.partial(lower_function, builder, function, operation),
            )
    placed: dict[int, NamedSharding] = {}
    for argument in builder.placed:
        placed.setdefault(argument.number, argument.sharding)
    taken = [placed.get(n) for n in range(len(parts.arrays))]
    given = [
        builder.slot_shardings[next(iter(by_group.values()))] for by_group in plan.assembled.results
    ]
    return LoweredStep(
        step,
        plan,
        key,
        tuple(programs.values()),
        parts.rebuild(taken, other=None),
        plan.traced.out.rebuild(given, other=None),
    )


def _row(program: StepProgram) -> Sequence[str]:
    sizes = [size if size is None else amount(size) for size in program.bytes().values()]
    return [
        program.name,
        str(program.group),
        "" if program.stage is None else str(program.stage),
        str(program.calls),
        *(size or "?" for size in sizes),
    ]


def _shardings_json(tree: Any) -> dict[str, Any]:
    """Map the path of every array to its spec, and the devices it lies on."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, NamedSharding)
    )
    return {
        path_text(path): {
            "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in leaf.spec],
            "devices": sorted(device.id for device in leaf.device_set),
        }
        for path, leaf in leaves
    }
