"""A part of the hardware: compact, on few slices and few hosts, its rings only where whole."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.hardware.topology import compact_part

NAMES = [
    ("v5e:16x16", 1),
    ("v5e:4x8", 3),
    ("v4:4x4x8", 1),
    ("v5p:2x2x4", 2),
    ("tpu7x:4x4x4", 1),
    ("h100:8x4", 1),
    ("gb200:72x2", 1),
    ("cpu:4x2", 1),
    ("cpu:13", 1),
]
checked = settings(derandomize=True, deadline=None, max_examples=80)


@st.composite
def parts(draw):
    name, slices = draw(st.sampled_from(NAMES))
    whole = mw.topology(name, slices=slices)
    count = draw(st.integers(1, whole.num_devices))
    return whole, count, compact_part(whole, count)


def per_host(topology):
    return topology.num_devices // topology.num_hosts


@checked
@given(parts())
def test_a_part_holds_so_many_devices_of_the_whole_each_once(case):
    whole, count, part = case
    assert part.num_devices == count
    assert part.index.shape == part.host.shape == part.shape
    chosen = part.index.ravel()
    assert np.unique(chosen).size == count
    assert (whole.host.ravel()[chosen] == part.host.ravel()).all()


@checked
@given(parts())
def test_a_part_touches_few_hosts(case):
    whole, count, part = case
    fewest = math.ceil(count / per_host(whole))
    assert fewest <= part.num_hosts <= 1.5 * fewest


@checked
@given(parts())
def test_a_part_touches_the_fewest_slices_a_box_can(case):
    whole, count, part = case
    touched = np.unique(whole.slices.ravel()[part.index.ravel()]).size
    inside = whole.num_devices // whole.num_slices
    if part.scattered:
        assert touched == math.ceil(count / inside)
    else:
        assert touched == part.num_slices
    if count <= inside and not part.scattered and part.num_slices > 1:
        pytest.fail(f"{count} devices fit one slice of {whole.name}, got {part.num_slices}")


def test_devices_of_one_slice_are_not_spread_over_two_to_form_a_box():
    part = compact_part(mw.topology("v5e:4x8", slices=3), 30)  # 2 x 3 x 5 would be a box
    assert part.scattered and part.num_slices == 1


@checked
@given(parts())
def test_a_part_is_a_ring_only_where_it_covers_a_whole_side(case):
    whole, _, part = case
    sides = {axis.name: axis for axis in whole.axes}
    for axis in part.axes:
        if axis.wraps:
            assert axis.size == sides[axis.name].size
            assert sides[axis.name].wraps


@checked
@given(parts())
def test_a_part_can_be_placed_on(case):
    _, count, part = case
    placed = mw.place("dp:-1", part)
    assert sorted(placed.positions.ravel()) == sorted(part.index.ravel())
    assert placed.positions.shape == (count,)


@pytest.mark.parametrize(
    ("name", "slices", "count", "shape", "hosts"),
    [
        ("v5e:16x16", 1, 4, (2, 2), 1),
        ("v5e:16x16", 1, 8, (2, 4), 2),
        ("v5e:16x16", 1, 64, (8, 8), 16),
        ("v5e:16x16", 1, 128, (8, 16), 32),
        ("v5e:16x16", 4, 256, (16, 16), 64),
        ("v5e:16x16", 4, 512, (2, 16, 16), 128),
        ("v5p:4x4x8", 1, 64, (4, 4, 4), 16),
        ("tpu7x:4x4x4", 1, 8, (2, 2, 1, 2), 1),
        ("tpu7x:4x4x4", 1, 2, (1, 1, 1, 2), 1),
        ("h100:8x4", 1, 4, (4,), 1),
        ("h100:8x4", 1, 12, (2, 6), 2),
        ("h100:8x4", 1, 24, (3, 8), 3),
        ("gb200:72x4", 1, 16, (16,), 4),
        ("gb200:72x4", 1, 144, (2, 72), 36),
        ("cpu:4x2", 1, 1, (1,), 1),
        ("cpu:4x2", 1, 6, (2, 3), 2),
    ],
)
def test_the_part_of_a_known_machine(name, slices, count, shape, hosts):
    part = compact_part(mw.topology(name, slices=slices), count)
    assert (part.shape, part.num_hosts, part.scattered) == (shape, hosts, False)
    assert part.name == f"{count} of {mw.topology(name, slices=slices).name}"


def test_half_a_slice_keeps_the_ring_of_its_whole_side():
    part = compact_part(mw.topology("v5e:16x16"), 128)
    assert [axis.wraps for axis in part.axes] == [False, True]


@pytest.mark.parametrize(("name", "count"), [("cpu:4x2", 5), ("v5e:16x16", 7), ("h100:8x4", 13)])
def test_devices_that_fill_no_box_come_host_by_host_at_the_slowest_speed(name, count):
    whole = mw.topology(name)
    part = compact_part(whole, count)
    assert part.scattered
    assert part.shape == (count,)
    assert (np.diff(part.host) >= 0).all()
    assert part.axes[0].speed == min(axis.speed for axis in whole.axes)


@pytest.mark.parametrize(
    ("name", "slices", "count", "asked", "shape"),
    [
        ("cpu:4x2", 1, 4, 2, (2, 2)),
        ("cpu:4x2", 1, 2, 2, (2, 1)),
        ("h100:8x4", 1, 8, 4, (4, 2)),
        ("h100:8x4", 1, 8, 1, (8,)),
        ("v5e:4x4", 4, 8, 4, (4, 1, 2)),
        ("v5e:4x4", 4, 8, 2, (2, 2, 2)),
    ],
)
def test_a_part_spans_as_many_slices_as_asked_for(name, slices, count, asked, shape):
    part = compact_part(mw.topology(name, slices=slices), count, asked)
    assert part.num_slices == asked
    assert part.num_devices == count
    assert tuple(s for s in part.shape if s > 1) == tuple(s for s in shape if s > 1)


def test_slices_that_cannot_be_had_are_refused():
    with pytest.raises(
        mw.errors.TopologyError, match="no part of h100:8x4 has 9 devices in 2 equal slices"
    ):
        compact_part(mw.topology("h100:8x4"), 9, 2)


def test_all_devices_are_the_topology_itself():
    whole = mw.topology("v5e:16x16")
    assert compact_part(whole, 256) is whole


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(
        mw.errors.TopologyError, match=r"^Not enough devices: 257 asked for, v5e:16x16 has 256\.$"
    ):
        compact_part(mw.topology("v5e:16x16"), 257)


def test_a_part_of_live_devices_points_into_their_list():
    here = mw.topology(list(reversed(jax.devices())))
    part = compact_part(here, 4)
    assert part.devices == here.devices
    assert [part.devices[i].id for i in part.index] == [0, 1, 2, 3]
