"""`MeshPartitionHelper`: the contract, member by member, and the faults it must not have."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.create_mesh((1, 4, 1, 2, 1))
FULL = mw.create_mesh((1, 2, 1, 2, 2))
shapes = st.lists(st.sampled_from([1, 2, 3, 5, 6, 8, 96, 129, 1024]), max_size=4).map(tuple)


def used(spec):
    return [
        axis
        for entry in spec
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    ]


def test_the_mesh_and_its_axis_sizes_are_there():
    helper = mw.MeshPartitionHelper(MESH)
    assert helper.mesh is MESH
    assert helper.axis_sizes == {"dp": 1, "fsdp": 4, "ep": 1, "tp": 2, "sp": 1}


def test_what_is_no_mesh_is_refused():
    with pytest.raises(
        mw.errors.PartitionError, match=r"^mesh: 'fsdp:8' is not a jax.sharding.Mesh"
    ):
        mw.MeshPartitionHelper("fsdp:8")


def test_analyze_lists_every_distinct_shape_once():
    tree = {
        "a": jnp.ones((1024, 4096)),
        "b": np.ones((1024, 4096)),
        "c": jax.ShapeDtypeStruct((64,), "float32"),
        "s": np.float32(1),
        "note": "x",
    }
    found = mw.MeshPartitionHelper(FULL).analyze_pytree(tree)
    assert found == {
        (1024, 4096): [("fsdp", "sp"), ("tp",)],
        (64,): [("fsdp", "sp"), ("tp",)],
        (): [],
    }


def test_methods_are_axes_used_together_best_first():
    assert mw.MeshPartitionHelper(MESH)._suggest_methods((1024, 4096)) == [("fsdp",), ("tp",)]
    deep = mw.MeshPartitionHelper(mw.abstract_mesh("fsdp:2, ep:2, tp:2"))
    assert deep._suggest_methods((8, 64, 64)) == [("ep",), ("fsdp",), ("tp",)]
    assert deep._suggest_methods((64, 64)) == [("fsdp",), ("tp",), ("ep",)]


def test_suggested_methods_may_be_changed_without_harm():
    helper = mw.MeshPartitionHelper(MESH)
    helper._suggest_methods((8, 8)).clear()
    assert helper._suggest_methods((8, 8)) == [("fsdp",), ("tp",)]


def test_a_weight_gets_both_axes():
    helper = mw.MeshPartitionHelper(MESH)
    spec = helper.create_partition_spec((1024, 4096), [("fsdp",), ("tp",)])
    assert spec == P("fsdp", "tp")


def test_axes_that_belong_together_share_a_dim():
    helper = mw.MeshPartitionHelper(FULL)
    spec = helper.create_partition_spec((1024, 4096), [("fsdp", "sp"), ("tp",)])
    assert spec == P(("fsdp", "sp"), "tp")


def test_scalars_and_what_does_not_fit_get_the_empty_spec():
    helper = mw.MeshPartitionHelper(MESH)
    methods = [("fsdp",), ("tp",)]
    assert helper.create_partition_spec((), methods) == P()
    assert helper.create_partition_spec((1023, 4095), methods) == P()
    assert helper.create_partition_spec((1024, 4096), []) == P()


def test_a_method_may_be_one_name():
    helper = mw.MeshPartitionHelper(MESH)
    assert helper.create_partition_spec([1024, 4096], ["tp"]) == P(None, "tp")


def test_unknown_and_repeated_axes_are_refused():
    helper = mw.MeshPartitionHelper(MESH)
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^methods: no mesh axis 'fdsp' in dp, fsdp, ep, tp, sp\. Did you mean 'fsdp'\?",
    ):
        helper.create_partition_spec((1024, 4096), [("fdsp",)])
    with pytest.raises(mw.errors.PartitionError, match=r"^methods: axis 'tp' appears twice\.$"):
        helper.create_partition_spec((1024, 4096), [("tp",), ("fsdp", "tp")])


def test_axes_of_size_one_never_appear():
    helper = mw.MeshPartitionHelper(MESH)
    every = [("dp",), ("fsdp", "sp"), ("ep",), ("tp",)]
    assert set(used(helper.create_partition_spec((1024, 4096, 8), every))) == {"fsdp", "tp"}
    assert all("ep" not in method for method in helper._suggest_methods((8, 8, 8)))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(shapes)
def test_fault_dims_that_do_not_divide_get_no_axis(shape):
    helper = mw.MeshPartitionHelper(FULL)
    spec = helper.create_partition_spec(shape, helper._suggest_methods(shape), min_shard_size=0)
    NamedSharding(FULL, spec).shard_shape(shape)  # raises where a dim does not divide
    for side, entry in zip(shape, spec, strict=False):
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        assert side % math.prod(helper.axis_sizes[name] for name in names) == 0


def test_fault_a_weight_uses_tp_although_fsdp_and_sp_are_there():
    helper = mw.MeshPartitionHelper(FULL)
    for shape in [(1024, 4096), (4096, 1024), (4096, 4096), (64, 32)]:
        spec = helper.create_partition_spec(shape, helper._suggest_methods(shape))
        assert set(used(spec)) == {"fsdp", "sp", "tp"}, shape


def test_fault_the_limit_counts_elements_not_dims():
    helper = mw.MeshPartitionHelper(MESH)
    methods = [("fsdp",), ("tp",)]
    # Every dim is below the limit, the count is not; and the other way round.
    assert helper.create_partition_spec((64, 64), methods, min_shard_size=4096) != P()
    assert helper.create_partition_spec((64, 64), methods, min_shard_size=4097) == P()
    assert helper.create_partition_spec((512, 2), methods) != P()
    assert helper.create_partition_spec((511, 2), methods) == P()


def test_fault_abstract_arrays_are_taken():
    tree = {"w": jax.ShapeDtypeStruct((1024, 4096), "bfloat16")}
    helper = mw.MeshPartitionHelper(MESH)
    assert helper.analyze_pytree(tree) == {(1024, 4096): [("fsdp",), ("tp",)]}
    placed = helper.auto_shard_pytree(tree)["w"]
    assert placed.sharding == NamedSharding(MESH, P("fsdp", "tp"))
    assert (placed.shape, placed.dtype) == ((1024, 4096), jnp.bfloat16)


def test_fault_a_whole_tree_is_one_transfer(monkeypatch):
    calls = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *a, **k: calls.append(a) or put(*a, **k))
    tree = {f"w{place}": np.ones((32, 32), np.float32) for place in range(50)}
    placed = mw.MeshPartitionHelper(MESH).auto_shard_pytree(tree)
    assert len(calls) == 1
    assert len(placed) == 50


def test_auto_shard_places_every_array_and_keeps_the_rest():
    tree = {
        "w": np.arange(1024 * 64, dtype=np.float32).reshape(1024, 64),
        "b": jnp.arange(8.0),
        "key": jax.random.key(0),
        "act": jnp.tanh,
        "n": 3,
    }
    placed = mw.MeshPartitionHelper(MESH).auto_shard_pytree(tree)
    assert set(used(placed["w"].sharding.spec)) == {"fsdp", "tp"}
    assert placed["b"].sharding == NamedSharding(MESH, P())  # fewer elements than the limit
    assert placed["key"].sharding.is_fully_replicated
    assert placed["act"] is jnp.tanh and placed["n"] == 3
    np.testing.assert_array_equal(placed["w"], tree["w"])
    np.testing.assert_array_equal(placed["b"], tree["b"])


def test_auto_shard_takes_the_limit():
    helper = mw.MeshPartitionHelper(MESH)
    tree = {"b": np.ones(64, np.float32)}
    assert helper.auto_shard_pytree(tree)["b"].sharding.spec == P()
    assert helper.auto_shard_pytree(tree, min_shard_size=64)["b"].sharding.spec != P()
    assert helper.auto_shard_pytree(tree, 65)["b"].sharding.spec == P()


def test_auto_shard_refuses_what_it_would_narrow():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^auto_shard_pytree: 1 problem, nothing was placed\.\n  w: float64 would become "
        r"float32\. Convert it, enable jax_enable_x64, or make the helper with narrow='convert'\.$",
    ):
        mw.MeshPartitionHelper(MESH).auto_shard_pytree({"w": np.ones((64, 64))})


def test_shard_array_places_one_array():
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    placed = mw.MeshPartitionHelper(MESH).shard_array(array, P("fsdp", "tp"))
    assert placed.sharding == NamedSharding(MESH, P("fsdp", "tp"))
    np.testing.assert_array_equal(placed, array)


@pytest.mark.parametrize(
    ("array", "spec", "message"),
    [
        (np.ones((6, 8), "float32"), P("fsdp"), r"\(the array\): dim 0 has size 6, not divisible"),
        (np.ones(8, "float32"), P("tpp"), r"no mesh axis 'tpp' in .* Did you mean 'tp'\?"),
        (np.ones(8, "float32"), P("tp", "fsdp"), "has 2 entries for an array with 1 dim"),
        (np.ones(8, "float32"), ("tp",), r"\('tp',\) is not a PartitionSpec"),
        ([np.ones(8, "float32")], P(), "is not one array"),
        (3, P(), "3 is not one array"),
    ],
)
def test_shard_array_says_what_does_not_fit(array, spec, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.MeshPartitionHelper(MESH).shard_array(array, spec)


def test_shard_array_names_itself():
    helper = mw.MeshPartitionHelper(MESH)
    for array, spec, message in [
        (
            np.ones(8),
            P(),
            r"float64 would become float32\. Convert it, enable jax_enable_x64, or make the helper "
            r"with narrow='convert'\.$",
        ),
        (np.ones(8, "float32"), P(P.UNCONSTRAINED), "leaves a dim unconstrained"),
    ]:
        with pytest.raises(
            mw.errors.PartitionError, match=rf"^shard_array: 1 problem, .*\n  .*{message}"
        ):
            helper.shard_array(array, spec)


@pytest.mark.parametrize(
    "shape", [1024, "a", None, (-1, 4), (1024.0,), (True, 8), {8: 8}, np.ones(2)], ids=repr
)
def test_what_is_no_shape_is_refused(shape):
    helper = mw.MeshPartitionHelper(MESH)
    for call in (
        lambda: helper.create_partition_spec(shape, []),
        lambda: helper._suggest_methods(shape),
    ):
        with pytest.raises(
            mw.errors.PartitionError, match=r"^array_shape: .* is not a shape, e\.g\. \(1024"
        ):
            call()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (None, r"^methods: None is not a list such as \[\('fsdp',\), \('tp',\)\]\.$"),
        ("tp", r"^methods: 'tp' is not a list such as"),
        ([3], r"^methods: 3 is not a tuple of mesh axes\.$"),
        ([("tp", None)], r"^methods: no mesh axis None in dp"),
    ],
)
def test_what_are_no_methods_is_refused(methods, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.MeshPartitionHelper(MESH).create_partition_spec((8, 8), methods)


@pytest.mark.parametrize("size", [None, "1024", -1, 2.5, True])
def test_what_is_no_limit_is_refused(size):
    helper = mw.MeshPartitionHelper(MESH)
    with pytest.raises(mw.errors.PartitionError, match=r"^min_shard_size: "):
        helper.create_partition_spec((8, 8), [("tp",)], size)
    with pytest.raises(mw.errors.PartitionError, match=r"^min_shard_size: "):
        helper.auto_shard_pytree({"w": np.ones((8, 8), "float32")}, size)


def test_a_helper_shows_its_axes():
    assert repr(mw.MeshPartitionHelper(mw.mesh("fsdp:4, tp:2"))) == (
        "<MeshPartitionHelper fsdp:4, tp:2>"
    )


def test_64_bit_arrays_are_converted_on_request():
    helper = mw.MeshPartitionHelper(MESH, narrow="convert")
    tree = {"w": np.ones((64, 64)), "ids": np.arange(4096)}
    placed = helper.auto_shard_pytree(tree)
    assert placed["w"].dtype == np.float32
    assert placed["ids"].dtype == np.int32
    assert np.array_equal(placed["ids"], tree["ids"])
    assert helper.shard_array(tree["w"], P("fsdp")).dtype == np.float32
    with pytest.raises(mw.errors.PartitionError, match=r"ids: holds integers from 0 to 4294967296"):
        helper.auto_shard_pytree({"ids": np.array([0, 2**32])})
    with pytest.raises(mw.errors.PartitionError, match="narrow: True is not 'error' or 'convert'"):
        mw.MeshPartitionHelper(MESH, narrow=True)
