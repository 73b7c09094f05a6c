"""Stacked layers: the dim a scan runs over is never cut."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.partitioning.stacks import MOST_LAYERS, STACKS

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
        ("layers/layer_0/up", False),
        ("layers/block0/up", False),
        ("blocks/h_3/up", False),
        ("layers/DecoderLayer_11/up", False),
        ("layers/Dense_0/kernel", True),  # so Linen names the parts of a layer
        ("blocks/0/layers/up", True),  # a stack in a list
    ],
)
def test_paths_tell_stacks_from_lists(path, stack):
    assert is_whole(path, sds(1024, 64, 3)) is stack


def nested(path, leaf):
    for word in reversed(path.split("/")):
        leaf = {word: leaf}
    return leaf


def is_whole(path, leaf):
    """Whether the first dim is left alone though it is the best one to cut."""
    (spec,) = jax.tree.leaves(
        mw.partition(nested(path, leaf), MESH, axes=["fsdp"], min_shard_bytes=0), is_leaf=is_spec
    )
    return spec[0] is None


def is_spec(value):
    return isinstance(value, P)


def test_a_word_alone_makes_no_stack_of_arrays_with_other_first_dims():
    tree = {"layers": {"w1": sds(4096, 10), "w2": sds(1024, 4097)}}
    assert mw.partition(tree, MESH)["layers"] == {"w1": P(("tp", "fsdp")), "w2": P(("tp", "fsdp"))}
    tree = {"layers": {"layer_0": {"w": sds(1024, 1024)}}}
    assert mw.partition(tree, MESH)["layers"]["layer_0"]["w"] == P("fsdp", "tp")


def test_a_scan_is_a_stack_whatever_its_name():
    tree = {"params": {"blk": {"bias": sds(8, 256), "kernel": sds(8, 256, 256)}}}
    specs = mw.partition(tree, MESH, min_shard_bytes=1024)["params"]["blk"]
    assert specs == {"bias": P(None, ("tp", "fsdp")), "kernel": P(None, "fsdp", "tp")}


def test_heads_that_come_first_are_no_stack():
    heads = {"query": sds(16, 512, 64), "bias": sds(16, 64), "out": sds(16, 64, 512)}
    layer = {"attention": heads, "mlp": {"up": sds(512, 2048), "down": sds(2048, 512)}}
    specs = mw.partition([layer] * 2, MESH, min_shard_bytes=0)
    assert specs[0]["attention"]["query"] == P("tp", "fsdp")
    stacked = jax.tree.map(lambda leaf: sds(4, *leaf.shape), layer)
    specs = mw.partition({"tower": stacked}, MESH)["tower"]
    assert specs["attention"]["query"] == P(None, "tp", "fsdp")


def test_a_linen_scan_is_a_stack_whatever_its_name():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(256)(nn.LayerNorm()(x)), None

    scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
    shapes = jax.eval_shape(
        scan(name="blk").init, jax.random.key(0), jax.numpy.ones((2, 256)), None
    )
    specs = mw.partition({"model": shapes}, MESH, min_shard_bytes=0)
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        assert spec[0] is None and len(spec) > 1


@pytest.mark.parametrize(
    "tree",
    [
        {"weight": sds(512, 512), "bias": sds(512)},  # Equinox keeps (out, in)
        {"up": sds(512, 2048), "gate": sds(512, 2048)},
        {"q": sds(512, 8, 64), "rank": sds(512, 32)},
        {"conv": sds(64, 3, 7, 7), "skip": sds(64, 3)},
    ],
    ids=str,
)
def test_arrays_that_share_a_first_dim_by_chance_are_no_stack(tree):
    def specs(tree, **options):
        return mw.partition(tree, MESH, min_shard_bytes=0, **options)

    alone = {name: specs(leaf, stacked=False) for name, leaf in tree.items()}
    assert specs({"block": tree})["block"] == alone
    assert all(spec[0] is not None for spec in alone.values())


STACKED = {
    "a.q": sds(16, 512, 8, 64),
    "a.b": sds(16, 512),
    "m.w": sds(16, 512, 2048),
    "m.b": sds(16, 2048),
    "emb": sds(32000, 512),
}


@pytest.mark.parametrize("mesh", ["fsdp:4, tp:2", "fsdp:16", "tp:16", "fsdp:8, ep:2, tp:8"])
@pytest.mark.parametrize("limit", [0, 65536])
def test_layers_without_a_subtree_of_their_own_are_recognised_by_their_number(mesh, limit):
    specs = mw.partition(STACKED, mw.abstract_mesh(mesh), min_shard_bytes=limit)
    assert specs["emb"][0] is not None
    for name in ("a.q", "m.w"):
        assert specs[name][0] is None and len(specs[name]) > 1
    for name in ("a.b", "m.b"):  # small layers
        assert specs[name] == P() if limit else specs[name][0] is None and len(specs[name]) > 1


def test_layers_that_the_second_dim_counts_stay_whole():
    # As MaxText stacks them, here 16 layers: (embed, layers, heads, size) and (embed, layers).
    attention = {"query": sds(512, 16, 16, 32), "out": sds(16, 16, 32, 512)}
    mlp = {"wi": sds(512, 16, 2048), "wo": sds(2048, 16, 512)}
    tree = {"layers": {"attention": attention, "mlp": mlp, "norm": sds(512, 16)}}
    specs = mw.partition({"decoder": tree}, MESH)["decoder"]["layers"]
    assert specs["attention"] == {
        "query": P("fsdp", None, "tp"),
        "out": P("tp", None, None, "fsdp"),
    }
    assert specs["mlp"] == {"wi": P("fsdp", None, "tp"), "wo": P("tp", None, "fsdp")}
    assert specs["norm"] == P()
    # Not by chance: fewer arrays, or without the name, are weights like others.
    few = mw.partition({"layers": {"wi": sds(64, 16, 4096), "b": sds(4096, 16)}}, MESH, axes=["tp"])
    assert few["layers"]["b"] == P("tp")
    assert mw.partition({"tower": tree["layers"]}, MESH)["tower"]["attention"]["query"][1] == "tp"


def test_in_a_tuple_what_is_no_layer_is_cut_whole():
    # As penzai's values of parameters: all paths are alike, and only shapes tell them apart.
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    layers = [f32(4, 512), f32(4, 512, 32, 16), f32(4, 512, 2048), f32(4, 2048, 512), f32(4, 2048)]
    values = [{"value": leaf} for leaf in (f32(32000, 512), *layers, f32(512, 32000))]
    specs = [tree["value"] for tree in mw.partition(values, mw.abstract_mesh("fsdp:4, tp:4"))]
    assert specs[0] == P(("tp", "fsdp")) and specs[-1] == P("fsdp", "tp")
    assert specs[1:-1] == [
        P(),
        P(None, "fsdp", "tp"),
        P(None, "fsdp", "tp"),
        P(None, "tp", "fsdp"),
        P(),
    ]


def test_flat_layers_are_cut_like_those_of_a_subtree():
    layers = {name: leaf for name, leaf in STACKED.items() if name != "emb"}
    tree = {"layers": layers, "emb": STACKED["emb"]}
    nested, specs = mw.partition(tree, MESH), mw.partition(STACKED, MESH)
    assert specs == {**nested["layers"], "emb": P(("tp", "fsdp"))}
    assert specs["a.q"] == P(None, "fsdp", "tp") and specs["m.w"] == P(None, "fsdp", "tp")


@pytest.mark.parametrize(
    "tree",
    [
        # Three arrays; as many others; of one rank; more than can be layers; fewer elements.
        {"a": sds(16, 512, 512), "b": sds(16, 512), "c": sds(16, 2048)},
        {
            **{name: leaf for name, leaf in STACKED.items() if name != "emb"},
            **{f"other{word}": sds(512, 512) for word in "wxyz"},
        },
        {word: sds(16, 4096) for word in "abcde"},
        {**{word: sds(512, 4096) for word in "abc"}, "d": sds(512, 8, 512)},
        {**{word: sds(16, 8, 64) for word in "abc"}, "d": sds(16, 8)},
    ],
    ids=["few", "half", "one rank", "many layers", "small layers"],
)
def test_what_may_share_its_first_dim_by_chance_is_cut_as_if_alone(tree):
    together = mw.partition(tree, MESH, min_shard_bytes=0)
    alone = mw.partition(tree, MESH, min_shard_bytes=0, stacked=False)
    assert together == alone
    assert alone[next(iter(tree))][0] is not None


def test_experts_are_not_counted_as_layers():
    mesh = mw.abstract_mesh("ep:4, tp:2")
    tree = {f"expert.{name}": leaf for name, leaf in STACKED.items() if name != "emb"}
    specs = mw.partition(tree, mesh)
    assert specs["expert.m.w"] == P("ep", None, "tp")
    assert specs["expert.a.q"][0] == "ep"


def attention(heads=8):
    """The arrays of Linen's `MultiHeadDotProductAttention`."""
    projection = {"kernel": sds(512, heads, 64), "bias": sds(heads, 64)}
    names = ("query", "key", "value")
    return {
        **dict.fromkeys(names, projection),
        "out": {"kernel": sds(heads, 64, 512), "bias": sds(512)},
    }


DENSE = {"kernel": sds(512, 2048), "bias": sds(2048)}


@pytest.mark.parametrize(
    "tree",
    [
        {"attention": attention(), "mlp": DENSE, "out": DENSE},
        {f"block_{place}": {"attention": attention(), "mlp": DENSE} for place in range(4)},
        {"attention": attention()},
    ],
    ids=["one block", "blocks", "attention alone"],
)
def test_heads_are_not_taken_for_layers(tree):
    specs = mw.partition(tree, MESH)
    attentions = (
        [specs["attention"]]
        if "attention" in specs
        else [block["attention"] for block in specs.values()]
    )
    for found in attentions:
        for name in ("query", "key", "value"):
            assert found[name]["kernel"] == P("fsdp", "tp")
        assert found["out"]["kernel"] == P("tp", None, "fsdp")


def test_experts_are_no_stack():
    mesh = mw.abstract_mesh("ep:8, tp:2")
    for name in ("experts", "MoeBlock_0"):
        tree = {name: {"up": sds(8, 256, 1024), "bias": sds(8, 1024)}}
        assert mw.partition(tree, mesh)[name]["up"] == P("ep", None, "tp")


def test_all_layers_of_a_list_are_judged_together():
    plain = {"w": sds(8, 256, 256), "b": sds(8, 256)}
    odd = {**plain, "scale": sds(256)}
    for layers in ([plain, odd], [odd, plain]):
        specs = mw.partition({"model": layers}, MESH)["model"]
        assert specs[0]["w"] == specs[1]["w"] and specs[0]["b"] == specs[1]["b"]


def test_the_layer_dim_stays_whole():
    tree = {"layers": {"up": sds(8, 1024, 4096), "norm": sds(8, 16384)}}
    specs = mw.partition(tree, MESH)
    assert specs["layers"]["up"] == P(None, "fsdp", "tp")
    assert specs["layers"]["norm"] == P(None, ("tp", "fsdp"))


def test_the_bytes_of_a_layer_decide_whether_a_stack_stays_whole():
    tree = {"layers": {"w": sds(48, 128, 128), "small": sds(48, 128, 64), "norm": sds(48, 1024)}}
    specs = mw.partition(tree, MESH)["layers"]
    assert specs == {"w": P(None, "fsdp", "tp"), "small": P(), "norm": P()}
    one_less = mw.partition(tree, MESH, min_shard_bytes=128 * 128 * 4 + 1)["layers"]
    assert one_less["w"] == P()
    # All 48 layers at once would be large enough.
    assert mw.partition(tree, MESH, stacked=False)["layers"]["small"] != P()


def test_a_layer_in_a_stack_is_cut_like_one_by_itself():
    alone = mw.partition({"layers": [{"up": sds(1024, 4096)}]}, MESH)["layers"][0]["up"]
    stacked = mw.partition({"layers": {"up": sds(32, 1024, 4096)}}, MESH)["layers"]["up"]
    assert tuple(stacked) == (None, *alone)


def test_a_vector_has_no_layer_dim_to_spare():
    assert mw.partition({"layers": {"scale": sds(16384)}}, MESH)["layers"]["scale"] != P()


def test_a_stack_that_can_only_be_cut_by_layer_stays_whole():
    tree = {"layers": {"w": sds(4096, 3, 5)}}
    assert mw.partition(tree, MESH, min_shard_bytes=0)["layers"]["w"] == P()


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.sampled_from(sorted(STACKS)),
    st.lists(st.sampled_from([2, 4, 8, 24, 96, 1024]), min_size=2, max_size=4),
)
def test_no_stack_of_any_shape_is_cut_by_layer(word, shape):
    if len(shape) == 2:  # of matrices with many rows, see below
        shape = [min(shape[0], MOST_LAYERS), shape[1]]
    spec = mw.partition({word: {"w": sds(*shape)}}, MESH, min_shard_bytes=0)[word]["w"]
    assert len(spec) == 0 or spec[0] is None


def test_patterns_name_the_stacks_by_hand():
    tree = {"tower": sds(8, 1024, 4096), "head": sds(8, 1024, 4096)}
    for stacked in ("tower", ["tower"], ("/tower", "tow.*")):
        specs = mw.partition(tree, MESH, stacked=stacked)
        assert specs["tower"][0] is None
        assert specs["head"] == mw.partition(tree, MESH)["head"]


def test_false_switches_the_words_off():
    tree = {"layers": {"w": sds(4096, 3, 5)}}
    assert mw.partition(tree, MESH, stacked=False)["layers"]["w"] == P(("tp", "fsdp"))
    assert mw.partition(tree, MESH, stacked=True, min_shard_bytes=0)["layers"]["w"] == P()


def test_patterns_replace_the_words():
    tree = {"layers": {"w": sds(4096, 3, 5)}}
    tree = {**tree, "tower": sds(8, 8, 8)}
    assert mw.partition(tree, MESH, stacked="tower")["layers"]["w"] == P(("tp", "fsdp"))


def test_a_pattern_that_matches_no_leaf_is_reported_unless_allowed():
    tree = {"layers": {"w": sds(8, 128, 128)}}
    with pytest.raises(
        mw.errors.PartitionError, match=r"stacked: 'zz' matches no leaf\. Fix or remove it"
    ):
        mw.partition(tree, MESH, stacked=["w", "zz"])
    assert mw.partition(tree, MESH, stacked=["w", "zz"], unused="allow")["layers"]["w"][0] is None


@pytest.mark.parametrize("option", [{"stacked": "w"}, {"axes": ["tp"]}])
def test_what_only_shapes_obey_is_refused_where_they_do_not_decide(option):
    tree = {"w": sds(64, 64), "rest": sds(64, 64)}
    message = rf"^{next(iter(option))}: is for deciding by shape, but rules= decides\. Drop it, or"
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition(tree, MESH, rules=[("**", None)], **option)
    with pytest.raises(
        mw.errors.PartitionError, match="is for deciding by shape, but logical= decides"
    ):
        mw.partition(tree, MESH, logical={}, **option)
    mw.partition(tree, MESH, rules=[("w", None)], unmatched="shape", **option)


@pytest.mark.parametrize("stacked", [3, {"layers": 0}, 1.5])
def test_what_is_no_pattern_is_refused(stacked):
    with pytest.raises(
        mw.errors.PartitionError, match=r"^stacked: .* is not a pattern or a list of patterns\.$"
    ):
        mw.partition({"layers": {"w": sds(64, 64, 64)}}, MESH, stacked=stacked)


def test_rules_are_taken_at_their_word():
    tree = {"layers": {"w": sds(8, 1024)}}
    specs = mw.partition(tree, MESH, rules={"w": "fsdp"})
    assert specs["layers"]["w"] == P("fsdp")


def test_matrices_with_many_rows_are_weights_of_one_block():
    up = sds(4096, 14336)
    assert mw.partition({"layers": {"up": up, "gate": up}}, MESH)["layers"]["up"] == P("fsdp", "tp")
    blocks = {"mlp": {"up": up}, "attn": {"q": sds(4096, 4096)}}
    assert mw.partition({"blocks": blocks}, MESH)["blocks"]["attn"]["q"] == P("fsdp", "tp")


def test_a_name_with_scan_in_it_says_that_layers_are_stacked():
    block = {"d": {"kernel": sds(12, 512, 512)}, "e": {"kernel": sds(12, 512, 512)}}
    specs = mw.partition({"params": {"ScanBlock_0": block, "emb": sds(1000, 512)}}, MESH)
    assert specs["params"]["ScanBlock_0"]["d"]["kernel"] == P(None, "fsdp", "tp")
