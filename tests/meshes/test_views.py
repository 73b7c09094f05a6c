"""Views of a mesh: other axes, the same devices in the same order."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import meshwright as mw


@pytest.fixture
def mesh() -> Mesh:
    return mw.mesh("dp:2, tp:4")  # type: ignore[return-value]


@pytest.fixture
def shuffled() -> Mesh:
    """The same devices in an order that is not the list's."""
    order = np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]]
    return Mesh(order.reshape(2, 4), ("dp", "tp"))


def flat(mesh: Any) -> list[Any]:
    return list(mesh.devices.flat)


def test_an_axis_splits_into_several(mesh: Mesh) -> None:
    view = mw.split_axis(mesh, "tp", "a:2, b:2")
    assert list(view.shape.items()) == [("dp", 2), ("a", 2), ("b", 2)]
    assert flat(view) == flat(mesh)


@pytest.mark.parametrize("into", ["a:2, b:-1", {"a": 2, "b": 2}, [("a", -1), ("b", 2)], "a=2,b=2"])
def test_every_form_of_a_spec_may_say_the_parts(mesh: Mesh, into: Any) -> None:
    assert dict(mw.split_axis(mesh, "tp", into).shape) == {"dp": 2, "a": 2, "b": 2}


def test_a_part_may_keep_the_old_name(mesh: Mesh) -> None:
    assert dict(mw.split_axis(mesh, "tp", "ep:2, tp:2").shape) == {"dp": 2, "ep": 2, "tp": 2}


def test_the_parts_have_the_axis_type_of_the_whole() -> None:
    mesh = mw.mesh("dp:2:explicit, tp:4")
    view = mw.split_axis(mesh, "dp", "a:2, b:1")
    assert view.axis_types == (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)


def test_a_part_may_have_an_axis_type_of_its_own(mesh: Mesh) -> None:
    view = mw.split_axis(mesh, "tp", "a:2:explicit, b:2")
    assert view.axis_types == (AxisType.Auto, AxisType.Explicit, AxisType.Auto)


def test_neighbouring_axes_merge(mesh: Mesh) -> None:
    view = mw.merge_axes(mesh, ["dp", "tp"], "all")
    assert dict(view.shape) == {"all": 8}
    assert flat(view) == flat(mesh)
    three = mw.split_axis(mesh, "tp", "a:2, b:2")
    assert dict(mw.merge_axes(three, ("dp", "a"), "dp").shape) == {"dp": 4, "b": 2}
    assert dict(mw.merge_axes(three, ["b"], "c").shape) == {"dp": 2, "a": 2, "c": 2}


def test_axes_get_other_names(mesh: Mesh) -> None:
    assert mw.rename_axes(mesh, {"dp": "data"}).axis_names == ("data", "tp")
    assert mw.rename_axes(mesh, {"dp": "tp", "tp": "dp"}).axis_names == ("tp", "dp")
    assert mw.rename_axes(mesh, {}) == mesh
    assert flat(mw.rename_axes(mesh, {"dp": "data"})) == flat(mesh)


def test_views_undo_each_other(shuffled: Mesh) -> None:
    split = mw.split_axis(shuffled, "tp", "a:2, b:2")
    assert mw.merge_axes(split, ["a", "b"], "tp") == shuffled
    assert mw.rename_axes(mw.rename_axes(shuffled, {"dp": "x"}), {"x": "dp"}) == shuffled


@given(st.permutations(range(8)), st.sampled_from(["a:2, b:4", "a:4, b:-1", "a:2, b:2, c:2"]))
@settings(deadline=None)
def test_views_keep_the_order_of_the_devices(order: list[int], into: str) -> None:
    devices = [jax.devices()[i] for i in order]
    mesh = Mesh(np.array(devices), ("all",))
    view = mw.split_axis(mesh, "all", into)
    assert flat(view) == devices
    assert mw.check_same_order(mesh, view) is True
    assert flat(mw.merge_axes(view, view.axis_names, "again")) == devices


def test_an_array_on_a_view_does_not_move(shuffled: Mesh) -> None:
    view = mw.split_axis(shuffled, "tp", "a:2, b:2")
    old = NamedSharding(shuffled, PartitionSpec("dp", "tp"))
    new = NamedSharding(view, PartitionSpec("dp", ("a", "b")))
    assert old.is_equivalent_to(new, 2)
    assert old.devices_indices_map((4, 8)) == new.devices_indices_map((4, 8))


def test_abstract_meshes_have_views_too() -> None:
    mesh = mw.abstract_mesh("dp:2, tp:4:explicit")
    split = mw.split_axis(mesh, "tp", "a:-1, b:2")
    assert isinstance(split, AbstractMesh)
    assert dict(split.shape) == {"dp": 2, "a": 2, "b": 2}
    assert split.axis_types == (AxisType.Auto, AxisType.Explicit, AxisType.Explicit)
    merged = mw.merge_axes(split, ["a", "b"], "tp")
    assert merged == mesh
    assert mw.rename_axes(mesh, {"dp": "data"}).axis_names == ("data", "tp")


@pytest.mark.parametrize(
    ("axis", "into", "message"),
    [
        ("tp", "a:3, b:-1", "axis 'tp' of size 4 does not split into 'a:3, b:-1'. Make the sizes"),
        ("tp", "a:2, b:4", "axis 'tp' of size 4 does not split into 'a:2, b:4'"),
        ("tp", "a:2", "multiply to 4"),
        ("tp", "a:8, b:-1", "axis 'tp' of size 4 does not split"),
        ("tp", "a:-1, b:-1", "-1 appears 2 times"),
        ("tp", "a:0, b:4", "axis 'a': size 0 is not allowed"),
        ("tp", "dp:2, b:2", "axis 'dp' appears twice"),
        ("tp", "a:2*2", r"'a:2\*2': a view keeps the devices where they are"),
        ("tp", "", "the spec is empty"),
        ("tp", 5, "cannot read a mesh spec from 5"),
        ("tpp", "a:2, b:2", r"no axis 'tpp' in this mesh: dp, tp. Did you mean 'tp'\?"),
        (1, "a:2, b:2", "no axis 1 in this mesh: dp, tp"),
        (["tp"], "a:2, b:2", r"no axis \['tp'\] in this mesh"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(
    mesh: Mesh, axis: Any, into: Any, message: str
) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.split_axis(mesh, axis, into)


@pytest.mark.parametrize(
    ("axes", "name", "message"),
    [
        (["tp", "dp"], "x", "axes tp, dp are not neighbours in this order in dp, tp; merging"),
        (["dp", "dp"], "x", "axes dp, dp are not neighbours"),
        (["dp", "fsdp"], "x", r"no axis 'fsdp' in this mesh: dp, tp. Did you mean 'dp'\?"),
        ([], "x", "merge_axes takes a list of at least one axis name"),
        ("dp", "x", "axes: 'dp' is not a list or tuple"),
        (5, "x", "axes: 5 is not a list or tuple"),
        ({"dp", "tp"}, "x", "axes: {.*} is not a list or tuple"),
        (["dp"], "tp", "axis 'tp' appears twice"),
        (["dp", "tp"], "", "an axis name is empty"),
        (["dp", "tp"], 5, "axis name 5 is a int"),
        (["dp", "tp"], "a b", "axis name 'a b' has"),
    ],
)
def test_a_merge_that_does_not_fit_is_refused(
    mesh: Mesh, axes: Any, name: Any, message: str
) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.merge_axes(mesh, axes, name)


def test_axes_with_a_gap_between_do_not_merge() -> None:
    mesh = mw.mesh("a:2, b:2, c:2")
    with pytest.raises(
        mw.errors.MeshError, match="axes a, c are not neighbours in this order in a, b, c"
    ):
        mw.merge_axes(mesh, ["a", "c"], "x")


def test_axes_of_different_types_do_not_merge() -> None:
    mesh = mw.mesh("dp:2, tp:4:explicit")
    with pytest.raises(mw.errors.MeshError, match="axes dp, tp have different axis types"):
        mw.merge_axes(mesh, ["dp", "tp"], "x")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"dq": "data"}, r"no axis 'dq' in this mesh: dp, tp. Did you mean 'dp'\?"),
        ({"dp": "tp"}, "axis 'tp' appears twice"),
        ({"dp": ""}, "an axis name is empty"),
        ({"dp": 5}, "axis name 5 is a int"),
        ({"dp": []}, r"axis name \[\] is a list"),
        ("dp", "names: 'dp' is not a dict such as {'dp': 'data'}"),
        ([("dp", "data")], "names: .* is not a dict"),
        (None, "names: None is not a dict"),
    ],
)
def test_a_renaming_that_does_not_fit_is_refused(mesh: Mesh, names: Any, message: str) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.rename_axes(mesh, names)


@pytest.mark.parametrize("thing", [None, "dp:8", 5, jax.devices])
def test_views_are_of_meshes(thing: Any) -> None:
    for view in (
        lambda: mw.split_axis(thing, "dp", "a:2"),
        lambda: mw.merge_axes(thing, ["dp"], "a"),
        lambda: mw.rename_axes(thing, {"dp": "a"}),
        lambda: mw.rename_axes(thing, {}),
    ):
        with pytest.raises(mw.errors.MeshError, match="is not a mesh"):
            view()


def test_meshes_in_one_order_agree(mesh: Mesh) -> None:
    assert mw.check_same_order(mesh, mw.mesh("a:2, b:2, c:2")) is True
    assert mw.check_same_order(mesh, mesh, on_mismatch="warn") is True


def test_another_order_is_an_error(mesh: Mesh, shuffled: Mesh) -> None:
    with pytest.raises(
        mw.errors.MeshError,
        match=r"the same 8 devices in a different order, first at flat position 0 "
        r"\(device 0 and 3\)\. Arrays moved between them are reshuffled",
    ):
        mw.check_same_order(mesh, shuffled)


def test_another_order_warns_when_asked(mesh: Mesh, shuffled: Mesh) -> None:
    with pytest.warns(mw.errors.MeshOrderWarning, match="first at flat position 0") as caught:
        assert mw.check_same_order(mesh, shuffled, on_mismatch="warn") is False
    assert caught[0].filename == __file__


def test_other_devices_are_an_error(mesh: Mesh) -> None:
    with pytest.warns(mw.errors.IdleDevicesWarning, match="uses 2 of 8 devices"):
        part = mw.mesh("dp:2")
    with pytest.raises(
        mw.errors.MeshError,
        match="hold different devices: 6 only in the first, 0 only in the second",
    ):
        mw.check_same_order(mesh, part)
    with pytest.warns(
        mw.errors.MeshOrderWarning, match="0 only in the first, 6 only in the second"
    ):
        assert mw.check_same_order(part, mesh, on_mismatch="warn") is False


@pytest.mark.parametrize("answer", ["ignore", None, [], True])
def test_a_mismatch_is_an_error_or_a_warning(mesh: Mesh, answer: Any) -> None:
    with pytest.raises(mw.errors.MeshError, match=r"on_mismatch: .* is not 'error' or 'warn'"):
        mw.check_same_order(mesh, mesh, on_mismatch=answer)


def test_only_meshes_with_devices_have_an_order(mesh: Mesh) -> None:
    for other in (mw.abstract_mesh("dp:8"), None, "dp:8"):
        with pytest.raises(mw.errors.MeshError, match="is not a mesh with devices"):
            mw.check_same_order(mesh, other)  # type: ignore[arg-type]
        with pytest.raises(mw.errors.MeshError, match="is not a mesh with devices"):
            mw.check_same_order(other, mesh)  # type: ignore[arg-type]
