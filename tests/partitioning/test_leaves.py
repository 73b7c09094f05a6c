"""What counts as an array of a tree, what passes through, and where it is said to stand."""

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import LONGEST_MESSAGE
from meshwright.partitioning.leaves import bits, walk

MESH = mw.mesh("fsdp:4, tp:2")


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any


class Model(eqx.Module):
    weight: jax.Array
    act: Any


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.ones((64, 64)),
        np.ones((64, 64), np.float32),
        np.ones((64, 64), np.float64),
        jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        jax.random.split(jax.random.key(0), (64, 64)),
        jnp.ones((64, 64), jnp.int4),
        np.ones((64, 64), jnp.uint4),
        jnp.ones((64, 64), jnp.float8_e4m3fn),
        np.ones((64, 64), bool),
        np.ones((64, 64), np.complex64),
        mw.FromCallback((64, 64), "float32", lambda index: None),
    ],
    ids=lambda leaf: f"{type(leaf).__name__} of {leaf.dtype}",
)
@pytest.mark.parametrize("mesh", [MESH, MESH.abstract_mesh], ids=["mesh", "abstract mesh"])
def test_every_kind_of_array_gets_a_spec(leaf, mesh):
    spec = mw.partition({"w": leaf}, mesh, rules={"w": ("fsdp", "tp")})["w"]
    assert spec == P("fsdp", "tp")
    by_shape = mw.partition({"w": leaf}, mesh)["w"]
    assert isinstance(by_shape, P) and len(by_shape) > 0


def test_other_leaves_pass_through_as_they_are():
    others = {"i": 3, "f": 2.5, "b": True, "s": "gelu", "fn": jnp.tanh, "t": jnp.float32, "n": None}
    assert mw.partition(others, MESH) == others
    assert mw.partition({**others, "w": np.ones((64, 64))}, MESH)["fn"] is jnp.tanh


def test_a_tree_without_arrays_stays_as_it_is():
    assert mw.partition({}, MESH) == {}
    assert mw.partition(None, MESH) is None
    assert mw.shardings([[], {}], MESH) == [[], {}]


def test_a_single_array_is_a_tree():
    assert mw.partition(np.ones((1024, 4096)), MESH) == P("fsdp", "tp")
    assert mw.partition(np.float32(1), MESH, min_shard_size=0) == P()


def test_the_result_has_the_containers_of_the_tree():
    array = jax.ShapeDtypeStruct((1024, 4096), "float32")
    spec = P("fsdp", "tp")
    for tree, expected in [
        (Pair(array, [array]), Pair(spec, [spec])),
        (Layer(array), Layer(spec)),
        (collections.OrderedDict(w=array), collections.OrderedDict(w=spec)),
    ]:
        assert mw.partition(tree, MESH) == expected


def test_a_module_with_functions_keeps_them():
    model = Model(jnp.ones((1024, 4096)), jnp.tanh)
    specs = mw.partition(model, MESH)
    assert specs.weight == P("fsdp", "tp")
    assert specs.act is jnp.tanh


def test_paths_are_words_joined_by_slashes():
    array = np.ones(2)
    tree = {"a": [array, Pair(array, Layer(array))], "b": {7: array, 8: 3}}
    paths = [leaf.path for leaf in walk(tree).arrays]
    assert paths == ["a/0", "a/1/first", "a/1/second/kernel", "b/7"]


def test_shardings_are_the_specs_on_the_mesh():
    tree = {"w": np.ones((1024, 4096)), "note": "x"}
    found = mw.shardings(tree, MESH)
    assert found["w"] == jax.NamedSharding(MESH, mw.partition(tree, MESH)["w"])
    assert found["note"] == "x"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 32),
        (jnp.bfloat16, 16),
        (jnp.float8_e5m2, 8),
        (jnp.int4, 4),
        (jnp.uint4, 4),
        (jnp.int2, 2),
        (jnp.float4_e2m1fn, 4),
        ("bool", 8),
        ("complex64", 64),
        (jax.random.key(0).dtype, 64),
    ],
    ids=str,
)
def test_bits_of_an_element(dtype, size):
    assert bits(dtype) == size


def test_odd_counts_of_half_bytes_round_up():
    (leaf,) = walk(jax.ShapeDtypeStruct((3,), jnp.int4)).arrays
    assert leaf.bytes == 2


@pytest.mark.parametrize("mesh", [None, "fsdp:8", 8, jax.devices()])
def test_what_is_no_mesh_is_refused(mesh):
    for call in (mw.partition, mw.shardings, mw.shard, mw.describe):
        with pytest.raises(
            mw.PartitionError, match=r"^mesh: .* is not a jax.sharding.Mesh or AbstractMesh\. Make"
        ):
            call({"w": np.ones((64, 64), "float32")}, mesh)


def test_thousands_of_bad_leaves_fit_on_a_screen():
    tree = {f"layer{place}": np.ones((6, 6)) for place in range(5000)}
    with pytest.raises(mw.PartitionError, match="5000 problems, nothing was placed") as caught:
        mw.partition(tree, MESH, rules=[("**", "fsdp")])
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    assert re.search(r"and 4994 more$", message)


def test_a_single_array_is_called_so_in_messages():
    with pytest.raises(mw.PartitionError, match=r"\(the array\): dim 0 has size 6"):
        mw.partition(np.ones((6, 6)), MESH, rules=[("**", "fsdp")])
