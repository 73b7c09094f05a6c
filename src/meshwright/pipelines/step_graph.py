"""A step as operations on numbered slots: `StepBuilder` writes the list, `run_operations` runs it.

A slot holds one value in one group. Which slots an operation reads, fills and frees is worked out
before the step runs, so that nothing is looked up while it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright import _compat
from meshwright._compat import Atom, Aval, Var, is_literal
from meshwright.axes import role
from meshwright.errors import PipelineError
from meshwright.mpmd.groups import Groups
from meshwright.partitioning.decide import Options, decide, read_options
from meshwright.partitioning.rules import match_rules, read_rules
from meshwright.schedules.types import Task
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, Walk, refuse
from meshwright.watchdog.watchdog import Watchdog

Call = Callable[..., Sequence[Any]]


@dataclasses.dataclass(eq=False)
class TaskFunction:
    """A function that is compiled once for all operations that call it.

    Where `out_shardings` has None the compiler chooses; `plan.compile_all` reads its choice back.
    """

    name: str
    fn: Call
    out_shardings: Sequence[NamedSharding | None]
    donate_argnums: tuple[int, ...] = ()
    compiled: Any = None  # `jax.stages.Compiled`, or a stand-in with its methods


@dataclasses.dataclass(eq=False)
class Operation:
    """`call` the values in slots `ins`, put the results into slots `outs`, then free `drop`.

    It either runs `function` in `group`, or transfers its values there from the group `source`.
    `number` is its index in the whole step, that of all groups: the same in every process.
    """

    group: int
    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    function: TaskFunction | None = None
    task: Task | None = None
    source: int | None = None
    waits: bool = False  # it only waits until what was received is there
    call: Call | None = None
    drop: tuple[int, ...] = ()
    number: int = -1

    @property
    def is_transfer(self) -> bool:
        """Whether it is a transfer, or one side of it."""
        return self.source is not None


@dataclasses.dataclass(frozen=True)
class PlacedArgument:
    """An argument of the step (by its number) that a group needs, its sharding and slot there."""

    number: int
    group: int
    sharding: NamedSharding
    slot: int


class StepBuilder:
    """Collects the operations of a step, and the tables of its slots.

    A variable (of the traced step, or a `PartialResult`) has one slot in each group that needs
    it: `slot_in_group` returns that slot, and writes the transfer that fills it the first time.
    `avals`, `slot_shardings` and `group_of_slot` are indexed by slot.

    `arguments` maps the step's input variables to their numbers, `consts` its constants to their
    values; `given` and `names` are the arrays that the caller passes and their paths.
    """

    def __init__(
        self,
        shardings: GroupShardings,
        arguments: dict[Var, int],
        consts: dict[Var, Any],
        given: Sequence[Any],
        names: Sequence[str],
    ):
        self.shardings, self.consts = shardings, consts
        self.arguments = arguments
        self.leaves = [
            Leaf(names[number], number, var.aval.shape, var.aval.dtype, None)
            for var, number in arguments.items()
        ]
        # Not the arrays themselves: a plan would keep those of its first call alive.
        self.given_shardings = [getattr(array, "sharding", None) for array in given]
        self.groups = len(shardings.meshes)
        self.group_of_var: dict[Var, int] = {}  # of arguments: the group that gets them first
        self.avals: list[Aval] = []
        self.slot_shardings: list[NamedSharding | None] = []  # None until it is compiled
        self.group_of_slot: list[int] = []
        self.operations: list[Operation] = []
        self.placed: list[PlacedArgument] = []
        self.constants: dict[int, Any] = {}  # by slot
        self.slot_of: dict[tuple[Var, int], int] = {}  # by variable and group
        self.var_shardings: dict[tuple[Var, int], NamedSharding] = {}
        self._by_shape: dict[int, list[NamedSharding]] = {}  # of all arguments, by group
        self._filled_by: dict[int, str] = {}  # a slot, and the name of the operation

    def new_slot(self, aval: Aval, sharding: NamedSharding | None, group: int) -> int:
        """Add a slot for a value in a group."""
        self.avals.append(aval)
        self.slot_shardings.append(sharding)
        self.group_of_slot.append(group)
        return len(self.avals) - 1

    def add_call(
        self,
        group: int,
        function: TaskFunction,
        ins: Sequence[int],
        avals: Sequence[Aval],
        task: Task | None = None,
    ) -> list[int]:
        """Add an operation that runs a function; returns the slots of its results."""
        outs = [
            self.new_slot(aval, sharding, group)
            for aval, sharding in zip(avals, function.out_shardings, strict=True)
        ]
        name = function.name if task is None else str(task)
        self.operations.append(Operation(group, name, tuple(ins), tuple(outs), function, task))
        self._filled_by.update(dict.fromkeys(outs, name))
        return outs

    def add_transfer(
        self, slots: Sequence[int], group: int, shardings: Sequence[NamedSharding]
    ) -> list[int]:
        """Add one transfer of several values to another group; returns their slots there."""
        outs = [
            self.new_slot(self.avals[slot], sharding, group)
            for slot, sharding in zip(slots, shardings, strict=True)
        ]
        source = self.group_of_slot[slots[0]]
        name = f"{self._filled_by.get(slots[0], 'an argument')} of group {source}"
        self.operations.append(Operation(group, name, tuple(slots), tuple(outs), source=source))
        return outs

    def shape(self, slot: int) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a slot, for lowering and for routes."""
        aval, sharding = self.avals[slot], self.slot_shardings[slot]
        # A counter that comes back is weakly typed, as the Python number that went in. Arrays are
        # not: in processes that hold no part of one its type is not known, and all take the same.
        weak = aval.weak_type and not aval.shape
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            aval.shape, aval.dtype, sharding=sharding, weak_type=weak
        )

    def constant(self, value: Any, group: int) -> int:
        """Add a slot with a constant, replicated over the group."""
        slot = self.new_slot(jax.typeof(value), self.shardings.replicated(group), group)
        self.constants[slot] = value
        return slot

    def sharding(self, var: Var, group: int) -> NamedSharding:
        """Return the sharding of a variable in a group, decided once."""
        if (var, group) not in self.var_shardings:
            self.var_shardings[var, group] = self._choose_sharding(var, group)
        return self.var_shardings[var, group]

    def _choose_sharding(self, var: Var, group: int) -> NamedSharding:
        number = self.arguments.get(var)
        if number is None:
            return self.shardings.replicated(group)
        given = self.given_shardings[number]
        # An array that already lives in the group stays as the caller has sharded it. Results of a
        # step are passed to the next one, which must not move them.
        if isinstance(given, NamedSharding) and given.mesh == self.shardings.meshes[group]:
            return given
        by_rules = self.shardings.by_rules(group, self.leaves[number])
        if by_rules is not None:
            return by_rules
        if group not in self._by_shape:
            self._by_shape[group] = self.shardings.by_shape(group, self.leaves)
        return self._by_shape[group][number]

    def slot_in_group(self, var: Atom, group: int) -> int:
        """The slot of a variable in a group; writes the transfer to it if there is none yet."""
        if is_literal(var):
            return self.constant(jax.numpy.asarray(var.val), group)
        if (var, group) not in self.slot_of:
            self.slot_of[var, group] = self._make_slot(var, group)
        return self.slot_of[var, group]

    def _make_slot(self, var: Var, group: int) -> int:
        if var in self.consts:
            return self.constant(jax.numpy.asarray(self.consts[var]), group)
        sharding = self.sharding(var, group)
        if var in self.arguments and self.group_of_var.get(var, group) == group:
            slot = self.new_slot(var.aval, sharding, group)
            self.placed.append(PlacedArgument(self.arguments[var], group, sharding, slot))
            return slot
        # An argument that several groups need is placed in one of them and copied from there: the
        # caller's array may live in that group alone, out of reach of the other processes.
        if var in self.arguments:
            self.slot_in_group(var, self.group_of_var[var])
        held = [self.slot_of[var, at] for at in range(self.groups) if (var, at) in self.slot_of]
        if not held:
            raise PipelineError(
                f"group {group} needs a value of type {var.aval.str_short()} that no group has "
                "made. This is a defect of meshwright: please report it with the step."
            )
        (slot,) = self.add_transfer(held[:1], group, [sharding])
        return slot


@dataclasses.dataclass(frozen=True)
class GroupShardings:
    """How values are sharded inside the groups.

    Parameters by `rules` or by shape, as `partition` does; activations and batches along their
    rows, over the axes that carry data; everything else is replicated. `unused` says whether each
    rule must match an argument of the step ("error") or not ("allow").
    """

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
        """Refuse rules that match none of the step's arrays."""
        if self.rules is not None and self.unused == "error":
            leaves = [Leaf(name, n, (), None, None) for n, name in enumerate(names)]
            _, problems = match_rules(leaves, read_rules(self.rules))
            refuse("pipeline", list(problems))

    def replicated(self, group: int) -> NamedSharding:
        return NamedSharding(self.meshes[group], make_spec())

    def over_data_axes(self, group: int, shape: tuple[int, ...], dim: int = 0) -> NamedSharding:
        """Shard one dim over the axes that carry data, as far as their sizes divide it."""
        axes: list[str] = []
        pieces = 1
        for name, size in self.meshes[group].shape.items():
            carries_data = role(name).name in ("data", "fsdp")
            if carries_data and len(shape) > dim and size > 1 and shape[dim] % (pieces * size) == 0:
                axes.append(name)
                pieces *= size
        if not axes:
            return self.replicated(group)
        entry = tuple(axes) if len(axes) > 1 else axes[0]
        return NamedSharding(self.meshes[group], make_spec([*[None] * dim, entry]))

    def by_shape(self, group: int, leaves: Sequence[Leaf]) -> list[NamedSharding]:
        """Shard the arguments of a step by shape. Together: stacks of layers show in trees only."""
        mesh = self.meshes[group]
        specs = decide(Walk((), tuple(leaves), None), None, mesh, Options())
        return [NamedSharding(mesh, spec) for spec in specs]

    def by_rules(self, group: int, leaf: Leaf) -> NamedSharding | None:
        """Shard an argument by the rule that matches it, or return None."""
        if self.rules is None or not leaf.shape:
            return None
        (spec,), _ = match_rules([leaf], read_rules(self.rules))
        if spec is None:
            return None
        # `check_rules` has seen all leaves; of a single one most rules are unused.
        options = Options(rules=self.rules, unused="allow")
        (spec,) = decide(Walk((), (leaf,), None), None, self.meshes[group], options)
        return NamedSharding(self.meshes[group], spec)


def free_after_last_use(operations: Sequence[Operation], kept: set[int]) -> None:
    """Let each operation free the slots it is the last to use, except those in `kept`.

    This is what makes memory follow the schedule: an activation is freed by the last backward
    task that reads it.
    """
    last: dict[int, int] = {}
    for number, operation in enumerate(operations):
        for slot in (*operation.ins, *operation.outs):
            last[slot] = number
    for slot, number in last.items():
        if slot not in kept:
            operations[number].drop += (slot,)


def run_operations(operations: Sequence[Operation], slots: list[Any]) -> None:
    """Dispatch every operation in turn; does not wait for the devices."""
    for operation in operations:
        execute(operation, slots)
        for slot in operation.drop:
            slots[slot] = None


def run_watched(operations: Sequence[Operation], slots: list[Any], watchdog: Watchdog) -> None:
    """Run operations and publish the current one to the watchdog."""
    for operation in operations:
        publish(watchdog, operation)
        run_operations((operation,), slots)


def publish(watchdog: Watchdog, operation: Operation) -> None:
    """Tell the watchdog which operation begins."""
    if operation.waits:
        watchdog.waiting = operation.name
    else:
        # A transfer runs beside the task dispatched last, which stays the one that is named.
        # Setting `doing` to itself is not idle: it ends a wait and counts as progress.
        watchdog.doing = watchdog.doing if operation.is_transfer else operation.name


def execute(operation: Operation, slots: list[Any]) -> Sequence[Any]:
    """Call one operation and keep its results, which are returned too."""
    try:
        results = operation.call(*[slots[slot] for slot in operation.ins])  # type: ignore[misc]
    except _compat.nan_error() as error:
        # With `jax_debug_nans` a compiled program raises JAX's internal error; `jit` would have
        # turned it into a FloatingPointError, and so do we, with the name of the task.
        raise FloatingPointError(
            f"{operation.name}: an invalid value ({error.args[-1]}) among its results."
        ) from error
    for slot, value in zip(operation.outs, results, strict=True):
        slots[slot] = value
    return results
