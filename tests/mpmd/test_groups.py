"""Groups that are not alike, from a list of meshes."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright._text import ranges
from meshwright.errors import GroupError
from meshwright.mpmd.groups import Groups, as_groups


class Device:
    """A device of some process and platform, as far as groups look at it."""

    def __init__(self, number, process=0, platform="cpu"):
        self.id, self.process_index, self.platform = number, process, platform


def mesh(places, *sizes, names="ab", types=None):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]), axis_types=types)


def line(*devices, name="a"):
    row = np.empty(len(devices), object)
    row[:] = devices
    return Mesh(row, (name,))


WIDE, NARROW, ONE = mesh(range(4), 2, 2), mesh((6, 4), names="z"), mesh((7,))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.permutations(range(8)), st.lists(st.integers(1, 7), max_size=5, unique=True))
def test_any_disjoint_meshes_are_groups(places, bounds):
    edges = [0, *sorted(bounds), 8]
    meshes = [
        mesh(places[start:stop], names="abcdefgh"[number:])
        for number, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    groups = mw.MeshGroups(meshes)
    assert groups.unstack == meshes
    assert groups.mpmd_dim == len(meshes)
    assert groups.mpmd_idx_for_mesh == {part: number for number, part in enumerate(meshes)}
    assert groups.device_mpmd_idx == {
        device: number for number, part in enumerate(meshes) for device in part.devices.flat
    }
    back = list(range(len(meshes)))[::-1]
    assert groups.mpmd_submesh(back).unstack == meshes[::-1]


def test_meshes_keep_their_shapes_names_and_types():
    explicit = mesh((4, 5), types=(AxisType.Explicit,))
    groups = mw.MeshGroups([WIDE, explicit, ONE])
    assert groups.unstack == [WIDE, explicit, ONE]
    assert groups.meshes[1].axis_types == (AxisType.Explicit,)
    assert groups.lowering_mesh() is WIDE


def test_they_are_frozen_hashable_and_compare_by_value():
    one, other = mw.MeshGroups([WIDE, NARROW]), mw.MeshGroups((WIDE, NARROW))
    assert one == other
    assert hash(one) == hash(other)
    assert one != mw.MeshGroups([NARROW, WIDE])
    assert one.device_mpmd_idx is one.device_mpmd_idx
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'meshes'"):
        one.meshes = ()


def test_every_group_runs_its_own_program():
    groups = mw.MeshGroups([WIDE, NARROW, ONE])
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    for part, program in zip(groups.unstack, (jnp.sin, jnp.cos, jnp.tan), strict=True):
        placed = jax.device_put(x, NamedSharding(part, P(part.axis_names[0])))
        assert jax.jit(program)(placed).sharding.device_set == set(part.devices.flat)


def test_in_one_process_no_group_is_its_own():
    groups = mw.MeshGroups([WIDE, NARROW])
    for name in ("my_mpmd_axis_index", "my_mpmd_group_mesh"):
        with pytest.raises(ValueError, match=r"no group is this process's own: .* in one process"):
            getattr(groups, name)


def test_in_several_processes_each_has_its_group(monkeypatch):
    groups = mw.MeshGroups(
        [line(Device(0, 0)), line(Device(1, 2), Device(2, 1), Device(3, 2)), line(Device(4, 3))]
    )
    for process, group in enumerate([0, 1, 1, 2]):
        monkeypatch.setattr(jax, "process_index", lambda *args, me=process: me)
        assert groups.my_mpmd_axis_index == group
        assert groups.my_mpmd_group_mesh is groups.lowering_mesh() is groups.unstack[group]


@pytest.mark.parametrize(
    ("meshes", "match"),
    [
        ([], r"meshes: the list is empty\. Give at least one mesh"),
        (WIDE, "meshes: Mesh.* is not a list of meshes"),
        (3, "meshes: 3 is not a list of meshes"),
        ([WIDE, "tp:2"], "group 1: 'tp:2' is not a jax.sharding.Mesh"),
        ([WIDE, None], "group 1: None is not a jax.sharding.Mesh"),
        ([mw.abstract_mesh("a:2"), WIDE], "group 0: an AbstractMesh .* has no devices"),
        ([WIDE, Mesh(np.empty((0,), object), ("a",))], "group 1: the mesh a:0 is empty"),
        ([WIDE, NARROW, mesh((3, 5))], r"device 3 is in groups 0 and 2\. Use every device once"),
        ([WIDE, WIDE], "device 0 is in groups 0 and 1"),
        (
            [line(Device(0), Device(1)), line(Device(2, platform="gpu"))],
            r"groups of different platforms: 2 of cpu, 1 of gpu devices\. Use devices of one",
        ),
        (
            [line(Device(0, 0), Device(1, 1)), line(Device(2, 1))],
            r"process 1 is in groups 0, 1\. A process runs one program",
        ),
    ],
)
def test_what_cannot_be_groups_is_refused(meshes, match):
    with pytest.raises(GroupError, match=match):
        mw.MeshGroups(meshes)


@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([2], r"group 2 is not there\. Use 0 to 1"),
        ([0, 0], "group 0 appears twice"),
        ([], "no groups are named"),
        ([0.5], "0.5 is not the number of a group"),
    ],
)
def test_groups_that_are_not_there_are_refused(indices, match):
    with pytest.raises(GroupError, match=match):
        mw.MeshGroups([WIDE, NARROW]).mpmd_submesh(indices)


def test_everything_that_means_groups_becomes_groups():
    cut, listed = mw.MpmdMesh(mesh(range(8), 2, 4), "a"), mw.MeshGroups([WIDE, NARROW])
    assert as_groups(cut) is cut
    assert as_groups(listed) is listed
    assert as_groups([WIDE, NARROW]) == as_groups((WIDE, NARROW)) == listed
    assert isinstance(cut, Groups) and isinstance(listed, Groups)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (WIDE, r"groups: Mesh.* is one mesh\. Cut it with MpmdMesh\(mesh, 'pp'\)"),
        (None, "groups: None is not an MpmdMesh or a list of meshes"),
        ("pp", "groups: 'pp' is not an MpmdMesh or a list of meshes"),
        ([], "the list is empty"),
    ],
)
def test_what_means_no_groups_is_refused(groups, match):
    with pytest.raises(GroupError, match=match):
        as_groups(groups)


def test_they_show_themselves():
    groups = mw.MeshGroups([WIDE, NARROW, ONE])
    assert repr(groups) == "MeshGroups(['a:2, b:2', 'z:2', 'a:1'])"
    assert str(groups).splitlines() == [
        "3 groups, 7 devices",
        "group  mesh      devices  process",
        "    0  a:2, b:2  0-3      0",
        "    1  z:2       4, 6     0",
        "    2  a:1       7        0",
    ]
    assert "<td" in groups._repr_html_()
    found = json.loads(json.dumps(groups.to_json()))
    assert found["mpmd_axis"] is None
    assert found["groups"][1] == {"axes": {"z": 2}, "devices": [6, 4], "processes": [0]}


def test_thousands_of_groups_fit_on_a_screen():
    groups = mw.MeshGroups([line(Device(2 * n, n)) for n in range(4096)])
    assert str(groups).endswith("and 4080 more groups")
    assert len(str(groups).splitlines()) == 19
    assert repr(groups).endswith("'a:1', and 4088 more])")


@given(st.sets(st.integers(0, 40), min_size=1))
@settings(derandomize=True, deadline=None)
def test_ranges_name_exactly_the_numbers(numbers):
    text = ranges(numbers)
    if " more" not in text:
        ends = [part.split("-") for part in text.split(", ")]
        assert numbers == {n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)}


def test_the_repr_is_short_however_many_groups_and_axes():
    groups = mw.MeshGroups([mesh((n,), 1, 1, names=("x" * 40, "y" * 40)) for n in range(8)])
    assert len(repr(groups)) <= 200
    assert repr(groups).startswith("MeshGroups(['xxx")
