"""The cost of arrangements that exist: ours are recognised, foreign ones are costed right."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import meshwright as mw
from meshwright.hardware.topology import compact_part
from meshwright.placement.placer import measure
from meshwright.placement.search import primes

checked = settings(derandomize=True, deadline=None, max_examples=150)

MACHINES = [
    *(("v5e:2x4", 1), ("v5e:4x8", 2), ("v5e:16x16", 1), ("v6e:4x4", 6), ("v5e:8x16", 1)),
    *(("v4:4x4x12", 1), ("v4:4x4x8_twisted", 1), ("v5p:2x2x4", 3), ("v5p:4x4x20", 1)),
    *(("tpu7x:2x2x1", 1), ("tpu7x:4x4x4", 2)),
    *(("h100:8x4", 1), ("gb200:72x4", 1), ("cpu:8", 1), ("cpu:4x2", 1), ("cpu:6x5", 1)),
]
# On a handful of chips an irregular layout can beat the best regular one by chance.
NOT_TINY = [case for case in MACHINES if case not in (("v5e:2x4", 1), ("tpu7x:2x2x1", 1))]


@st.composite
def requests(draw, least=1, machines=MACHINES):
    name, slices = draw(st.sampled_from(machines))
    pod = mw.topology(name, slices=slices)
    axes = draw(st.integers(least, 4))
    sizes = [1] * axes
    for prime in primes(pod.num_devices):
        sizes[draw(st.integers(0, axes - 1))] *= prime
    names = draw(st.permutations(("dp", "fsdp", "tp", "ep", "pp", "mine")))[:axes]
    return pod, mw.MeshSpec.parse(sizes, names=names)


@checked
@given(requests(), st.sampled_from(["auto", "ring", "grid"]))
def test_our_own_placement_is_recognised(request_, order):
    pod, spec = request_
    placed = mw.place(spec, pod, order=order)
    seen = measure(spec, pod, placed.positions)
    assert seen.cost == pytest.approx(placed.cost, rel=1e-12)
    assert [a.parts for a in seen.axes] == [a.parts for a in placed.axes]
    assert [a.slow for a in seen.axes] == [a.slow for a in placed.axes]
    for ours, theirs in zip(placed.axes, seen.axes, strict=True):
        if ours.order == "line" or ours.cost.shape == "ring":
            assert theirs.order == ours.order


@checked
@given(requests())
def test_our_own_placement_on_a_part_is_recognised(request_):
    whole, _ = request_
    part = compact_part(whole, max(1, whole.num_devices // 2))
    placed = mw.place("dp:-1", part)
    seen = measure(placed.spec, part, placed.positions)
    assert seen.cost == pytest.approx(placed.cost, rel=1e-12)
    assert [a.parts for a in seen.axes] == [a.parts for a in placed.axes]


@checked
@given(requests(machines=NOT_TINY), st.integers(0, 2**32 - 1))
def test_a_random_arrangement_is_never_cheaper_than_the_best(request_, seed):
    pod, spec = request_
    mixed = np.random.default_rng(seed).permutation(pod.num_devices).reshape(spec.sizes)
    best = mw.place(spec, pod)
    assert measure(spec, pod, mixed).cost >= best.cost * (1 - 1e-9)


@checked
@given(requests(least=2, machines=NOT_TINY), st.integers(0, 2**32 - 1))
def test_our_placement_with_a_few_devices_swapped_is_never_cheaper(request_, seed):
    pod, spec = request_
    best = mw.place(spec, pod)
    swapped = best.positions.copy().ravel()
    rng = np.random.default_rng(seed)
    for _ in range(rng.integers(1, 4)):
        one, other = rng.integers(0, pod.num_devices, 2)
        swapped[[one, other]] = swapped[[other, one]]
    assert measure(spec, pod, swapped.reshape(spec.sizes)).cost >= best.cost * (1 - 1e-9)


@checked
@given(requests(least=2, machines=NOT_TINY), st.integers(0, 2**32 - 1))
def test_rows_dealt_in_any_order_are_never_cheaper(request_, seed):
    """Row-major layouts with the devices of each host mixed up, as a careless launcher does."""
    pod, spec = request_
    rng = np.random.default_rng(seed)
    rows = pod.index.reshape(pod.num_slices, -1)
    mixed = np.concatenate([rng.permutation(row) for row in rows]).reshape(spec.sizes)
    assert measure(spec, pod, mixed).cost >= mw.place(spec, pod).cost * (1 - 1e-9)


@checked
@given(st.integers(0, 2**32 - 1))
def test_a_random_arrangement_is_scattered(seed):
    pod, spec = mw.topology("v5e:16x16"), mw.MeshSpec.parse("fsdp:32, tp:8")
    mixed = np.random.default_rng(seed).permutation(256).reshape(32, 8)
    seen = measure(spec, pod, mixed)
    assert [(a.parts, a.order, a.cost.shape) for a in seen.axes] == [
        (None, "scattered", "scattered")
    ] * 2
    assert seen.cost > 2 * mw.place(spec, pod).cost
    assert "scattered devices" in str(seen)


@pytest.mark.parametrize(
    ("name", "sizes", "made_of", "shapes", "orders"),
    [
        # Row-major on a ring pod: `tp` runs along y, `fsdp` along x and what is left of y.
        (
            "v5e:16x16",
            (64, 4),
            [[("x", 16, 1), ("y", 4, 4)], [("y", 4, 1)]],
            ["ring", "line"],
            ["grid", "line"],
        ),
        (
            "v5e:4x4",
            (4, 4),
            [[("x", 4, 1)], [("y", 4, 1)]],
            ["line", "line"],
            ["line", "line"],
        ),
        (
            "v5p:4x4x4",
            (16, 4),
            [[("x", 4, 1), ("y", 4, 1)], [("z", 4, 1)]],
            ["2d torus", "ring"],
            ["grid", "line"],
        ),
        (
            "h100:8x4",
            (8, 4),
            [[("host", 4, 1), ("gpu", 2, 4)], [("gpu", 4, 1)]],
            ["switch", "switch"],
            ["line", "line"],
        ),
        (
            "tpu7x:2x2x1",
            (4, 2),
            [[("x", 2, 1), ("y", 2, 1)], [("core", 2, 1)]],
            ["2d grid", "chip"],
            ["grid", "line"],
        ),
    ],
)
def test_row_major_layouts_are_read_off(name, sizes, made_of, shapes, orders):
    pod = mw.topology(name)
    spec = mw.MeshSpec.parse(sizes, names=("fsdp", "tp"))
    seen = measure(spec, pod, np.arange(pod.num_devices).reshape(sizes))
    assert [
        [(pod.axes[p.direction].name, p.factor, p.stride) for p in axis.parts] for axis in seen.axes
    ] == made_of
    assert [axis.cost.shape for axis in seen.axes] == shapes
    assert [axis.order for axis in seen.axes] == orders


def test_row_major_over_slices_in_the_wrong_order_costs_dearly():
    """`tp` outermost: it is the one that crosses the network."""
    pod = mw.topology("h100:8x4")
    spec = mw.MeshSpec.parse("tp:4, dp:8")
    seen = measure(spec, pod, np.arange(32).reshape(4, 8))
    assert (seen.axes[0].slow, seen.axes[1].slow) == (4, 1)
    assert seen.axes[0].cost.network == 50
    assert seen.cost > 5 * mw.place(spec, pod).cost


def test_a_box_in_an_order_of_its_own_keeps_its_parts():
    pod, spec = mw.topology("v5e:4x4"), mw.MeshSpec.parse("dp:4, tp:4")
    positions = np.arange(16).reshape(4, 4)[:, [0, 2, 1, 3]]
    seen = measure(spec, pod, positions)
    assert [axis.order for axis in seen.axes] == ["line", "other"]
    assert [[p.factor for p in axis.parts] for axis in seen.axes] == [[4], [4]]


def test_groups_that_lie_in_unlike_directions_are_scattered():
    """Rows in one half, columns in the other: each a line, together no regular axis."""
    pod, spec = mw.topology("v5e:4x8"), mw.MeshSpec.parse("dp:8, tp:4")
    grid = np.arange(32).reshape(4, 8)
    seen = measure(spec, pod, np.concatenate([grid[:, :4], grid[:, 4:].T]))
    assert seen.axes[1].parts is None
    assert seen.axes[1].cost.bandwidth == 50  # a line there and back, not a ring


def test_every_group_must_lie_like_the_first():
    """Pairs two apart in the first row, three and one apart in the second."""
    pod, spec = mw.topology("v5e:2x4"), mw.MeshSpec.parse("dp:4, tp:2")
    regular = measure(spec, pod, np.array([[0, 2], [1, 3], [4, 6], [5, 7]]))
    irregular = measure(spec, pod, np.array([[0, 2], [1, 3], [4, 7], [5, 6]]))
    assert [(p.factor, p.stride) for p in regular.axes[1].parts] == [(2, 2)]
    assert irregular.axes[1].parts is None


def test_a_scattered_axis_counts_the_slices_it_spans():
    pod, spec = mw.topology("cpu:4x2"), mw.MeshSpec.parse("dp:2, tp:4")
    seen = measure(spec, pod, np.array([[0, 1, 2, 3], [5, 4, 7, 6]]))
    assert (seen.axes[0].parts, seen.axes[0].slow) == (None, 2)
    assert seen.cost == pytest.approx(mw.place(spec, pod).cost, rel=1e-3)


def test_intensity_weighs_a_measured_axis_too():
    pod, spec = mw.topology("v5e:4x4"), mw.MeshSpec.parse("a:4, b:4")
    positions = np.arange(16).reshape(4, 4)
    seen = measure(spec, pod, positions, intensity={"a": 5, "b": 0})
    assert [axis.weight for axis in seen.axes] == [5, 0]
    assert seen.cost == 5 * seen.axes[0].cost.all_gather


# Through the front door, with a real mesh.


def test_explaining_our_mesh_gives_the_placement_back():
    mesh = mw.mesh("dp:2, tp:4")
    seen = mw.explain(mesh)
    placed = mw.place("dp:2, tp:4", mw.topology(jax.devices()))
    assert seen.cost == pytest.approx(placed.cost)
    assert [a.parts for a in seen.axes] == [a.parts for a in placed.axes]


def test_explaining_a_foreign_mesh_of_live_devices():
    devices = np.array(jax.devices())
    mesh = Mesh(devices[::-1].reshape(2, 4), ("data", "model"))
    seen = mw.explain(mesh)
    assert (str(seen.spec), seen.topology.name) == ("data:2, model:4", "cpu:8")
    assert [a.cost.shape for a in seen.axes] == ["switch", "switch"]
    assert seen.axes[1].weight == 12
    assert str(seen).startswith("data:2, model:4 on cpu:8 (8 devices, 1 host)\naxis ")


def test_explaining_a_part_of_the_devices_in_any_order():
    some = [jax.devices()[i] for i in (6, 1, 3, 4)]
    seen = mw.explain(Mesh(np.array(some).reshape(2, 2), ("a", "b")))
    assert seen.topology.num_devices == 4
    assert seen.cost > 0


@checked
@given(requests())
def test_positions_may_be_any_view(request_):
    """Transposed, so not contiguous in memory."""
    pod, spec = request_
    assume(len(spec.names) > 1)
    placed = mw.place(spec, pod)
    turned = mw.MeshSpec(spec.axes[::-1])
    seen = measure(turned, pod, placed.positions.T)
    assert seen.cost == pytest.approx(measure(spec, pod, placed.positions).cost, rel=1e-12)
