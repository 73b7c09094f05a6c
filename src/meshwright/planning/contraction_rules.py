"""Rules of matrix products, convolutions and attention kernels: the operations with the work."""

from __future__ import annotations

import math

from meshwright.hlo.program import count_taps
from meshwright.planning.iteration_dims import Loops, Params, Rule, windows_touch_once


def dot_general(loops: Loops, params: Params) -> Rule:
    """Batch and free dims may be cut; contracted ones leave partial sums."""
    (left_sums, right_sums), (left_batch, right_batch) = params["dimension_numbers"]
    left, right = loops.inputs[:2]
    out = loops.result
    for dim, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        loops.free((0, a), (1, b), (out, dim))
    kept = [(0, a) for a in range(len(left)) if a not in (*left_batch, *left_sums)]
    kept += [(1, b) for b in range(len(right)) if b not in (*right_batch, *right_sums)]
    for dim, at in enumerate(kept, len(left_batch)):
        loops.free(at, (out, dim))
    for a, b in zip(left_sums, right_sums, strict=True):
        loops.sum((0, a), (1, b))
    return loops.rule(2 * math.prod(loops.outputs[0]) * math.prod(left[a] for a in left_sums))


def ragged_dot_general(loops: Loops, params: Params) -> Rule:
    """As the dense product; the groups stay whole, and but for CPUs the ragged dim.

    For CPUs JAX writes masked dense products, whose rows do not depend on each other. Elsewhere
    it is one operation, and the partitioner gathers what is cut by groups or by ragged rows.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (left_sums, right_sums), (left_batch, right_batch) = numbers.dot_dimension_numbers
    ragged, groups = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    masked = loops.platform == "cpu"
    left, right, out = loops.inputs[0], loops.inputs[1], loops.result
    # Where the ragged dim is contracted the result has the groups in front.
    first = int(bool(ragged & set(left_sums)))
    # The sizes of the groups: one row of them, or one per batch element and ragged dim's rows.
    sizes = [(2, d) for d in range(len(loops.inputs[2]) - 1)] if len(loops.inputs) > 2 else []
    for dim, (a, b) in enumerate(zip(left_batch, right_batch, strict=True), first):
        if a in ragged:
            loops.whole((0, a), (1, b), (out, dim))
        else:
            loops.free((0, a), (1, b), (out, dim), *sizes[dim - first : dim - first + 1])
    kept = [(0, a) for a in range(len(left)) if a not in (*left_batch, *left_sums)]
    kept += [(1, b) for b in range(len(right)) if b not in (*right_batch, *right_sums, *groups)]
    for dim, (side, at) in enumerate(kept, first + len(left_batch)):
        if side == 0 and at in ragged and not masked:
            loops.along((side, at), (out, dim))
        else:
            loops.free((side, at), (out, dim))
    for a, b in zip(left_sums, right_sums, strict=True):
        if a in ragged and not masked:
            loops.along((0, a), (1, b))
        else:
            loops.sum((0, a), (1, b))
    # Each row of the ragged dim meets one group, so the groups are no factor of the work.
    size = math.prod(loops.outputs[0][first:]) * math.prod(left[a] for a in left_sums)
    return loops.rule(2 * size)


def conv_general_dilated(loops: Loops, params: Params) -> Rule:
    """Rows may be cut and channels of the result; channels of the operand leave partial sums.

    Spatial dims stay whole unless windows lie side by side: elsewhere a cut exchanges borders.
    """
    numbers = params["dimension_numbers"]
    (rows, channels, *space), out = numbers.lhs_spec, loops.result
    made, taken, *window = numbers.rhs_spec
    out_rows, out_channels, *out_space = numbers.out_spec
    image, kernel, result = loops.inputs[0], loops.inputs[1], loops.outputs[0]
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    # But for TPUs, XLA takes a convolution in groups apart, and gathers all of it, unless every
    # group is one channel (or in the gradient of its weights one row).
    depthwise = feature_groups == image[channels]
    by_row = batch_groups == image[rows]
    apart = loops.platform != "tpu"
    if apart and ((feature_groups > 1 and not depthwise) or (batch_groups > 1 and not by_row)):
        loops.along((0, rows), (out, out_rows))
        loops.along((1, made), (out, out_channels))
    elif batch_groups > 1:  # the gradient of weights in groups: a group's rows make its channels
        loops.sum((0, channels), (1, taken))
        if by_row:
            loops.free((0, rows), (1, made), (out, out_channels))
        else:
            loops.free((1, made), (out, out_channels))
    else:
        loops.free((0, rows), (out, out_rows))
        if feature_groups == 1:
            loops.sum((0, channels), (1, taken))
        if depthwise and (apart or image[channels] == kernel[made]):
            loops.free((0, channels), (1, made), (out, out_channels))
        else:
            loops.free((1, made), (out, out_channels))
    pairs = 1
    for i, (a, w, b) in enumerate(zip(space, window, out_space, strict=True)):
        padding = tuple(params["padding"][i])
        dilations = (params["lhs_dilation"][i], params["rhs_dilation"][i])
        stride = params["window_strides"][i]
        pairs *= count_taps(
            image[a],
            result[b],
            size=kernel[w],
            stride=stride,
            pad=padding[0],
            lhs_dilate=dilations[0],
            rhs_dilate=dilations[1],
        )
        if feature_groups > 1 or batch_groups > 1:
            continue
        if windows_touch_once(image[a], result[b], kernel[w], stride, padding, dilations):
            loops.free((0, a), (out, b))
        elif (kernel[w], result[b], padding, dilations) == (image[a], 1, (0, 0), (1, 1)):
            loops.sum((0, a), (1, w))  # the gradient of a window of 1, a product over all places
    # Products with padding, or between the entries of a dilated image, are not computed.
    return loops.rule(2 * result[out_rows] * result[out_channels] * kernel[taken] * pairs)


def cudnn_attention(loops: Loops, params: Params) -> Rule:
    """Batch and heads may be cut, of queries, keys and values alike; nothing else.

    Operands are query, key, value, bias, two lengths, two offsets and two page tables, and
    backward also the statistics, the result and its gradient.
    """
    heads = 1 if params["layout"] == 1 else 2  # (batch, heads, seq, dim), else seq before heads
    arrays = [0, 1, 2, *range(11, loops.result)]  # (batch, seq, heads, dim)
    arrays += [i for i in range(loops.result, len(loops.shapes)) if len(loops.shapes[i]) == 4]
    rows = loops.inputs[0][0]
    bias = [3] if len(loops.inputs[3]) == 4 else []
    if bias and len(loops.outputs) == 4:
        arrays.remove(loops.result + 3)  # the gradient of a bias
        bias.append(loops.result + 3)
    # The statistics of the softmax: (batch, heads, seq), backward an operand.
    statistics = [i for i in range(10, len(loops.shapes)) if len(loops.shapes[i]) == 3]
    lengths = [i for i in range(4, 10) if loops.inputs[i][:1] == (rows,)]
    loops.free(*((i, 0) for i in (*arrays, *bias, *statistics, *lengths)))
    loops.free(*((i, heads) for i in arrays), *((i, 1) for i in (*bias, *statistics)))
    query, value = loops.inputs[0], loops.inputs[2]
    scores = math.prod(query[:-1]) * value[3 - heads]
    products = 2 if len(loops.outputs) < 3 else 5
    return loops.rule(2 * products * scores * query[-1])


CONTRACTIONS = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "conv_general_dilated": conv_general_dilated,
    "dot_product_attention_fwd_wrapper": cudnn_attention,
    "dot_product_attention_bwd_wrapper": cudnn_attention,
    "dot_product_attention_fwd": cudnn_attention,
    "dot_product_attention_bwd": cudnn_attention,
}
