"""The rule of Pallas kernels: which dims of their grids may be cut, and what work they do.

A kernel is a program that runs at every place of a grid, on blocks of its arrays. XLA cannot look
inside and gathers all operands, but a plan may run the kernel on a part of its grid on each device
(`apply_plan` does), where that computes the same. What proves it is here: scalars of the kernel's
body and of its index maps are evaluated for all places of the grid at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from meshwright._compat import Atom, Eqn, Jaxpr, is_literal, scan_counts
from meshwright._compat_lowering import (
    KernelBlocks,
    KernelCall,
    bind_kernel,
    is_whole_store,
    kernel_name,
    read_kernel_call,
)
from meshwright.planning.contraction_rules import dot_general
from meshwright.planning.iteration_dims import Loops, Params, Rule

_MOST_POINTS = 1 << 22  # of a grid, at which one scalar is evaluated


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A reference of the kernel's body, by the number of its operand, result or scratch."""

    number: int


# What the body or an index map knows of a value: its number at each place of the grid (an array
# with a dim for each of the grid's, of size 1 where it does not depend on that), or a reference.
_Known = np.ndarray | _Ref | None


def _quotient(a: Any, b: Any) -> Any:
    whole = np.issubdtype(np.result_type(a, b), np.integer)
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1)) if whole else a / b


_SCALARS: Mapping[str, Any] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "sign": np.sign,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_EXPONENTIALS = ("exp", "exp2")
_STORES = ("swap", "masked_swap", "addupdate")


# In: a jaxpr of a kernel, and what is known of its inputs. Out, as attributes: `seen`, every scalar
# with which a place of the grid leaves the world of scalars (to index, to choose, to compute);
# for each reference, where it is `written` whole before anything else, and where it is not;
# FLOP and exponentials. Invariant: two places with equal `seen` do the same with their blocks.
# Example: `@pl.when(pl.program_id(1) == 0)` is an array (1, n) that is true at its first entry.
class _Evaluation:
    """The scalars of a kernel at all places of its grid."""

    def __init__(self, call: KernelCall, tables: Mapping[int, np.ndarray]):
        self.grid, self.tables = call.grid, tables
        self.own = [dim for dim in range(len(call.grid)) if dim not in call.mapped]
        self.seen: list[np.ndarray] = []
        self.sizes: set[int] = set()  # dims of the grid whose size the body asks for
        self.written: dict[int, np.ndarray] = {}
        self.unwritten: dict[int, np.ndarray] = {}
        self.flops = self.exponentials = 0.0
        self.at_most = False  # some of the work may not be done
        # Something goes on from place to place: a generator of random numbers, an operand or a
        # table that is written to.
        self.goes_on = False
        self.operands = call.prefetched + len(call.operands)

    def place(self, dim: int) -> np.ndarray:
        """The places along a dim of the grid."""
        shape = [-1 if each == dim else 1 for each in range(len(self.grid))]
        return np.arange(self.grid[dim]).reshape(shape)

    def scalar(self, value: Any) -> np.ndarray:
        return np.asarray(value).reshape((1,) * len(self.grid))

    def see(self, *values: _Known) -> None:
        found = [_squeezed(value) for value in values]
        self.seen += [value for value in found if isinstance(value, np.ndarray) and value.size > 1]

    def run(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[_Known],
        where: np.ndarray,
        consts: Sequence[_Known] = (),
    ) -> list[_Known]:
        """Evaluate a jaxpr where `where` holds, and return what is known of its results."""
        opened: Any = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, _Known] = dict(zip(opened.invars, inputs, strict=True))
        env.update(zip(opened.constvars, consts, strict=False))

        def read(atom: Atom) -> _Known:
            if not is_literal(atom):
                return env.get(atom)
            return self.scalar(atom.val) if np.ndim(atom.val) == 0 else None

        for eqn in opened.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars], where)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in opened.outvars]

    def equation(self, eqn: Eqn, values: list[_Known], where: np.ndarray) -> Sequence[_Known]:
        name, params = eqn.primitive.name, eqn.params
        if name == "program_id":
            return [self.place(self.own[params["axis"]])]
        if name == "num_programs":
            self.sizes.add(self.own[params["axis"]])
            return [None]
        if name == "cond":
            return self.branches(eqn, values, where)
        if name in _CALLS:
            return self.run(next(_jaxprs(params)), values, where)
        known = self.known(eqn, values)
        if known is not None:
            return [known]
        self.see(*values)
        self.touch(eqn, values, where)
        self.work(eqn, where)
        self.goes_on |= name.startswith("prng_")
        if name == "scan":
            constants, _ = scan_counts(params)
            rounds = params["length"]
            inputs = [*values[:constants], *([None] * (len(values) - constants))]
            flops, exponentials = self.flops, self.exponentials
            self.run(params["jaxpr"], inputs, where)
            self.flops += (rounds - 1) * (self.flops - flops)
            self.exponentials += (rounds - 1) * (self.exponentials - exponentials)
        else:
            self.inside(eqn, [each if isinstance(each, _Ref) else None for each in values], where)
        return [None] * len(eqn.outvars)

    def inside(self, eqn: Eqn, refs: Sequence[_Known], where: np.ndarray) -> None:
        """Evaluate the jaxprs that an equation holds; of its values only references are known."""
        if eqn.primitive.name == "while":
            tests = eqn.params["cond_nconsts"]
            carry = refs[tests + eqn.params["body_nconsts"] :]
            self.run(eqn.params["cond_jaxpr"], [*refs[:tests], *carry], where)
            self.run(eqn.params["body_jaxpr"], refs[tests:], where)
            return
        for inner in _jaxprs(eqn.params):
            self.at_most = True
            scoped = len(inner.constvars) == len(refs)  # as `pl.run_scoped` takes them
            self.goes_on |= not scoped and any(self.is_operand(ref) for ref in refs)
            consts = refs if scoped else ()
            self.run(inner, [None] * len(inner.invars), where, consts)

    def is_operand(self, value: _Known) -> bool:
        return isinstance(value, _Ref) and value.number < self.operands

    def branches(self, eqn: Eqn, values: list[_Known], where: np.ndarray) -> Sequence[_Known]:
        """Each branch of a condition is evaluated where it is taken, as far as that is known."""
        chosen = values[0]
        self.see(chosen)
        for number, branch in enumerate(eqn.params["branches"]):
            if isinstance(chosen, np.ndarray):
                here = where & (chosen.astype(np.int64) == number)
                self.see(*self.run(branch, values[1:], here))
                continue
            flops = self.flops
            before = dict(self.written), dict(self.unwritten)
            self.see(*self.run(branch, values[1:], where))
            self.at_most |= self.flops > flops
            # It may be left out: what it writes is not sure, what it reads may be.
            touched = {**before[1]}
            for ref, bad in self.unwritten.items():
                touched[ref] = touched.get(ref, np.zeros_like(bad)) | bad
            self.written, self.unwritten = before[0], touched
        return [None] * len(eqn.outvars)

    def known(self, eqn: Eqn, values: list[_Known]) -> np.ndarray | None:
        """The result of an operation on scalars; of a table that is known, the scalar read."""
        name = eqn.primitive.name
        if not eqn.outvars or eqn.outvars[0].aval.shape:
            return None
        if name == "get" and isinstance(values[0], _Ref):
            return self.looked_up(eqn, values[0].number, values[1:])
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if not values or len(arrays) < len(values):
            return None
        if math.prod(np.broadcast_shapes(*(each.shape for each in arrays))) > _MOST_POINTS:
            return None
        if name in _SCALARS:
            return np.asarray(_SCALARS[name](*arrays))
        if name == "select_n":
            number, *cases = np.broadcast_arrays(arrays[0].astype(np.int64), *arrays[1:])
            return np.asarray(np.choose(number, cases))
        if name == "convert_element_type":
            dtype = np.dtype(eqn.params["new_dtype"])
            return arrays[0].astype(dtype) if dtype.kind in "biuf" else None
        if name in ("broadcast_in_dim", "reshape", "squeeze", "stop_gradient", "copy"):
            return arrays[0]
        return None

    def looked_up(self, eqn: Eqn, ref: int, indices: list[_Known]) -> np.ndarray | None:
        """What a table of scalars has at known places; the places are seen, whatever it has."""
        self.see(*indices)
        table = self.tables.get(ref)
        arrays = [each for each in indices if isinstance(each, np.ndarray)]
        if table is None or len(arrays) != table.ndim or len(indices) != table.ndim:
            return None
        return np.asarray(table[tuple(np.broadcast_arrays(*arrays))])

    def touch(self, eqn: Eqn, values: list[_Known], where: np.ndarray) -> None:
        """Note which references are written whole, and which are used before that."""
        self.goes_on |= eqn.primitive.name in _STORES and self.is_operand(values[0])
        for value in values:
            if not isinstance(value, _Ref):
                continue
            fresh = ~self.written.get(value.number, self.scalar(False))
            fresh = fresh & ~self.unwritten.get(value.number, self.scalar(False)) & where
            kept = self.written if is_whole_store(eqn) and values[0] == value else self.unwritten
            kept[value.number] = kept.get(value.number, self.scalar(False)) | fresh

    def work(self, eqn: Eqn, where: np.ndarray) -> None:
        """Count the work of an equation at all places where it is done."""
        name = eqn.primitive.name
        times = where.mean() * math.prod(self.grid)
        if name == "dot_general":
            inputs, outputs = (
                [var.aval.shape for var in each] for each in (eqn.invars, eqn.outvars)
            )
            self.flops += times * dot_general(Loops(inputs, outputs), eqn.params).flops
        elif name in _EXPONENTIALS:
            self.exponentials += times * math.prod(eqn.outvars[0].aval.shape)
        elif name == "while":
            self.at_most = True


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            opened = getattr(each, "jaxpr", each)
            if hasattr(opened, "eqns"):
                yield opened


def _squeezed(value: _Known) -> _Known:
    """A scalar with size 1 along the dims of the grid on which it does not depend."""
    if isinstance(value, np.ndarray):
        for dim in range(value.ndim):
            first = value.take([0], dim)
            if value.shape[dim] > 1 and (value == first).all():
                value = first
    return value


def _period(seen: np.ndarray, dim: int, size: int) -> int:
    """After how many places along a dim of the grid a scalar repeats itself."""
    if seen.shape[dim] == 1:
        return 1
    moved = np.moveaxis(seen, dim, 0)
    for period in range(1, size):
        if size % period == 0 and np.array_equal(moved[period:], moved[:-period]):
            return period
    return size


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The numbers of an array's blocks at all places of the grid, dim by dim; `None`: unknown."""

    blocks: KernelBlocks
    numbers: tuple[_Known, ...]

    def along(self, dim: int, size: int) -> tuple[int, int] | Literal[False] | None:
        """Which dim of the array goes along a dim of the grid, and how many places share a block.

        `False`: none does. `None`: in another way than place by place.
        """
        moving = [
            (at, number)
            for at, number in enumerate(self.numbers)
            if isinstance(number, np.ndarray) and number.shape[dim] > 1
        ]
        if not moving:
            return False
        (at, number), *others = moving
        if others or number.size != size:
            return None
        numbers = number.reshape(-1)
        count = int(numbers[-1]) + 1
        if count < 1 or size % count or (numbers != np.arange(size) // (size // count)).any():
            return None
        whole = self.blocks.shape[at] == self.blocks.sizes[at] * count
        return (at, size // count) if whole else None


class _Kernel:
    """What is known of a kernel: its scalars, and the blocks of its arrays."""

    def __init__(self, call: KernelCall, tables: Mapping[int, np.ndarray]):
        self.call = call
        self.scalars = _Evaluation(call, tables)
        everywhere = self.scalars.scalar(True)
        places = [self.scalars.place(dim) for dim in range(len(call.grid))]
        refs = [_Ref(number) for number in range(call.prefetched)]
        self.arrays = [
            _Blocks(
                blocks,
                tuple(map(_squeezed, self.scalars.run(blocks.index, [*places, *refs], everywhere))),
            )
            for blocks in (*call.operands, *call.results)
        ]
        self.scalars.written.clear()
        self.scalars.unwritten.clear()
        body = [_Ref(number) for number in range(len(call.body.invars))]
        self.scalars.run(call.body, body, everywhere)

    # In: a dim of the grid, and which results nobody uses. Out: the dims of arrays that go along
    # it, and how many parts it may be cut into. A cut is safe where each device does at its places
    # what is done at those places of the whole grid: what the body sees repeats itself from part to
    # part; results are written place by place; nothing is carried over from one part to the next.
    def loop(
        self, dim: int, unused: Collection[int]
    ) -> tuple[tuple[tuple[int, int], ...], int] | None:
        """Return the positions of arrays along a dim of the grid and its parts, if it may be cut.

        Arrays are counted as the equation has them, operands first.
        """
        call, size = self.call, self.call.grid[dim]
        if size < 2 or dim in self.scalars.sizes or self.scalars.goes_on:
            return None
        found = [array.along(dim, size) for array in self.arrays]
        count = len(call.operands)
        aliased = set(call.aliases.values())
        still = {n for n in range(len(call.results)) if found[count + n] is False}
        if None in found or still - (set(unused) - aliased):
            return None
        if any(
            operand < 0 or found[operand] != found[count + result]  # below 0: a table
            for operand, result in call.aliases.items()
        ):
            return None
        period = math.lcm(
            *(_period(seen, dim, size) for seen in self.scalars.seen),
            *(each[1] for each in found if isinstance(each, tuple)),
        )
        if size % period or period == size or not self._fresh(dim, period, still):
            return None
        first = call.bounds + call.prefetched
        at = tuple((first + n, each[0]) for n, each in enumerate(found) if isinstance(each, tuple))
        return at, size // period

    def _fresh(self, dim: int, period: int, still: Collection[int]) -> bool:
        """Whether no part of the grid along a dim begins with what another left in scratch."""
        call, scalars = self.call, self.scalars
        first = call.prefetched + len(call.operands)
        scratch = [first + n for n in still]
        scratch += range(first + len(call.results), len(call.body.invars))
        if not scratch or dim in call.mapped or dim in call.parallel:
            return True
        # A body that cannot tell the parts apart, nor what is around them, begins each of them as
        # it begins the first one: with nothing.
        if all(seen.shape[outer] == 1 for outer in range(dim) for seen in scalars.seen):
            return True
        starts = scalars.place(dim) % period == 0
        for inner in range(dim + 1, len(call.grid)):
            starts = starts & (scalars.place(inner) == 0)
        never = scalars.scalar(False)
        return all(
            not (starts & ~scalars.written.get(ref, never)).any()
            for ref in scratch
            if ref in scalars.written or ref in scalars.unwritten
        )


def kernel(
    loops: Loops,
    params: Params,
    unused: Collection[int] = (),
    tables: Mapping[int, np.ndarray] | None = None,
) -> Rule:
    """Dims of the grid may be cut where every device then computes its places as before.

    `unused`: results that nobody reads. `tables`: operands whose scalars are known, by number.
    """
    call = read_kernel_call(params)
    if call is None or not all(call.grid):
        return loops.rule()
    if call.bounds + call.prefetched + len(call.operands) != len(loops.inputs):
        return loops.rule()  # references among them
    known = {n - call.bounds: np.asarray(table) for n, table in (tables or {}).items()}
    analysed = _Kernel(call, {n: t for n, t in known.items() if 0 <= n < call.prefetched})
    for dim in range(len(call.grid)):
        found = analysed.loop(dim, unused)
        if found is not None:
            loops.blocks(found[1], *found[0])
    scalars = analysed.scalars
    counted = scalars.flops
    if call.declared is not None and scalars.at_most:
        counted = call.declared
    return loops.rule(counted, exponentials=scalars.exponentials)


# In: the equation of a kernel, and the parts of its operands that one device has. Out: what the
# kernel makes of them. The grid is cut as the arrays are: a dim of an array that is a quarter of
# the kernel's own makes a quarter of the dim of the grid that goes along it.
def run_on_parts(
    eqn: Eqn, operands: Sequence[Any], results: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Run a kernel on a device's parts of its operands; `results` are the shapes of its results."""
    call = read_kernel_call(eqn.params)
    if call is None or not all(call.grid):  # nothing of it is cut
        return list(eqn.primitive.bind(*operands, **eqn.params))
    arrays = (*call.operands, *call.results)
    first = call.bounds + call.prefetched
    shapes = [*(tuple(each.shape) for each in operands[first:]), *results]
    scalars = _Evaluation(call, {})
    inputs = [scalars.place(dim) for dim in range(len(call.grid))]
    refs = [_Ref(number) for number in range(call.prefetched)]
    ways = [1] * len(call.grid)
    for blocks, shape in zip(arrays, shapes, strict=True):
        if shape == blocks.shape:
            continue
        numbers = map(_squeezed, scalars.run(blocks.index, [*inputs, *refs], scalars.scalar(True)))
        for number, whole, part in zip(numbers, blocks.shape, shape, strict=True):
            if whole != part and isinstance(number, np.ndarray):  # along one dim of the grid
                ways[int(np.argmax(number.shape))] = whole // part
    with jax.named_scope(kernel_name(eqn)):  # for profiles: a `shard_map` has its own
        return bind_kernel(eqn.params, ways, shapes, operands)
