"""Rules of reshapes, reductions, windows, sorts and matrix decompositions."""

from __future__ import annotations

import math

from meshwright.planning.iteration_dims import Loops, Params, Rule, windows_touch_once


def transpose(loops: Loops, params: Params) -> Rule:
    """Dims change places."""
    for b, a in enumerate(params["permutation"]):
        loops.free((0, a), (loops.result, b))
    return loops.rule()


def broadcast_in_dim(loops: Loops, params: Params) -> Rule:
    """New dims belong to the result alone."""
    operand, result = loops.inputs[0], loops.outputs[0]
    source = {b: a for a, b in enumerate(params["broadcast_dimensions"]) if operand[a] == result[b]}
    for b in range(len(result)):
        loops.free(*([(0, source[b])] if b in source else []), (loops.result, b))
    return loops.rule()


def reshape(loops: Loops, params: Params) -> Rule:
    """Of dims merged or split the major ones are one loop, the minor ones stay whole.

    (batch, seq) -> tokens: a cut of batch is one of tokens, as long as it divides both. Where no
    even cut divides both (3 of a fused query, key and value) they are apart: such a loop would only
    keep its group from being cut elsewhere.
    """
    a = [(dim, size) for dim, size in enumerate(loops.inputs[0]) if size > 1]
    b = [(dim, size) for dim, size in enumerate(loops.outputs[0]) if size > 1]
    out = loops.result
    while a and b and 0 not in loops.inputs[0]:
        left, right = [a.pop(0)], [b.pop(0)]
        while True:
            have, want = math.prod(s for _, s in left), math.prod(s for _, s in right)
            if have == want:
                break
            if have < want:
                left.append(a.pop(0))
            else:
                right.append(b.pop(0))
        (here, size), (there, other) = left[0], right[0]
        if size == other or math.gcd(size, other) % 2 == 0:
            loops.free((0, here), (out, there))
    return loops.rule()


def bitcast_convert_type(loops: Loops, params: Params) -> Rule:
    """All dims may be cut but one that an entry is taken apart into, or put together from."""
    for dim in range(min(len(loops.inputs[0]), len(loops.outputs[0]))):
        loops.free((0, dim), (loops.result, dim))
    return loops.rule()


def stack(loops: Loops, params: Params) -> Rule:
    """The new dim (of `unstack` the one that goes) stays whole, the others may be cut."""
    stacked = loops.shapes.index(max(loops.shapes, key=len))
    flat = [i for i, shape in enumerate(loops.shapes) if len(shape) < len(loops.shapes[stacked])]
    axis = params["axis"] % len(loops.shapes[stacked])
    dims = [dim for dim in range(len(loops.shapes[stacked])) if dim != axis]
    for flat_dim, dim in enumerate(dims):
        loops.free(*((i, flat_dim) for i in flat), (stacked, dim))
    return loops.rule()


def tile(loops: Loops, params: Params) -> Rule:
    """Repeated dims stay whole."""
    for dim, (size, made) in enumerate(zip(loops.inputs[0], loops.outputs[0], strict=True)):
        if size == made:
            loops.free((0, dim), (loops.result, dim))
        elif size == 1:
            loops.free((loops.result, dim))
    return loops.rule()


def along(loops: Loops, params: Params) -> Rule:
    """The dim that the operation runs along stays whole, the others may be cut."""
    rank = len(loops.inputs[0])
    keys = ("dimension", "axis", "dimensions", "reduction_dimension")
    given = next((params[key] for key in keys if params.get(key) is not None), rank - 1)
    dims = {dim % rank for dim in (given if isinstance(given, tuple | list) else (given,))}
    arrays = [i for i, shape in enumerate(loops.shapes) if len(shape) == rank]
    for dim in range(rank):
        at = [(i, dim) for i in arrays]
        if dim not in dims:
            loops.free(*at)
        elif len({loops.shapes[i][dim] for i in arrays}) == 1:
            loops.along(*at)
    return loops.rule()


def top_k(loops: Loops, params: Params) -> Rule:
    """Rows may be cut on TPUs; elsewhere XLA calls a function of its own, with all of them."""
    if loops.platform == "tpu":
        return along(loops, params)
    return whole_batch(loops, params)


def approx_top_k(loops: Loops, params: Params) -> Rule:
    """Rows may be cut, but not on GPUs, where it is the same function."""
    return whole_batch(loops, params) if loops.platform == "cuda" else along(loops, params)


def whole_batch(loops: Loops, params: Params) -> Rule:
    """Nothing may be cut, though dims that all operands and results have in front go through."""
    for dim, sizes in enumerate(zip(*loops.shapes, strict=False)):
        if len(set(sizes)) > 1 or dim == len(loops.inputs[0]) - 1:
            break
        loops.along(*((i, dim) for i in range(len(loops.shapes))))
    return loops.rule()


def reduction(loops: Loops, params: Params) -> Rule:
    """Reduced dims leave partial results; the others may be cut."""
    axes = params["axes"] if "axes" in params else params["dimensions"]
    operands = range(len(loops.outputs))
    for b, a in enumerate(dim for dim in range(len(loops.inputs[0])) if dim not in axes):
        loops.free(*((i, a) for i in operands), *((loops.result + i, b) for i in operands))
    for a in axes:
        loops.sum(*((i, a) for i in operands))
    return loops.rule()


def odd_reduction(loops: Loops, params: Params) -> Rule:
    """A reduction by a function of the user's, or xor: only TPUs exchange its partial results.

    Several operands are another matter: their partial results are gathered and reduced again.
    """
    if loops.platform == "tpu" or len(loops.outputs) > 1:
        return reduction(loops, params)
    axes = params["axes"] if "axes" in params else params["dimensions"]
    for b, a in enumerate(dim for dim in range(len(loops.inputs[0])) if dim not in axes):
        loops.free((0, a), (loops.result, b))
    return loops.rule()


def reduce_window(loops: Loops, params: Params) -> Rule:
    """Dims may be cut along which windows lie side by side; elsewhere a cut exchanges borders."""
    rank = len(loops.inputs[0])
    count, out = len(loops.outputs), loops.result
    operands = [i for i in range(len(loops.inputs)) if len(loops.inputs[i]) == rank]
    for dim in range(rank):
        if _side_by_side(params, dim, loops.inputs[0][dim], loops.outputs[0][dim]):
            loops.free(*((i, dim) for i in operands), *((out + i, dim) for i in range(count)))
    return loops.rule()


def select_and_scatter_add(loops: Loops, params: Params) -> Rule:
    """The gradient of a pooling: operands are the gradient and what was pooled."""
    pooled, operand = loops.inputs[:2]
    for dim, (count, size) in enumerate(zip(pooled, operand, strict=True)):
        if _side_by_side(params, dim, size, count):
            loops.free((0, dim), (1, dim), (loops.result, dim))
    return loops.rule()


def _side_by_side(params: Params, dim: int, size: int, count: int) -> bool:
    ones = (1,) * (dim + 1)
    dilations = params.get("base_dilation", ones)[dim], params.get("window_dilation", ones)[dim]
    window, stride = params["window_dimensions"][dim], params["window_strides"][dim]
    return windows_touch_once(size, count, window, stride, tuple(params["padding"][dim]), dilations)


def decomposition(loops: Loops, params: Params, core: int = 2) -> Rule:
    """Matrices of a stack are independent of each other; `core` last dims of the first stay whole.

    What else is stacked has the same dims in front.
    """
    for dim in range(len(loops.inputs[0]) - core):
        size = loops.inputs[0][dim]
        loops.free(*((i, dim) for i, shape in enumerate(loops.shapes) if shape[dim] == size))
    return loops.rule()


def looped_decomposition(loops: Loops, params: Params) -> Rule:
    """The same but on TPUs, where it is a loop in which the partitioner gathers the stack."""
    if loops.platform == "tpu":
        return whole_batch(loops, params)
    return decomposition(loops, params)


def symmetric_product(loops: Loops, params: Params) -> Rule:
    """Stacks may be cut, but not on GPUs, where a library has all of them."""
    return (whole_batch if loops.platform == "cuda" else decomposition)(loops, params)


def triangular_solve(loops: Loops, params: Params) -> Rule:
    """Stacks may be cut; right-hand sides too on TPUs, where it is no call of a library."""
    batch = len(loops.inputs[0]) - 2
    for dim in range(batch):
        loops.free((0, dim), (1, dim), (2, dim))
    sides = batch + 1 if params["left_side"] else batch
    if loops.platform == "tpu":
        loops.free((1, sides), (2, sides))
    else:
        loops.along((1, sides), (2, sides))
    return loops.rule()


def pivots(loops: Loops, params: Params) -> Rule:
    """Stacks may be cut, of one dim each."""
    return decomposition(loops, params, core=1)


def tridiagonal_solve(loops: Loops, params: Params) -> Rule:
    """Stacks may be cut; right-hand sides, the last dim, on TPUs."""
    sides = len(loops.inputs[3]) - 1
    if loops.platform == "tpu":
        loops.free((3, sides), (4, sides))
    return decomposition(loops, params, core=1)


def fft(loops: Loops, params: Params) -> Rule:
    """Transformed dims stay whole; the others too, but on TPUs."""
    core = len(params["fft_lengths"])
    for dim in range(len(loops.inputs[0]) - core):
        (loops.free if loops.platform == "tpu" else loops.along)((0, dim), (1, dim))
    return loops.rule()


SHAPES = {
    "transpose": transpose,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": reshape,
    "bitcast_convert_type": bitcast_convert_type,
    "stack": stack,
    "unstack": stack,
    "tile": tile,
    "top_k": top_k,
    "approx_top_k": approx_top_k,
    "reduce": odd_reduction,
    "reduce_xor": odd_reduction,
    **dict.fromkeys(
        """concatenate cumlogsumexp cummax cummin cumprod cumsum rev sort
        split""".split(),
        along,
    ),
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split(),
        reduction,
    ),
    **dict.fromkeys(
        """reduce_window reduce_window_max reduce_window_min reduce_window_sum
        select_and_gather_add""".split(),
        reduce_window,
    ),
    "select_and_scatter_add": select_and_scatter_add,
    "triangular_solve": triangular_solve,
    **dict.fromkeys(
        """cholesky eig hessenberg householder_product ormqr qr schur tridiagonal""".split(),
        decomposition,
    ),
    **dict.fromkeys("eigh lu svd".split(), looped_decomposition),
    "symmetric_product": symmetric_product,
    "lu_pivots_to_permutation": pivots,
    "tridiagonal_solve": tridiagonal_solve,
    "fft": fft,
}
