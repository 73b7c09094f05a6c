"""Memory that XLA sets aside for a GPU's libraries, and cannot know of where there is no GPU.

Without one the compiler asks no library and tries nothing out: attention calls have no workspace,
products are Triton's, sorts are kernels of its own. With one, cuDNN says what it needs, large
products go to cuBLASLt and large sorts to CUB. `scratch_sizes` says what those take while they run;
a result of the program that is not written yet may give some of it a place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from meshwright.hardware.chips import Chip, device_facts, gpu_capability
from meshwright.hlo.instructions import Computation, Instruction, integers
from meshwright.hlo.program import Program
from meshwright.rehearsal.gpu_fusions import (
    LIBRARY_PRODUCTS,
    fused_product,
    is_eight_bit,
    transposed_sizes,
)
from meshwright.rehearsal.kernel_speeds import LONGEST_FFT


# In: an instruction of a program that was compiled without a GPU. Out: sizes of the buffers that
# the library which does its work there takes while it runs; none for what the compiler does itself.
# Invariant: what was not measured counts as nothing. Example: a fused product of bf16[4096,4096]s,
# which is Triton's here, is cuBLASLt's on an H200, with 32 MiB of workspace.
def scratch_sizes(program: Program, instruction: Instruction, chip: Chip) -> list[int]:
    """Bytes of the buffers that an instruction needs beside its operands and results.

    Of a sort they are all that it needs but results of the program: `library_sort`.
    """
    if instruction.opcode == "custom-call":
        size = _attention_workspace(program, instruction)
        return [size] if size else []
    if instruction.opcode != "fusion":
        return []
    if '"kind":"__triton' in instruction.attributes:
        return _product_buffers(program, instruction, chip)
    sort = library_sort(program, instruction, chip)
    return [] if sort is None else _sort_buffers(program, instruction, sort)


def unplaced(sizes: Iterable[int], idle: Iterable[int]) -> int:
    """Bytes that find no place in results that are idle, each of which has room for one.

    >>> unplaced([64, 128, 32], [70, 10])
    160
    """
    free = sorted(idle)
    left = 0
    for size in sorted(sizes, reverse=True):
        place = next((room for room in free if room >= size), None)
        if place is None:
            left += size
        else:
            free.remove(place)
    return left


# cuDNN says how much memory a call needs beside its results, and it is not asked where it is not
# installed: the compiler leaves the last result at `u8[0]`. These are the sizes measured on an H200
# with nine shapes, exactly: forward 256 bytes, backward a float32 copy of the query's gradient with
# a sum for each row, and one of the keys' for each head where several share them.

_FMHA = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^]]*"dimensions":\s*\[([^]]*)\]')


def _attention_workspace(program: Program, call: Instruction) -> int:
    """Bytes a call of cuDNN's attention needs for itself; 0 of others and where they are known."""
    if call.shape.leaves[-1].bytes:
        return 0
    target, scores = _FMHA.search(call.attributes), _SCORES.search(call.attributes)
    if target is None or scores is None or "F8" in target[1]:  # of which nothing was measured
        return 0
    if "Backward" not in target[1]:
        return 256
    batch, heads, rows, columns = (int(size.strip(' "')) for size in scores[1].split(","))
    query, keys = program.computations[call.computation].operands(call)[:2]
    width = query.shape.leaves[0].dims[-1]
    all_heads = batch * heads * columns * width
    shared = 4 * all_heads if keys.shape.leaves[0].elements < all_heads else 0
    return 256 + 4 * batch * rows * heads * (width + 1) + shared


# cuBLASLt gets what XLA's GemmRewriter grants it: 32 MiB from Hopper on, 4 MiB before
# (GemmConfig::kHopperWorkspace, kDefaultWorkspace), but no more than the operands have. Products
# below `LIBRARY_PRODUCTS` operations stay with Triton.

_WORKSPACE_HOPPER, _WORKSPACE = 32 * 2**20, 4 * 2**20


def _product_buffers(program: Program, fusion: Instruction, chip: Chip) -> list[int]:
    if fusion.computation != program.entry.name or program.flops_of(fusion) < LIBRARY_PRODUCTS:
        return []
    operands = program.computations[fusion.computation].operands(fusion)
    most = _WORKSPACE_HOPPER if gpu_capability(chip) >= (9, 0) else _WORKSPACE
    workspace = min(most, sum(operand.shape.bytes for operand in operands))
    return [workspace, *_eight_bit_buffers(program, fusion)]


# Products of 8-bit numbers always go to the library. It takes them with the contracted dimension
# last, so others are copied in that order first, and it rounds nothing: what Triton's fusion makes
# of the result is made of the whole result. Three steps of fp8 on one H200, exactly.


def _eight_bit_buffers(program: Program, fusion: Instruction) -> list[int]:
    dot = fused_product(program, fusion)
    if dot is None or not eight_bit_product(program, fusion):
        return []
    sizes = transposed_sizes(program.computations[dot.computation], dot)
    return sizes if dot.root else [*sizes, dot.shape.bytes]


def eight_bit_product(program: Program, fusion: Instruction) -> bool:
    """Whether a fusion multiplies 8-bit numbers; its results are then made of a whole product."""
    dot = fused_product(program, fusion)
    if dot is None:
        return False
    multiplied, _ = program.computations[dot.computation].operands(dot)
    return is_eight_bit(multiplied.shape.leaves[0])


# cuFFT writes over the input of a transform to real numbers, so XLA hands it a copy, which it takes
# from the allocator when it runs, as cuFFT's own buffer between passes. On one H200, beside all
# that is planned: 8,192 rows of 16,384 to real numbers 537 MB, 256 of 262,144 537 MB, 64 of 2**20
# 268 MB.


def taken_at_run(program: Program, computations: Iterable[Computation]) -> int:
    """Bytes of the largest buffer that is no part of the plan, but taken while the program runs."""
    transforms = (
        each for where in computations for each in where.instructions if each.opcode == "fft"
    )
    return max((sum(_fft_buffers(program, each)) for each in transforms), default=0)


def _fft_buffers(program: Program, fft: Instruction) -> list[int]:
    (given,) = program.computations[fft.computation].operands(fft)
    sizes = [given.shape.bytes] if "fft_type=IRFFT" in fft.attributes else []
    if any(length > LONGEST_FFT for length in integers(fft.attribute("fft_length"))):
        sizes.append(max(given.shape.bytes, fft.shape.bytes))  # between its passes
    return sizes


# Sorts: XLA's SortRewriter takes CUB where it measured it to be faster than its own kernel, by the
# bits of a key, the rows and the keys of a row (`IsCubSortFasterOnH100` and `...OnA100` in
# xla/service/gpu/transforms/sort_rewriter.cc). Pairs of the fewest rows for rows longer than that.

_FASTER = {
    "hopper": {
        16: ((12, 1 << 16), (14, 1 << 15), (16, 1 << 14), (18, 1 << 13), (33, 1 << 12)),
        32: ((26, 1 << 17), (31, 1 << 16), (38, 1 << 15), (44, 1 << 14), (52, 1 << 13)),
        64: ((55, 1 << 17), (70, 1 << 16), (92, 1 << 15), (354, 1 << 14)),
    },
    "ampere": {
        16: ((9, 1 << 17), (13, 1 << 13), (27, 1 << 12)),
        32: ((24, 1 << 17), (30, 1 << 16), (36, 1 << 15), (39, 1 << 14), (52, 1 << 13)),
        64: ((46, 1 << 17), (55, 1 << 16), (72, 1 << 15), (289, 1 << 14)),
    },
}
_FASTER_ALONE = {
    "hopper": {8: 0, 16: 1 << 9, 32: 22000, 64: 1 << 17},
    "ampere": {8: 0, 16: 1 << 16, 32: 1 << 15, 64: 1 << 16},
}


def library_sort(program: Program, instruction: Instruction, chip: Chip) -> Instruction | None:
    """Return the sort in a fusion that CUB does on this GPU, or `None`."""
    root = next(
        (program.computations[name].root for how, name in instruction.called if how == "calls"),
        None,
    )
    if root is None or root.opcode != "sort":
        return None
    keys = root.shape.leaves[0]
    along = root.attribute("dimensions") or ""
    if along.strip("{}") != str(len(keys.dims) - 1) or not keys.elements:
        return None
    bits = 8 * keys.bytes // keys.elements
    length = keys.dims[-1]
    rows = keys.elements // length
    kind = "hopper" if gpu_capability(chip) >= (9, 0) else "ampere"
    if rows == 1:
        faster = length > _FASTER_ALONE[kind].get(bits, math.inf)
    else:
        table = _FASTER[kind].get(bits, ())
        faster = any(rows > least and length > short for least, short in table)
        fits_at_once = 88 < rows <= device_facts(chip)[2]
        faster |= kind == "hopper" and bits == 32 and fits_at_once and length > 1 << 12
    used = _used(program, instruction)
    return root if faster and 1 <= _arrays(root, used) <= 2 else None


# What CUB is given. It reads keys and values and writes them elsewhere, and its passes go back and
# forth to a second copy of both (DeviceRadixSort without a DoubleBuffer). NumPy's order of floats
# takes keys made for it, unsigned: the array itself is then the value, or array and value packed
# into one. Example: jnp.sort of 1 GiB needs 1 GiB each of keys, sorted keys, and second copies of
# both: 4 GiB beside the array and its result.
PACKED_BUFFERS = 5  # keys and packed pairs, both again when they are sorted, and second copies
_KEYS_OF_TILE, _TILE_BYTES = 6528, 1024  # of passes; from the 10.05 MiB of 2**26 keys (one H200)


def _sort_buffers(program: Program, fusion: Instruction, sort: Instruction) -> list[int]:
    used = _used(program, fusion)
    leaves = sort.shape.leaves[: _arrays(sort, used)]
    keys = leaves[0]
    rows = keys.elements // keys.dims[-1]
    numpy_order = keys.dtype[0] in "fb" and not _compares_plainly(program, sort)
    made: list[int] = []  # inputs that are no arguments of the sort
    if numpy_order:
        values = sum(leaf.bytes for leaf in leaves)
        made += [keys.bytes] if len(leaves) == 1 else [keys.bytes, values]
        written = [keys.bytes] if len(leaves) == 1 else [keys.bytes, values]
    else:
        values = sum(leaf.bytes for leaf in leaves[1:])
        made += [leaf.bytes for leaf in leaves[1:]]  # places, counted up
        written = [leaf.bytes for number, leaf in enumerate(leaves) if len(leaves) > 1 or number]
    passes = 4 * (rows + 1) if rows > 1 else _TILE_BYTES * -(-keys.elements // _KEYS_OF_TILE)
    return [*made, *written, keys.bytes + values + passes]


def own_results(fusion: Instruction, results: frozenset[int]) -> int:
    """Bytes of a sort's results that are no `results` of the program: CUB has others instead."""
    leaves = enumerate(fusion.shape.leaves)
    return sum(leaf.bytes for number, leaf in leaves if number not in results)


def _used(program: Program, instruction: Instruction) -> set[int]:
    """Which results of a fusion anything reads."""
    where: Computation = program.computations[instruction.computation]
    users = where.users.get(instruction.name, [])
    return {
        int(user.attribute("index") or 0) for user in users if user.opcode == "get-tuple-element"
    } or {0}


def _arrays(sort: Instruction, used: set[int]) -> int:
    """How many arrays were sorted before XLA added places at the end, for a stable order."""
    count = max(1, len(sort.shape.leaves))
    return count - 1 if count > 1 and count - 1 not in used else count


def _compares_plainly(program: Program, sort: Instruction) -> bool:
    applied = next((name for how, name in sort.called if how == "to_apply"), "")
    body = program.computations.get(applied)
    return body is not None and body.root.opcode == "compare"
