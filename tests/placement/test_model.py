"""The model's numbers by hand, and against a link-by-link simulation of what we place."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.placement.cost_model import PAYLOAD, Part, axis_cost, busiest_link, scattered_cost
from meshwright.placement.search import primes

US = 1e-6
checked = settings(derandomize=True, deadline=None, max_examples=150)

TORI = [
    ("v5e:16x16", 1),
    ("v5e:4x8", 1),
    ("v6e:8x16", 2),
    ("v4:4x4x8", 1),
    ("v4:4x12x12", 1),
    ("v5p:2x2x4", 1),
    ("v5p:4x4x20", 1),
    ("v5p:4x4x8_twisted", 1),
    ("v5p:8x8x8", 1),
    ("tpu7x:4x4x4", 1),
    ("tpu7x:2x2x4", 2),
]


def seconds(members, gb_per_s):
    """An all-gather that leaves 1 GiB everywhere, over `members`."""
    return PAYLOAD * (members - 1) / members / (gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("name", "parts", "bandwidth", "shape", "hops", "time"),
    [
        pytest.param(
            "v5e:16x16",
            [Part(0, 16, 1)],
            *(100, "ring", 1, seconds(16, 100) + 15 * US),
            id="a whole wrapped direction is a ring",
        ),
        pytest.param(
            "v5e:4x4",
            [Part(1, 4, 1)],
            *(50, "line", 1, seconds(4, 50) + 3 * US),
            id="a whole direction without wraparound is a line",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(1, 4, 1)],
            *(50, "line", 1, seconds(4, 50) + 3 * US),
            id="a run of a ring is a line",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(0, 8, 2)],
            *(50, "ring", 2, seconds(8, 50) + 7 * US),
            id="every second chip of a ring shares it with one more group",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(0, 4, 2)],
            *(25, "line", 2, seconds(4, 25) + 3 * US),
            id="a strided run in the middle of a ring is a line",
        ),
        pytest.param(
            "v5e:8x8",
            [Part(0, 2, 4)],
            *(12.5, "line", 4, seconds(2, 12.5) + 1 * US),
            id="a strided piece without wraparound is a line",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(0, 2, 1), Part(1, 2, 1)],
            *(100, "ring", 1, seconds(4, 100) + 2 * US),
            id="a block is a ring",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(0, 8, 2), Part(1, 4, 4)],
            *(25, "ring", 4, seconds(32, 25) + 10 * US),
            id="the largest stride holds a block ring up",
        ),
        pytest.param(
            "v5p:4x12x12",
            [Part(1, 3, 1), Part(2, 3, 1)],
            *(100, "line", 1, seconds(9, 100) + 4 * US),
            id="an odd block is a line",
        ),
        pytest.param(
            "v5e:16x16",
            [Part(0, 16, 1), Part(1, 16, 1)],
            *(200, "2d torus", 1, seconds(256, 200) + 30 * US),
            id="two whole rings work at once",
        ),
        pytest.param(
            "v5e:8x16",
            [Part(0, 8, 1), Part(1, 16, 1)],
            *(150, "2d grid", 1, seconds(128, 150) + 22 * US),
            id="a line and a ring work at once",
        ),
        pytest.param(
            "v5p:4x4x4",
            [Part(0, 4, 1), Part(1, 4, 1), Part(2, 4, 1)],
            *(600, "3d torus", 1, seconds(64, 600) + 9 * US),
            id="three whole rings work at once",
        ),
        pytest.param(
            "v5p:4x4x8_twisted",
            [Part(0, 4, 1)],
            *(100, "line", 1, seconds(4, 100) + 3 * US),
            id="a twisted side alone is a line",
        ),
        pytest.param(
            "v5p:4x4x8_twisted",
            [Part(2, 8, 1)],
            *(200, "ring", 1, seconds(8, 200) + 7 * US),
            id="the long side of a twisted torus is a ring",
        ),
        pytest.param(
            "v5p:4x4x8_twisted",
            [Part(0, 4, 1), Part(2, 8, 1)],
            *(400, "2d torus", 1, seconds(32, 400) + 10 * US),
            id="a twisted side closes together with the long one",
        ),
        pytest.param(
            "v5p:4x4x8_twisted",
            [Part(0, 4, 1), Part(1, 4, 1)],
            *(200, "2d grid", 1, seconds(16, 200) + 6 * US),
            id="two twisted sides without the long one do not close",
        ),
        pytest.param(
            "v5p:4x4x8_twisted",
            [Part(0, 2, 2)],
            *(50, "line", 2, seconds(2, 50) + 1 * US),
            id="a strided piece of a twisted side is a line",
        ),
        pytest.param(
            "h100:8x4",
            [Part(1, 8, 1)],
            *(450, "switch", 1, seconds(8, 450) + 14 * US),
            id="a switch joins all at full speed",
        ),
        pytest.param(
            "h100:8x4",
            [Part(1, 2, 4)],
            *(450, "switch", 1, seconds(2, 450) + 2 * US),
            id="a stride on a switch costs nothing",
        ),
        pytest.param(
            "h100:8x4",
            [Part(0, 4, 1)],
            *(0, "", 0, seconds(4, 50) + 60 * US),
            id="one member a host gathers over the network alone",
        ),
        pytest.param(
            "h100:8x4",
            [Part(0, 4, 1), Part(1, 2, 1)],
            *(450, "switch", 1, seconds(2, 450) + seconds(4, 2 * 50) + 62 * US),
            id="two members a host share the work over the network",
        ),
        pytest.param(
            "tpu7x:4x4x4",
            [Part(3, 2, 1)],
            *(600, "chip", 0, seconds(2, 600) + 0.5 * US),
            id="the cores of a chip have their own link",
        ),
        pytest.param(
            "tpu7x:4x4x4",
            [Part(0, 4, 1)],
            *(100, "ring", 1, seconds(4, 100) + 3 * US),
            id="one core of each chip gets half of the links",
        ),
        pytest.param(
            "tpu7x:4x4x4",
            [Part(0, 4, 1), Part(3, 2, 1)],
            *(200, "ring", 1, seconds(2, 600) + seconds(4, 200) + 3.5 * US),
            id="both cores of each chip get all of the links",
        ),
        pytest.param("v5e:4x4", [], 0, "", 0, 0, id="an axis of one costs nothing"),
    ],
)
def test_the_model_by_hand(name, parts, bandwidth, shape, hops, time):
    cost = axis_cost(mw.topology(name), tuple(parts))
    assert (cost.bandwidth, cost.shape, cost.hops) == (bandwidth, shape, hops)
    assert cost.all_gather == pytest.approx(time, rel=1e-12)
    assert cost.all_reduce == 2 * cost.all_gather


def test_the_network_speed_is_told_apart_from_the_one_inside():
    pod = mw.topology("tpu7x:4x4x4", slices=2)
    cost = axis_cost(pod, (Part(0, 2, 1), Part(1, 4, 1), Part(4, 2, 1)))
    assert (cost.bandwidth, cost.network) == (200, 6.25)
    inside = seconds(2, 600) + seconds(4, 200)
    assert cost.all_gather == pytest.approx(inside + seconds(2, 6.25 * 8) + 23.5 * US)


def test_speeds_of_your_own_change_the_model():
    slow = mw.topology("v5e:16x16", speeds={"link": 25})
    assert axis_cost(slow, (Part(0, 16, 1),)).bandwidth == 50


@st.composite
def placements(draw, names=TORI):
    """A placement with our weights turned at random, so that many kinds of layouts win."""
    name, slices = draw(st.sampled_from(names))
    pod = mw.topology(name, slices=slices)
    axes = draw(st.integers(1, 4))
    sizes = [1] * axes
    for prime in primes(pod.num_devices):
        sizes[draw(st.integers(0, axes - 1))] *= prime
    intensity = {f"a{i}": draw(st.sampled_from([0.1, 1.0, 3.0, 12.0])) for i in range(axes)}
    spec = {f"a{i}": size for i, size in enumerate(sizes)}
    order = draw(st.sampled_from(["auto", "ring"]))
    return mw.place(spec, pod, intensity=intensity, order=order)


def groups(placement, dim):
    """`(groups, members, directions)`: where the devices of an axis stand, in mesh order."""
    moved = np.moveaxis(placement.positions, dim, -1).reshape(-1, placement.axes[dim].size)
    return np.stack(np.unravel_index(moved, placement.topology.shape), axis=-1)


def within_slices(topology, axis):
    kinds = {topology.axes[part.direction].kind for part in axis.parts}
    return "torus" in kinds and kinds <= {"torus", "core"}


def simulated(topology, coords):
    """What a ring in both senses gets, held up by its busiest link."""
    torus = [dim for dim, axis in enumerate(topology.axes) if axis.kind == "torus"]
    load = max(busiest_link(topology, coords, dim) for dim in torus)
    return 2 * topology.chip.link / load


@checked
@given(placements())
def test_a_modelled_ring_gets_its_bandwidth_link_by_link(placement):
    pod = placement.topology
    for dim, axis in enumerate(placement.axes):
        if axis.cost.shape == "ring" and within_slices(pod, axis):
            assert axis.order in ("line", "ring")
            assert simulated(pod, groups(placement, dim)) >= axis.cost.bandwidth * (1 - 1e-9)


@checked
@given(placements())
def test_a_modelled_line_gets_its_bandwidth_link_by_link(placement):
    pod = placement.topology
    for dim, axis in enumerate(placement.axes):
        torus = [p for p in axis.parts if pod.axes[p.direction].kind == "torus"]
        if axis.cost.shape == "line" and within_slices(pod, axis) and len(torus) == 1:
            assert simulated(pod, groups(placement, dim)) >= axis.cost.bandwidth * (1 - 1e-9)


@checked
@given(placements())
def test_neighbours_on_a_ring_are_a_stride_apart_and_the_ring_closes(placement):
    pod = placement.topology
    for dim, axis in enumerate(placement.axes):
        if axis.cost.shape != "ring" or not within_slices(pod, axis):
            continue
        coords = groups(placement, dim)
        strides = [0] * len(pod.axes)
        for part in axis.parts:
            strides[part.direction] = part.stride
        for d, physical in enumerate(pod.axes):
            step = np.abs(np.roll(coords[..., d], -1, axis=1) - coords[..., d])
            if physical.wraps:
                step = np.minimum(step, physical.size - step)
            assert set(np.unique(step)) <= {0, strides[d]}


def walk(topology, coords):
    """The same simulation without arrays: every message, one link at a time."""
    torus = [dim for dim, axis in enumerate(topology.axes) if axis.kind == "torus"]
    loads = {}
    for group in coords.tolist():
        for here, there in zip(group, [*group[1:], group[0]], strict=True):
            at = [c for d, c in enumerate(here) if topology.axes[d].kind != "core"]
            for dim in torus:
                size = topology.axes[dim].size
                hops = there[dim] - at[dim]
                if topology.axes[dim].wraps and not topology.axes[dim].twisted:
                    hops = (hops + size // 2) % size - size // 2
                while hops:
                    step = 1 if hops > 0 else -1
                    onto = (at[dim] + step) % size
                    low = at[dim] if step > 0 else onto
                    link = (dim, *at[:dim], low, *at[dim + 1 :])
                    loads[link] = loads.get(link, 0) + 1
                    at[dim], hops = onto, hops - step
    return {
        dim: max((n for link, n in loads.items() if link[0] == dim), default=0) for dim in torus
    }


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.sampled_from(["v5e:8x16", "v4:4x4x4", "v5p:2x2x4", "tpu7x:2x2x2", "v4:4x4x8_twisted"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 4, 8]),
)
def test_the_busiest_link_is_what_walking_every_message_finds(name, seed, members):
    pod = mw.topology(name)
    order = np.random.default_rng(seed).permutation(pod.num_devices).reshape(-1, members)
    coords = np.stack(np.unravel_index(order, pod.shape), axis=-1)
    found = walk(pod, coords)
    for dim, load in found.items():
        assert busiest_link(pod, coords, dim) == load


def test_a_line_walked_there_and_back_loads_each_link_twice():
    pod = mw.topology("v5e:4x4")
    coords = np.array([[[0, y] for y in range(4)]])
    assert busiest_link(pod, coords, 1) == 2
    assert busiest_link(pod, coords, 0) == 0


def test_a_scattered_ring_over_the_network_sends_each_half_its_own_way():
    pod = mw.topology("h100:8x2")

    def cost(*points):
        return scattered_cost(pod, np.array([points]))

    pair = cost((0, 0), (1, 5))
    assert (pair.bandwidth, pair.network) == (0, 50)
    assert pair.all_gather == pytest.approx(seconds(2, 50) + 20 * US)
    # Two and two: each device has one neighbour inside and one outside.
    pairs = cost((0, 0), (0, 1), (1, 5), (1, 7))
    assert pairs.all_gather == pytest.approx(seconds(4, 450) + seconds(4, 100) + 60 * US)
    # Crossing at every step takes twice as long on the network.
    zigzag = cost((0, 0), (1, 5), (0, 1), (1, 7))
    assert zigzag.all_gather == pytest.approx(seconds(4, 50) + 60 * US)


@checked
@given(placements([*TORI, ("h100:8x4", 1), ("gb200:72x2", 1), ("cpu:6x4", 1)]))
def test_more_speed_never_costs_more(placement):
    pod = placement.topology
    faster = mw.topology(
        pod.name.split(" ")[0],
        slices=pod.num_slices if pod.chip.family == "tpu" else 1,
        speeds={"link": 2 * pod.chip.link, "network": 2 * pod.chip.network},
    )
    for axis in placement.axes:
        before, after = axis.cost, axis_cost(faster, axis.parts)
        assert after.all_gather <= before.all_gather
        assert after.shape == before.shape
        assert math.isfinite(before.all_gather)
