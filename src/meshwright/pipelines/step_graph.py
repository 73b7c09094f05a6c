"""Where a step's values are: slots, the groups they lie in, and the operations that fill them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright import _compat
from meshwright.axes import role
from meshwright.errors import PipelineError
from meshwright.mpmd.groups import Groups
from meshwright.partitioning.decide import partition, read_options
from meshwright.partitioning.rules import match_rules, read_rules
from meshwright.schedules.types import Task
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, refuse
from meshwright.watchdog.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the step that a group needs: which one, how it lies there, in which slot."""

    number: int
    group: int
    sharding: NamedSharding
    slot: int


class StepBuilder:
    """The step while it is put together.

    Variables of the step (`jaxpr` variables, or parts of results) have one slot per group that
    needs them: `fetch` finds it, or brings the value there.
    """

    def __init__(
        self,
        layouts: Layouts,
        arguments: dict[Any, int],
        consts: dict[Any, Any],
        given: Sequence[Any],
        names: Sequence[str],
    ):
        self.layouts, self.consts = layouts, consts
        self.group_of_var: dict[Any, int] = {}
        self.arguments, self.given, self.names = arguments, given, names
        self.groups = len(layouts.meshes)
        self.avals: list[Any] = []
        self.slot_shardings: list[NamedSharding | None] = []
        self.group_of: list[int] = []
        self.operations: list[Operation] = []
        self.placed: list[Argument] = []
        self.constants: dict[int, Any] = {}
        self.slot_of: dict[tuple[Any, int], int] = {}
        self.made_by: dict[int, str] = {}
        self.layout_of: dict[tuple[Any, int], NamedSharding] = {}

    def new(self, aval: Any, sharding: NamedSharding | None, group: int) -> int:
        """A slot for a value of this shape that lies so in a group."""
        self.avals.append(aval)
        self.slot_shardings.append(sharding)
        self.group_of.append(group)
        return len(self.avals) - 1

    def run(
        self,
        group: int,
        code: TaskFunction,
        ins: Sequence[int],
        avals: Sequence[Any],
        task: Any = None,
    ) -> list[int]:
        """An operation; returns the slots of its results."""
        outs = [self.new(aval, to, group) for aval, to in zip(avals, code.outs, strict=True)]
        name = code.name if task is None else str(task)
        self.operations.append(Operation(group, name, tuple(ins), tuple(outs), code, task))
        self.made_by.update(dict.fromkeys(outs, name))
        return outs

    def send(self, slots: Sequence[int], group: int, layouts: Sequence[NamedSharding]) -> list[int]:
        """Values to another group, all in one transfer; returns their slots there."""
        outs = [self.new(self.avals[c], to, group) for c, to in zip(slots, layouts, strict=True)]
        source = self.group_of[slots[0]]
        name = f"{self.made_by.get(slots[0], 'an argument')} of group {source}"
        moved = Operation(group, name, tuple(slots), tuple(outs), source=source)
        self.operations.append(moved)
        return outs

    def layout(self, var: Any, group: int) -> NamedSharding:
        """How a variable lies in a group: as it came if it came placed there, else as decided."""
        if (var, group) not in self.layout_of:
            self.layout_of[var, group] = self._decide(var, group)
        return self.layout_of[var, group]

    def _decide(self, var: Any, group: int) -> NamedSharding:
        number = self.arguments.get(var)
        if number is None:
            return self.layouts.whole(group)
        given = getattr(self.given[number], "sharding", None)
        if isinstance(given, NamedSharding) and given.mesh == self.layouts.meshes[group]:
            return given
        return self.layouts.parameter(group, self.names[number], var.aval.shape, var.aval.dtype)

    def slot_in_group(self, var: Any, group: int) -> int:
        """The slot of a variable in a group; it is brought there once."""
        if _compat.is_literal(var):
            return self.constant(jax.numpy.asarray(var.val), group)
        if (var, group) not in self.slot_of:
            self.slot_of[var, group] = self._bring(var, group)
        return self.slot_of[var, group]

    def _bring(self, var: Any, group: int) -> int:
        if var in self.consts:
            return self.constant(jax.numpy.asarray(self.consts[var]), group)
        layout = self.layout(var, group)
        if var in self.arguments and self.group_of_var.get(var, group) == group:
            slot = self.new(var.aval, layout, group)
            self.placed.append(Argument(self.arguments[var], group, layout, slot))
            return slot
        # An argument that several groups need comes to its home, and goes on from there.
        if var in self.arguments:
            self.slot_in_group(var, self.group_of_var[var])
        held = [self.slot_of[var, at] for at in range(self.groups) if (var, at) in self.slot_of]
        if not held:
            raise PipelineError(
                f"group {group} needs a value of type {var.aval.str_short()} that no group has "
                "made. This is a defect of meshwright: please report it with the step."
            )
        (slot,) = self.send(held[:1], group, [layout])
        return slot

    def constant(self, value: Any, group: int) -> int:
        """A slot with a constant."""
        slot = self.new(jax.typeof(value), self.layouts.whole(group), group)
        self.constants[slot] = value
        return slot


# A step as a list of operations on numbered slots: nothing is looked up while it runs.


Call = Callable[..., Sequence[Any]]


@dataclasses.dataclass(eq=False)
class TaskFunction:
    """A function to be compiled once for all operations that run it.

    A result whose sharding is None lies as the compiler sees fit.
    """

    name: str
    fn: Call
    outs: Sequence[NamedSharding | None]
    donated: tuple[int, ...] = ()
    compiled: Any = None


@dataclasses.dataclass(eq=False)
class Operation:
    """`call` the values of `ins`, put the results into `outs`, then forget `drop`.

    It has `code` to run in its group, or it brings its values there from the group `source`.
    `number` is its place in the whole step, that of all groups.
    """

    group: int
    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    code: TaskFunction | None = None
    task: Task | None = None
    source: int | None = None
    waits: bool = False
    call: Call | None = None
    drop: tuple[int, ...] = ()
    number: int = -1

    @property
    def moves(self) -> bool:
        """Whether it is a transfer, or one side of it."""
        return self.source is not None


def free_after_last_use(operations: Sequence[Operation], kept: set[int]) -> None:
    """Every slot is forgotten after its last use, so that memory follows the schedule."""
    last: dict[int, int] = {}
    for number, operation in enumerate(operations):
        for slot in (*operation.ins, *operation.outs):
            last[slot] = number
    for slot, number in last.items():
        if slot not in kept:
            operations[number].drop += (slot,)


def run_watched(operations: Sequence[Operation], slots: list[Any], watch: Watchdog) -> None:
    """The same, while others may ask what this process is about."""
    for operation in operations:
        tell(watch, operation)
        run((operation,), slots)


def tell(watch: Watchdog, operation: Operation) -> None:
    """Say what this process is about: transfers go beside the task that it is in."""
    if operation.waits:
        watch.waiting = operation.name
    else:
        watch.doing = watch.doing if operation.moves else operation.name


def run(operations: Sequence[Operation], slots: list[Any]) -> None:
    """Dispatch every operation; the devices work on while this goes ahead."""
    for operation in operations:
        execute(operation, slots)
        for slot in operation.drop:
            slots[slot] = None


def execute(operation: Operation, slots: list[Any]) -> Sequence[Any]:
    """Call one operation and keep its results, which are returned too."""
    try:
        results = operation.call(*[slots[slot] for slot in operation.ins])  # type: ignore[misc]
    except _compat.no_number() as error:  # with jax_debug_nans
        raise FloatingPointError(
            f"{operation.name}: an invalid value ({error.args[-1]}) among its results."
        ) from error
    for slot, value in zip(operation.outs, results, strict=True):
        slots[slot] = value
    return results


# How values lie in the groups: parameters as partitioned, activations by rows, the rest whole.


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Shardings on the groups' meshes."""

    groups: Groups
    rules: Any = None
    unused: str = "error"

    def __post_init__(self) -> None:
        read_options({"rules": self.rules, "unmatched": "shape", "unused": self.unused})
        if self.rules is not None:
            read_rules(self.rules)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return self.groups.meshes

    def check_rules(self, names: Sequence[str]) -> None:
        """Refuse rules that no array of a step obeys."""
        if self.rules is not None and self.unused == "error":
            leaves = [Leaf(name, n, (), None, None) for n, name in enumerate(names)]
            _, wrong = match_rules(leaves, read_rules(self.rules))
            refuse("pipeline", list(wrong))

    def whole(self, group: int) -> NamedSharding:
        return NamedSharding(self.meshes[group], make_spec())

    def rows(self, group: int, shape: tuple[int, ...], dim: int = 0) -> NamedSharding:
        """Cut along one dim over the axes that carry data, as far as they divide it."""
        axes, cut = [], 1
        for name, size in self._data_axes(group):
            if len(shape) > dim and size > 1 and shape[dim] % (cut * size) == 0:
                axes.append(name)
                cut *= size
        if not axes:
            return self.whole(group)
        entry = tuple(axes) if len(axes) > 1 else axes[0]
        return NamedSharding(self.meshes[group], make_spec([*[None] * dim, entry]))

    def parameter(self, group: int, name: str, shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        """By rules where there are any, else by shape."""
        mesh = self.meshes[group]
        if math.prod(mesh.shape.values()) == 1 or not shape:
            return self.whole(group)
        leaf = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        tree: Any = leaf
        for word in reversed(name.split("/")):
            tree = {word: tree}
        options = (
            {}
            if self.rules is None
            else {
                "rules": self.rules,
                "unmatched": "shape",
                "unused": "allow",
            }
        )
        (spec,) = jax.tree.leaves(
            partition(tree, mesh, **options), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return NamedSharding(mesh, spec)

    def _data_axes(self, group: int) -> list[tuple[str, int]]:
        return [
            (name, size) for name, size in self.meshes[group].shape.items() if _carries_data(name)
        ]


def _carries_data(axis: str) -> bool:
    return role(axis).name in ("data", "fsdp")
