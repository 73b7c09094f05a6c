"""Specs from shapes alone: as few bytes per device as can be, and the same every time."""

import collections
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.partitioning import by_shape
from meshwright.partitioning.by_shape import choose_spec, weight_axes

MESH = mw.mesh("fsdp:4, tp:2")
WIDE = mw.abstract_mesh("dp:2, fsdp:4, ep:3, tp:2, sp:2")
steady = settings(deadline=None, derandomize=True, max_examples=200)
shapes = st.lists(
    st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24, 30, 48, 129, 256, 768, 4096]), max_size=4
).map(tuple)


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def axes_of(entry):
    return entry if isinstance(entry, tuple) else (() if entry is None else (entry,))


def used(spec):
    return [axis for entry in spec for axis in axes_of(entry)]


def local_size(shape, spec, sizes):
    """Elements of one piece; a dim that is not cut evenly ends the test."""
    left = list(shape)
    for dim, entry in enumerate(spec):
        for axis in axes_of(entry):
            assert left[dim] % sizes[axis] == 0, (shape, spec)
            left[dim] //= sizes[axis]
    return math.prod(left)


def least(shape, sizes):
    """Every way to put every axis on a dim or nowhere."""
    best = math.prod(shape)
    for owners in itertools.product([None, *range(len(shape))], repeat=len(sizes)):
        cuts = [1] * len(shape)
        for size, dim in zip(sizes, owners, strict=True):
            if dim is not None:
                cuts[dim] *= size
        if all(side % cut == 0 for side, cut in zip(shape, cuts, strict=True)):
            best = min(best, math.prod(s // c for s, c in zip(shape, cuts, strict=True)))
    return best


def test_both_axes_cut_a_weight():
    assert mw.partition(sds(1024, 4096), MESH) == P("fsdp", "tp")
    assert mw.partition(sds(4096, 1024), MESH) == P("tp", "fsdp")
    assert mw.partition(sds(4096, 4096), MESH) == P("fsdp", "tp")


@steady
@given(shapes, st.sampled_from(["float32", "bfloat16", "int8", "int4"]))
def test_bytes_per_device_are_the_fewest_there_can_be(shape, dtype):
    sizes = dict(WIDE.shape)
    spec = mw.partition(sds(*shape, dtype=getattr(jnp, dtype)), WIDE, min_shard_bytes=0)
    assert local_size(shape, spec, sizes) == least(shape, [sizes[a] for a in ("fsdp", "ep", "tp")])
    assert len(set(used(spec))) == len(used(spec))


@steady
@given(shapes, st.lists(st.sampled_from(list(WIDE.shape)), unique=True))
def test_asked_axes_are_used_as_well_as_can_be_and_no_others(shape, axes):
    sizes = dict(WIDE.shape)
    spec = mw.partition(sds(*shape), WIDE, axes=axes, min_shard_bytes=0)
    assert set(used(spec)) <= set(axes)
    assert local_size(shape, spec, sizes) == least(shape, [sizes[a] for a in axes])


@steady
@given(shapes)
def test_axes_of_size_one_never_appear(shape):
    mesh = mw.abstract_mesh("dp:1, fsdp:2, ep:1, tp:1, sp:1")
    for axes in (None, ["fsdp", "ep", "tp", "sp", "dp"]):
        spec = mw.partition(sds(*shape), mesh, axes=axes, min_shard_bytes=0)
        assert set(used(spec)) <= {"fsdp"}


@steady
@given(shapes)
def test_data_and_sequence_axes_never_cut_weights_unasked(shape):
    spec = mw.partition(sds(*shape), WIDE, min_shard_bytes=0)
    assert set(used(spec)) <= {"fsdp", "ep", "tp"}
    mesh = mw.abstract_mesh("dp:4, sp:2, cp:2, pp:2")
    assert mw.partition(sds(*shape), mesh, min_shard_bytes=0) == P()


def test_a_sequence_axis_cuts_weights_when_asked():
    mesh = mw.abstract_mesh("fsdp:4, sp:2")
    assert mw.partition(sds(1024, 4096), mesh) == P(None, "fsdp")
    asked = mw.partition(sds(1024, 4096), mesh, axes=["fsdp", "sp"])
    assert set(used(asked)) == {"fsdp", "sp"}


def test_axes_of_your_own_names_are_all_used():
    mesh = mw.abstract_mesh("x:4, y:2")
    assert set(used(mw.partition(sds(1024, 4096), mesh))) == {"x", "y"}


def test_a_name_of_your_own_beside_known_ones_is_left_alone():
    mesh = mw.abstract_mesh("fsdp:4, banana:2")
    assert used(mw.partition(sds(1024, 4096), mesh)) == ["fsdp"]


def test_an_axis_that_fits_one_dim_only_goes_there():
    assert mw.partition(sds(6, 4096), MESH) == P(None, ("tp", "fsdp"))
    assert mw.partition(sds(8192, 3), MESH) == P(("tp", "fsdp"))
    assert mw.partition(sds(107, 155), MESH) == P()


@pytest.mark.parametrize(
    ("mesh", "entry"),
    [
        ("fsdp:4, tp:2", ("tp", "fsdp")),
        ("tp:2, fsdp:4", ("tp", "fsdp")),
        ("fsdp:4, ep:2", ("ep", "fsdp")),
        ("fsdp:4, ep:2, tp:2", ("ep", "tp", "fsdp")),
        ("fsdp:2, tp:2, ep:4", ("tp", "ep", "fsdp")),
    ],
)
def test_tensor_and_expert_axes_come_first_in_an_entry(mesh, entry):
    # In the mesh's order among themselves: gathered over `fsdp` alone, what is left is one piece.
    mesh = mw.abstract_mesh(mesh)
    assert mw.partition(sds(5, 8192), mesh) == P(None, entry)
    assert mw.partition(sds(16384), mesh) == P(entry)


@steady
@given(shapes, st.permutations(["fsdp:4", "tp:2", "ep:2", "sp:2", "x:2"]))
def test_no_entry_has_a_tensor_or_expert_axis_behind_another(shape, words):
    mesh = mw.abstract_mesh(", ".join(words))
    for axes in (None, list(mesh.shape)):
        for entry in mw.partition(sds(*shape), mesh, axes=axes, min_shard_bytes=0):
            behind = [axis not in ("tp", "ep") for axis in axes_of(entry)]
            assert behind == sorted(behind), (shape, entry)


def test_padding_below_one_half_counts_as_none():
    # A piece of 96 x 288 fills tiles of 128 lanes by 33 % more; to merge axes would cost more.
    mesh = mw.abstract_mesh("fsdp:8, tp:8")
    assert mw.partition(sds(768, 2304), mesh) == P("fsdp", "tp")
    assert mw.partition(sds(768, 2304, dtype=jnp.bfloat16), mesh) == P("fsdp", "tp")


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((512, 8, 64), P("fsdp", "tp")),
        ((8, 64, 512), P("tp", None, "fsdp")),
        ((8, 512, 64), P("tp", "fsdp")),
        ((2, 4, 512, 64), P(None, "tp", "fsdp")),
        ((512, 3, 8, 64), P("fsdp", None, "tp")),
        ((2, 512, 16, 16), P(None, "fsdp", "tp")),  # no window before 2 channels
    ],
)
def test_heads_are_what_a_tensor_axis_cuts_in_a_kernel_of_attention(shape, spec):
    assert mw.partition(sds(*shape), MESH) == spec


def test_experts_are_not_taken_for_heads():
    up, narrow = sds(8, 4096, 14336), sds(8, 512, 64)
    assert mw.partition(up, MESH) == P(None, "fsdp", "tp")  # feed-forwards are wider than heads
    for tree in ({"experts": narrow}, {"MoeBlock_0": {"w": narrow}}):
        (spec,) = jax.tree.leaves(
            mw.partition(tree, MESH), is_leaf=lambda value: isinstance(value, P)
        )
        assert "tp" not in axes_of(spec[0]) and "tp" in axes_of(spec[1])
    assert "tp" in axes_of(mw.partition({"attention": narrow}, MESH)["attention"][0])
    mesh = mw.abstract_mesh("fsdp:4, ep:8, tp:2")
    assert mw.partition({"experts": narrow}, mesh)["experts"] == P("ep", "fsdp", "tp")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [
        ((3, 3, 64, 128), 3),  # height, width, input, output: Flax
        ((3, 3, 128, 64), 3),
        ((3, 3, 256, 256), 3),
        ((1, 1, 256, 512), 3),
        ((16, 16, 3, 768), 3),  # the patches of a vision transformer
        ((3, 3, 3, 64, 128), 4),
        ((128, 64, 3, 3), 0),  # output, input, height, width: Equinox
        ((64, 128, 3, 3), 0),
        ((256, 256, 3, 3), 0),
        ((768, 3, 16, 16), 0),
        ((3, 256, 512), 2),  # over a sequence, the window's side is odd
        ((5, 512, 512), 2),
        ((512, 256, 3), 0),
        ((512, 512, 7), 0),
    ],
)
def test_output_channels_take_all_axes_in_a_convolution(shape, outputs, dtype):
    spec = mw.partition(sds(*shape, dtype=getattr(jnp, dtype)), MESH)
    assert spec == P(*[None] * outputs, ("tp", "fsdp"))


def test_where_output_channels_divide_by_one_axis_it_is_the_tensor_axis():
    mesh = mw.abstract_mesh("fsdp:4, tp:4")
    assert mw.partition(sds(3, 3, 256, 24), mesh) == P(None, None, "fsdp", "tp")
    assert mw.partition(sds(24, 256, 3, 3), mesh) == P("tp", "fsdp")


def test_a_wide_tensor_axis_cuts_output_channels_too():
    mesh = mw.abstract_mesh("tp:8")
    assert mw.partition(sds(3, 3, 128, 128), mesh) == P(None, None, None, "tp")
    assert mw.partition(sds(128, 128, 3, 3), mesh) == P("tp")


@pytest.mark.parametrize("name", ["hidden_{}/kernel", "layers/{}/weight"])
def test_along_a_chain_of_layers_the_tensor_axis_alternates(name):
    def chain(*shapes):
        specs = mw.partition({name.format(n): sds(*s) for n, s in enumerate(shapes)}, MESH)
        return [specs[name.format(n)] for n in range(len(shapes))]

    made, taken = P("fsdp", "tp"), P("tp", "fsdp")
    square = (1024, 1024)
    assert chain((512, 1024), square, square, (1024, 512)) == [made, taken, made, taken]
    # Kernels of (out, in), as Equinox has them.
    assert chain((1024, 512), square, square, (512, 1024)) == [taken, made, taken, made]
    # Four square ones may as well be the parts of attention, which stand side by side.
    assert chain(square, square, square, square) == [made] * 4


def attention(array, *names, **beside):
    layers = {name: {array: sds(1024, 1024)} for name in names}
    specs = mw.partition({"attn": {**layers, **beside}}, MESH)["attn"]
    return [specs[name][array] for name in names]


def test_attention_makes_its_heads_and_takes_them():
    out_last, out_first = P("fsdp", "tp"), P("tp", "fsdp")
    flax = attention("kernel", "q_proj", "k_proj", "v_proj", "o_proj")
    assert flax == [out_last] * 3 + [out_first]
    equinox = attention("weight", "query_proj", "key_proj", "value_proj", "output_proj")
    assert equinox == [out_first] * 3 + [out_last]
    # Biases say which dim comes out, whatever the name: GPT-2's kernels are (out, in).
    beside = {"c_attn": {"kernel": sds(3072, 1024), "bias": sds(3072)}}
    assert attention("kernel", "c_proj", **beside) == [out_last]
    beside = {"qkv": {"weight": sds(1024, 3072), "bias": sds(3072)}}
    assert attention("weight", "proj", **beside) == [out_first]
    # Stacked layers, and arrays without a layer around them.
    stacked = {"layers": {"attn": {name: sds(8, 1024, 1024) for name in "qkvo"}}}
    specs = mw.partition(stacked, MESH)["layers"]["attn"]
    assert specs == {**dict.fromkeys("qkv", P(None, *out_last)), "o": P(None, *out_first)}


def test_outputs_without_queries_beside_them_are_as_any_square_kernel():
    assert attention("kernel", "up_proj", "out_proj") == [P("fsdp", "tp")] * 2


def test_layers_with_more_than_one_matrix_are_no_chain():
    layer = {"q": sds(1024, 1024), "up": sds(1024, 4096)}
    specs = mw.partition({"in_0": {"w": sds(64, 1024)}, "layers": [layer] * 3}, MESH)["layers"]
    assert specs == [{"q": P("fsdp", "tp"), "up": P("fsdp", "tp")}] * 3


@pytest.mark.parametrize("rows", [32000, 50304, 3072])
def test_tables_of_embeddings_are_cut_along_their_rows(rows):
    assert mw.partition(sds(rows, 512), MESH) == P(("tp", "fsdp"))
    assert mw.partition(sds(512, rows), MESH) == P("fsdp", "tp")  # a head of logits
    stacked = mw.partition({"layers": {"embed": sds(2, rows, 512)}}, MESH)["layers"]["embed"]
    assert stacked == P(None, ("tp", "fsdp"))


@pytest.mark.parametrize("path", ["mlp/down", "down_proj", "fc2/weight", "layer/kernel"])
def test_kernels_that_narrow_much_are_no_tables(path):
    tree = sds(16384, 2048)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    assert jax.tree.leaves(mw.partition(tree, MESH)) == [P("tp", "fsdp")]


def test_less_than_six_times_more_rows_than_columns_are_no_table():
    assert mw.partition(sds(6 * 512 - 8, 512), MESH) == P("tp", "fsdp")


@pytest.mark.parametrize(
    "path", ["embed/table", "wte/embedding", "embed_tokens/weight", "embedder/input_embedding"]
)
def test_tables_are_recognised_by_their_name_too(path):
    tree = sds(1024, 512)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    assert jax.tree.leaves(mw.partition(tree, MESH)) == [P(("tp", "fsdp"))]


@pytest.mark.parametrize("path", ["patch_embedding", "tables", "embed_norm"])
def test_kernels_beside_embeddings_are_no_tables(path):
    specs = mw.partition({path: {"linear": {"weight": sds(1024, 512)}}}, MESH)
    assert jax.tree.leaves(specs) == [P("tp", "fsdp")]


def test_experts_are_cut_along_the_first_dim():
    mesh = mw.abstract_mesh("fsdp:4, ep:8, tp:2")
    assert mw.partition(sds(64, 1024, 4096), mesh) == P("ep", "fsdp", "tp")


def test_small_arrays_stay_whole_by_their_bytes():
    # 16384 bytes though no dim is as large as the limit, and the other way round.
    assert mw.partition(sds(64, 64), MESH, min_shard_bytes=16384) != P()
    assert mw.partition(sds(64, 64), MESH, min_shard_bytes=16385) == P()
    half = sds(64, 64, dtype=jnp.bfloat16)
    assert mw.partition(half, MESH, min_shard_bytes=8192) != P()
    assert mw.partition(half, MESH, min_shard_bytes=8193) == P()
    assert mw.partition(sds(16383), MESH) == P()
    assert mw.partition(sds(16384), MESH) == P(("tp", "fsdp"))


def test_vectors_of_norms_stay_whole():
    tree = {"scale": sds(1024), "layers": {"norm": sds(12, 1024)}, "up": sds(1024, 4096)}
    specs = mw.partition(tree, MESH)
    assert (specs["scale"], specs["layers"]["norm"]) == (P(), P())
    assert specs["up"] == P("fsdp", "tp")


def test_scalars_and_empty_arrays_stay_whole():
    for array in (sds(), sds(0), sds(0, 4096), sds(1, 1)):
        assert mw.partition(array, MESH, min_shard_bytes=0) == P()


def test_the_same_shape_and_kind_of_path_get_the_same_spec():
    layer = {"mlp": {"up": sds(768, 3072), "down": sds(3072, 768)}, "norm": sds(768)}
    specs = mw.partition({"layers": [layer] * 24, "extra": sds(99, 99)}, MESH)["layers"]
    assert all(spec == specs[0] for spec in specs)
    assert specs[0]["mlp"] == {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}
    assert specs[0] == mw.partition({"layers": [layer]}, MESH)["layers"][0]


names = st.lists(
    st.sampled_from(["a", "b", "layers", "w", "emb", "x1", "x2", "norm"]), unique=True, min_size=2
)


@steady
@given(st.data(), names)
def test_the_order_of_the_tree_does_not_matter(data, keys):
    tree = {key: sds(*data.draw(shapes)) for key in keys}
    shuffled = data.draw(st.permutations(keys))
    straight = collections.OrderedDict((key, tree[key]) for key in keys)
    mixed = collections.OrderedDict((key, tree[key]) for key in shuffled)

    def specs(tree):
        return dict(mw.partition(tree, WIDE, min_shard_bytes=0))

    assert specs(straight) == specs(mixed)
    assert specs(mixed) == {key: specs({key: tree[key]})[key] for key in keys}


def test_arrays_and_their_shapes_get_the_same_spec():
    array = np.ones((64, 256), np.float32)
    assert mw.partition({"w": array}, MESH) == mw.partition({"w": sds(64, 256)}, MESH)
    assert mw.partition({"w": array}, MESH)["w"] != P()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ["fdsp"]}, r"^axes: no mesh axis 'fdsp' in fsdp, tp\. Did you mean 'fsdp'\?"),
        ({"axes": [3]}, r"^axes: no mesh axis 3 in fsdp, tp\.$"),
        ({"axes": "fsdp"}, r"^axes: 'fsdp' is not a list of mesh axes"),
        ({"axes": 3}, r"^axes: 3 is not a list of mesh axes"),
        ({"axes": ["tp", "tp"]}, r"^axes: 'tp' appears twice\. Name it once\.$"),
        ({"min_shard_bytes": "1k"}, r"^min_shard_bytes: '1k' is not a count of bytes\.$"),
        ({"min_shard_bytes": None}, r"^min_shard_bytes: None is not a count"),
        (
            {"min_shard_bytes": -1},
            r"^min_shard_bytes: -1 is less than 0\. Use 0 to shard all arrays\.$",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition({"w": sds(8, 8)}, MESH, **options)


def test_no_axes_at_all_leave_everything_whole():
    assert mw.partition(sds(1024, 4096), MESH, axes=[]) == P()


def test_many_dims_and_many_axes_take_little_time():
    start = time.process_time()
    mesh = mw.abstract_mesh(", ".join(f"x{place}:2" for place in range(8)))
    spec = mw.partition(sds(*[2] * 24), mesh)
    assert sorted(used(spec)) == sorted(mesh.shape)
    spec = mw.partition(sds(*[64] * 6), mesh)
    assert sorted(used(spec)) == sorted(mesh.shape)
    assert time.process_time() - start < 5


@steady
@given(shapes, st.sampled_from([32, 16, 8]))
def test_where_not_every_way_is_tried_the_choice_is_as_good(shape, bits):
    axes = weight_axes(dict(WIDE.shape), list(WIDE.shape))
    every = choose_spec.__wrapped__(shape, bits, axes, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_shape, "MOST_SCORED", 0)
        few = choose_spec.__wrapped__(shape, bits, axes, 0)
    assert few == every


@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((4, 256, 512), 2), ((512, 256, 4), 0), ((1, 4, 256, 512), 3), ((2, 4, 4, 64, 128), 4)],
)
def test_a_path_with_conv_in_it_says_what_a_window_of_any_sides_is(shape, outputs):
    for mesh in (MESH, mw.abstract_mesh("fsdp:2, tp:4")):
        spec = mw.partition({"conv1": {"weight": sds(*shape)}}, mesh)["conv1"]["weight"]
        assert axes_of((*spec, *[None] * 5)[outputs]) == ("tp", "fsdp")


@steady
@given(
    st.sampled_from([1, 3, 4, 7, 14, 16]),
    st.sampled_from([3, 64, 128]),
    st.sampled_from([64, 128, 256, 768]),
    st.sampled_from(["fsdp:4, tp:2", "fsdp:2, tp:4", "fsdp:8, tp:8", "tp:8"]),
)
def test_no_convolution_has_its_window_or_its_inputs_cut(side, ins, outs, mesh):
    # XLA computes values or gradients of some nets wrongly then: tools/shardy_convolution.py.
    mesh = mw.abstract_mesh(mesh)
    hwio = mw.partition(sds(side, side, ins, outs), mesh, min_shard_bytes=0)
    oihw = mw.partition(sds(outs, ins, side, side), mesh, min_shard_bytes=0)
    assert (*hwio[:3], *oihw[1:]) == (None,) * 3 and hwio[3] == oihw[0]
