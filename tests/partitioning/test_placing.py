"""`shard`: values where the specs say, and a word about the leaf when that cannot be."""

import collections
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.mesh("fsdp:4, tp:2")
W = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def same(placed, values):
    """The values, and that every shard is the part of them its index says."""
    np.testing.assert_array_equal(placed, values)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(values)[shard.index])


@pytest.mark.parametrize(
    "array",
    [
        W,
        jnp.asarray(W),
        jax.device_put(W, jax.devices()[3]),
        jax.device_put(W, NamedSharding(MESH, P("tp"))),
        W.astype(jnp.bfloat16),
        W.astype(jnp.int4),
        (W % 200).astype(jnp.float8_e4m3fn),
        W > 5,
        W[::2, ::-1],
        np.asfortranarray(W),
    ],
    ids=["numpy", "jax", "on a device", "placed", "bf16", "int4", "fp8", "bool", "view", "columns"],
)
@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P(("tp", "fsdp")), P(None, "fsdp"), P()])
def test_values_stand_where_the_spec_says(array, spec):
    placed = mw.shard({"w": array}, MESH, {"w": spec})["w"]
    assert placed.sharding == NamedSharding(MESH, spec)
    assert placed.dtype == array.dtype
    same(placed, np.asarray(array))


def test_keys_are_placed():
    keys = jax.random.split(jax.random.key(7), 64)
    placed = mw.shard({"k": keys, "one": jax.random.key(1)}, MESH, {"k": P("fsdp"), "one": P()})
    assert placed["k"].sharding.spec == P("fsdp")
    assert placed["k"].addressable_shards[0].data.shape == (16,)
    np.testing.assert_array_equal(jax.random.key_data(placed["k"]), jax.random.key_data(keys))


def test_without_specs_partition_decides():
    tree = {"a": W, "b": W.T}
    placed = mw.shard(tree, MESH)
    specs = mw.partition(tree, MESH)
    assert {key: array.sharding.spec for key, array in placed.items()} == specs
    ruled = mw.shard(tree, MESH, rules=[("a", "tp"), ("b", None)])
    assert [ruled["a"].sharding.spec, ruled["b"].sharding.spec] == [P("tp"), P()]


def test_one_spec_serves_the_whole_tree():
    placed = mw.shard({"a": W, "b": [W.T]}, MESH, P("tp"))
    assert placed["a"].sharding.spec == placed["b"][0].sharding.spec == P("tp")


def test_other_leaves_pass_through():
    tree = {"w": W, "n": 3, "lr": 1e-3, "on": True, "act": jnp.tanh, "s": "x", "none": None}
    for specs in (None, P(), mw.partition(tree, MESH)):
        placed = mw.shard(tree, MESH, specs)
        assert {**placed, "w": None} == {**tree, "w": None}
        assert isinstance(placed["w"], jax.Array)


def test_numpy_scalars_are_arrays():
    placed = mw.shard({"s": np.float32(2)}, MESH)["s"]
    assert isinstance(placed, jax.Array) and placed.sharding == NamedSharding(MESH, P())


def test_arrays_of_another_mesh_move_here():
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    there = jax.device_put(W, NamedSharding(other, P("x", "y")))
    back = jax.device_put(W, NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("z",)), P("z")))
    placed = mw.shard({"a": there, "b": back}, MESH, P("tp", "fsdp"))
    same(placed["a"], W)
    same(placed["b"], W)
    assert placed["a"].sharding == NamedSharding(MESH, P("tp", "fsdp"))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)])
def test_empty_arrays_are_placed_from_anywhere(shape):
    empty = np.ones(shape, np.float32)
    other = Mesh(np.array(jax.devices()[:2]), ("x",))
    for array in (empty, jnp.asarray(empty), jax.device_put(empty, NamedSharding(other, P("x")))):
        placed = mw.shard({"w": array}, MESH, P("fsdp"))["w"]
        assert placed.shape == shape
        assert placed.sharding == NamedSharding(MESH, P("fsdp"))


def test_the_source_stays_usable():
    source = jnp.asarray(W)
    placed = mw.shard({"w": source}, MESH)["w"]
    placed.delete()
    np.testing.assert_array_equal(source, W)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), max_size=3).map(tuple),
    st.sampled_from(["float32", "int32", "bfloat16", "uint8", "bool"]),
)
def test_any_small_tree_comes_back_the_same(shape, dtype):
    values = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(getattr(jnp, dtype))
    same(mw.shard({"w": values}, MESH, min_shard_size=0)["w"], values)


def test_ten_thousand_leaves_are_no_trouble():
    tree = {f"w{place}": np.full(8, place, np.int32) for place in range(10_000)}
    placed = mw.shard(tree, MESH, P("fsdp"))
    assert len(placed) == 10_000
    np.testing.assert_array_equal(placed["w9999"], tree["w9999"])
    assert placed["w17"].addressable_shards[0].data.shape == (2,)


# Abstract: shapes instead of arrays, meshes without devices.


def test_shapes_come_back_with_their_sharding():
    shape = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    placed = mw.shard({"w": shape, "b": W}, MESH, P("fsdp"))
    assert placed["w"] == jax.ShapeDtypeStruct(
        (64, 32), jnp.bfloat16, sharding=NamedSharding(MESH, P("fsdp"))
    )
    same(placed["b"], W)


def test_an_abstract_mesh_gives_shapes():
    mesh = mw.abstract_mesh("fsdp:256, tp:16")
    callback = mw.FromCallback((512, 512), "float32", lambda index: 1 / 0)
    tree = {"w": jax.ShapeDtypeStruct((1024, 4096), "float32"), "h": W, "c": callback, "n": 3}
    placed = mw.shard(tree, mesh, rules=[("w", ("fsdp", "tp")), ("c", "tp"), ("**", None)])
    assert placed["w"].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    assert placed["h"] == jax.ShapeDtypeStruct(
        (64, 32), "float32", sharding=NamedSharding(mesh, P())
    )
    assert placed["c"].sharding.spec == P("tp")
    assert placed["n"] == 3


def test_shapes_on_an_abstract_mesh_can_be_compiled_against():
    mesh = mw.abstract_mesh("fsdp:4, tp:2")
    placed = mw.shard({"w": jax.ShapeDtypeStruct((64, 32), "float32")}, mesh, P("fsdp"))
    out = jax.eval_shape(lambda tree: tree["w"] * 2, placed)
    assert out.shape == (64, 32)


# Arrays that are made where they are needed.


def test_a_callback_is_called_for_the_pieces_that_are_needed():
    asked = []

    def part(index):
        asked.append(index)
        return W[index]

    callback = mw.FromCallback(W.shape, W.dtype, part)
    few = Mesh(np.array(jax.devices()[:2]), ("x",))
    placed = mw.shard({"w": callback}, few, P("x"))["w"]
    same(placed, W)
    rows = {index[0].indices(64)[:2] for index in asked}
    assert rows == {(0, 32), (32, 64)}  # the pieces, and never the whole


def test_a_callback_may_stand_beside_arrays():
    callback = mw.FromCallback([64, 32], "bfloat16", lambda index: W.astype(jnp.bfloat16)[index])
    placed = mw.shard({"c": callback, "w": W}, MESH)
    assert placed["c"].dtype == jnp.bfloat16
    same(placed["c"], W.astype(jnp.bfloat16))
    same(placed["w"], W)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda index: W, r"^c: the function gave float32 \(64, 32\) for the piece at"),
        (lambda index: W[index].astype("int32"), r"which is float32 \(16, 32\)\. Return that part"),
        (lambda index: 0.0, r"^c: the function gave None None for the piece"),
    ],
)
def test_a_callback_that_gives_another_piece_names_the_leaf(made, message):
    with pytest.raises(mw.PartitionError, match=message):
        mw.shard({"c": mw.FromCallback((64, 32), "float32", made)}, MESH, P("fsdp"))


# 64 bits.

WIDE = ["int64", "uint64", "float64", "complex128"]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("form", ["array", "callback"])
def test_values_that_would_be_narrowed_are_refused(dtype, form):
    array = W.astype(dtype)
    leaf = array if form == "array" else mw.FromCallback(W.shape, dtype, lambda index: array[index])
    kept = jax.dtypes.canonicalize_dtype(dtype)
    for mesh in (MESH, MESH.abstract_mesh):
        with pytest.raises(
            mw.PartitionError,
            match=rf"w: {dtype} would become {kept}\. Convert it, enable jax_enable_x64, or pass",
        ):
            mw.shard({"w": leaf}, mesh)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("form", ["array", "callback"])
def test_values_are_narrowed_when_asked(dtype, form):
    array = W.astype(dtype)
    leaf = array if form == "array" else mw.FromCallback(W.shape, dtype, lambda index: array[index])
    placed = mw.shard({"w": leaf}, MESH, narrow="convert")["w"]
    assert placed.dtype == jax.dtypes.canonicalize_dtype(dtype)
    same(placed, W)
    abstract = mw.shard({"w": leaf}, MESH.abstract_mesh, narrow="convert")["w"]
    assert abstract.dtype == placed.dtype


def test_with_64_bits_enabled_nothing_is_narrowed():
    with jax.enable_x64(True):
        placed = mw.shard({"w": W.astype("float64")}, MESH)["w"]
        assert placed.dtype == np.float64


def test_narrow_takes_two_words():
    with pytest.raises(mw.PartitionError, match=r"^narrow: True is not 'error' or 'convert'\.$"):
        mw.shard({"w": W}, MESH, narrow=True)


# What cannot be placed.


def test_under_jit_the_message_says_what_to_use():
    with pytest.raises(
        mw.PartitionError,
        match=r"w: a tracer\. Under jit use jax\.lax\.with_sharding_constraint with the specs of "
        r"partition, or jit's in_shardings",
    ):
        jax.jit(lambda w: mw.shard({"w": w}, MESH))(W)


def test_specs_can_be_decided_under_jit():
    def constrained(w):
        spec = mw.partition({"w": w}, MESH)["w"]
        return jax.lax.with_sharding_constraint(w, NamedSharding(MESH, spec))

    assert jax.jit(constrained)(W).sharding.spec == mw.partition({"w": W}, MESH)["w"]


def test_deleted_arrays_are_all_named():
    gone = {"a": jnp.ones(8), "b": [jnp.ones(8)], "c": jnp.ones(8)}
    gone["a"].delete()
    gone["b"][0].delete()
    with pytest.raises(mw.PartitionError, match="2 problems") as caught:
        mw.shard(gone, MESH)
    assert "a: the array was deleted or donated. Use the one it went into." in str(caught.value)
    assert "b/0: the array was deleted or donated" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "b"]), np.array([None, 3]), np.ma.masked_array(W), W.view("V4")],
    ids=["text", "objects", "masked", "void"],
)
def test_what_is_no_number_names_the_leaf(value):
    for narrow in ("error", "convert"):
        with pytest.raises(
            mw.PartitionError, match=r"w: .* cannot be placed\. Make it an array of numbers first"
        ):
            mw.shard({"w": value}, MESH, narrow=narrow)


# Specs that do not fit.


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": P()}, "First difference: 'b/0' has no spec."),
        ({"a": P(), "b": [P(), P()]}, "First difference: 'b/1' has a spec but is not in the tree."),
        ({"a": P(), "b": (P(),)}, "same leaves in containers of different kinds"),
        ({"a": ("fsdp",), "b": [P()]}, "First difference: 'a' has no spec"),
        ("fsdp", "First difference: 'a' has no spec"),
        ({"a": P(), "b": [None]}, r"b/0: None is not a PartitionSpec\. Use PartitionSpec\(\) for"),
        ({"a": P(), "b": [3]}, r"b/0: 3 is not a PartitionSpec"),
    ],
)
def test_specs_in_another_tree_name_the_first_difference(specs, message):
    with pytest.raises(mw.PartitionError, match=rf"^specs: .*{message}"):
        mw.shard({"a": W, "b": [W]}, MESH, specs)


def test_the_first_difference_of_a_large_tree_is_found():
    tree = {f"w{place:05}": W[0] for place in range(10_000)}
    specs = {key: P() for key in tree if key != "w07777"}
    with pytest.raises(mw.PartitionError, match="First difference: 'w07777' has no spec"):
        mw.shard(tree, MESH, specs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("fsdp", None, "tp"), r"w: P\(.*\) has 3 entries for an array with 2 dims \(64, 32\)"),
        (P("fdsp"), r"w: dim 0: no mesh axis 'fdsp' in fsdp, tp\. Did you mean 'fsdp'\?"),
        (P("tp", "tp"), r"w: P\('tp', 'tp'\) uses axis 'tp' twice"),
        (P(("tp", "tp")), r"w: P\(\('tp', 'tp'\),\) uses axis 'tp' twice"),
        (P(P.UNCONSTRAINED), r"w: .* leaves a dim unconstrained, which only jit can decide"),
    ],
)
def test_specs_that_do_not_fit_name_the_leaf(spec, message):
    with pytest.raises(mw.PartitionError, match=message):
        mw.shard({"w": W}, MESH, {"w": spec})


def test_every_leaf_that_does_not_divide_is_named():
    tree = {"a": np.ones((6, 8), "f4"), "b": [np.ones((8, 3), "f4")], "c": np.ones((8, 8), "f4")}
    with pytest.raises(mw.PartitionError, match="shard: 2 problems, nothing was placed") as caught:
        mw.shard(tree, MESH, P("fsdp", "tp"))
    assert "a: dim 0 has size 6, not divisible by 4 (axes fsdp). Pad to 8" in str(caught.value)
    assert "b/0: dim 1 has size 3, not divisible by 2 (axes tp). Pad to 4" in str(caught.value)


def test_nothing_is_placed_when_anything_is_wrong():
    asked = []
    good = mw.FromCallback((8,), "float32", lambda index: asked.append(index) or W[0, :8][index])
    deleted = jnp.ones(8)
    deleted.delete()
    gc.collect()
    before = len(jax.live_arrays())
    wrong = [
        ({"a": W, "good": good, "z": np.ones((3, 3), "float32")}, P("tp")),
        ({"a": W, "good": good, "z": deleted}, P()),
        ({"a": W, "good": good, "z": np.ones(8)}, P()),
        ({"a": W, "good": good, "z": np.ones(8, "float32")}, P(P.UNCONSTRAINED)),
        ({"a": W, "good": good, "z": np.ones(8, "float32")}, {"a": P(), "good": P()}),
    ]
    for tree, specs in wrong:
        with pytest.raises(mw.PartitionError):
            mw.shard(tree, MESH, specs)
    assert asked == []
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_options_of_partition_do_not_go_with_specs():
    with pytest.raises(
        mw.PartitionError, match=r"^rules, uneven: options of partition, but specs were given\.$"
    ):
        mw.shard({"w": W}, MESH, P(), rules=[], uneven="replicate")


# Parts of a process; several processes have tests of their own.


def test_in_one_process_a_local_part_is_the_whole():
    placed = mw.shard({"w": W}, MESH, P("fsdp"), local=True)["w"]
    assert placed.sharding == NamedSharding(MESH, P("fsdp"))
    same(placed, W)


def test_a_local_part_needs_specs_that_fit():
    with pytest.raises(mw.PartitionError, match=r"^local=True needs specs: a part does not tell"):
        mw.shard({"w": W}, MESH, local=True)
    with pytest.raises(mw.PartitionError, match=r"w: dim 0: no mesh axis 'fspd' in fsdp, tp"):
        mw.shard({"w": W}, MESH, P("fspd"), local=True)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_axis_types_do_not_matter(kind):
    mesh = mw.mesh("fsdp:4, tp:2", axis_types=kind)
    placed = mw.shard({"w": W}, mesh, P("tp", "fsdp"))["w"]
    assert placed.sharding == NamedSharding(mesh, P("tp", "fsdp"))
    same(placed, W)


def test_containers_are_kept():
    tree = collections.OrderedDict(b=W, a=(W, [W]))
    placed = mw.shard(tree, MESH)
    assert jax.tree.structure(placed) == jax.tree.structure(tree)


def test_messages_name_a_single_array_too():
    with pytest.raises(mw.PartitionError, match=re.escape("(the array): float64 would become")):
        mw.shard(np.ones((8, 8)), MESH)


def test_what_is_placed_from_one_device_outlives_its_donation():
    mesh = mw.mesh("fsdp:8")
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    for spec in (P("fsdp"), P(), P(None, "fsdp")):
        whole = jax.numpy.arange(64.0).reshape(8, 8) + 0
        placed = mw.shard(whole, mesh, spec)
        bump(whole)
        assert (np.asarray(placed) == np.arange(64.0).reshape(8, 8)).all()
        bumped = bump(placed)
        assert (np.asarray(bumped) == np.arange(64.0).reshape(8, 8) + 1).all()
