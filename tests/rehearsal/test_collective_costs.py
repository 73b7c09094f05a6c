"""Modelled times: those of the placement's model for the same devices and bytes."""

import itertools

import numpy as np
import pytest
from collectives_helpers import collectives_of

import meshwright as mw
from meshwright.placement.cost_model import PAYLOAD
from meshwright.rehearsal.collectives.costs import group_cost, permutation_cost

GIB = f"f32[{PAYLOAD // 4}]"


def gibibyte(kind, groups, **options):
    operand = f"%x = {GIB} parameter(0)"
    (entry,) = collectives_of([operand, f"ROOT %c = {GIB} {kind}(%x), {groups}"], **options)
    return entry


@pytest.mark.parametrize("on", ["v5e:2x4", "v6e:2x4"])
def test_a_gibibyte_over_an_axis_of_tpus_takes_the_axis_time(on):
    spec = "dp:2, tp:4"
    placed = mw.explain(spec, on=on)
    tp = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    dp = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    # Of a TPU's links an all-gather reaches 0.90, an all-reduce 0.59; one starts in 15 us.
    gathered, reduced, start = 0.90, 0.59, 15e-6
    for axis, groups in zip(placed.axes, (dp, tp), strict=True):
        gather = gibibyte("all-gather", groups, spec=spec, on=on)
        assert gather.seconds == pytest.approx(axis.cost.all_gather / gathered + start, 1e-3)
        reduce = gibibyte("all-reduce", groups, spec=spec, on=on)
        assert reduce.seconds == pytest.approx(axis.cost.all_reduce / reduced + start, 1e-3)
        scatter = gibibyte("reduce-scatter", groups, spec=spec, on=on)
        assert scatter.seconds == pytest.approx(axis.cost.all_gather / reduced + start, 1e-3)


def test_a_product_of_axes_is_measured_as_one():
    both = gibibyte("all-gather", "replica_groups={}", spec="dp:2, tp:4", on="v5e:2x4")
    one = mw.explain("all:8", on="v5e:2x4").axes[0]
    assert both.seconds == pytest.approx(one.cost.all_gather / 0.90 + 15e-6, 1e-3)


def of_a_float(spec, on):
    lines = ["%x = f32[] parameter(0)", "ROOT %c = f32[] all-reduce(%x), replica_groups={}"]
    return collectives_of(lines, spec=spec, on=on)[0].seconds


def test_small_messages_pay_latency():
    start, hops = 15e-6, 2 * (1 + 3) * 1e-6
    assert of_a_float("dp:8", "v5e:2x4") == pytest.approx(start + hops, rel=1e-3)
    # NCCL: 12.5 to 16 us on 8 GPUs (DeepEP#303), 47 us on two nodes (NVIDIA/nccl#1244).
    assert 12.5e-6 < of_a_float("dp:8", "h100:8") <= 16.1e-6
    assert of_a_float("dp:8", "h100:4x2") > 2 * of_a_float("dp:8", "h100:8")


# GB/s of NCCL's bus bandwidth, with their sources: benchmarks/data/collectives.json.
@pytest.mark.parametrize(
    ("kind", "on", "devices", "bus"),
    [
        ("all-gather", "h200:8", 8, 361),
        ("reduce-scatter", "h200:8", 8, 363),
        ("all-reduce", "h200:8", 8, 473),
        ("all-reduce", "h200:4", 4, 363),  # too few for NVLink SHARP
        ("all-reduce", "a100:8", 8, 235),  # whose switches cannot add
        ("reduce-scatter", "h100:8x4", 32, 360),
        ("reduce-scatter", "h100:8x16", 128, 320),  # rings lose speed with the nodes
        ("all-reduce", "h200:8x4", 32, 365),
    ],
)
def test_gpus_reach_what_nccl_is_known_to_reach(kind, on, devices, bus):
    plan = mw.explain(f"dp:{devices}", on=on).axes[0]
    size = 16 * 2**30
    passes = (2 if kind == "all-reduce" else 1) * (devices - 1) / devices
    seconds = group_cost(kind, size, plan, mw.topology(on)).seconds
    assert size * passes / seconds / 1e9 == pytest.approx(bus, rel=0.04)


def test_what_leaves_a_node_in_an_all_to_all_leaves_by_the_gpus_own_adapter():
    size = 2**30
    plan = mw.explain("ep:16", on="h100:8x2").axes[0]
    seconds = group_cost("all-to-all", size, plan, mw.topology("h100:8x2")).seconds
    assert seconds > size / 2 / 50e9
    assert seconds == pytest.approx(size / 2 / 47e9, rel=0.03)


def test_links_are_named():
    assert gibibyte("all-gather", "replica_groups={}", spec="tp:8", on="h100:8").links == "NVLink"
    assert gibibyte("all-gather", "replica_groups={}", spec="tp:8", on="v5e:2x4").links == (
        "ICI 2d grid"
    )
    across = gibibyte("all-gather", "replica_groups={}", spec="tp:8", on="h100:4x2")
    assert across.links == "NVLink, network"
    apart = gibibyte(
        "all-gather", "replica_groups={{0,4},{1,5},{2,6},{3,7}}", spec="dp:2, tp:4", on="h100:4x2"
    )
    assert apart.links == "network"


def all_to_all_on_a_ring(chips):
    """Bytes over the busiest link, one way, if every chip sends a byte to every other."""
    load = np.zeros((2, chips))
    for a, b in itertools.permutations(range(chips), 2):
        there = (b - a) % chips
        ways = [(0, there)] if 2 * there < chips else [(1, chips - there)]
        ways = [(0, there), (1, there)] if 2 * there == chips else ways
        for way, hops in ways:
            for hop in range(hops):
                load[way, (a + hop if way == 0 else a - 1 - hop) % chips] += 1 / len(ways)
    return load.max()


def test_an_all_to_all_on_a_ring_takes_what_its_busiest_link_takes():
    pod = mw.topology("v5e:16x16")
    plan = mw.explain("dp:16, tp:16", on=pod).axes[1]
    assert plan.cost.bandwidth == 100  # a ring of 16, both ways at 50 GB/s
    size = 2**30
    seconds = group_cost("all-to-all", size, plan, pod).seconds
    assert seconds == pytest.approx(all_to_all_on_a_ring(16) * size / 16 / 45e9, rel=0.1)


@pytest.mark.parametrize(
    ("pairs", "load"),
    [
        ([(0, 1), (1, 2), (2, 3)], 1),
        ([(0, 3), (1, 2)], 2),
        ([(0, 3), (3, 0)], 1),
        ([(3, 0), (2, 1)], 2),
        ([(0, 0)], 0),
    ],
)
def test_a_permutation_takes_what_its_busiest_link_takes(pairs, load):
    pod = mw.topology("v5e:4x4")
    coords = np.array([[(a, 0), (b, 0)] for a, b in pairs])
    seconds, kind = permutation_cost(pod, coords, 10**9)
    hops = max(abs(a - b) for a, b in pairs)
    assert kind == ("torus" if load else "")
    assert seconds == pytest.approx(load * 1e9 / 45e9 + hops * 1e-6)


def test_a_permutation_goes_the_short_way_round():
    pod = mw.topology("v5e:16x16")
    coords = np.array([[((i + 15) % 16, 0), (i, 0)] for i in range(16)])
    seconds, _ = permutation_cost(pod, coords, 10**9)
    assert seconds == pytest.approx(1e9 / 45e9 + 1e-6)


def test_a_permutation_between_hosts_waits_for_the_network():
    entry = gibibyte("collective-permute", "source_target_pairs={{0,4},{4,0}}", on="h100:4x2")
    assert entry.links == "network"
    assert entry.seconds == pytest.approx(PAYLOAD / 47e9, rel=2e-3)  # of 50 (nccl-tests#290)
