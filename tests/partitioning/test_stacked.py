"""Stacked layers: the dim a scan runs over is never cut."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.partitioning.stacked import STACKS, is_stacked

MESH = mw.mesh("fsdp:4, tp:2")


def sds(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("path", "stack"),
    [
        ("layers/mlp/up", True),
        ("model/blocks/attn/wq", True),
        ("params/Layers/kernel", True),
        ("layers", True),
        ("layers/0/mlp/up", False),
        ("layers/_0/up", False),
        ("blocks/12/wq", False),
        ("mlp/up", False),
        ("player/up", False),
        ("layers_0/up", False),
    ],
)
def test_paths_tell_stacks_from_lists(path, stack):
    assert is_stacked(path, 3, None) is stack


def test_the_layer_dim_stays_whole():
    tree = {"layers": {"up": sds(8, 1024, 4096), "norm": sds(8, 4096)}}
    specs = mw.partition(tree, MESH)
    assert specs["layers"]["up"] == P(None, "fsdp", "tp")
    assert specs["layers"]["norm"] == P(None, ("fsdp", "tp"))


def test_a_layer_in_a_stack_is_cut_like_one_by_itself():
    alone = mw.partition({"layers": [{"up": sds(1024, 4096)}]}, MESH)["layers"][0]["up"]
    stacked = mw.partition({"layers": {"up": sds(32, 1024, 4096)}}, MESH)["layers"]["up"]
    assert tuple(stacked) == (None, *alone)


def test_a_vector_has_no_layer_dim_to_spare():
    assert mw.partition({"layers": {"scale": sds(4096)}}, MESH)["layers"]["scale"] != P()


def test_a_stack_that_can_only_be_cut_by_layer_stays_whole():
    assert mw.partition({"layers": {"w": sds(4096, 3, 5)}}, MESH)["layers"]["w"] == P()


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.sampled_from(sorted(STACKS)),
    st.lists(st.sampled_from([2, 4, 8, 24, 96, 1024]), min_size=2, max_size=4),
)
def test_no_stack_of_any_shape_is_cut_by_layer(word, shape):
    spec = mw.partition({word: {"w": sds(*shape)}}, MESH, min_shard_size=0)[word]["w"]
    assert len(spec) == 0 or spec[0] is None


def test_patterns_name_the_stacks_by_hand():
    tree = {"tower": sds(8, 1024, 4096), "head": sds(8, 1024, 4096)}
    for stacked in ("tower", ["tower"], ("nothing", "tow.*")):
        specs = mw.partition(tree, MESH, stacked=stacked)
        assert specs["tower"][0] is None
        assert specs["head"] == mw.partition(tree, MESH)["head"]


def test_false_switches_the_words_off():
    tree = {"layers": {"w": sds(4096, 3, 5)}}
    assert mw.partition(tree, MESH, stacked=False)["layers"]["w"] == P(("fsdp", "tp"))
    assert mw.partition(tree, MESH, stacked=True)["layers"]["w"] == P()


def test_patterns_replace_the_words():
    tree = {"layers": {"w": sds(4096, 3, 5)}}
    assert mw.partition(tree, MESH, stacked="tower")["layers"]["w"] == P(("fsdp", "tp"))


@pytest.mark.parametrize("stacked", [3, {"layers": 0}, 1.5])
def test_what_is_no_pattern_is_refused(stacked):
    with pytest.raises(
        mw.PartitionError, match=r"^stacked: .* is not a pattern or a list of patterns\.$"
    ):
        mw.partition({"layers": {"w": sds(64, 64, 64)}}, MESH, stacked=stacked)


def test_rules_are_taken_at_their_word():
    tree = {"layers": {"w": sds(8, 1024)}}
    specs = mw.partition(tree, MESH, rules={"w": "fsdp"})
    assert specs["layers"]["w"] == P("fsdp")
