"""`Timed`: a compiled program and its runs, timed by the profiler's trace or the clock.

Programs of a part are compiled first, then all are run under one trace. Arguments are made when a
program's turn comes and freed after it, so that one of them is in memory at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.calibration.trace import Event, Trace, length, record, union
from meshwright.errors import CalibrationError
from meshwright.hlo.program import Program, read_program
from meshwright.trees.specs import make_spec

Seconds = dict[int, list[float]]  # of every run, by the device's number in this process

# Kernels inside of a CUDA graph have no instruction's name in a trace, at 0.6 % of a step's time.
NO_GRAPHS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
_NAMED_KERNELS = {"gpu": NO_GRAPHS}
wait: Any = jax.block_until_ready  # untyped in JAX
_CONTAINERS = ("while", "call", "conditional")
# Runs of a program; of simulated devices few, since writing their events takes long.
_BATCHES, _MOST_RUNS = 5, {"cpu": 10}
_MOST_RUNS_ELSEWHERE = 60


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program on every device: random numbers, below `high` where they count.

    `normal`: as weights are spread. The clocks of multipliers fall with how many bits change.
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    high: int = 0
    normal: bool = False

    def make(self, key: jax.Array, rows: int) -> jax.Array:
        shape = (rows * self.shape[0], *self.shape[1:])
        if self.high:
            return jax.random.randint(key, shape, 0, self.high, jnp.int32)
        if jnp.issubdtype(self.dtype, jnp.integer):
            return jax.random.randint(key, shape, -64, 64, jnp.int32).astype(self.dtype)
        # Between 0 and 1 functions stay finite, however often they are applied.
        wide = self.dtype if jnp.dtype(self.dtype).itemsize > 1 else jnp.bfloat16
        draw = jax.random.normal if self.normal else jax.random.uniform
        return draw(key, shape, wide).astype(self.dtype)


class Timed:
    """A program that is to be timed, on the devices of a mesh of which some are in this process."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[Input],
        mesh: Mesh,
        *,
        whole: bool = True,
        traced: bool = True,
        memory: tuple[str, str] = ("device", "device"),
    ):
        """`whole`: the function is that of one device. Otherwise it is a `shard_map` already.

        `memory`: the kinds of memory of arguments and results.
        """
        spec = make_spec([mesh.axis_names])
        sharding, result = (NamedSharding(mesh, spec, memory_kind=kind) for kind in memory)

        def program(*args: jax.Array) -> Any:
            return function(*args)

        if whole:
            program = jax.shard_map(
                program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        named = _with_name(program, name)
        shapes = [_shape(each, mesh.size, sharding) for each in inputs]
        platform = mesh.devices.flat[0].platform
        options = _NAMED_KERNELS.get("gpu" if platform in ("cuda", "rocm") else platform)
        moved = memory[0] != memory[1]
        jitted = jax.jit(named, out_shardings=result) if moved else jax.jit(named)
        lowered = jitted.lower(*shapes)
        self.compiled = lowered.compile(compiler_options=options if traced else None)
        self.module = f"jit_{name}"
        self.name, self.traced = name, traced
        self._make = _maker(tuple(inputs), mesh.size, sharding)
        # A TPU's trace has an asynchronous operation up to three times: its start, its end, and
        # on a line of its own all that lies between.
        self._at_once = platform == "tpu"
        self._most = _MOST_RUNS.get(platform, _MOST_RUNS_ELSEWHERE)
        self.runs = 0
        self.walls: list[float] = []

    def program(self) -> Program:
        """The optimised HLO as data."""
        return read_program(self.compiled.as_text() or "")

    def run(self, target: float, agreed: Callable[[float], float]) -> None:
        """Run it for about so many seconds; `agreed` makes one number of all processes'."""
        args = self._make()
        wait(self.compiled(*args))
        began = time.perf_counter()
        wait(self.compiled(*args))
        one = agreed(time.perf_counter() - began)
        batch = int(np.clip(target / max(one, 1e-6) / _BATCHES, 1, self._most // _BATCHES))
        for _ in range(_BATCHES):
            began = time.perf_counter()
            for _ in range(batch):
                result = self.compiled(*args)
            wait(result)
            self.walls.append((time.perf_counter() - began) / batch)
        self.runs = 2 + _BATCHES * batch

    def seconds(self, trace: Trace | None, chosen: Callable[[str], bool] | None = None) -> Seconds:
        """Every run's seconds on each device, of the chosen instructions, or of all that work."""
        events = trace.events.get(self.module, []) if trace is not None and self.traced else []
        if chosen is None:
            containers = self._containers() if events else frozenset()
            events = [each for each in events if each.instruction not in containers]
        else:
            events = [each for each in events if chosen(each.instruction)]
        if events:
            return _by_run(events, self.runs, self._at_once)
        if chosen is not None:
            return {}
        return {device.local_hardware_id or i: self.walls for i, device in enumerate(self.local)}

    @property
    def local(self) -> list[Any]:
        """The devices of this process that run it, in the order of their numbers."""
        devices = self.compiled.input_shardings[0][0].addressable_devices
        return sorted(devices, key=lambda device: device.id)

    def _containers(self) -> frozenset[str]:
        computations = self.program().computations.values()
        return frozenset(
            each.name
            for computation in computations
            for each in computation.instructions
            if each.opcode in _CONTAINERS
        )


@functools.lru_cache(maxsize=64)
def _maker(inputs: tuple[Input, ...], devices: int, sharding: NamedSharding) -> Callable[[], Any]:
    """What makes arguments of a kind; programs with the same ones share it."""

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0), len(inputs))
        return tuple(each.make(key, devices) for each, key in zip(inputs, keys, strict=True))

    return jax.jit(make, out_shardings=(sharding,) * len(inputs))


def _with_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: jax.Array) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = name
    return named


def _shape(each: Input, devices: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    shape = (devices * each.shape[0], *each.shape[1:])
    dtype = jnp.int32 if each.high else each.dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


# In: the events of some runs. Out: each device's seconds of every run but the first two, which warm
# up. Invariant: an instruction has as many events in each run, which a trace has in order. Example:
# of 6 events of `fusion` and 3 of `copy` in 3 runs, a run has two of the one and one of the other.
# `at_once`: events may lie upon each other, and what counts is the time that they cover.
def _by_run(events: Sequence[Event], runs: int, at_once: bool = False) -> Seconds:
    by_device: dict[int, dict[str, list[float]]] = collections.defaultdict(dict)
    spans: dict[int, dict[str, list[tuple[float, float]]]] = collections.defaultdict(dict)
    for event in events:
        by_device[event.device].setdefault(event.instruction, []).append(event.seconds)
        spans[event.device].setdefault(event.instruction, []).append((event.start, event.end))
    seconds: Seconds = {}
    for device, instructions in by_device.items():
        if any(len(each) % runs for each in instructions.values()):
            together = [span for each in spans[device].values() for span in each]
            total = length(union(together)) if at_once else sum(map(sum, instructions.values()))
            seconds[device] = [total / runs]
            continue
        if at_once:
            seconds[device] = _covered(list(spans[device].values()), runs)[min(2, runs - 1) :]
            continue
        each_run = [np.reshape(each, (runs, -1)).sum(1) for each in instructions.values()]
        seconds[device] = np.sum(each_run, axis=0)[min(2, runs - 1) :].tolist()
    return seconds


def _covered(instructions: Sequence[Sequence[tuple[float, float]]], runs: int) -> list[float]:
    """The time that all events of each run cover; every instruction has as many in each."""
    each_run: list[list[tuple[float, float]]] = [[] for _ in range(runs)]
    for spans in instructions:
        count = len(spans) // runs
        for run in range(runs):
            each_run[run] += spans[run * count : (run + 1) * count]
    return [length(union(spans)) for spans in each_run]


def run_all(
    programs: Sequence[Timed],
    target: float,
    agreed: Callable[[float], float],
    tell: Callable[[], None] = lambda: None,
) -> Trace | None:
    """Run programs one after the other, under one trace where they want one; `tell` after each."""

    def run() -> None:
        for each in programs:
            each.run(target, agreed)
            tell()

    if not any(each.traced for each in programs):
        run()
        return None
    with record() as recording:
        agreed(0.0)  # before anyone waits in a collective, all have a profiler
        run()
    return recording.trace


def spread(runs: Sequence[float] | np.ndarray) -> float:
    """Half of what lies between the slowest and the fastest tenth, as a part of the median."""
    low, middle, high = np.quantile(np.asarray(runs), [0.1, 0.5, 0.9])
    return float((high - low) / 2 / middle) if middle > 0 else 0.0


def fastest(runs: Sequence[float]) -> list[float]:
    """The fastest tenth of some runs, at least one.

    >>> fastest([3.0, 1.0, 2.0])
    [1.0]
    """
    return sorted(runs)[: max(1, len(runs) // 10)]


# Steps that are run again and again, on what they return.


def elements(results: Any) -> list[Any]:
    """The results of a step, one by one."""
    return list(results) if isinstance(results, (tuple, list)) else [results]


def structure(tree: Any) -> Any:
    """What a result must have to take the place of an argument: its tree, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def changed_argument(name: str, arg: Any, given: Sequence[Any]) -> CalibrationError | None:
    """What is wrong if a result has the tree of a donated argument, but not its shapes.

    Of a bare array nobody knows which result is meant to take its place.
    """
    tree, leaves = structure(arg)
    for other, changed in map(structure, given):
        if other != tree or jax.tree_util.treedef_is_leaf(tree) or leaves == changed:
            continue
        where = next(number for number, leaf in enumerate(leaves) if leaf != changed[number])
        path = jax.tree_util.tree_flatten_with_path(arg)[0][where][0]
        old, new = (_type_text(each[where]) for each in (leaves, changed))
        return CalibrationError(
            f"{name}{jax.tree_util.keystr(path)}: the step takes {old} and gives back {new}. A "
            "loop would compile it anew each time: keep shapes and types as they are.",
            option="step",
        )
    return None


def refuse_donation(name: str, arg: Any, given: Sequence[Any]) -> CalibrationError:
    """What is raised where no result of a step can take the place of a donated argument."""
    return changed_argument(name, arg, given) or CalibrationError(
        f"{name} is donated, and no result of the step has its structure and shapes: the step "
        "cannot be run again. Return the new one, or do not donate it.",
        option="step",
    )


def _type_text(leaf: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = leaf
    return f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, shape))}]"
