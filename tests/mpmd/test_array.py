"""An array that lives in several groups: what it tells, and that no tree function trips over it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import GroupError


def mesh(places, *sizes, names="ab"):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]))


CUT = mw.MpmdMesh(mesh(range(8), 4, 2, names=("pp", "tp")), "pp")
LISTED = mw.MeshGroups([mesh(range(4), 2, 2), mesh((4, 5), names="b")])
VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)
ROWS = P("tp")


def on(group, spec=ROWS, values=VALUES, groups=CUT):
    return jax.device_put(values, NamedSharding(groups.unstack[group], spec))


def make(ids=(0, 2), spec=ROWS, values=VALUES):
    return mw.MpmdArray([on(group, spec, values) for group in ids], mw.MpmdSharding(CUT, ids, spec))


def test_it_tells_what_it_is():
    array = make()
    assert (array.shape, array.dtype, array.ndim, array.size) == ((8, 4), np.float32, 2, 32)
    assert array.nbytes == VALUES.nbytes
    assert array.spec == P("tp")
    assert array.mesh_ids == (0, 2)
    assert array.sharding == mw.MpmdSharding(CUT, [0, 2], P("tp"))
    assert array.is_partially_addressable
    assert not array.is_deleted()


def test_it_gives_the_array_of_every_group():
    array = make((3, 1))
    assert array.first is array.local is array.on(1)
    assert array.on(1).sharding == NamedSharding(CUT.unstack[1], P("tp"))
    assert array.on(3).sharding == NamedSharding(CUT.unstack[3], P("tp"))
    assert np.array_equal(array.on(3), VALUES)
    assert list(array.arrays) == [1, 3]
    with pytest.raises(GroupError, match="group 0 does not hold the array; groups 1, 3 do"):
        array.on(0)


def test_one_group_is_enough():
    part = on(2)
    array = mw.MpmdArray(part, mw.MpmdSharding(CUT, 2, P("tp")))
    assert array.local is array.first is part


def test_it_tells_whether_several_groups_hold_it():
    assert make((0, 2)).is_mpmd_replicated
    assert not make((1,)).is_mpmd_replicated


def test_the_arrays_of_this_process_are_one_a_list_or_none():
    one, several = make((1,)), make((3, 1))
    assert one.to_mpmd_local_array is one.on(1)
    assert several.to_mpmd_local_array == [several.on(1), several.on(3)]
    assert several.first_mpmd_replica is several.on(1)


def test_arrays_that_this_process_does_not_have_are_left_out():
    split = mw.MpmdSharding(CUT, [0, 2], ROWS)
    other, none = on(2), mw.MpmdArray([], split, shape=(8, 4), dtype="float32")
    assert not none.is_partially_addressable
    assert none.is_mpmd_replicated
    assert none.to_mpmd_local_array is none.first_mpmd_replica is none.local is None
    assert repr(none).endswith("in groups 0, 2 of 4, none of it in this process)")
    second = mw.MpmdArray([other], split)
    assert second.is_partially_addressable
    assert second.local is second.to_mpmd_local_array is second.on(2) is other
    assert second.first_mpmd_replica is None
    assert np.array_equal(np.asarray(second), VALUES)
    assert repr(second) == "MpmdArray(f32[8@tp,4] in groups 0, 2 of 4, not given here: 0)"
    for ask in (
        lambda: second.first,
        lambda: second.on(0),
        lambda: mw.from_groups(second, CUT, P()),
    ):
        with pytest.raises(
            GroupError, match=r"group 0 has devices of this process, .* not given"
        ) as e:
            ask()
        assert e.value.option == "arrays"


def test_a_deleted_array_is_not_handed_out():
    array = make()
    array.delete()
    for ask in (lambda: array.to_mpmd_local_array, lambda: array.first_mpmd_replica):
        with pytest.raises(GroupError, match="it was deleted or donated"):
            ask()


def test_its_sharding_has_the_mesh_of_all_its_groups():
    array = make((0, 2))
    assert array.sharding.mesh == CUT.mpmd_submesh([0, 2]).jax_mesh
    assert array.sharding.sharding == NamedSharding(array.sharding.mesh, P("tp"))
    assert array.on(0).sharding.mesh != array.sharding.mesh
    assert make((1,)).sharding.mesh == CUT.unstack[1]


def test_meshes_of_their_own_join_to_no_mesh():
    assert mw.MpmdSharding(LISTED, 1, P("b")).mesh == LISTED.unstack[1]
    with pytest.raises(GroupError, match=r"groups 0, 1 are meshes of their own.*sharding_of"):
        _ = mw.MpmdSharding(LISTED, [0, 1], P("b")).mesh


def test_it_has_the_abstract_value_of_its_array():
    assert (make().aval.shape, make().aval.dtype) == ((8, 4), np.float32)


def test_a_scalar_is_a_number_and_takes_a_format():
    loss = make(spec=P(), values=np.float32(3.14159))
    assert (int(loss), round(float(loss), 3), f"{loss:.2f}") == (3, 3.142, "3.14")
    assert f"{make()}" == str(make())
    with pytest.raises(TypeError, match=r"scalar|0-dimensional"):
        float(make())


def test_groups_may_split_it_in_different_ways():
    parts = [on(0, P("a", "b"), groups=LISTED), on(1, P(None, "b"), groups=LISTED)]
    array = mw.MpmdArray(parts, mw.MpmdSharding(LISTED, [0, 1], {0: P("a", "b"), 1: P(None, "b")}))
    assert [array.on(group) for group in (0, 1)] == parts
    assert repr(array) == ("MpmdArray(f32[8,4] in groups 0, 1 of 2 as P('a', 'b'), P(None, 'b'))")
    with pytest.raises(GroupError, match="the groups split the array in different ways"):
        _ = array.spec


def test_splits_that_mean_the_same_are_the_same():
    parts = [on(0, P("tp", None)), on(1, P(("tp",)))]
    assert mw.MpmdArray(parts, mw.MpmdSharding(CUT, [0, 1], P("tp"))).spec == P("tp")


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "bool", "float8_e4m3fn"])
def test_any_dtype(dtype):
    array = make(values=np.zeros((8, 4), jnp.dtype(dtype)))
    assert array.dtype == jnp.dtype(dtype)
    assert array.nbytes == 32 * jnp.dtype(dtype).itemsize


def test_keys_too():
    keys = jax.random.split(jax.random.key(0), 8)
    split = mw.MpmdSharding(CUT, [0, 1], P("tp"))
    array = mw.MpmdArray([jax.device_put(keys, split.sharding_of(g)) for g in (0, 1)], split)
    assert array.dtype == keys.dtype
    assert array.shape == (8,)
    assert repr(array) == "MpmdArray(key<fry>[8@tp] in groups 0, 1 of 4)"


def test_a_scalar():
    array = make(spec=P(), values=np.float32(3))
    assert (array.shape, array.ndim, array.size, float(np.asarray(array))) == ((), 0, 1, 3.0)


def test_deleting_gives_up_the_array_of_every_group():
    array = make()
    array.delete()
    assert array.is_deleted()
    assert array.on(0).is_deleted() and array.on(2).is_deleted()
    assert repr(array) == "MpmdArray(f32[8@tp,4] in groups 0, 2 of 4, deleted)"


def test_one_deleted_part_is_enough_to_say_so():
    array = make()
    array.on(2).delete()
    assert array.is_deleted()


def test_waiting_returns_the_array():
    array = make()
    assert array.block_until_ready() is array
    assert jax.block_until_ready({"x": array})["x"] is array


def test_its_values_can_be_read():
    assert np.array_equal(np.asarray(make()), VALUES)
    assert np.asarray(make(), dtype=np.float64).dtype == np.float64
    copied = np.array(make())
    copied += 1


def test_it_is_frozen_and_compares_by_identity():
    array = make()
    assert array == array
    assert array != make()
    assert array in {array}
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'shape'"):
        array.shape = ()


TREE = {"a": [make(), 3, None], "b": (make((1, 2, 3)), jnp.ones(2))}


def test_to_a_tree_it_is_one_leaf():
    plain = {"a": [VALUES, 3, None], "b": (VALUES, jnp.ones(2))}
    assert jax.tree.structure(TREE) == jax.tree.structure(plain)
    assert jax.tree.leaves(TREE)[0] is TREE["a"][0]
    assert len(jax.tree.leaves(TREE)) == 4
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(TREE)]
    assert paths == ["['a'][0]", "['a'][1]", "['b'][0]", "['b'][1]"]


@pytest.mark.parametrize(
    "change",
    [jnp.shape, lambda leaf: None, lambda leaf: 0, lambda leaf: leaf, str, lambda leaf: object()],
)
def test_tree_functions_put_anything_in_its_place(change):
    changed = jax.tree.map(lambda leaf: change(leaf), TREE)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, TREE)) == jax.tree.structure(TREE)
    assert [type(x) for x in (changed["a"][0], changed["b"][0])] == [
        type(change(x)) for x in (TREE["a"][0], TREE["b"][0])
    ]
    leaves, treedef = jax.tree.flatten(TREE)
    rebuilt = jax.tree.unflatten(treedef, [change(leaf) for leaf in leaves])
    assert jax.tree.structure(rebuilt) == jax.tree.structure(changed)


def test_tree_functions_take_it_with_others():
    both = jax.tree.map(lambda one, other: (one.shape, other), {"x": make()}, {"x": "here"})
    assert both == {"x": ((8, 4), "here")}
    assert jax.tree.reduce(lambda total, leaf: total + leaf.size, {"x": make()}, 0) == 32
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.ndim == 2, [make(), make()]))
    assert jax.tree.transpose(
        jax.tree.structure([0]), jax.tree.structure({"x": 0}), [{"x": TREE["b"][0]}]
    ) == {"x": [TREE["b"][0]]}


def test_partitioning_and_reports_take_it_like_any_array():
    tree = {"w": make(values=np.zeros((128, 128), np.float32))}
    whole = mesh(range(8), names=("fsdp",))
    assert mw.partition(tree, whole) == {"w": P("fsdp")}
    assert mw.explain(tree, whole).bytes == 128 * 128 * 4


def test_a_program_does_not_take_it_by_mistake():
    with pytest.raises(TypeError, match="MpmdArray"):
        jax.jit(lambda x: x)(make())


def outside():
    return mw.MpmdMesh(mesh((0, 1, 2, 3), 2, 2, names=("pp", "tp")), "pp")


@pytest.mark.parametrize(
    ("arrays", "sharding", "match"),
    [
        (
            [on(0), on(3)],
            mw.MpmdSharding(outside(), [0, 1], P("tp")),
            r"an array is on devices 6, 7, which no group of MpmdMesh\('pp:2, tp:2', 'pp'\) has",
        ),
        (
            [on(0), jax.device_put(VALUES, jax.devices()[7])],
            mw.MpmdSharding(outside(), [0, 1], P("tp")),
            r"an array is on device 7, which no group .* has\. Move it there with to_groups",
        ),
        (
            jax.device_put(VALUES, NamedSharding(CUT.jax_mesh, P("tp"))),
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            "an array is spread over groups 0, 1, 2, 3. A group's array is in that group alone",
        ),
        (
            [on(0), on(2)],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            "array 1 is in group 2; the sharding names groups 0, 1",
        ),
        (
            [on(0), on(0)],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            "array 1 is in group 0, as one before",
        ),
        (
            [on(0), on(1, values=VALUES[:4])],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            r"group 1: float32\[4, 4\] is not the same array as float32\[8, 4\], .* in group 0",
        ),
        (
            [on(0), on(1, values=VALUES.astype("int32"))],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            r"group 1: int32\[8, 4\] is not the same array as float32\[8, 4\]",
        ),
        (
            [on(0), on(1, P(None, "tp"))],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            r"group 1: the array is sharded as P\(None, 'tp'\), the sharding says P\('tp',\)",
        ),
        (
            [on(0, P()), on(1, P())],
            mw.MpmdSharding(CUT, [0, 1], P("tp")),
            r"group 0: the array is sharded as P\(\), the sharding says P\('tp',\)",
        ),
        (
            [on(0)],
            mw.MpmdSharding(CUT, 0, P(None, None, "tp")),
            "sharding: group 0: .* has 3 entries for an array with 2 dims",
        ),
        (["x"], mw.MpmdSharding(CUT, 0, P()), "array 0: 'x' is not a jax.Array with values"),
        ([on(0)], NamedSharding(CUT.unstack[0], P("tp")), "sharding: .* is not an MpmdSharding"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arrays, sharding, match):
    with pytest.raises(GroupError, match=match):
        mw.MpmdArray(arrays, sharding)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (
            {"shape": (8, 8)},
            r"float32\[8, 4\] is not the same array as float32\[8, 8\], given explicitly",
        ),
        ({"dtype": np.int32}, r"float32\[8, 4\] is not the same array as int32\[8, 4\]"),
        ({"dtype": "nonsense"}, "dtype 'nonsense' is not a valid shape or dtype"),
        ({"shape": "ab"}, "shape 'ab' or dtype .* is not a valid shape or dtype"),
    ],
)
def test_what_is_said_must_hold(said, match):
    split = mw.MpmdSharding(CUT, 0, P("tp"))
    with pytest.raises(GroupError, match=match):
        mw.MpmdArray(on(0), split, **said)
    assert mw.MpmdArray(on(0), split, shape=[8, 4], dtype="float32").shape == (8, 4)


def test_tracers_are_refused():
    split = mw.MpmdSharding(CUT, 0, P())
    with pytest.raises(GroupError, match=r"is not a jax\.Array with values"):
        jax.jit(lambda x: mw.MpmdArray(x, split).first)(VALUES)


def test_the_repr_is_short_however_long_the_names():
    name = "x" * 200
    groups = mw.MeshGroups([mesh((0, 1), names=[name]), mesh((2, 3), names=[name])])
    arrays = [on(group, P(name), groups=groups) for group in (0, 1)]
    text = repr(mw.MpmdArray(arrays, mw.MpmdSharding(groups, [0, 1], P(name))))
    assert len(text) <= 200
    assert text.startswith("MpmdArray(f32[8@xxx")
