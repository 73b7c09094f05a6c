"""Where an array of groups lies: in which of them, and how each splits it."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import GroupError
from meshwright.mpmd.groups import without_axis


def mesh(places, *sizes, names="ab"):
    devices = np.array(jax.devices())[list(places)].reshape(sizes or -1)
    return Mesh(devices, tuple(names[: devices.ndim]))


CUT = mw.MpmdMesh(mesh(range(8), 4, 2, names=("pp", "tp")), "pp")
LISTED = mw.MeshGroups([mesh(range(4), 2, 2), mesh((4, 5), names="b"), mesh((6, 7), names="a")])


@pytest.mark.parametrize(
    ("given", "ids"),
    [(2, (2,)), (np.int64(3), (3,)), ([3, 0], (0, 3)), ({1, 2}, (1, 2)), (range(4), (0, 1, 2, 3))],
)
def test_ids_are_sorted_numbers(given, ids):
    assert mw.MpmdSharding(CUT, given, P()).mesh_ids == ids


def test_it_is_frozen_hashable_and_compares_by_value():
    one, other = mw.MpmdSharding(CUT, [1, 0], P("tp")), mw.MpmdSharding(CUT, (0, 1), P("tp"))
    assert one == other
    assert hash(one) == hash(other)
    assert one != mw.MpmdSharding(CUT, 0, P("tp"))
    assert one != mw.MpmdSharding(CUT, [0, 1], P())
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'mesh_ids'"):
        one.mesh_ids = (0,)


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        (P("pp"), P(None)),
        (P(("pp", "tp")), P("tp")),
        (P(("tp", "pp"), None), P("tp", None)),
        (P("tp", "pp"), P("tp", None)),
        (P(None, ("tp",)), P(None, ("tp",))),
        (P(), P()),
    ],
)
def test_the_axis_that_was_cut_is_dropped(given, inside):
    split = mw.MpmdSharding(CUT, [0, 3], given)
    assert split.spec == inside
    assert split.sharding_of(3) == NamedSharding(CUT.unstack[3], inside)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), max_size=4))
def test_dropping_an_axis_keeps_all_others_in_place(entries):
    spec = P(*(tuple(entry) or None for entry in entries))
    found = [(e,) if isinstance(e, str) else tuple(e or ()) for e in without_axis(spec, "a")]
    assert found == [tuple(axis for axis in entry if axis != "a") for entry in entries]


def test_an_open_sum_stays_open():
    assert without_axis(P("a", "b", unreduced={"c"}), "a") == P(None, "b", unreduced={"c"})
    assert without_axis(P("b", unreduced={"c"}), "a") == P("b", unreduced={"c"})


def test_groups_that_differ_may_have_specs_of_their_own():
    split = mw.MpmdSharding(LISTED, [0, 1], {0: P("a", "b"), 1: P(None, "b")})
    assert split.sharding_of(0) == NamedSharding(LISTED.unstack[0], P("a", "b"))
    assert split.sharding_of(1) == NamedSharding(LISTED.unstack[1], P(None, "b"))
    match = r"different ways: P\('a', 'b'\) in group 0, P\(None, 'b'\) in group 1\. Ask sharding_of"
    with pytest.raises(GroupError, match=match):
        _ = split.spec


def test_specs_that_agree_are_one():
    split = mw.MpmdSharding([*LISTED.unstack], [0, 1], {1: P("b"), 0: P("b", None)})
    assert split.mpmd_mesh == LISTED
    assert split.spec == P("b", None)
    assert mw.MpmdSharding(LISTED, [0, 1], {0: P("b"), 1: P("b")}) == mw.MpmdSharding(
        LISTED, [0, 1], P("b")
    )


def test_the_local_sharding_is_that_of_the_first_group_held_here():
    assert mw.MpmdSharding(CUT, [2, 1], P("tp")).local == NamedSharding(CUT.unstack[1], P("tp"))


@pytest.mark.parametrize(
    ("groups", "ids", "spec", "match"),
    [
        (CUT, 4, P(), r"mesh_ids: group 4 is not there\. Use 0 to 3"),
        (CUT, [0, 0], P(), "mesh_ids: group 0 appears twice"),
        (CUT, [], P(), "mesh_ids: no groups are named"),
        (CUT, True, P(), "mesh_ids: True is not the number of a group"),
        (CUT, "0", P(), "mesh_ids: '0' is not a list of group numbers"),
        (CUT, None, P(), "mesh_ids: None is not a list of group numbers"),
        (CUT, np.array(1.5), P(), r"mesh_ids: array\(1.5\) is not a list of group numbers"),
        (CUT, 0, P("dp"), "spec: group 0: dim 0: no mesh axis 'dp' in pp, tp"),
        (CUT, 0, P("tp", "tp"), "spec: group 0: .* uses axis 'tp' twice"),
        (CUT, 0, P(unreduced={"tp"}), "spec: group 0: .* asks for more than a split"),
        (CUT, 0, "tp", "spec: group 0: 'tp' is not a PartitionSpec"),
        (CUT, 0, None, "spec: group 0: None is not a PartitionSpec"),
        (LISTED, [0, 1], P("a"), "spec: group 1: dim 0: no mesh axis 'a' in b"),
        (LISTED, [0, 2], P(None, "b"), "spec: group 2: dim 1: no mesh axis 'b' in a"),
        (LISTED, [0, 1], {0: P()}, r"spec: group 1 has none\. Give one for each of groups 0, 1"),
        (LISTED, 0, {0: P(), 1: P()}, "spec: group 1 has a spec but is not one of group 0"),
        (LISTED, 0, {0: "a"}, "spec: group 0: 'a' is not a PartitionSpec"),
        (mesh(range(8)), 0, P(), "groups: Mesh.* is one mesh"),
    ],
)
def test_what_does_not_fit_is_refused(groups, ids, spec, match):
    with pytest.raises(GroupError, match=match):
        mw.MpmdSharding(groups, ids, spec)


@pytest.mark.parametrize("group", [0, 7, "a", None])
def test_a_group_that_does_not_hold_the_array_is_refused(group):
    with pytest.raises(GroupError, match="does not hold the array; groups 1, 3 do"):
        mw.MpmdSharding(CUT, [1, 3], P()).sharding_of(group)


def test_it_prints_itself():
    assert repr(mw.MpmdSharding(CUT, [1, 3], P("tp"))) == (
        "MpmdSharding(P('tp',) in groups 1, 3 of 4)"
    )
    mixed = mw.MpmdSharding(LISTED, [0, 1], {0: P("a"), 1: P("b")})
    assert repr(mixed) == "MpmdSharding(P('a',), P('b',) in groups 0, 1 of 3)"


def test_the_repr_is_short_however_long_the_specs():
    names = ["x" * 90, "y" * 90]
    groups = mw.MeshGroups([mesh([n, n + 4], names=[names[n % 2]]) for n in range(4)])
    specs = {group: P(None, names[group % 2]) for group in range(4)}
    assert len(repr(mw.MpmdSharding(groups, range(4), specs))) <= 200
