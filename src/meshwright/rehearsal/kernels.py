"""`kernels`: every instruction of a program that takes time, with its operations and bytes.

Instructions of the entry, of loops, branches and calls are kernels; what is fused into one works
on chip. A kernel that only slices an operand, or only updates a slice of it, moves the slice; one
that gathers rows of a table moves the rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from meshwright.hlo.instructions import Computation, Instruction, Leaf
from meshwright.hlo.kernel_work import KernelWork
from meshwright.hlo.program import Program, estimated_cycles, flops
from meshwright.rehearsal.gpu_fusions import (
    beside_result,
    fused_before,
    is_eight_bit,
    memory_access,
    multiplies_zeros,
    row_operations,
    tile_traffic,
    transposed_sizes,
)

# What takes no time of its own: it names a value, or only runs other computations.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
        *("conditional", "optimization-barrier", "after-all", "partition-id", "replica-id"),
        *("domain", "add-dependency"),
    }
)
_IN_PLACE = ("dynamic-update-slice", "scatter")
_COMMUNICATION = re.compile(
    r"all-(gather|reduce|to-all)|reduce-scatter|collective-|ragged-all-to-all|(send|recv)(-done)?$"
)
_ASYNC_END = re.compile(r'"AsyncCollective(Start|Done)"')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that takes time; `dtype` is that of what it multiplies, if it does.

    `custom` is the work of a custom kernel. `access` is how a fusion of a GPU goes over memory
    (`memory_access`), `row_operations` what one that reduces rows computes on their elements,
    `beside_result` the bytes of a product's result and of what is added to it. `zeros`: half of
    what it multiplies are zeros, which take less power. `fused_before`: bytes of kernels that a
    library's product has beside it, where this one has them fused. `started`: it is in a
    computation that starts and ends apart. `slow` counts what other units than multipliers and
    memory may bound: elements of transcendental functions by HLO's opcode, and what `_irregular`
    names.
    """

    instruction: Instruction
    flops: float
    bytes: float
    dtype: str
    custom: KernelWork | None = None
    access: str = ""
    row_operations: float = 0.0
    beside_result: float = 0.0
    slow: Mapping[str, float] = dataclasses.field(default_factory=dict)
    zeros: bool = False
    fused_before: float = 0.0
    started: bool = False

    @property
    def looped(self) -> float:
        """Elements that a loop fusion of a GPU writes, one by one; 0 in other kernels."""
        if "kind=kLoop" not in self.instruction.attributes or "dynamic_update_slice" in self.name:
            return 0.0
        return float(max((leaf.elements for leaf in self.instruction.shape.leaves), default=0))

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def cycles(self) -> int | None:
        """How long the compiler of a TPU expects it to take, if it says so."""
        return estimated_cycles(self.instruction)

    @property
    def beside(self) -> bool:
        """Whether it only starts a copy on the device, beside which others run, or is that copy."""
        return (self.started or self.instruction.opcode.endswith("-start")) and not self.flops


# In: a computation that runs. Out: its kernels in order, each with floating-point operations and
# bytes of main memory, those of what is fused into it included. Collectives are not among them.
# Example: `fusion(%x, %w)` of a dot and an addition is one kernel with the dot's operations, that
# reads x and w and writes its result; what the dot hands to the addition stays on chip.
def kernels(program: Program, computation: Computation) -> Iterator[Kernel]:
    """List the kernels of a computation."""
    started = computation.name in program.started
    for instruction in computation.instructions:
        if _is_free(instruction) or _is_communication(program, instruction):
            continue
        custom = program.kernel_work(instruction)
        traffic = _traffic(program, computation, instruction)
        if custom is not None:
            moved = traffic if custom.bytes is None else custom.bytes
            slow = custom.transcendentals
            yield Kernel(instruction, custom.flops, moved, custom.dtype, custom, slow=slow)
            continue
        work, dtype = _work(program, computation, instruction)
        slow = _slow(program, computation, instruction)
        access = "" if work else memory_access(program, instruction)
        reduces = access in ("rows", "reduction")
        rows = row_operations(program, instruction, access) if reduces else 0.0
        beside = beside_result(program, instruction) if work else 0.0
        zeros = bool(work) and multiplies_zeros(program, computation, instruction)
        traffic *= tile_traffic(program, computation, instruction) if work else 1.0
        before = fused_before(program, instruction) if work else 0.0
        yield Kernel(
            *(instruction, work, traffic, dtype, None, access, rows, beside, slow, zeros, before),
            started=started,
        )


def running(program: Program) -> Iterator[Computation]:
    """Yield the entry and the computations of loops, branches and calls, each once."""
    seen = {program.entry.name}
    pending = [program.entry]
    while pending:
        computation = pending.pop()
        yield computation
        for instruction in computation.instructions:
            if not instruction.only_calls:
                continue
            for how, name in instruction.called:
                # `to_apply` is the scalar function of a reduce or a sort, but the body of a call.
                if name not in seen and (how != "to_apply" or instruction.opcode == "call"):
                    seen.add(name)
                    pending.append(program.computations[name])


def _is_free(instruction: Instruction) -> bool:
    ends = instruction.opcode.endswith(("-done", "-update"))
    return instruction.opcode in _FREE or ends or instruction.only_calls


def _is_communication(program: Program, instruction: Instruction) -> bool:
    if instruction.opcode != "fusion":
        return bool(_COMMUNICATION.match(instruction.opcode))
    # Fusions of a TPU: an all-reduce of which a slice is kept, or one end of a collective whose
    # pieces are in other kernels. Those pieces move the memory: an end has no work of its own.
    names = [name for _, name in instruction.called]
    if any("all-reduce-scatter" in name for name in names):
        return True
    ends = (_ASYNC_END.search(program.computations[name].root.attributes) for name in names)
    return any(ends) and not program.flops_of(instruction)


def _work(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[float, str]:
    """Operations of an instruction and of all that is fused into it, and their dtype."""
    operations = float(flops(instruction, computation))
    dtype = computation.operands(instruction)[0].shape.leaves[0].dtype if operations else ""
    if instruction.opcode == "fusion":
        for _, name in instruction.called:
            inner = program.computations[name]
            for each in inner.instructions:
                more, inner_dtype = _work(program, inner, each)
                operations, dtype = operations + more, dtype or inner_dtype
    return operations, dtype


def _traffic(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction reads and writes of main memory."""
    operands = computation.operands(instruction)
    if instruction.opcode == "copy-start":
        return 2.0 * sum(map(_main_memory, operands))
    if instruction.opcode in ("slice", "dynamic-slice"):  # what it takes, and not all that is there
        taken = instruction.shape.bytes if _main_memory(operands[0]) else 0
        return float(taken + _main_memory(instruction))
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * _main_memory(operands[1])
    if instruction.opcode == "scatter":  # in place: what is there is read and written
        return 3.0 * _main_memory(operands[-1]) + _main_memory(operands[1])
    if instruction.opcode == "gather":
        return 2.0 * _main_memory(instruction) + _main_memory(operands[1])
    if instruction.opcode != "fusion":
        return float(_main_memory(instruction) + sum(map(_main_memory, operands)))
    inner = program.computations[next(name for how, name in instruction.called if how == "calls")]
    reads = sum(
        _read(program, inner, number, _main_memory(operand))
        for number, operand in enumerate(operands)
    )
    return float(reads + _written(inner, instruction))


def _read(program: Program, inner: Computation, number: int, whole: float) -> float:
    """What a fusion reads of an operand: the slices, where it only slices it."""
    parameter = inner.parameters.get(number)
    if not whole or parameter is None:
        return whole
    users = _users(inner, parameter)
    read = 0.0 if users else whole
    for user in users:
        if user.opcode == "dynamic-slice" or (
            user.opcode == "gather" and _base(inner, user) is parameter
        ):
            # As wide as it is in memory: a fusion may convert a table of which it takes rows.
            read += user.shape.leaves[0].elements * _width(parameter)
        elif user.opcode == "fusion":  # a TPU has fusions in fusions
            nested = program.computations[user.called[0][1]]
            for place, operand in enumerate(inner.operands(user)):
                if _through_bitcasts(inner, operand) is parameter:
                    read += _read(program, nested, place, whole)
        elif not (user.opcode in _IN_PLACE and _base(inner, user) is parameter):
            return whole
    return min(whole, read)


def _users(inner: Computation, value: Instruction) -> list[Instruction]:
    """What reads a value, seen through bitcasts, and through conversions of a gather's table."""
    users: list[Instruction] = []
    for user in inner.users.get(value.name, []):
        if user.opcode == "convert":
            behind = _users(inner, user)
            gathers = bool(behind) and all(
                each.opcode == "gather" and _base(inner, each) is _base(inner, user)
                for each in behind
            )
            users += behind if gathers else [user]
        else:
            users += _users(inner, user) if user.opcode == "bitcast" else [user]
    return users


def _width(instruction: Instruction) -> float:
    """Bytes of an element."""
    leaf = instruction.shape.leaves[0]
    return leaf.bytes / max(1, leaf.elements)


def _base(inner: Computation, user: Instruction) -> Instruction:
    """Return the array that is gathered from, updated or converted, seen through bitcasts."""
    base = _through_bitcasts(inner, inner.operands(user)[0])
    if user.opcode == "gather" and base.opcode == "convert":
        return _base(inner, base)
    return base


def _through_bitcasts(inner: Computation, value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = inner.operands(value)[0]
    return value


def _written(inner: Computation, instruction: Instruction) -> float:
    """What a fusion writes: the update, where it updates a slice in place."""
    root = inner.root
    roots = inner.operands(root) if root.opcode == "tuple" else (root,)
    # Results of a fusion may lie elsewhere than the values inside that they are.
    shape = instruction.shape
    if len(shape.leaves) != len(roots):
        return float(_main_memory(instruction))
    written = 0.0
    for each, leaf, space in zip(roots, shape.leaves, shape.spaces, strict=True):
        value, whole = _through_bitcasts(inner, each), 0 if space else leaf.bytes
        if value.opcode == "dynamic-update-slice":
            written += min(whole, inner.operands(value)[1].shape.bytes)
        elif value.opcode in _IN_PLACE:  # what is there is read, and written
            written += min(whole, 2 * inner.operands(value)[-1].shape.bytes)
        else:
            written += whole
    return written


def _main_memory(instruction: Instruction) -> int:
    """Bytes of a value in main memory; a TPU keeps some on chip."""
    shape = instruction.shape
    places = zip(shape.leaves, shape.spaces, strict=True)
    return sum(leaf.bytes for leaf, space in places if space == 0)


# Counting what other units may bound.
# Input: an instruction. Output: `{what: how many}`, that of fused instructions included.
# Example: a fusion of `sine(bf16[8,16])` has `{"sine": 128}`; a sort of 1000 rows of 64 keys, in 21
# stages, has `{"sorted in rows": 1344000}`; a gather of 5 rows from a table in main memory
# `{"gathered": 5}`.

_TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one logistic tanh erf sine cosine tan power "
    "rsqrt sqrt cbrt atan2 divide".split()
)
# Sorts by NVIDIA's library, as jax 0.10 and later ones call it.
_CUB_SORTS = ('"__cub$DeviceRadixSort', '"xla.gpu.ext.cub_sort_')
_IN_CACHE = 50 * 2**20  # bytes: the L2 of an H100 and an H200 (datasheet)
_ALONE = 8  # bytes that are moved of a number that is sorted alone
_MOST_STAGES = 86  # as rows of 16,384 keys take on one H200
_INTEGER = frozenset("add subtract multiply and or xor shift-left shift-right-logical".split())


def _slow(program: Program, computation: Computation, instruction: Instruction) -> dict[str, float]:
    counts: dict[str, float] = {}
    name, count = _irregular(program, computation, instruction)
    if instruction.opcode == "dot":
        name, count = "8 bits transposed", sum(transposed_sizes(computation, instruction))
    if instruction.opcode == "convert" and is_eight_bit(instruction.shape.leaves[0]):
        name, count = "8 bits rounded", instruction.shape.leaves[0].elements
    if instruction.opcode in _INTEGER and instruction.shape.leaves[0].dtype in ("u32", "s32"):
        name, count = "integer", instruction.shape.leaves[0].elements
    if instruction.opcode in _TRANSCENDENTAL and instruction.shape.leaves[0].dtype[0] in "fb":
        name, count = instruction.opcode, instruction.shape.leaves[0].elements
    if count:
        counts[name] = float(count)
    if instruction.opcode == "fusion":
        for _, called in instruction.called:
            inner = program.computations[called]
            for each in inner.instructions:
                for key, more in _slow(program, inner, each).items():
                    counts[key] = counts.get(key, 0.0) + more
    return counts


def _irregular(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[str, float]:
    """What a sort, a gather or a scatter does, by the name of its speed."""
    if instruction.opcode not in ("sort", "gather", "scatter", "custom-call"):
        return "", 0
    operands = [
        each.shape.leaves[0] for each in computation.operands(instruction) if each.shape.leaves
    ]
    if instruction.opcode == "sort" or any(each in instruction.attributes for each in _CUB_SORTS):
        keys, library = operands[0], instruction.opcode != "sort"
        if len(keys.dims) > 1 and keys.elements > max(keys.dims):
            if library:
                return "sorted in long rows", keys.elements
            return "sorted in rows", keys.elements * _sort_stages(keys.dims[-1])
        pairs = len(operands) > 1 and operands[1].elements == keys.elements
        # The library moves keys with what belongs to them. Of floating-point numbers the keys are
        # their bits in order, so numbers alone are pairs of 8 bytes, with their places of 12.
        moved = sum(each.bytes for each in operands[: 1 + pairs]) / max(1, keys.elements)
        pairs = moved > _ALONE if library else pairs
        return ("sorted pairs" if pairs else "sorted"), keys.elements
    if instruction.opcode == "gather":
        # JAX's take_along_axis goes through the table row by row.
        local = operands[0].bytes <= _IN_CACHE or "take_along_axis" in instruction.attributes
        where = "gathered in cache" if local else "gathered"
        rows = max(1, operands[1].elements // max(1, _index_size(instruction, operands[1].dims)))
        return where, rows
    if instruction.opcode == "scatter":
        return _scattered(program, instruction, operands)
    return "", 0


def _sort_stages(length: int) -> int:
    """Stages of the network that sorts a row; long rows go to a library, which takes no longer."""
    bits = max(1, (length - 1).bit_length())
    return min(bits * (bits + 1) // 2, _MOST_STAGES)


def _index_size(instruction: Instruction, dims: tuple[int, ...]) -> int:
    """How many of the numbers of a gather or scatter make one index."""
    axis = int(instruction.attribute("index_vector_dim") or len(dims))
    return dims[axis] if axis < len(dims) else 1


def _scattered(
    program: Program, instruction: Instruction, operands: list[Leaf]
) -> tuple[str, float]:
    """Elements that are added to others, which takes atomics; plain writes are memory's."""
    applied = next((name for how, name in instruction.called if how == "to_apply"), "")
    body = program.computations.get(applied)
    if body is None or body.root.opcode != "add":
        return "", 0
    updates = operands[-1]
    indices = max(1, operands[1].elements // max(1, _index_size(instruction, operands[1].dims)))
    if updates.elements < 8 * indices:  # single elements, at random places
        cached = operands[0].bytes <= _IN_CACHE
        return f"scattered elements{' in cache' if cached else ''}", updates.elements
    return f"scattered {'f32' if updates.dtype == 'f32' else 'bf16'}", updates.elements
