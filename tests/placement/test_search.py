"""The search: it always finds a layout, it finds the best one, and it can be steered."""

import functools
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.placement.cost_model import Part, axis_cost
from meshwright.placement.search import primes, search

checked = settings(derandomize=True, deadline=None, max_examples=200)

MACHINES = [
    *(("v5e:1x1", 1), ("v5e:2x4", 1), ("v5e:4x8", 2), ("v5e:16x16", 1), ("v5e:16x16", 4)),
    *(("v6e:2x2", 4), ("v6e:8x16", 1), ("v6e:4x4", 6)),
    *(("v4:2x2x1", 1), ("v4:4x4x12", 1), ("v4:4x8x8_twisted", 1), ("v4:16x16x16", 1)),
    *(("v5p:2x2x4", 1), ("v5p:2x4x4", 3), ("v5p:4x4x28", 1), ("v5p:16x20x28", 1)),
    *(("tpu7x:2x2x1", 1), ("tpu7x:4x4x4", 2), ("tpu7x:4x8x8", 1)),
    *(("h100:8", 1), ("h100:8x4", 1), ("b200:6x5", 1), ("gb200:72x4", 1), ("gb200:36x6", 1)),
    *(("cpu:1", 1), ("cpu:8", 1), ("cpu:4x2", 1), ("cpu:7x3", 1), ("cpu:1000", 1)),
]
NAMES = ("dp", "fsdp", "tp", "ep", "sp", "pp", "mine", "yours")


def machine(case):
    name, slices = case
    return mw.topology(name, slices=slices)


@st.composite
def factorizations(draw, total, most=5):
    """Sizes of 1 to `most` axes that multiply to `total`."""
    axes = draw(st.integers(1, most))
    sizes = [1] * axes
    for prime in primes(total):
        sizes[draw(st.integers(0, axes - 1))] *= prime
    return tuple(sizes)


@st.composite
def requests(draw):
    """A machine, and axes of any names and sizes that fill it."""
    pod = machine(draw(st.sampled_from(MACHINES)))
    sizes = draw(factorizations(pod.num_devices))
    names = draw(st.permutations(NAMES))[: len(sizes)]
    return pod, dict(zip(names, sizes, strict=True))


def parts_of(placement):
    return {
        a.name: tuple((p.direction, p.factor, p.stride) for p in a.parts) for a in placement.axes
    }


def slices_along(placement, name):
    """How many slices each group of an axis touches: the set of counts."""
    dim = placement.spec.names.index(name)
    slices = placement.topology.slices.ravel()[placement.positions]
    lines = np.moveaxis(slices, dim, -1).reshape(-1, slices.shape[dim])
    return {np.unique(line).size for line in lines}


@checked
@given(requests())
def test_every_device_is_placed_once_in_the_shape_asked_for(request_):
    pod, spec = request_
    placed = mw.place(spec, pod)
    assert placed.positions.shape == tuple(spec.values())
    assert sorted(placed.positions.ravel().tolist()) == list(range(pod.num_devices))
    assert (placed.spec.names, placed.spec.sizes) == (tuple(spec), tuple(spec.values()))


@checked
@given(requests())
def test_the_same_request_gives_the_same_placement(request_):
    pod, spec = request_
    first, second = mw.place(spec, pod), mw.place(spec, mw.topology(pod))
    assert (first.positions == second.positions).all()
    assert (first.axes, first.runner_up) == (second.axes, second.runner_up)


@checked
@given(requests())
def test_the_cost_is_the_weighted_sum_of_the_axes(request_):
    pod, spec = request_
    placed = mw.place(spec, pod)
    total = sum(a.weight * axis_cost(pod, a.parts).all_gather for a in placed.axes)
    assert placed.cost == pytest.approx(total, rel=1e-12)
    if placed.runner_up is not None:
        assert placed.runner_up_cost > placed.cost
    for axis in placed.axes:
        assert math.prod(part.factor for part in axis.parts) == axis.size


@checked
@given(requests())
def test_the_parts_of_all_axes_make_up_the_machine(request_):
    pod, spec = request_
    taken = [1] * len(pod.axes)
    for axis in mw.place(spec, pod).axes:
        for part in axis.parts:
            taken[part.direction] *= part.factor
    assert tuple(taken) == pod.shape


@checked
@given(requests(), st.data())
def test_a_free_axis_costs_nothing_wherever_it_goes(request_, data):
    pod, spec = request_
    idle = data.draw(st.sampled_from(sorted(spec)))
    alone = mw.place(spec, pod, intensity={n: 0.0 for n in spec if n != idle} | {idle: 1.0})
    assert alone.cost <= mw.place(spec, pod, intensity=dict.fromkeys(spec, 1.0)).cost * (1 + 1e-9)
    assert [a.weighted for a in alone.axes if a.name != idle] == [0.0] * (len(spec) - 1)


# The best of all: an enumeration that shares nothing with the search but the cost of an axis.

SMALL = [
    *(("v5p:2x2x4", 1), ("v5e:4x4", 1), ("v5e:4x8", 1), ("v4:4x4x4", 1), ("v5p:4x4x12", 1)),
    *(("v5p:4x4x8_twisted", 1), ("v4:4x4x20", 1), ("v6e:8x16", 1), ("v5e:16x16", 1)),
    *(("tpu7x:2x2x2", 1), ("tpu7x:4x4x4", 1), ("v5e:4x4", 2), ("v5p:2x2x2", 3)),
    *(("h100:8x4", 1), ("gb200:72x2", 1), ("cpu:6x4", 1)),
]


def every_layout(pod, sizes, gaps):
    """Every way to deal the primes of every direction, in every order, out to the axes.

    With `gaps` an axis may take several runs of one direction, with other axes in between.
    """
    orders = [
        set(itertools.permutations(primes(axis.size)))
        if axis.kind == "torus"
        else {primes(axis.size)}
        for axis in pod.axes
    ]
    found = set()
    for nesting in itertools.product(*orders):
        deal = [
            (dim, math.prod(order[:place]), prime)
            for dim, order in enumerate(nesting)
            for place, prime in enumerate(order)
        ]
        for owners in itertools.product(range(len(sizes)), repeat=len(deal)):
            hands = [[] for _ in sizes]
            for owner, card in zip(owners, deal, strict=True):
                hands[owner].append(card)
            if any(math.prod(c[2] for c in h) != s for h, s in zip(hands, sizes, strict=True)):
                continue
            layout = tuple(in_runs(pod, hand) for hand in hands)
            if gaps or all(len({p.direction for p in parts}) == len(parts) for parts in layout):
                found.add(layout)
    return found


def in_runs(pod, hand):
    """One axis' primes as parts: neighbours joined, all of a switch or network in one."""
    parts = []
    for dim, stride, prime in hand:
        last = parts[-1] if parts and parts[-1].direction == dim else None
        torus = pod.axes[dim].kind == "torus"
        if last and (not torus or last.factor * last.stride == stride):
            parts[-1] = Part(dim, last.factor * prime, last.stride)
        else:
            parts.append(Part(dim, prime, stride if torus else 0))
    return tuple(parts)


@st.composite
def small_requests(draw):
    pod = machine(draw(st.sampled_from(SMALL)))
    sizes = draw(factorizations(pod.num_devices, most=4 if pod.num_devices <= 64 else 3))
    weights = tuple(draw(st.sampled_from([0.01, 0.25, 1.0, 3.0, 12.0])) for _ in sizes)
    return pod, sizes, weights


def total_costs(pod, sizes, weights, gaps):
    price = functools.cache(lambda parts: axis_cost(pod, parts).all_gather)
    layouts = every_layout(pod, sizes, gaps)
    return sorted(
        math.fsum(w * price(p) for w, p in zip(weights, parts, strict=True)) for parts in layouts
    )


@checked
@given(small_requests())
def test_no_layout_is_better_than_the_one_found(request_):
    pod, sizes, weights = request_
    costs = total_costs(pod, sizes, weights, gaps=False)
    found = search(pod, sizes, weights, (None,) * len(sizes), True)
    assert found[0].cost == pytest.approx(costs[0], rel=1e-9)


@checked
@given(small_requests())
def test_the_runner_up_is_the_next_best_of_another_cost(request_):
    pod, sizes, weights = request_
    costs = total_costs(pod, sizes, weights, gaps=False)
    others = [cost for cost in costs if cost > costs[0] * (1 + 1e-8)]
    found = search(pod, sizes, weights, (None,) * len(sizes), True)
    assert len(found) == (2 if others else 1)
    if others:
        assert found[1].cost == pytest.approx(others[0], rel=1e-8)


@checked
@given(small_requests())
def test_runs_with_gaps_would_gain_no_more_than_latency(request_):
    pod, sizes, weights = request_
    found = search(pod, sizes, weights, (None,) * len(sizes), True)
    assert found[0].cost <= total_costs(pod, sizes, weights, gaps=True)[0] * 1.001


# What `jax.make_mesh` cannot lay out, or lays out badly.


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("a:4, b:4, c:16", "v5p:4x4x16"),
        ("a:2, b:2, c:4", "v5p:2x2x4"),
        ("a:7, b:16, c:4", "v5p:4x4x28"),
        ("a:14, b:32", "v5p:4x4x28"),
        ("a:32, b:280", "v5p:16x20x28"),
        ("a:5, b:28, c:64", "v5p:16x20x28"),
        ("a:10, b:4, c:8", "v5p:4x4x20"),
        ("a:40, b:8", "v5p:4x4x20"),
        ("a:64, b:4", "v6e:16x16"),
        ("a:2, b:4", "v5e:2x4"),
        ("a:4, b:2", "v6e:2x4"),
        ("a:8", "v6e:2x4"),
    ],
)
def test_shapes_that_greedy_assignment_refuses_are_placed(spec, name):
    placed = mw.place(spec, name)
    assert sorted(placed.positions.ravel()) == list(range(placed.topology.num_devices))


@pytest.mark.parametrize("name", ["v5p:4x4x16", "v5p:2x2x4"])
def test_whole_directions_are_found_without_splitting(name):
    x, y, z = (int(side) for side in name.split(":")[1].split("x"))
    placed = mw.place({"a": x, "b": y, "c": z}, name, allow_split=False)
    taken = sorted(parts[0] for parts in parts_of(placed).values())
    assert taken == [(0, x, 1), (1, y, 1), (2, z, 1)]


def physical_neighbours(pod, here, there):
    """Whether a link joins two grid points."""
    away = [abs(a - b) for a, b in zip(here, there, strict=True)]
    for dim, axis in enumerate(pod.axes):
        if axis.wraps:
            away[dim] = min(away[dim], axis.size - away[dim])
    return sum(away) == 1


def groups(placement, name):
    dim = placement.spec.names.index(name)
    moved = np.moveaxis(placement.positions, dim, -1).reshape(-1, placement.axes[dim].size)
    return np.stack(np.unravel_index(moved, placement.topology.shape), axis=-1)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(("tp", "blocks"), [(4, [(2, 2)]), (8, [(2, 4), (4, 2)])])
def test_tensor_parallelism_on_a_pod_gets_blocks_in_ring_order(chip, tp, blocks):
    placed = mw.place(f"fsdp:{256 // tp}, tp:{tp}", f"{chip}:16x16")
    for group in groups(placed, "tp"):
        assert tuple(np.ptp(group, axis=0) + 1) in blocks
        for here, there in zip(group, np.roll(group, -1, axis=0), strict=True):
            assert physical_neighbours(placed.topology, here, there)
    assert placed.axes[1].cost.bandwidth == 2 * placed.topology.chip.link


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_the_eight_chips_of_one_host_form_a_ring(chip):
    placed = mw.place("tp:8", f"{chip}:2x4")
    (group,) = groups(placed, "tp")
    for here, there in zip(group, np.roll(group, -1, axis=0), strict=True):
        assert physical_neighbours(placed.topology, here, there)


def test_every_axis_as_a_whole_ring_beats_blocks_and_runs():
    placed = mw.place("dp:4, fsdp:4, tp:4", "v5p:4x4x4")
    assert [axis.cost.shape for axis in placed.axes] == ["ring"] * 3
    assert {part.stride for axis in placed.axes for part in axis.parts} == {1}


# No splitting.


@checked
@given(requests())
def test_without_splitting_torus_directions_stay_whole_or_the_near_shapes_work(request_):
    pod, spec = request_
    try:
        placed = mw.place(spec, pod, allow_split=False)
    except mw.errors.PlacementError as error:
        for sizes in suggested(error):
            near = mw.place(sizes, pod, allow_split=False)
            assert near.positions.size == pod.num_devices
        return
    for axis in placed.axes:
        for part in axis.parts:
            if pod.axes[part.direction].kind == "torus":
                assert part.factor == pod.axes[part.direction].size


def suggested(error):
    """The shapes an error says would work, as dicts."""
    text = re.search(r"Near shapes that do: (.*?)\. Or pass", str(error))
    if not text:
        return []
    shapes = text[1].split("; ")
    return [
        {name: int(size) for name, size in (axis.split(":") for axis in shape.split(", "))}
        for shape in shapes
    ]


def test_forbidden_splitting_names_near_shapes_that_work():
    with pytest.raises(
        mw.errors.PlacementError,
        match=r"'fsdp:64, tp:4' needs a direction of v5e:16x16 to be split, and splitting is "
        r"forbidden\. Near shapes that do: fsdp:16, tp:16; .* allow_split=True",
    ) as error:
        mw.place("fsdp:64, tp:4", "v5e:16x16", allow_split=False)
    shapes = suggested(error.value)
    assert shapes == [{"fsdp": 16, "tp": 16}, {"fsdp": 256, "tp": 1}, {"fsdp": 1, "tp": 256}]
    for shape in shapes:
        assert mw.place(shape, "v5e:16x16", allow_split=False).spec.sizes == tuple(shape.values())


def test_hosts_and_domains_can_be_divided_without_splitting():
    placed = mw.place("dp:8, tp:4", "h100:8x4", allow_split=False)
    assert placed.positions.shape == (8, 4)


# DCN.


@pytest.mark.parametrize(
    ("name", "slices", "spec"),
    [
        ("v5e:16x16", 4, "dp:4, fsdp:-1, tp:4"),
        ("v5e:16x16", 4, "tp:8, fsdp:-1, dp:4"),
        ("v6e:16x16", 4, "dp:-1, tp:8"),
        ("tpu7x:4x4x4", 2, "dp:2, fsdp:16, tp:8"),
        ("h100:8x4", 1, "dp:4, tp:8"),
        ("h100:8x4", 1, "dp:8, tp:4"),
        ("gb200:72x4", 1, "dp:4, fsdp:9, tp:8"),
        ("gb200:72x4", 1, "dp:36, tp:8"),
        ("cpu:4x2", 1, "dp:2, tp:4"),
        ("cpu:4x2", 1, "tp:2, dp:4"),
    ],
)
def test_data_parallelism_crosses_the_slow_network_and_tensor_parallelism_never(name, slices, spec):
    pod = mw.topology(name, slices=slices)
    placed = mw.place(spec, pod)
    assert slices_along(placed, "dp") == {pod.num_slices}
    assert slices_along(placed, "tp") == {1}
    assert {axis.name: axis.slow for axis in placed.axes}["dp"] == pod.num_slices


@checked
@given(st.data())
def test_an_axis_crosses_exactly_the_slices_its_slow_part_says(data):
    name, slices = data.draw(
        st.sampled_from([("v5e:4x8", 4), ("v5p:2x4x4", 6), ("tpu7x:2x2x1", 2), ("h100:8x12", 1)])
    )
    pod = mw.topology(name, slices=slices)
    fast = data.draw(factorizations(pod.num_devices // pod.num_slices, most=3))
    parts = [1] * len(fast)
    for prime in primes(pod.num_slices):
        parts[data.draw(st.integers(0, len(fast) - 1))] *= prime
    spec = ", ".join(f"a{i}:{s}*{f}" for i, (s, f) in enumerate(zip(parts, fast, strict=True)))
    placed = mw.place(spec, pod)
    for axis, part in zip(placed.axes, parts, strict=True):
        assert axis.slow == part
        assert slices_along(placed, axis.name) == {part}


def test_a_slow_part_is_respected_though_it_costs_more():
    pod = mw.topology("v5e:4x4", slices=2)
    free, told = mw.place("dp:2, tp:16", pod), mw.place("dp:1*2, tp:2*8", pod)
    assert slices_along(free, "dp") == {2}
    assert (slices_along(told, "dp"), slices_along(told, "tp")) == ({1}, {2})
    assert told.cost > free.cost


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp:2*2, tp:1*16", "its DCN parts multiply to 2, DCN joins 4 parts"),
        (
            "dp:1*4, tp:1*16",
            r"DCN parts multiply to 1, .* joins 4 parts \(they must multiply to 4",
        ),
    ],
)
def test_slow_parts_that_leave_slices_over_are_refused(spec, message):
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.place(spec, mw.topology("v5e:4x4", slices=4))


def test_slow_parts_beyond_the_slices_are_refused():
    with pytest.raises(mw.errors.SpecError, match="spans 8 parts over DCN, but there are 4"):
        mw.place("dp:8*1, tp:8", mw.topology("v5e:4x4", slices=4))


# Steering.


def test_intensity_decides_who_gets_the_ring():
    spec, pod = "a:16, b:4, c:4", "v5e:16x16"
    first = mw.place(spec, pod, intensity={"a": 100, "b": 1, "c": 1})
    second = mw.place(spec, pod, intensity={"a": 0.01, "b": 100, "c": 100})
    assert first.axes[0].cost.all_gather < second.axes[0].cost.all_gather
    assert second.axes[1].cost.all_gather < first.axes[1].cost.all_gather
    assert parts_of(first) != parts_of(second)


def test_intensity_decides_who_crosses_the_slow_network():
    pod = mw.topology("h100:8x4")
    usual = mw.place("dp:4, tp:8", pod)
    turned = mw.place("dp:4, tp:8", pod, intensity={"dp": 1000, "tp": 1})
    assert (slices_along(usual, "dp"), slices_along(turned, "dp")) == ({4}, {1})


def test_order_is_as_asked():
    spec, pod = "dp:4, tp:16", "v5p:4x4x4"
    auto, ring, grid = (mw.place(spec, pod, order=order) for order in ("auto", "ring", "grid"))
    assert [p.axes[1].order for p in (auto, ring, grid)] == ["grid", "ring", "grid"]
    assert (auto.positions == grid.positions).all()
    assert (np.diff(grid.positions, axis=1) > 0).all()
    assert (np.sort(ring.positions, axis=1) == grid.positions).all()
    for group in groups(ring, "tp"):
        for here, there in zip(group, np.roll(group, -1, axis=0), strict=True):
            assert physical_neighbours(ring.topology, here, there)


@pytest.mark.parametrize("order", ["snake", "", None, 3])
def test_an_unknown_order_is_refused(order):
    with pytest.raises(
        mw.errors.PlacementError, match=r"^order: .* is not one of auto, ring, grid\.$"
    ):
        mw.place("dp:16", "v5e:4x4", order=order)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "much", True, None])
def test_a_bad_intensity_is_refused(value):
    with pytest.raises(
        mw.errors.SpecError, match=r"intensity of axis 'dp': .* is not a finite number"
    ):
        mw.place("dp:16", "v5e:4x4", intensity={"dp": value})


def test_intensity_of_an_unknown_axis_suggests_the_near_one():
    with pytest.raises(
        mw.errors.SpecError, match=r"intensity: no axis 'fdsp' in dp, fsdp\. Did you mean"
    ):
        mw.place("dp:4, fsdp:4", "v5e:4x4", intensity={"fdsp": 1})


def test_a_request_of_another_size_is_refused():
    with pytest.raises(
        mw.errors.SpecError, match="Not enough devices: 'dp:32' needs 32, there are 16"
    ):
        mw.place("dp:32", "v5e:4x4")
    with pytest.raises(mw.errors.SpecError, match="'dp:8' uses 8 of 16 devices"):
        mw.place("dp:8", "v5e:4x4")


def test_axes_of_one_take_nothing():
    placed = mw.place("dp:1, fsdp:16, tp:1", "v5e:4x4")
    assert [axis.parts for axis in placed.axes[::2]] == [(), ()]
    assert [axis.weighted for axis in placed.axes[::2]] == [0, 0]


def test_a_hundred_thousand_devices_are_placed():
    placed = mw.place("dp:-1, fsdp:64, tp:8", "cpu:512x200")
    assert placed.positions.shape == (200, 64, 8)
    assert slices_along(placed, "tp") == {1}
