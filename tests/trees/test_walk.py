"""What counts as an array of a tree, what passes through, and where it is said to stand."""

import collections
import dataclasses
import re
import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import LONGEST_MESSAGE
from meshwright.trees.split import split_arrays
from meshwright.trees.walk import bits, is_key, walk

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
    by_shape = mw.partition({"w": leaf}, mesh, min_shard_bytes=0)["w"]
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
    assert mw.partition(np.float32(1), MESH, min_shard_bytes=0) == P()


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
    for call in (mw.partition, mw.shardings, mw.shard, mw.explain):
        with pytest.raises(
            mw.errors.PartitionError,
            match=r"^mesh: .* is not a jax.sharding.Mesh or AbstractMesh\. Make",
        ):
            call({"w": np.ones((64, 64), "float32")}, mesh)


def test_thousands_of_bad_leaves_fit_on_a_screen():
    tree = {f"layer{place}": np.ones((6, 6)) for place in range(5000)}
    with pytest.raises(mw.errors.PartitionError, match=r"^partition: 5000 problems\.\n") as caught:
        mw.partition(tree, MESH, rules=[("**", "fsdp")])
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    assert re.search(r"and 4994 more$", message)


def test_a_single_array_is_called_so_in_messages():
    with pytest.raises(mw.errors.PartitionError, match=r"\(the array\): dim 0 has size 6"):
        mw.partition(np.ones((6, 6)), MESH, rules=[("**", "fsdp")])


# What cannot be walked or put together, and paths that are hard to print.


def test_keys_without_an_order_name_the_dict():
    array = np.ones(8, "float32")
    match = r"^b/1: a dict with keys that have no order, \[0, '1'\]\. Use keys of one kind"
    for call in (mw.partition, mw.shard, mw.explain):
        with pytest.raises(mw.errors.PartitionError, match=match):
            call({"a": array, "b": [array, {0: array, "1": array}]}, MESH)


def test_a_tree_that_is_too_deep_is_refused():
    deep = np.ones(8, "float32")
    for _ in range(3000):
        deep = {"a": deep}
    around = []
    around.append(around)
    message = r"^tree: nested too deeply, or inside itself"
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition(around, MESH)
    if sys.version_info < (3, 12):  # later ones walk deeper
        with pytest.raises(mw.errors.PartitionError, match=message):
            mw.partition(deep, MESH)


@jax.tree_util.register_pytree_node_class
class Measured:
    """A node that looks at what it is given."""

    def __init__(self, x):
        self.x, self.shape_was = x, x.shape

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_node_that_refuses_specs_is_named():
    tree = {"a": [Measured(np.ones((128, 128), "float32"))], "b": np.ones(8, "float32")}
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^tree: a node of type Measured refuses leaves of type 'P\w*' "
        r"\(AttributeError: .*\)\. Pass its arrays as a plain dict\.$",
    ):
        mw.partition(tree, MESH)
    placed = mw.shard(tree, MESH)
    assert placed["a"][0].shape_was == (128, 128)


def test_keys_that_do_not_print_are_written_out():
    tree = {"red\x1b[31m": np.ones(8), "two\nlines": np.ones(8), "grün": np.ones(8)}
    paths = [leaf.path for leaf in walk(tree).arrays]
    assert paths == ["grün", "red\\x1b[31m", "two\\nlines"]
    with pytest.raises(
        mw.errors.PartitionError, match=r"\n  two\\nlines: \(8,\) matches no rule"
    ) as caught:
        mw.partition(tree, MESH, rules=[])
    assert "\x1b" not in str(caught.value)


def test_a_long_path_and_a_long_spec_leave_room_for_the_reason():
    tree = {"a" * 3000: {"z" * 3000: np.ones((6, 6), "float32")}}
    with pytest.raises(
        mw.errors.PartitionError, match=r"aaa \.\.\. zzz.*: dim 0 has size 6, not div"
    ):
        mw.shard(tree, MESH, P("fsdp"))
    spec = P(*[f"axis{place}" for place in range(500)])
    with pytest.raises(mw.errors.PartitionError, match=r"has 500 entries for an array with 2 dims"):
        mw.shard(np.ones((8, 8), "float32"), MESH, spec)


def test_only_what_places_says_that_nothing_was_placed():
    tree = {"w": np.ones((6, 6), "float32")}
    for call, said in ((mw.shard, True), (mw.explain, False)):
        with pytest.raises(mw.errors.PartitionError, match="1 problem") as caught:
            call(tree, MESH, P("fsdp"))
        assert ("nothing was placed" in str(caught.value)) is said


@pytest.mark.parametrize("uneven", ["error", "replicate"])
def test_specs_with_open_sums_are_refused(uneven):
    tree = {"w": np.ones((8, 8), "float32")}
    spec = P("fsdp", unreduced={"tp"})
    match = r"w: P\('fsdp',.* unreduced=\{'tp'\}.*\) asks for more than a split\. Name axes"
    with pytest.raises(mw.errors.PartitionError, match=match):
        mw.partition(tree, MESH, rules=[("w", spec)], uneven=uneven)
    for call in (mw.shard, mw.explain, mw.reshard):
        with pytest.raises(mw.errors.PartitionError, match=match):
            call(tree, MESH, spec)
    with pytest.raises(mw.errors.PartitionError, match="asks for more than a split"):
        mw.data_shard(MESH, spec)


STALE = """
import tempfile
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from jax.extend import backend
from jax.sharding import PartitionSpec as P
import meshwright as mw

mesh = mw.mesh("fsdp:4, tp:2")
tree = {"w": np.ones((128, 128), "float32")}
old = mw.shard(tree, mesh)
helper = mw.MeshPartitionHelper(mesh)
path = tempfile.mkdtemp() + "/"
mw.save_checkpoint(path + "before", old)
backend.clear_backends()
for call in (
    lambda: mw.partition(tree, mesh),
    lambda: mw.shard(tree, mesh),
    lambda: mw.shard(tree, mesh, P("tp"), local=True),
    lambda: mw.init(lambda: jax.numpy.ones((8, 8)), mesh=mesh),
    lambda: mw.reshard(tree, mesh, P("tp")),
    lambda: mw.shard_like(tree, old),
    lambda: mw.data_shard(mesh),
    lambda: helper.auto_shard_pytree(tree),
    lambda: helper.shard_array(tree["w"], P()),
    lambda: mw.restore_checkpoint(path + "before", old),
):
    try:
        print(call())
    except mw.errors.MeshError as error:
        assert "these 8 cpu devices belong to a backend that was reset" in str(error), error
        print("refused")
# What is left of the old arrays can be saved, and brought to the new devices.
mw.save_checkpoint(path + "after", old)
new = mw.shard(tree, mw.mesh("fsdp:4, tp:2"))
assert (np.asarray(mw.restore_checkpoint(path + "after", new)["w"]) == 1).all()
"""


def test_a_mesh_of_devices_that_are_gone_is_refused():
    found = subprocess.run(
        [sys.executable, "-c", STALE], capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["refused"] * 10


def test_reprs_stay_short_and_do_not_print_arrays():
    tree = {"w": np.ones((512, 512), "float32"), "b" * 1000: [np.ones(3)] * 1000, "act": "tanh"}
    walked, parts = walk(tree), split_arrays(tree)
    for value in (walked, parts, *walked.arrays):
        assert len(repr(value)) <= 200
    assert repr(walked) == "<Walk 1,001 arrays of 1,002>"
    assert repr(parts) == "<Split 1,001 arrays of 1,002>"
    assert repr(walk({"w": np.ones((2, 3))}).arrays[0]) == "<Leaf w: float64[2, 3]>"


def test_keys_are_told_by_their_dtype():
    assert is_key(jax.random.key(0).dtype)
    assert not is_key(jax.random.PRNGKey(0).dtype)
    assert not is_key("bfloat16")
