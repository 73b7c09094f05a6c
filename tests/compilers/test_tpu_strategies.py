"""The cost model against the algorithm the TPU compiler picks."""

import itertools

import pytest
from strategies import LAYOUTS, X, Y, Z, gathered_directions, laid_out_by_hand, lanes, strategy

import meshwright as mw
from meshwright.meshes.build import build_mesh
from meshwright.meshes.devices import target_topology

pytestmark = pytest.mark.compilers


def _mesh(name, layout):
    placed = laid_out_by_hand(target_topology(name, None, 1), layout)
    return placed, build_mesh(placed)


@pytest.mark.parametrize(("name", "layouts"), LAYOUTS)
def test_model_and_compiler_never_rank_two_layouts_differently(name, layouts):
    seen = []
    for layout in layouts:
        placed, mesh = _mesh(name, layout)
        seen.append((placed.axes[0].cost.bandwidth, lanes(mesh, "axis")))
    for (ours, theirs), (our_other, their_other) in itertools.combinations(seen, 2):
        assert not (ours > our_other and theirs < their_other), (layouts, seen)
        assert not (ours < our_other and theirs > their_other), (layouts, seen)


def test_whole_directions_are_driven_together_and_pieces_as_one_ring():
    _, whole = _mesh("v5p:8x8x8", [(X, 8, 1), (Y, 8, 1)])
    _, pieces = _mesh("v5p:8x8x8", [(X, 4, 1), (Y, 4, 1), (Z, 4, 1)])
    assert lanes(whole, "axis") == 4
    assert lanes(pieces, "axis") == 2
    assert strategy(pieces, "axis", "all_reduce")[1] == "StrategyRing"


def test_grid_order_keeps_the_two_direction_gather_that_ring_order_loses():
    auto = mw.mesh("fsdp:-1, tp:8", on="v5p:8x8x8")
    ring = mw.mesh("fsdp:-1, tp:8", on="v5p:8x8x8", order="ring")
    assert gathered_directions(auto, "fsdp") == 2
    assert gathered_directions(ring, "fsdp") < 2
    assert lanes(auto, "fsdp") == lanes(ring, "fsdp") == 4


def test_ring_order_costs_nothing_on_planar_chips():
    ring = mw.mesh("fsdp:-1", on="v5e:16x16")
    grid = mw.mesh("fsdp:-1", on="v5e:16x16", order="grid")
    for kind in ("all_reduce", "all_gather"):
        assert strategy(ring, "fsdp", kind) == strategy(grid, "fsdp", kind)


def test_twisted_torus_compiles_over_all_directions():
    mesh = mw.mesh("fsdp:-1", on="v5p:4x4x8_twisted")
    assert lanes(mesh, "fsdp") == 6
