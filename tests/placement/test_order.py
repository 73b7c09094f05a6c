"""The order along an axis: paths and rings that only ever step to a neighbour."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.placement.cost_model import (
    Part,
    choose_order,
    grid_path,
    offsets,
    ring_path,
    snake_path,
)

checked = settings(derandomize=True, deadline=None, max_examples=100)
boxes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def step_lengths(path):
    """Over how many unit steps each move goes, the way home last."""
    return np.abs(np.roll(path, -1, axis=0) - path).sum(axis=1)


def visits_all_once(path, sizes):
    codes = np.ravel_multi_index(tuple(path.T), tuple(sizes))
    return sorted(codes.tolist()) == list(range(math.prod(sizes)))


@checked
@given(boxes)
def test_a_snake_steps_to_neighbours_and_visits_all_once(sizes):
    path = snake_path(sizes)
    assert visits_all_once(path, sizes)
    assert (step_lengths(path)[:-1] == 1).all()


@checked
@given(boxes)
def test_a_ring_steps_to_neighbours_and_visits_all_once(sizes):
    path = ring_path(sizes)
    assert path[0].tolist() == [0] * len(sizes)
    assert visits_all_once(path, sizes)
    assert (step_lengths(path)[:-1] == 1).all()


@checked
@given(boxes)
def test_a_ring_closes_exactly_when_a_box_has_one(sizes):
    real = [side for side in sizes if side > 1]
    home = step_lengths(ring_path(sizes))[-1]
    if len(real) >= 2 and math.prod(real) % 2 == 0:
        assert home == 1
    elif real not in ([], [2]):  # a pair is its own way home
        assert home > 1


@checked
@given(boxes)
def test_a_grid_counts_like_digits(sizes):
    path = grid_path(sizes)
    assert visits_all_once(path, sizes)
    codes = np.ravel_multi_index(tuple(path.T), tuple(sizes))
    assert (np.diff(codes) == 1).all()


def test_nothing_is_one_position_with_no_digits():
    assert grid_path([]).shape == snake_path([]).shape == ring_path([]).shape == (1, 0)


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ([2, 2], [[0, 0], [0, 1], [1, 1], [1, 0]]),
        ([3, 2], [[0, 0], [1, 0], [2, 0], [2, 1], [1, 1], [0, 1]]),
        ([1, 3], [[0, 0], [0, 1], [0, 2]]),
    ],
)
def test_rings_by_hand(sizes, path):
    assert ring_path(sizes).tolist() == path


def test_an_odd_box_gets_the_open_path():
    assert ring_path([3, 3]).tolist() == snake_path([3, 3]).tolist()


@pytest.mark.parametrize(
    ("name", "parts", "axis", "order"),
    [
        # One direction has only one sensible order.
        ("v5p:4x4x4", (Part(0, 4, 1),), "tp", "line"),
        ("h100:8x4", (Part(0, 4, 1), Part(1, 8, 1)), "tp", "line"),
        ("tpu7x:4x4x4", (Part(0, 4, 1), Part(3, 2, 1)), "tp", "line"),
        # Whole wrapped directions on the chips whose compiler gathers over planes.
        ("v5p:4x4x4", (Part(0, 4, 1), Part(1, 4, 1)), "tp", "grid"),
        ("v4:4x4x4", (Part(0, 4, 1), Part(1, 4, 1), Part(2, 4, 1)), "fsdp", "grid"),
        ("tpu7x:4x4x4", (Part(0, 4, 1), Part(1, 4, 1), Part(3, 2, 1)), "fsdp", "grid"),
        # An axis that talks to its neighbours wants them near.
        ("v5p:4x4x4", (Part(0, 4, 1), Part(1, 4, 1)), "pp", "ring"),
        ("v5p:4x4x4", (Part(0, 4, 1), Part(1, 4, 1)), "cp", "ring"),
        # Pieces, planes that do not wrap, and the planar chips.
        ("v5p:4x4x4", (Part(0, 2, 1), Part(1, 4, 1)), "tp", "ring"),
        ("v5p:2x4x4", (Part(1, 4, 1), Part(2, 4, 1)), "tp", "ring"),
        ("v5e:16x16", (Part(0, 16, 1), Part(1, 16, 1)), "fsdp", "ring"),
    ],
)
def test_the_order_follows_what_the_axis_covers_and_what_it_does(name, parts, axis, order):
    assert choose_order(mw.topology(name), parts, axis, "auto") == order


@pytest.mark.parametrize("asked", ["ring", "grid"])
def test_the_order_asked_for_wins_where_there_is_a_choice(asked):
    pod = mw.topology("v5p:4x4x4")
    assert choose_order(pod, (Part(0, 4, 1), Part(1, 2, 1)), "tp", asked) == asked
    assert choose_order(pod, (Part(0, 4, 1),), "tp", asked) == "line"


def test_offsets_run_outside_in_slices_then_chips_then_cores():
    pod = mw.topology("tpu7x:2x2x1", slices=2)  # grid (2, 2, 2, 1, 2)
    everything = (Part(0, 2, 1), Part(1, 2, 1), Part(2, 2, 1), Part(4, 2, 1))
    # Within a slice the chips go round 0, 1, 3, 2, each with its two cores in turn.
    around = [0, 1, 2, 3, 6, 7, 4, 5]
    assert offsets(pod, everything, "ring").tolist() == [*around, *(8 + i for i in around)]
    assert offsets(pod, everything, "grid").tolist() == list(range(16))


def test_offsets_of_a_strided_piece_skip_what_lies_between():
    pod = mw.topology("v5e:16x16")
    assert offsets(pod, (Part(0, 4, 4),), "line").tolist() == [0, 64, 128, 192]
    assert offsets(pod, (Part(0, 2, 8), Part(1, 2, 4)), "ring").tolist() == [0, 4, 132, 128]


def test_offsets_of_nothing_are_one_place():
    assert offsets(mw.topology("v5e:4x4"), (), "line").tolist() == [0]
