"""`shard`: values where the specs say, and a word about the leaf when that cannot be."""

import collections
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.transfers import device_put

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
    for options in ({}, {"min_shard_bytes": 0}, {"axes": ["tp"], "min_shard_bytes": 0}):
        placed = mw.shard(tree, MESH, **options)
        specs = mw.partition(tree, MESH, **options)
        assert {key: array.sharding.spec for key, array in placed.items()} == specs
        assert (P() in specs.values()) == (not options)
    ruled = mw.shard(tree, MESH, rules=[("a", "tp"), ("b", None)])
    assert [ruled["a"].sharding.spec, ruled["b"].sharding.spec] == [P("tp"), P()]


def test_one_spec_serves_the_whole_tree():
    placed = mw.shard({"a": W, "b": [W.T]}, MESH, P("tp"))
    assert placed["a"].sharding.spec == placed["b"][0].sharding.spec == P("tp")


def test_other_leaves_pass_through():
    tree = {"w": W, "n": 3, "lr": 1e-3, "on": True, "act": jnp.tanh, "s": "x", "none": None}
    for specs in (None, P(), mw.partition(tree, MESH, min_shard_bytes=0)):
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
    placed = mw.shard({"w": source}, MESH, min_shard_bytes=0)["w"]
    placed.delete()
    np.testing.assert_array_equal(source, W)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), max_size=3).map(tuple),
    st.sampled_from(["float32", "int32", "bfloat16", "uint8", "bool"]),
)
def test_any_small_tree_comes_back_the_same(shape, dtype):
    values = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(getattr(jnp, dtype))
    same(mw.shard({"w": values}, MESH, min_shard_bytes=0)["w"], values)


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
    placed = mw.shard({"c": callback, "w": W}, MESH, min_shard_bytes=0)
    assert not placed["c"].sharding.is_fully_replicated
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
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.shard({"c": mw.FromCallback((64, 32), "float32", made)}, MESH, P("fsdp"))


@pytest.mark.parametrize("spec", [P("tp"), P("fsdp"), P(None, "tp"), P()])
def test_a_piece_that_several_devices_hold_is_asked_for_once(spec):
    asked = []

    def part(index):
        asked.append(str(index))
        return W[index]

    placed = mw.shard(mw.FromCallback(W.shape, W.dtype, part), MESH, spec)
    same(placed, W)
    assert len(asked) == len(set(asked)) == placed.size // placed.addressable_data(0).size


def test_an_error_of_the_callback_names_the_leaf():
    with pytest.raises(ZeroDivisionError, match=r"c: raised by the function for the piece at \(sl"):
        mw.shard({"c": mw.FromCallback((8, 8), "float32", lambda index: 1 / 0)}, MESH)


@pytest.mark.parametrize(
    ("shape", "dtype", "fn", "message"),
    [
        (8, "float32", W.__getitem__, r"^FromCallback: 8 is not a shape, e\.g\. \(1024, 4096\)\.$"),
        ((8, -1), "float32", W.__getitem__, r"^FromCallback: \(8, -1\) is not a shape"),
        ((8.0,), "float32", W.__getitem__, r"^FromCallback: \(8\.0,\) is not a shape"),
        (
            (8,),
            "flot32",
            W.__getitem__,
            r"^FromCallback: 'flot32' is not a dtype, e\.g\. 'float32'",
        ),
        ((8,), None, W.__getitem__, r"^FromCallback: None is not a dtype"),
        ((8,), "float32", 3, r"^FromCallback: 3 is not a function\. Pass one that takes an index"),
    ],
)
def test_a_callback_that_cannot_be_is_refused_when_made(shape, dtype, fn, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.FromCallback(shape, dtype, fn)


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
            mw.errors.PartitionError,
            match=rf"w: {dtype} would become {kept}\. Convert it, enable jax_enable_x64, or pass",
        ):
            mw.shard({"w": leaf}, mesh)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("form", ["array", "callback"])
def test_values_are_narrowed_when_asked(dtype, form):
    array = W.astype(dtype)
    leaf = array if form == "array" else mw.FromCallback(W.shape, dtype, lambda index: array[index])
    placed = mw.shard({"w": leaf}, MESH, narrow="convert", min_shard_bytes=0)["w"]
    assert not placed.sharding.is_fully_replicated
    assert placed.dtype == jax.dtypes.canonicalize_dtype(dtype)
    same(placed, W)
    abstract = mw.shard({"w": leaf}, MESH.abstract_mesh, narrow="convert")["w"]
    assert abstract.dtype == placed.dtype


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([2**40], 2**40, 2**40), ([0, -(2**31) - 1], -(2**31) - 1, 0), ([2**31], 2**31, 2**31)],
)
@pytest.mark.parametrize("form", ["array", "callback", "big-endian"])
def test_integers_that_do_not_fit_are_refused_all_the_same(values, low, high, form):
    leaf = array = np.array(values)
    if form == "callback":
        leaf = mw.FromCallback(array.shape, array.dtype, lambda index: array[index])
    elif form == "big-endian":
        leaf = array.astype(">i8")
    message = rf"holds integers from {low} to {high}, and int32 only those from -2147483648 to"
    with pytest.raises(mw.errors.PartitionError, match=rf"a: .*{message} 2147483647"):
        mw.shard({"a": leaf}, MESH, narrow="convert")


def test_integers_at_the_edge_are_converted():
    edges = np.array([-(2**31), 2**31 - 1])
    same(mw.shard({"a": edges}, MESH, narrow="convert")["a"], edges)
    whole = np.array([2**32 - 1], np.uint64)
    same(mw.shard({"a": whole}, MESH, narrow="convert")["a"], whole)
    assert mw.shard(np.zeros((0, 8), np.int64), MESH, narrow="convert").dtype == np.int32


def test_with_64_bits_enabled_nothing_is_narrowed():
    with jax.enable_x64(True):
        placed = mw.shard({"w": W.astype("float64")}, MESH, min_shard_bytes=0)["w"]
        assert placed.dtype == np.float64


def test_narrow_takes_two_words():
    with pytest.raises(
        mw.errors.PartitionError, match=r"^narrow: True is not 'error' or 'convert'\.$"
    ):
        mw.shard({"w": W}, MESH, narrow=True)


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">c8", ">u2"])
def test_numbers_in_the_other_byte_order_are_placed_as_they_read(dtype):
    array = W.astype(dtype)
    callback = mw.FromCallback(W.shape, dtype, lambda index: array[index])
    for local in (False, True):
        placed = mw.shard({"a": array, "c": callback}, MESH, P("fsdp"), local=local)
        assert placed["a"].dtype == placed["c"].dtype == array.dtype.newbyteorder("=")
        same(placed["a"], W)
        same(placed["c"], W)


# What cannot be placed.


class OnDisk:
    """Like a dataset of h5py: it has a shape, and is read by slicing."""

    shape, dtype = W.shape, W.dtype

    def __getitem__(self, index):
        return W[index]


@pytest.mark.parametrize("value", [OnDisk(), jax.typeof(W)], ids=["on disk", "aval"])
def test_what_only_has_a_shape_says_how_to_read_it(value):
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"w: \w+ has a shape but is no array\. Read it with numpy\.asarray\(x\), or in "
        r"pieces with FromCallback",
    ):
        mw.shard({"w": value}, MESH)
    if isinstance(value, OnDisk):
        pieces = mw.FromCallback(value.shape, value.dtype, lambda index: value[index])
        same(mw.shard(pieces, MESH, P("tp")), W)


def test_under_jit_the_message_says_what_to_use():
    with pytest.raises(
        mw.errors.PartitionError,
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
    with pytest.raises(mw.errors.PartitionError, match="2 problems") as caught:
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
            mw.errors.PartitionError,
            match=r"w: .* cannot be placed\. Make it an array of numbers first",
        ):
            mw.shard({"w": value}, MESH, narrow=narrow)


# Specs that do not fit.


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": P()}, "First difference: 'b/0' has no spec."),
        ({"a": P(), "b": [P(), P()]}, "First difference: 'b/1' has a spec but is not in the tree."),
        ({"a": P(), "b": (P(),)}, "same leaves in containers of different kinds"),
    ],
)
def test_specs_in_another_tree_name_the_first_difference(specs, message):
    with pytest.raises(mw.errors.PartitionError, match=rf"^specs: .*{message}"):
        mw.shard({"a": W, "b": [W]}, MESH, specs)


@pytest.mark.parametrize(
    ("specs", "lines"),
    [
        (
            {"a": P(), "b": [None]},
            [
                "b/0: None is not a PartitionSpec. Use PartitionSpec() for an array that is "
                "replicated."
            ],
        ),
        ({"a": 2, "b": [3]}, ["a: 2 is not a PartitionSpec.", "b/0: 3 is not a PartitionSpec."]),
        (
            {"a": ("fsdp",), "b": [[None, ["fsdp", "tp"]]]},
            [
                "a: ('fsdp',) is not a PartitionSpec. Write P('fsdp').",
                "b/0: [None, ['fsdp', 'tp']] is not a PartitionSpec. "
                "Write P(None, ('fsdp', 'tp')).",
            ],
        ),
        (
            {"a": "tp", "b": ["fsdp"]},
            [
                "a: 'tp' is not a PartitionSpec. Write P('tp').",
                "b/0: 'fsdp' is not a PartitionSpec. Write P('fsdp').",
            ],
        ),
    ],
)
def test_every_leaf_without_a_spec_is_named_with_what_to_write(specs, lines):
    with pytest.raises(mw.errors.PartitionError, match=r"^specs: \d problems?\.\n") as caught:
        mw.shard({"a": W, "b": [W]}, MESH, specs)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == lines


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("fsdp", r"^specs: 'fsdp' is not a PartitionSpec\. Write P\('fsdp'\)\.$"),
        (("tp", None), r"^specs: \('tp', None\) is not a PartitionSpec\. Write P\('tp', None\)\.$"),
    ],
)
def test_names_in_place_of_one_spec_for_all_say_what_to_write(specs, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.shard({"a": W, "b": [W]}, MESH, specs)


def test_how_many_more_have_no_spec_is_said():
    with pytest.raises(mw.errors.PartitionError, match="'a' has no spec, nor have 2 more"):
        mw.shard({"a": W, "b": W, "c": W}, MESH, {})


# Shardings in place of specs.


def test_shardings_of_the_mesh_are_taken_for_specs():
    tree = {"a": W, "b": [W.T], "n": 3}
    shardings = mw.shardings(tree, MESH, min_shard_bytes=0)
    assert not shardings["a"].is_fully_replicated
    for placed in (
        mw.shard(tree, MESH, shardings),
        mw.shard(tree, MESH, shardings, local=True),
        mw.reshard(tree, MESH, shardings),
        mw.init(
            lambda: {"a": jnp.ones(W.shape), "b": [jnp.ones(W.T.shape)], "n": 3},
            mesh=MESH,
            specs=shardings,
        ),
    ):
        assert placed["a"].sharding == shardings["a"]
        assert placed["b"][0].sharding == shardings["b"][0]
    one = NamedSharding(MESH, P("tp"))
    assert mw.shard(tree, MESH, one)["a"].sharding == one
    assert mw.MeshPartitionHelper(MESH).shard_array(W, one).sharding == one
    assert mw.partition_like(tree, tree, shardings)["a"] == shardings["a"].spec


def test_shardings_of_another_mesh_are_all_refused():
    other, few = mw.mesh("tp:8"), Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("fsdp", "tp"))
    specs = {"a": NamedSharding(other, P("tp")), "b": NamedSharding(few, P()), "c": P()}
    calls = (
        lambda: mw.shard({"a": W, "b": W, "c": W}, MESH, specs),
        lambda: mw.reshard({"a": W, "b": W, "c": W}, MESH, specs),
        lambda: mw.init(lambda: {"a": 0, "b": 0, "c": 0}, mesh=MESH, specs=specs),
    )
    for call in calls:
        with pytest.raises(mw.errors.PartitionError, match=r"specs: 2 problems") as caught:
            call()
        text = str(caught.value)
        assert "a: a sharding on the mesh 'tp:8', but the mesh is 'fsdp:4, tp:2'. Pass its" in text
        assert "b: a sharding on another mesh 'fsdp:4, tp:2', of other devices, another ord" in text


def test_a_sharding_in_other_memory_is_refused():
    there = NamedSharding(MESH, P(), memory_kind="pinned_host")
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"specs: a sharding in memory 'pinned_host'; arrays go to 'device'",
    ):
        mw.shard({"a": W}, MESH, there)


def test_the_first_difference_of_a_large_tree_is_found():
    tree = {f"w{place:05}": W[0] for place in range(10_000)}
    specs = {key: P() for key in tree if key != "w07777"}
    with pytest.raises(mw.errors.PartitionError, match="First difference: 'w07777' has no spec"):
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
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.shard({"w": W}, MESH, {"w": spec})


def test_every_leaf_that_does_not_divide_is_named():
    tree = {"a": np.ones((6, 8), "f4"), "b": [np.ones((8, 3), "f4")], "c": np.ones((8, 8), "f4")}
    with pytest.raises(
        mw.errors.PartitionError, match="shard: 2 problems, nothing was placed"
    ) as caught:
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
        with pytest.raises(mw.errors.PartitionError):
            mw.shard(tree, MESH, specs)
    assert asked == []
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_options_of_partition_do_not_go_with_specs():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^rules, uneven: options of partition, but specs were given\.$",
    ):
        mw.shard({"w": W}, MESH, P(), rules=[], uneven="replicate")


# Parts of a process; several processes have tests of their own.


def test_in_one_process_a_local_part_is_the_whole():
    placed = mw.shard({"w": W}, MESH, P("fsdp"), local=True)["w"]
    assert placed.sharding == NamedSharding(MESH, P("fsdp"))
    same(placed, W)


def test_a_local_part_needs_specs_that_fit():
    with pytest.raises(
        mw.errors.PartitionError, match=r"^local=True needs specs: a part does not tell"
    ):
        mw.shard({"w": W}, MESH, local=True)
    with pytest.raises(
        mw.errors.PartitionError, match=r"w: dim 0: no mesh axis 'fspd' in fsdp, tp"
    ):
        mw.shard({"w": W}, MESH, P("fspd"), local=True)


def test_parts_that_do_not_divide_are_all_named_and_none_is_placed():
    gc.collect()
    before = len(jax.live_arrays())
    tree = {"a": W, "x": np.ones((9, 4), "float32"), "y": np.ones((4, 3), "float32")}
    specs = {"a": P("fsdp"), "x": P("fsdp"), "y": P(None, "tp")}
    with pytest.raises(
        mw.errors.PartitionError, match=r"^shard: 2 problems, nothing was placed"
    ) as caught:
        mw.shard(tree, MESH, specs, local=True)
    assert (
        "x: dim 0: this process's part has size 9, not divisible by the 4 pieces it holds (axes "
        "fsdp). Pad it to 12, or drop the last batch." in str(caught.value)
    )
    assert "y: dim 1: this process's part has size 3, not divisible by the 2 pieces" in str(
        caught.value
    )
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    ("held", "count", "shares"),
    [
        ({0: {0, 1}, 1: {2, 3}}, 4, [2, 2]),
        ({0: {0, 2}, 1: {1, 3}}, 4, [2, 2]),
        ({0: {0}, 1: {0}, 2: {1}, 3: {1}}, 2, [1, 1, 1, 1]),
        ({0: {0, 1}, 1: {0, 1}}, 2, [2, 2]),
        ({0: {0, 1}, 1: {1, 2}}, 3, [None, None]),
        ({0: {0, 1}, 1: {2}}, 3, [None, None]),
    ],
)
def test_a_process_holds_an_equal_share_or_none_can_be_told(held, count, shares):
    assert [device_put.share(held, count, process) for process in held] == shares


def test_an_array_from_a_callback_has_a_short_repr():
    lazy = mw.FromCallback((8,) * 99, "float32", lambda index: np.zeros((8,) * 99)[index])
    assert repr(mw.FromCallback((8, 6), "float32", len)) == "<FromCallback float32[8, 6]>"
    assert len(repr(lazy)) <= 200


def test_parts_that_overlap_are_refused(monkeypatch):
    monkeypatch.setattr(device_put, "_pieces_here", lambda mesh, entry: None)
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"w: dim 0: axes fsdp, tp do not give every process an equal part of its own\. Put",
    ):
        mw.shard({"w": W}, MESH, P(("fsdp", "tp")), local=True)


def test_beside_parts_a_callback_tells_its_whole_shape():
    callback = mw.FromCallback((9, 4), "float32", lambda index: 1 / 0)
    with pytest.raises(mw.errors.PartitionError, match="c: dim 0 has size 9, not divisible by 4"):
        mw.shard({"c": callback}, MESH, P("fsdp"), local=True)


def test_local_is_true_or_false():
    with pytest.raises(mw.errors.MeshwrightError, match=r"^local: 'yes' is not True or False\.$"):
        mw.shard({"w": W}, MESH, P(), local="yes")


# Arrays that stand in a tree twice.


@pytest.mark.parametrize(
    "array", [W, jnp.asarray(W), mw.FromCallback(W.shape, W.dtype, W.__getitem__)]
)
def test_an_array_that_stands_there_twice_is_placed_once(array):
    tree = {"a": array, "b": [array], "c": array}
    placed = mw.shard(tree, MESH, {"a": P("fsdp"), "b": [P("fsdp")], "c": P("tp")})
    assert placed["a"] is placed["b"][0]
    assert placed["c"] is not placed["a"]
    assert placed["c"].sharding.spec == P("tp")
    same(placed["c"], W)


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones((8, 8)))
        self.b = self.a
        self.c = nnx.Param(jnp.ones((8, 8)))


def test_variables_of_nnx_that_are_tied_are_refused_by_name():
    match = (
        r"1 problem, nothing was placed\.\n  b: the same variable as a, and two would come back\. "
    )
    for call in (
        lambda: mw.shard(Tied(), MESH),
        lambda: mw.reshard(Tied(), MESH, P()),
        lambda: mw.init(Tied, mesh=MESH),
        lambda: mw.MeshPartitionHelper(MESH).auto_shard_pytree(Tied()),
    ):
        with pytest.raises(mw.errors.PartitionError, match=match + r"Pass nnx\.state\(model\)"):
            call()


def test_tied_variables_stay_tied_as_the_message_says():
    model = Tied()
    nnx.update(model, mw.shard(nnx.state(model), MESH, P("tp")))
    assert model.a is model.b
    assert model.b.get_value().sharding == NamedSharding(MESH, P("tp"))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_axis_types_do_not_matter(kind):
    mesh = mw.mesh("fsdp:4, tp:2", axis_types=kind)
    placed = mw.shard({"w": W}, mesh, P("tp", "fsdp"))["w"]
    assert placed.sharding == NamedSharding(mesh, P("tp", "fsdp"))
    same(placed, W)


def test_containers_are_kept():
    tree = collections.OrderedDict(b=W, a=(W, [W]))
    placed = mw.shard(tree, MESH, min_shard_bytes=0)
    assert jax.tree.structure(placed) == jax.tree.structure(tree)


def test_messages_name_a_single_array_too():
    with pytest.raises(
        mw.errors.PartitionError, match=re.escape("(the array): float64 would become")
    ):
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
