"""Rules of gathers, scatters, slices and pads."""

from __future__ import annotations

import math

from meshwright.planning.iteration_dims import Loops, Params, Rule


def gather(loops: Loops, params: Params) -> Rule:
    """Rows that are looked up may be cut; a cut table is a masked lookup, then a sum."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand, out = loops.inputs[0], loops.result
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(operand)) if dim not in gone]
    for a, b in zip(kept, numbers.offset_dims, strict=True):
        if sizes[a] == operand[a]:
            loops.free((0, a), (out, b))
        elif sizes[a] == 1:
            loops.sum((0, a))
        else:
            loops.whole((0, a), (out, b))
    looped = [dim for dim in range(len(loops.outputs[0])) if dim not in numbers.offset_dims]
    for index, b in enumerate(looped):
        rows = [(0, batching[index])] if index in batching else []
        loops.free(*rows, (1, index), (out, b))
    for a in numbers.collapsed_slice_dims:
        loops.sum((0, a))
    return loops.rule()


def scatter(loops: Loops, params: Params, adds_up: bool = False) -> Rule:
    """The table may be cut, each device takes the updates it has rows for.

    `adds_up`: results of cut updates are added up (or multiplied, or their maxima taken); else the
    partitioner gathers the updates.
    """
    numbers = params["dimension_numbers"]
    operand, updates, out = loops.inputs[0], loops.inputs[2], loops.result
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(operand)) if dim not in gone]
    # Of a single update XLA makes slices, but for CPUs, and gathers what they go along.
    single = loops.platform != "cpu" and math.prod(loops.inputs[1][:-1]) == 1
    for a, b in zip(kept, numbers.update_window_dims, strict=True):
        if updates[b] == operand[a] or (updates[b] == 1 and not single):
            loops.free((0, a), (2, b), (out, a))
        else:
            loops.along((0, a), (out, a))
    looped = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for index, b in enumerate(looped):
        if index in batching:
            row = batching[index]
            loops.free((0, row), (1, index), (2, b), (out, row))
        elif adds_up:
            loops.sum((1, index), (2, b))
        else:
            loops.along((1, index), (2, b))
    for a in numbers.inserted_window_dims:
        (loops.along if single else loops.free)((0, a), (out, a))
    return loops.rule()


def scatter_add(loops: Loops, params: Params) -> Rule:
    """A scatter that leaves partial results when its updates are cut."""
    return scatter(loops, params, adds_up=True)


def slice_(loops: Loops, params: Params) -> Rule:
    """Dims that are kept may be cut, and those of which every n-th is kept, from first to last."""
    strides = params["strides"] or (1,) * len(loops.inputs[0])
    starts, out = params["start_indices"], loops.result
    for dim, (size, kept) in enumerate(zip(loops.inputs[0], loops.outputs[0], strict=True)):
        if size == kept * strides[dim] and starts[dim] < strides[dim]:
            loops.free((0, dim), (out, dim))
    return loops.rule()


def pad(loops: Loops, params: Params) -> Rule:
    """Dims without padding may be cut, and those padded between, the same around every entry."""
    for dim, (low, high, interior) in enumerate(params["padding_config"]):
        if min(low, high) >= 0 and low + high == interior:
            loops.free((0, dim), (loops.result, dim))
    return loops.rule()


def dynamic_slice(loops: Loops, params: Params) -> Rule:
    """Dims that are kept may be cut; a slice along a cut one gathers it."""
    for dim, (size, kept) in enumerate(zip(loops.inputs[0], loops.outputs[0], strict=True)):
        if size == kept:
            loops.free((0, dim), (loops.result, dim))
    return loops.rule()


def dynamic_update_slice(loops: Loops, params: Params) -> Rule:
    """Dims may be cut along which all is replaced, or one entry: its owner writes it."""
    out = loops.result
    for dim, (size, given) in enumerate(zip(loops.inputs[0], loops.inputs[1], strict=True)):
        if given in (1, size):
            loops.free((0, dim), (1, dim), (out, dim))
        else:
            loops.along((0, dim), (out, dim))
    return loops.rule()


INDEXING = {
    "gather": gather,
    "scatter": scatter,
    "scatter-sub": scatter,  # which could be added up as well
    **dict.fromkeys("scatter-add scatter-mul scatter-min scatter-max".split(), scatter_add),
    "slice": slice_,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
