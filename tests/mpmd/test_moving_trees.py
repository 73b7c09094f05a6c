"""Whole trees go into groups and come back bit for bit; what cannot is refused at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_scripts import needs_clear_refs, run_script

import meshwright as mw
from meshwright import _compat
from meshwright.errors import GroupError, PartitionError
from meshwright.mpmd import assign
from meshwright.trees.split import broadcast_prefix

DTYPES = ("float32", "bfloat16", "int8", "complex64", "float8_e4m3fn", "uint16")
WHOLE = P()


def mesh(places, *sizes, names="ab"):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]))


ALL = mesh(range(8), 4, 2, names=("pp", "tp"))
CUT = mw.MpmdMesh(ALL, "pp")
LISTED = mw.MeshGroups([mesh((6, 1, 0, 3), 2, 2), mesh((4, 5), names="b"), mesh((7,), names="a")])


def pattern(shape, dtype="float32", seed=0):
    """Any bits: NaNs of all kinds, negative zeros, subnormals."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * jnp.dtype(dtype).itemsize)
    return np.frombuffer(raw, jnp.dtype(dtype)).reshape(shape)


def on(values, at=ALL, spec=WHOLE):
    return jax.make_array_from_callback(
        values.shape, NamedSharding(at, spec), lambda index: values[index], dtype=values.dtype
    )


def replicas(array):
    return list(array.arrays.values()) if isinstance(array, mw.MpmdArray) else [array]


def assert_is(array, values, groups=None, ids=None):
    """Every shard in every group holds exactly these bits; one group gives a plain array."""
    if ids is not None:
        assert isinstance(array, mw.MpmdArray if len(ids) > 1 else jax.Array)
        meshes = [part.sharding.mesh for part in replicas(array)]
        assert meshes == [groups.unstack[number] for number in ids]
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    for part in replicas(array):
        for shard in part.addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@st.composite
def journeys(draw):
    groups = draw(st.sampled_from([CUT, LISTED]))
    some = st.sets(st.integers(0, groups.mpmd_dim - 1), min_size=1)
    shapes = st.lists(st.sampled_from([0, 1, 4, 8]), max_size=3).map(tuple)
    leaf = st.tuples(shapes, st.sampled_from(DTYPES), some, st.booleans())
    return groups, draw(st.lists(leaf, min_size=1, max_size=4)), draw(st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(journeys())
def test_there_and_back_keeps_every_bit(journey):
    groups, leaves, donate = journey
    values = {str(n): pattern(leaf[0], leaf[1], n) for n, leaf in enumerate(leaves)}
    where = {str(n): leaf[2] for n, leaf in enumerate(leaves)}
    split = {str(n): P("tp") if leaf[3] and leaf[0] else P() for n, leaf in enumerate(leaves)}
    split = {n: P() if values[n].shape[:1] == (1,) else spec for n, spec in split.items()}
    tree = {n: on(value, ALL, split[n]) for n, value in values.items()}
    placed = mw.to_groups(tree, groups, where, donate=donate)
    for n, value in values.items():
        assert_is(placed[n], value, groups, sorted(where[n]))
        if not donate:
            assert_is(tree[n], value)
    back = mw.from_groups(placed, ALL, split, donate=donate)
    for n, value in values.items():
        assert_is(back[n], value)
        assert back[n].sharding == NamedSharding(ALL, split[n])
        if not donate:
            assert_is(placed[n], value)


A, B, C = (pattern((8, 4), seed=n) for n in range(3))
TREE = {"embed": A, "layers": [{"w": B}, {"w": C}]}


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        (2, [[2], [2], [2]]),
        (np.int32(2), [[2], [2], [2]]),
        ([3, 1], [[1, 3]] * 3),
        ({3, 1}, [[1, 3]] * 3),
        (range(4), [[0, 1, 2, 3]] * 3),
        ({"embed": 0, "layers": 3}, [[0], [3], [3]]),
        ({"embed": 0, "layers": [1, 2]}, [[0], [1], [2]]),
        ({"embed": 0, "layers": {1, 2}}, [[0], [1, 2], [1, 2]]),
        ({"embed": [0, 3], "layers": [1, {"w": (2, 3)}]}, [[0, 3], [1], [2, 3]]),
        ({"embed": (0,), "layers": [(0, 1), 1]}, [[0], [0, 1], [1]]),
        (lambda path: {"embed": [0, 3]}.get(path, 1), [[0, 3], [1], [1]]),
        (lambda path: int(path.split("/")[1]) if "/" in path else 2, [[2], [0], [1]]),
    ],
)
def test_where_is_said_in_many_ways(where, ids):
    placed = mw.to_groups(TREE, CUT, where)
    for array, values, numbers in zip(jax.tree.leaves(placed), (A, B, C), ids, strict=True):
        assert_is(array, values, CUT, numbers)


def test_groups_may_be_a_list_of_meshes():
    placed = mw.to_groups(TREE, LISTED.unstack, {"embed": {0, 2}, "layers": [1, 2]})
    assert_is(placed["embed"], A, LISTED, [0, 2])
    assert placed["embed"].sharding.mpmd_mesh == LISTED


def test_other_leaves_pass_through():
    tree = {"n": 3, "s": "text", "f": len, "none": None, "w": A}
    placed = mw.to_groups(tree, CUT, {"n": 0, "s": None, "f": "x", "none": None, "w": 1})
    assert (placed["n"], placed["s"], placed["f"], placed["none"]) == (3, "text", len, None)
    assert_is(placed["w"], A, CUT, [1])
    assert mw.to_groups({}, CUT, 0) == {}
    assert mw.from_groups({"n": 3}, ALL, WHOLE) == {"n": 3}


def test_a_model_is_a_tree():
    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return x

    placed = mw.to_groups(Model(jnp.asarray(A)), CUT, Model(2))
    assert_is(placed.w, A, CUT, [2])


def test_without_specs_each_group_decides_by_shape():
    big = np.ones((128, 128), np.float32)
    placed = mw.to_groups({"w": big, "b": big[0]}, CUT, {0, 2})
    inside = mw.partition({"w": big, "b": big[0]}, CUT.unstack[0])
    assert (
        {name: array.spec for name, array in placed.items()} == inside == {"w": P("tp"), "b": P()}
    )
    wide = mesh(range(4), 2, 2, names=("fsdp", "tp"))
    unlike = mw.MeshGroups([wide, mesh((4, 5), names=("tp",)), mesh((6, 7), names=("dp",))])
    array = mw.to_groups(big, unlike, {0, 1, 2})
    assert array.sharding.specs == tuple(mw.partition(big, part) for part in unlike.unstack)
    assert len(set(array.sharding.specs)) > 1


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        (P("tp"), [P("tp")] * 3),
        (P(("pp", "tp")), [P("tp")] * 3),
        ({"embed": P(), "layers": P(None, "tp")}, [P(), P(None, "tp"), P(None, "tp")]),
        ({"embed": P(), "layers": [P("tp"), P("pp", "tp")]}, [P(), P("tp"), P(None, "tp")]),
    ],
)
def test_specs_are_said_in_many_ways(specs, found):
    placed = mw.to_groups(TREE, CUT, {1, 2}, specs)
    assert [array.spec for array in jax.tree.leaves(placed)] == found
    assert_is(placed["embed"], A, CUT, [1, 2])


def test_groups_that_differ_have_specs_of_their_own():
    by_group = {0: P("a", "b"), 1: P(None, "b"), 2: P()}
    placed = mw.to_groups(TREE, LISTED, {"embed": {0, 1}, "layers": [1, 2]}, by_group)
    assert placed["embed"].sharding.specs == (P("a", "b"), P(None, "b"))
    assert [layer["w"].sharding.spec for layer in placed["layers"]] == [P(None, "b"), P()]
    nested = {"embed": by_group, "layers": P()}
    placed = mw.to_groups(TREE, LISTED, {"embed": {0, 1}, "layers": [1, 2]}, nested)
    assert placed["embed"].sharding.specs == (P("a", "b"), P(None, "b"))


def test_keys_go_and_come_back():
    keys = jax.random.split(jax.random.key(7), 8)
    data = np.asarray(jax.random.key_data(keys))
    placed = mw.to_groups({"k": keys, "one": jax.random.key(3)}, CUT, {0, 3})
    assert placed["k"].dtype == keys.dtype
    for group in (0, 3):
        assert np.array_equal(jax.random.key_data(placed["k"].on(group)), data)
    again = mw.to_groups(placed, CUT, {3}, donate=True)
    assert np.array_equal(jax.random.key_data(again["k"]), data)
    back = mw.from_groups(again, ALL, P(), donate=True)
    assert np.array_equal(jax.random.key_data(back["k"]), data)


def test_arrays_go_on_from_groups_to_groups():
    first = mw.to_groups(TREE, CUT, {"embed": {0, 1}, "layers": [0, 1]})
    second = mw.to_groups(first, CUT, {"embed": {1, 3}, "layers": [{0, 1}, 2]})
    assert_is(second["embed"], A, CUT, [1, 3])
    assert second["embed"].on(1) is first["embed"].on(1)
    assert_is(second["layers"][0]["w"], B, CUT, [0, 1])
    assert second["layers"][0]["w"].on(0) is first["layers"][0]["w"]
    third = mw.to_groups(second, LISTED, {0, 2}, P())
    assert_is(third["embed"], A, LISTED, [0, 2])
    assert_is(third["layers"][1]["w"], C, LISTED, [0, 2])


def test_an_array_held_twice_stays_one():
    array = on(A)
    placed = mw.to_groups([array, array, array], CUT, [1, 1, 2], donate=True)
    assert placed[0] is placed[1]
    assert_is(placed[2], A, CUT, [2])


def test_donated_arrays_are_given_up():
    tree = {"x": on(A, ALL, P("pp")), "y": on(B, ALL, P("tp", "pp")), "host": C}
    placed = mw.to_groups(tree, CUT, {"x": 1, "y": {0, 2, 3}, "host": {0, 1}}, P(), donate=True)
    assert tree["x"].is_deleted() and tree["y"].is_deleted()
    assert_is(placed["y"], B, CUT, [0, 2, 3])
    assert_is(placed["host"], C, CUT, [0, 1])
    back = mw.from_groups(placed, ALL, P("tp", "pp"), donate=True)
    assert placed["x"].is_deleted()
    assert all(part.is_deleted() for part in replicas(placed["y"]))
    assert_is(back["y"], B)


def test_without_donation_all_sources_live():
    tree = {"x": on(A, ALL, P("pp")), "y": on(B, ALL, P("tp", "pp"))}
    placed = mw.to_groups(tree, CUT, {0, 2})
    mw.from_groups(placed, ALL, P("tp"))
    for array, values in ((tree["x"], A), (tree["y"], B), (placed["x"], A), (placed["y"], B)):
        assert_is(array, values)


def test_a_source_lives_until_its_last_copy(monkeypatch):
    tied = on(A, ALL, P("pp"))
    tree = {"embed": tied, "w": on(B, ALL, P("pp")), "head": tied}
    seen, move = [], assign.move_batch
    monkeypatch.setattr(assign, "batches", lambda moves: ([one] for one in moves))
    monkeypatch.setattr(assign, "move_batch", lambda batch: seen.append(gone(tree)) or move(batch))
    placed = mw.to_groups(tree, CUT, {"embed": {0, 1}, "w": {1, 2}, "head": 3}, P(), donate=True)
    # In the order of the leaves: embed to two groups, head to one, w to two.
    assert seen == [(False, False)] * 3 + [(True, False)] * 2
    assert gone(tree) == (True, True)
    assert_is(placed["embed"], A, CUT, [0, 1])
    assert_is(placed["head"], A, CUT, [3])


def gone(tree):
    return tree["embed"].is_deleted(), tree["w"].is_deleted()


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("shape", [(8, 8), (1024, 640)])
def test_results_that_live_on_in_donated_memory_are_whole(shape):
    values = pattern(shape)
    array = on(values)
    placed = mw.to_groups(array, CUT, {1, 3}, P(), donate=True)
    assert pointers(placed.on(1)) == pointers(array)[2:4]
    assert_is(placed, values, CUT, [1, 3])
    kept = mw.to_groups(placed, CUT, 3, P(), donate=True)
    assert not array.is_deleted()
    assert_is(kept, values, CUT, [3])
    renamed = mesh((6, 7), names="z")
    assert_is(mw.from_groups(kept, renamed, P(), donate=True), values)


def test_donating_breaks_no_array_that_shares_memory():
    array = on(A, ALL, P("pp"))
    alias = jax.device_put(array, NamedSharding(mesh(range(8), 4, 2), P("a")))
    assert pointers(alias) == pointers(array)
    mw.to_groups(array, CUT, {0, 1}, P("tp"), donate=True)
    assert_is(alias, A)
    placed = mw.to_groups(A, CUT, {0, 1}, P("tp"))
    other = jax.device_put(placed.on(1), NamedSharding(mesh((2, 3), names="z"), P("z")))
    mw.from_groups(placed, mesh((7,)), P(), donate=True)
    assert placed.on(0).is_deleted()
    assert_is(other, A)


def test_donating_into_the_same_groups_keeps_what_lies_there():
    placed = mw.to_groups(A, CUT, {0, 1, 2}, P("tp"))
    fewer = mw.to_groups(placed, CUT, {0, 2}, P("tp"), donate=True)
    assert placed.on(1).is_deleted()
    assert_is(fewer, A, CUT, [0, 2])


def test_replicas_held_twice_are_given_up_too():
    placed = mw.to_groups(A, CUT, {0, 1, 2}, P("tp"))
    back = mw.from_groups([placed, placed], ALL, P("tp", "pp"), donate=True)
    assert all(part.is_deleted() for part in replicas(placed))
    assert_is(back[0], A)
    assert_is(back[1], A)


MEMORY = """
import json, pathlib
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import meshwright as mw

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
whole = Mesh(np.array(jax.devices()).reshape(2, 4), ("pp", "x"))
groups = mw.MpmdMesh(whole, "pp")
status = pathlib.Path("/proc/self/status")

def resident(field):
    return next(int(x.split()[1]) for x in status.read_text().splitlines() if field in x) / 1024

def tree():
    split = NamedSharding(whole, P(("pp", "x")))
    fill = jax.jit(lambda n: jnp.full((1024, 4096), n), out_shardings=split)
    return jax.block_until_ready([fill(jnp.float32(n)) for n in range(12)])

def measured(move, values):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    moved = move(values)
    return resident("VmHWM") - before, resident("VmRSS") - before, moved

mw.to_groups(tree()[:1], groups, {0, 1}, P(None, "x"))
where = lambda path: int(path) % 2
found = {}
*found["one group each"], placed = measured(
    lambda values: mw.to_groups(values, groups, where, P(None, "x"), donate=True), tree()
)
assert [float(x[5, 5]) for x in placed] == list(range(12))
*found["back"], moved = measured(
    lambda values: mw.from_groups(values, whole, P(("pp", "x")), donate=True), placed
)
*found["two groups"], placed = measured(
    lambda values: mw.to_groups(values, groups, {0, 1}, P(None, "x"), donate=True), moved
)
del moved
*found["again"], moved = measured(
    lambda values: mw.from_groups(values, whole, P(("pp", "x")), donate=True), placed
)
assert [float(x[5, 5]) for x in moved] == list(range(12))
print(json.dumps(found))
"""


@pytest.mark.slow
@needs_clear_refs
def test_memory_stays_bounded():
    """12 arrays of 16 MiB: with donation little more than one exists beside source and results."""
    found = run_script(MEMORY)
    for name, grown in (("one group each", 0), ("back", 0), ("two groups", 12), ("again", 0)):
        peak, after = found[name]
        assert peak < 16 * (grown + 3), name
        assert after < 16 * (grown + 2), name


X = np.ones((8, 6), np.float32)


def deleted():
    array = jnp.ones((8, 6))
    array.delete()
    return array


def half_deleted():
    array = mw.to_groups(X, CUT, {0, 1}, P())
    array.on(1).delete()
    return array


@pytest.mark.parametrize(
    ("tree", "where", "specs", "match"),
    [
        ({"w": X}, 4, P(), r"w: group 4 is not there\. Use 0 to 3"),
        ({"w": X}, [0, 0], P(), "w: group 0 appears twice"),
        ({"w": X}, set(), P(), "w: no groups are named"),
        ({"w": X}, [], P(), "w: no groups are named"),
        ({"w": X}, True, P(), "w: True is not the number of a group"),
        ({"w": X}, "0", P(), "w: '0' is not a list of group numbers"),
        ({"w": X}, {"w": None}, P(), "w: None is not a list of group numbers"),
        ({"w": X}, lambda path: None, P(), "w: None is not a list of group numbers"),
        ({"w": X}, {"v": 0}, P(), r"where: \(the tree\): {'v': 0} is not like the dict of 1 there"),
        ({"a": {"w": X}}, {"a": {"v": 0}}, P(), "where: a: {'v': 0} is not like the dict of 1"),
        ([X, X, X], [0, 1], P(), r"\[0, 1\] is not like the list of 3 there.* the set {0, 1}\."),
        ((X, X), [0, 1], P(), r"\[0, 1\] is not like the tuple of 2 there"),
        ({"a": [X] * 2}, {"a": (0,)}, P(), r"where: a: \(0,\) is not like the list of 2 there"),
        ({0: X}, 0, {0: P(), 1: P()}, "specs: .* is not like the dict of 1 there"),
        ({"w": X}, None, P(), r"where: \(the tree\): None is not like the dict of 1 there"),
        ({"w": X}, 1, {"v": P()}, r"specs: \(the tree\): {'v': P\(\)} is not like the dict of 1"),
        ({"w": X}, 1, {"w": None}, r"w \(group 1\): None is not a PartitionSpec"),
        ({"w": X}, 1, {0: P()}, r"w \(group 1\): None is not a PartitionSpec"),
        ({"w": X}, 1, {"w": "tp"}, r"w \(group 1\): 'tp' is not a PartitionSpec"),
        ({"w": X}, 1, P("z"), r"w \(group 1\): dim 0: no mesh axis 'z' in pp, tp"),
        ({"w": X[:7]}, 1, P("tp"), r"w \(group 1\): dim 0 has size 7, not divisible by 2"),
        ({"w": X}, 1, P(None, None, "tp"), r"w \(group 1\): .* has 3 entries for an array with 2"),
        ({"w": X}, 1, P(P.UNCONSTRAINED), r"w \(group 1\): .* leaves a dim open"),
        ({"w": X}, 1, P(unreduced={"tp"}), r"w \(group 1\): .* asks for more than a split"),
        ({"w": deleted()}, {0, 1}, P(), "w: the array was deleted or donated"),
        ({"w": half_deleted()}, 0, P(), "w: the array was deleted or donated"),
        ({"w": jax.ShapeDtypeStruct((8, 6), "float32")}, 0, P(), "w: a shape without values"),
        ({"w": X.astype("float64")}, 0, P(), "w: float64 would become float32"),
        (X, 9, P(), r"\(the array\): group 9 is not there"),
    ],
)
def test_bad_input_is_refused(tree, where, specs, match):
    start = r"^to_groups: 1 problem, nothing was placed\."
    with pytest.raises(PartitionError, match=start) as error:
        mw.to_groups(tree, CUT, where, specs)
    with pytest.raises(PartitionError, match=match):
        raise error.value


def test_all_problems_are_named_at_once_and_nothing_is_given_up():
    good = on(A, ALL, P("pp"))
    tree = {"a": deleted(), "b": X, "c": X.astype("float64"), "d": good, "e": X[:5]}
    where = {"a": 0, "b": 7, "c": 1, "d": {0, 1}, "e": {2, 3}}
    with pytest.raises(PartitionError, match="5 problems") as error:
        mw.to_groups(tree, CUT, where, P("tp"), donate=True)
    lines = [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert lines == ["a", "b", "c", "e (group 2)", "e (group 3)"]
    assert_is(good, A)


def test_thousands_of_bad_leaves_fit_on_a_screen():
    tree = {f"layer{n}": X[:7] for n in range(500)}
    with pytest.raises(PartitionError, match="2000 problems") as error:
        mw.to_groups(tree, CUT, range(4), P("tp"))
    assert len(str(error.value)) <= 1500


def test_specs_that_fit_one_group_only_name_the_other():
    with pytest.raises(PartitionError, match=r"w \(group 1\): dim 0: no mesh axis 'a' in b"):
        mw.to_groups({"w": X}, LISTED, {0, 1, 2}, P("a"))


def test_tracers_are_sent_to_the_right_function():
    with pytest.raises(PartitionError, match=r"w: a tracer\. Under jit use"):
        jax.jit(lambda w: mw.to_groups({"w": w}, CUT, 0))(X)


def test_groups_of_the_compiler_hold_no_arrays(monkeypatch):
    monkeypatch.setattr(_compat, "is_compile_only", lambda device: True)
    groups = mw.MpmdMesh(ALL, "pp")
    with pytest.raises(PartitionError, match="groups: their devices exist only for the compiler"):
        mw.to_groups(X, groups, 0)


def test_what_means_no_groups_is_refused():
    with pytest.raises(GroupError, match=r"is one mesh\. Cut it with MpmdMesh"):
        mw.to_groups(X, ALL, 0)


@pytest.mark.parametrize(
    ("tree", "mesh", "specs", "match"),
    [
        ({"w": X}, ALL, P("z"), "w: dim 0: no mesh axis 'z' in pp, tp"),
        ({"w": X}, CUT, P(), "mesh: MpmdMesh.* is not a jax.sharding.Mesh"),
        ({"w": deleted()}, ALL, P(), "w: the array was deleted"),
        ({"w": X}, ALL, {"v": P()}, "'w' has no spec"),
    ],
)
def test_what_cannot_come_back_is_refused(tree, mesh, specs, match):
    with pytest.raises(PartitionError, match=match):
        mw.from_groups(tree, mesh, specs)


def test_a_deleted_array_of_groups_cannot_come_back():
    array = mw.to_groups(X, CUT, {0, 1}, P())
    array.delete()
    with pytest.raises(PartitionError, match="w: the array was deleted or donated"):
        mw.from_groups({"w": array}, ALL, P())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.integers(0, 3),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_a_full_tree_is_its_own_prefix(tree):
    leaves = jax.tree.leaves(tree)
    assert broadcast_prefix("where", tree, tree, lambda value, node: False) == leaves
    assert broadcast_prefix("where", "one", tree, lambda value, node: False) == ["one"] * len(
        leaves
    )
