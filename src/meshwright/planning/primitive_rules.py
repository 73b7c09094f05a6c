"""Which dims of an operation may be cut: a rule per primitive, as XLA's partitioner handles it.

Where the partitioner is worse than mathematics (it gathers what could stay cut), the rule says what
the partitioner does: a plan is only as good as the program that is compiled from it. Every rule is
tested by compiling the operation alone with each of its dims cut, for CPUs, TPUs and GPUs. Pallas
kernels alone are not left to the partitioner: `apply_plan` cuts them itself.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.planning.contraction_rules import CONTRACTIONS
from meshwright.planning.indexing_rules import INDEXING
from meshwright.planning.iteration_dims import (
    IterationDim,
    Kind,
    Loops,
    Params,
    Platform,
    Rule,
)
from meshwright.planning.kernel_rules import kernel
from meshwright.planning.shape_rules import SHAPES

__all__ = ["IterationDim", "Kind", "Rule", "rule_of"]


def elementwise(loops: Loops, params: Params, *, known: bool = True) -> Rule:
    """Every dim may be cut; scalars and dims of size 1 are broadcast."""
    out = loops.result
    result = loops.outputs[0] if loops.outputs else ()
    arrays = [i for i, shape in enumerate(loops.inputs) if shape and len(shape) == len(result)]
    for dim, size in enumerate(result):
        same = [(i, dim) for i in arrays if loops.inputs[i][dim] == size]
        same += [(out + i, dim) for i, shape in enumerate(loops.outputs) if shape == result]
        if all(loops.inputs[i][dim] in (1, size) for i in arrays):
            loops.free(*same)
        else:
            loops.along(*same)
    return loops.rule(known=known)


def pairwise(loops: Loops, params: Params) -> Rule:
    """Every operand goes to its own result as it is."""
    for i, shape in enumerate(loops.outputs):
        for dim in range(len(shape)):
            loops.free((i, dim), (loops.result + i, dim))
    return loops.rule()


def keys(loops: Loops, params: Params) -> Rule:
    """Keys go through, one for one; what is made of each (its words, bits, new keys) follows.

    With JAX's partitionable Threefry every device computes its own part of the bits.
    """
    shared = min(len(loops.inputs[0]), len(loops.outputs[0]))
    for dim in range(shared):
        loops.free((0, dim), (loops.result, dim))
    return loops.rule()


def random_bits(loops: Loops, params: Params) -> Rule:
    """Every dim of the bits may be cut, and those of the keys they are drawn from."""
    rank = len(loops.inputs[0])
    for dim in range(len(loops.outputs[0])):
        loops.free(*([(0, dim)] if dim < rank else []), (loops.result, dim))
    return loops.rule()


def opaque(loops: Loops, params: Params) -> Rule:
    """Nothing may be cut: XLA cannot look inside, and gathers every operand.

    Calls of foreign functions and the like; inside of `shard_map` they are cut by hand, and its own
    layout is the user's.
    """
    return loops.rule()


def custom_partitioning(loops: Loops, params: Params) -> Rule:
    """What the function's own sharding rule says, where it has one; else nothing may be cut."""
    given: Any = params.get("sharding_rule")
    if not hasattr(given, "operand_mappings"):  # none, or a function of the mesh
        return loops.rule()
    at: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    results: set[str] = set()
    mappings = (*given.operand_mappings, *given.result_mappings)
    for index, (shape, mapping) in enumerate(zip(loops.shapes, mappings, strict=True)):
        dim = 0
        for factor in mapping:
            if not isinstance(factor, str):  # merged dims: a cut of the major one
                names = [factor[0]]
            elif factor.startswith(("...", "…")):  # as many dims as are left
                left = range(len(shape) - len(mapping) + 1)
                names = [f"{factor}{place - len(left)}" for place in left]
            else:
                names = [factor]
            for name in names:
                at[name].append((index, dim))
                if index >= loops.result:
                    results.add(name)
                dim += 1
    kept_whole = {*given.need_replication_factors, *given.permutation_factors}
    for name, members in at.items():
        if name in given.reduction_factors:
            loops.sum(*(member for member in members if member[0] < loops.result))
        elif name in kept_whole or name not in results:
            loops.along(*members)
        else:
            loops.free(*members)
    return loops.rule()


_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy cos cosh digamma div empty eq eq_to
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow iota
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul name ne neg nextafter not
    one_minus_square or polygamma polynomial population_count pow random_clone random_fold_in
    random_gamma random_seed real reduce_precision regularized_incomplete_beta rem reshard round
    rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta"""
# `cholesky_update` is a loop over columns, each of which changes all that follow; generators of the
# hardware draw all numbers everywhere; of a layout for the whole array no part is made.
_OPAQUE = """cholesky_update cudnn_fusion debug_callback debug_print ffi_call io_callback
    layout_constraint pure_callback rng_bit_generator rng_uniform shard_map"""
_RULES: dict[str, Callable[[Loops, Params], Rule]] = {
    **CONTRACTIONS,
    **INDEXING,
    **SHAPES,
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(_OPAQUE.split(), opaque),
    "device_put": pairwise,
    "optimization_barrier": pairwise,
    "random_bits": random_bits,
    "random_split": random_bits,
    "random_unwrap": keys,
    "random_wrap": keys,
    "custom_partitioning": custom_partitioning,
    "pallas_call": kernel,
}


def rule_of(
    primitive: str,
    params: Mapping[str, Any],
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    platform: Platform = "tpu",
) -> Rule:
    """Return which dims of an operation may be cut, leave partial results, or must be whole.

    Args: the primitive's name and parameters as a jaxpr has them, the shapes of its operands and
    results, and whose compiler partitions it: they differ in a few (`top_k`, `fft`, convolutions
    in groups). A primitive without a rule gets a guess, `known=False`: dims of equal size go
    through.

    >>> from meshwright.planning.primitive_rules import rule_of
    >>> params = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    >>> rule = rule_of("dot_general", params, [(8, 16), (16, 32)], [(8, 32)])
    >>> [(dim.kind, dim.at) for dim in rule.dims]
    [('free', ((0, 0), (2, 0))), ('free', ((1, 1), (2, 1))), ('sum', ((0, 1), (1, 0)))]
    >>> rule.flops
    8192.0
    """
    loops = Loops(inputs, outputs, platform)
    if primitive in _RULES:
        return _RULES[primitive](loops, params)
    return elementwise(loops, params, known=False)
