"""A mesh cut along one axis: the whole contract, in one process and as several would see it."""

import dataclasses
import itertools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import LONGEST_MESSAGE, GroupError


class Device:
    """A device of some process, as far as groups look at it."""

    platform = "cpu"

    def __init__(self, number, process=0):
        self.id, self.process_index = number, process


def mesh(*sizes, names="abc", types=None):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(
        devices, tuple(names[: len(sizes)]), axis_types=types or (AxisType.Auto,) * len(sizes)
    )


def elsewhere(processes, *sizes, names="abc"):
    """A mesh of devices that are not here, given each one's process."""
    devices = np.empty(len(processes), object)
    devices[:] = [Device(number, process) for number, process in enumerate(processes)]
    return Mesh(devices.reshape(sizes), tuple(names[: len(sizes)]))


@st.composite
def cuts(draw):
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (1, 8), (2, 2, 2), (2, 1, 4), (3, 2)]))
    places = draw(st.permutations(range(8)))[: math.prod(sizes)]
    types = draw(st.tuples(*[st.sampled_from(AxisType)] * len(sizes)))
    devices = np.array(jax.devices())[list(places)].reshape(sizes)
    names = tuple("abc"[: len(sizes)])
    return Mesh(devices, names, axis_types=types), draw(st.sampled_from(names))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cuts())
def test_groups_share_out_the_devices_and_coordinates_agree(cut):
    whole, axis = cut
    groups = mw.MpmdMesh(whole, axis)
    assert groups.mpmd_axis == whole.axis_names.index(axis)
    assert groups.mpmd_dim == len(groups.unstack) == whole.shape[axis]
    assert isinstance(groups.unstack, list)
    held = [set(part.devices.flat) for part in groups.unstack]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(held, 2))
    assert set().union(*held) == set(whole.devices.flat)
    for number, part in enumerate(groups.unstack):
        assert part.axis_names == whole.axis_names
        assert part.axis_types == whole.axis_types
        assert dict(part.shape) == {**whole.shape, axis: 1}
        assert groups.mpmd_idx_for_mesh[part] == number
    assert set(groups.device_coords) == set(groups.device_mpmd_idx) == set(whole.devices.flat)
    for device, place in groups.device_coords.items():
        assert whole.devices[place] is device
        assert place[groups.mpmd_axis] == groups.device_mpmd_idx[device]
        inside = tuple(0 if d == groups.mpmd_axis else i for d, i in enumerate(place))
        assert groups.unstack[groups.device_mpmd_idx[device]].devices[inside] is device


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cuts(), st.data())
def test_chosen_groups_keep_their_devices_in_the_order_given(cut, data):
    groups = mw.MpmdMesh(*cut)
    chosen = data.draw(st.permutations(range(groups.mpmd_dim)))
    chosen = chosen[: data.draw(st.integers(1, groups.mpmd_dim))]
    part = groups.mpmd_submesh(chosen)
    assert isinstance(part, mw.MpmdMesh)
    assert part.mpmd_axis_name == groups.mpmd_axis_name
    assert part.unstack == [groups.unstack[number] for number in chosen]


def test_the_example_of_the_contract():
    groups = mw.MpmdMesh(elsewhere([0] * 16, 4, 2, 2, names=("mpmd", "data", "model")), "mpmd")
    assert (groups.mpmd_dim, groups.mpmd_axis) == (4, 0)
    assert [part.size for part in groups.unstack] == [4, 4, 4, 4]


def test_it_is_frozen_hashable_and_compares_by_value():
    one, other = mw.MpmdMesh(mesh(2, 4), "a"), mw.MpmdMesh(mesh(2, 4), "a")
    assert one == other
    assert hash(one) == hash(other)
    assert one != mw.MpmdMesh(mesh(2, 4), "b")
    assert [field.name for field in dataclasses.fields(one)] == ["jax_mesh", "mpmd_axis_name"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'jax_mesh'"):
        one.jax_mesh = mesh(8)


def test_arguments_have_the_names_of_the_contract():
    groups = mw.MpmdMesh(jax_mesh=mesh(2, 4), mpmd_axis_name="b")
    assert groups.jax_mesh == mesh(2, 4)
    assert groups.mpmd_axis_name == "b"
    assert groups.mpmd_submesh(indices=[1]).mpmd_dim == 1


def test_what_is_derived_is_worked_out_once():
    groups = mw.MpmdMesh(mesh(4, 2), "a")
    for name in ("device_coords", "device_mpmd_idx", "mpmd_idx_for_mesh"):
        assert getattr(groups, name) is getattr(groups, name)
    groups.unstack.clear()
    assert groups.mpmd_dim == len(groups.unstack) == 4


def test_entering_pushes_and_leaving_pops():
    outer, inner = mw.MpmdMesh(mesh(2, 4), "a"), mw.MpmdMesh(mesh(8), "a")
    assert mw.MpmdMesh.mesh_stack == []
    with outer as entered:
        assert entered is outer
        with pytest.raises(KeyError, match="inside"), inner:
            assert mw.MpmdMesh.mesh_stack == [outer, inner]
            raise KeyError("inside")
        assert mw.MpmdMesh.mesh_stack == [outer]
    assert mw.MpmdMesh.mesh_stack == []


def test_in_one_process_no_group_is_its_own():
    groups = mw.MpmdMesh(mesh(2, 4), "a")
    for name in ("my_mpmd_axis_index", "my_mpmd_group_mesh"):
        with pytest.raises(ValueError, match=r"no group is this process's own: .* in one process"):
            getattr(groups, name)
    assert groups.lowering_mesh() is groups.unstack[0]


def test_a_program_compiled_for_the_lowering_mesh_runs_in_every_group():
    groups = mw.MpmdMesh(mesh(2, 4), "a")
    split = NamedSharding(groups.lowering_mesh(), P("b"))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    assert jax.jit(lambda x: x @ x).lower(shape).compile().output_shardings.device_set == set(
        groups.unstack[0].devices.flat
    )
    for part in groups.unstack:
        x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(part, P("b")))
        assert jax.jit(lambda x: x @ x)(x).sharding.device_set == set(part.devices.flat)


@pytest.mark.parametrize(
    ("processes", "sizes", "axis", "mine"),
    [
        ([0, 0, 1, 1], (2, 2), "a", [0, 1]),
        ([0, 1, 0, 1], (2, 2), "b", [0, 1]),
        ([0, 1, 2, 3], (2, 2), "a", [0, 0, 1, 1]),
        ([0, 0, 1, 1, 2, 2, 3, 3], (2, 4), "a", [0, 0, 1, 1]),
        ([0, 1], (1, 2), "a", [0, 0]),
    ],
)
def test_in_several_processes_each_has_its_group(monkeypatch, processes, sizes, axis, mine):
    groups = mw.MpmdMesh(elsewhere(processes, *sizes), axis)
    for process, group in enumerate(mine):
        monkeypatch.setattr(jax, "process_index", lambda *args, me=process: me)
        assert groups.my_mpmd_axis_index == group
        assert groups.my_mpmd_group_mesh is groups.lowering_mesh() is groups.meshes[group]


def test_a_process_outside_is_told_so(monkeypatch):
    groups = mw.MpmdMesh(elsewhere([0, 0, 1, 1, 2, 2, 3, 3], 4, 2), "a").mpmd_submesh([0, 2])
    monkeypatch.setattr(jax, "process_index", lambda *args: 3)
    match = r"process 3 has no devices in MpmdMesh\('a:2, b:2', 'a'\); processes 0, 2 have"
    for ask in (lambda: groups.my_mpmd_axis_index, groups.lowering_mesh):
        with pytest.raises(GroupError, match=match):
            ask()


def test_groups_of_one_process_of_several_are_a_single_process():
    groups = mw.MpmdMesh(elsewhere([0, 0, 1, 1], 2, 2), "a").mpmd_submesh([1])
    assert groups.lowering_mesh() is groups.unstack[0]
    with pytest.raises(ValueError, match="in one process"):
        _ = groups.my_mpmd_axis_index


@pytest.mark.parametrize(
    ("whole", "axis", "match"),
    [
        (
            mesh(2, 4, names=("pp", "fsdp")),
            "pq",
            r"no axis 'pq' in this mesh: pp, fsdp\. Did you mean 'pp'\?",
        ),
        (mesh(2, 4), "zzzz", r"mpmd_axis_name: no axis 'zzzz' in this mesh: a, b\.$"),
        (mesh(2, 4), 0, "no axis 0 in this mesh"),
        (mesh(2, 4), ["a"], r"no axis \['a'\] in this mesh"),
        (mesh(2, 4), None, "no axis None in this mesh"),
        ("pp:2", "pp", "jax_mesh: 'pp:2' is not a jax.sharding.Mesh"),
        (mw.abstract_mesh("pp:2, fsdp:4"), "pp", "jax_mesh: an AbstractMesh .* has no devices"),
        (Mesh(np.empty((0, 2), object), ("a", "b")), "b", "jax_mesh: the mesh a:0, b:2 is empty"),
        (
            Mesh(np.array([jax.devices()[:2], jax.devices()[1:3]]), ("a", "b")),
            "a",
            r"device 1 is in groups 0 and 1\. Use every device once",
        ),
        (
            Mesh(np.array([[jax.devices()[3]] * 2]), ("a", "b")),
            "a",
            "device 3 is in group 0 twice",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(whole, axis, match):
    with pytest.raises(GroupError, match=match):
        mw.MpmdMesh(whole, axis)


def test_a_process_in_two_groups_is_named():
    with pytest.raises(ValueError, match=r"process 1 is in groups 0, 1\. A process runs one"):
        mw.MpmdMesh(elsewhere([0, 1, 1, 2], 2, 2), "a")
    with pytest.raises(
        GroupError, match=r"process 0 is in groups 0, 1, 2, 3 \(and 1 more likewise\)"
    ):
        mw.MpmdMesh(elsewhere([0, 1] * 4, 4, 2), "a")


def test_one_process_may_hold_all_groups():
    assert mw.MpmdMesh(elsewhere([5] * 4, 2, 2), "a").mpmd_dim == 2


@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([4], r"mpmd_submesh: group 4 is not there\. Use 0 to 3"),
        ([-1], "group -1 is not there"),
        ([1, 0, 1], r"group 1 appears twice\. Name it once"),
        ([], r"no groups are named\. Name at least one of 0 to 3"),
        ([1.0], "1.0 is not the number of a group"),
        ([True], "True is not the number of a group"),
        (["0"], "'0' is not the number of a group"),
        ("01", "'01' is not a list of group numbers"),
        (2, "2 is not a list of group numbers"),
        ({0: 1}, "{0: 1} is not a list of group numbers"),
        (None, "None is not a list of group numbers"),
    ],
)
def test_groups_that_are_not_there_are_refused(indices, match):
    with pytest.raises(ValueError, match=match):
        mw.MpmdMesh(mesh(4, 2), "a").mpmd_submesh(indices)


@pytest.mark.parametrize("indices", [[1, 3], (1, 3), range(1, 4, 2), np.array([1, 3])])
def test_groups_are_chosen_by_any_list(indices):
    groups = mw.MpmdMesh(mesh(4, 2), "a")
    assert groups.mpmd_submesh(indices).unstack == [groups.unstack[1], groups.unstack[3]]


def test_it_shows_itself():
    groups = mw.MpmdMesh(mesh(2, 4, names=("pp", "<x>")), "pp")
    assert repr(groups) == "MpmdMesh('pp:2, <x>:4', 'pp')"
    assert str(groups).splitlines() == [
        "2 groups of 4 devices, pp:2, <x>:4 cut along pp",
        "group  mesh         devices  process",
        "    0  pp:1, <x>:4  0-3      0",
        "    1  pp:1, <x>:4  4-7      0",
    ]
    assert "<x>" not in groups._repr_html_()
    assert "&lt;x&gt;:4 cut along pp" in groups._repr_html_()
    found = json.loads(json.dumps(groups.to_json()))
    assert found["mpmd_axis"] == "pp"
    assert found["groups"][1] == {
        "axes": {"pp": 1, "<x>": 4},
        "devices": [4, 5, 6, 7],
        "processes": [0],
    }


@pytest.mark.parametrize("sizes", [(64, 64), (4096, 1), (2, 2048)])
def test_thousands_of_devices_fit_on_a_screen(sizes):
    scattered = np.random.default_rng(0).permutation(4096)
    groups = mw.MpmdMesh(elsewhere([0] * 4096, *sizes), "a")
    shuffled = Mesh(groups.jax_mesh.devices.reshape(-1)[scattered].reshape(sizes), ("a", "b"))
    for shown in (groups, mw.MpmdMesh(shuffled, "a")):
        lines = str(shown).splitlines()
        assert len(lines) <= 19
        assert max(map(len, lines)) <= 100
        assert len(repr(shown)) <= 80
        assert len(shown._repr_html_()) < 20_000
    with pytest.raises(GroupError, match="appears twice") as error:
        groups.mpmd_submesh([*range(sizes[0]), 0])
    assert len(str(error.value)) <= LONGEST_MESSAGE


def test_the_repr_is_short_however_long_the_names():
    groups = mw.MpmdMesh(mesh(2, 4, names=("p" * 150, "x" * 150)), "p" * 150)
    assert len(repr(groups)) <= 200
    assert repr(groups).startswith("MpmdMesh('ppp")


def test_a_hundred_thousand_devices_take_little_time():
    whole = elsewhere([n // 8 for n in range(102_400)], 64, 1600)
    start = time.process_time()
    groups = mw.MpmdMesh(whole, "a")
    assert len(groups.device_coords) == 102_400
    assert time.process_time() - start < 5
    start = time.process_time()
    for _ in range(1000):
        _ = groups.device_coords, groups.device_mpmd_idx, groups.mpmd_dim, hash(groups)
    assert time.process_time() - start < 0.5
