"""`DeviceMeshManager`: the contract on a fixed set of devices."""

import inspect
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import meshwright as mw


@pytest.fixture
def manager() -> mw.DeviceMeshManager:
    return mw.DeviceMeshManager()


def defaults(member: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(mw.DeviceMeshManager, member)).parameters
    return {name: p.default for name, p in parameters.items() if name != "self"}


def test_the_signatures_are_the_contract() -> None:
    empty = inspect.Parameter.empty
    assert defaults("__init__") == {"devices": None}
    assert defaults("create_device_mesh") == {"mesh_shape": empty, "devices": None}
    assert defaults("create_data_parallel_mesh") == {"num_devices": None, "axis_name": "data"}
    assert defaults("create_model_parallel_mesh") == {"num_devices": None, "axis_name": "model"}
    assert list(defaults("create_hybrid_mesh").items()) == [
        ("data_parallel_size", 1),
        ("model_parallel_size", 1),
        ("data_axis", "data"),
        ("model_axis", "model"),
    ]
    assert defaults("get_mesh_info") == {"mesh": empty}


def test_it_manages_all_devices_unless_told(manager: mw.DeviceMeshManager) -> None:
    assert manager.devices == jax.devices()
    assert manager.num_devices == 8


def test_it_manages_the_devices_it_is_given() -> None:
    chosen = jax.devices()[2:6]
    for given in (chosen, tuple(chosen), iter(chosen), np.array(chosen)):
        manager = mw.DeviceMeshManager(given)  # type: ignore[arg-type]
        assert manager.devices == chosen
        assert manager.num_devices == 4
        assert set(manager.create_data_parallel_mesh().devices.flat) == set(chosen)


@pytest.mark.parametrize(
    "shape",
    [
        {"data": 2, "model": 4},
        [("data", 2), ("model", 4)],
        (("data", 2), ("model", 4)),
        {"data": -1, "model": 4},
        [("data", np.int64(2)), ("model", -1)],
    ],
)
def test_shapes_are_dicts_or_pairs(manager: mw.DeviceMeshManager, shape: Any) -> None:
    mesh = manager.create_device_mesh(shape)
    assert isinstance(mesh, Mesh)
    assert list(mesh.shape.items()) == [("data", 2), ("model", 4)]


def test_known_fault_minus_one_used_the_wrong_number_of_devices(
    manager: mw.DeviceMeshManager,
) -> None:
    mesh = manager.create_device_mesh({"data": -1, "model": 2})
    assert manager.get_mesh_info(mesh) == {"total_devices": 8, "axes": {"data": 4, "model": 2}}
    assert manager.create_data_parallel_mesh(-1).size == 8
    with pytest.raises(ValueError, match="multiply to 3, which does not divide 8 devices"):
        manager.create_device_mesh({"data": -1, "model": 3})


def test_known_fault_devices_were_always_in_list_order() -> None:
    shuffled = [jax.devices()[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    mesh = mw.DeviceMeshManager(shuffled).create_device_mesh({"data": 2, "model": 4})
    assert list(mesh.devices.flat) == jax.devices()


def test_fewer_devices_are_fine_and_silent(manager: mw.DeviceMeshManager) -> None:
    mesh = manager.create_device_mesh({"data": 2, "model": 1})
    assert list(mesh.devices.flat) == jax.devices()[:2]
    assert manager.create_hybrid_mesh(2, 2).size == 4


def test_devices_may_be_given_per_mesh(manager: mw.DeviceMeshManager) -> None:
    chosen = jax.devices()[4:]
    mesh = manager.create_device_mesh({"data": 2, "model": -1}, devices=chosen)
    assert set(mesh.devices.flat) == set(chosen)
    assert manager.num_devices == 8
    with pytest.raises(ValueError, match="Not enough devices: 'data:8' needs 8, there are 4"):
        manager.create_device_mesh({"data": 8}, devices=chosen)


def test_one_axis_over_some_or_all(manager: mw.DeviceMeshManager) -> None:
    assert dict(manager.create_data_parallel_mesh().shape) == {"data": 8}
    assert dict(manager.create_data_parallel_mesh(4).shape) == {"data": 4}
    assert dict(manager.create_data_parallel_mesh(2, "batch").shape) == {"batch": 2}
    assert dict(manager.create_model_parallel_mesh().shape) == {"model": 8}
    assert dict(manager.create_model_parallel_mesh(num_devices=2).shape) == {"model": 2}
    assert dict(manager.create_model_parallel_mesh(axis_name="tp").shape) == {"tp": 8}


def test_hybrid_meshes_have_data_outside_and_model_inside(manager: mw.DeviceMeshManager) -> None:
    assert list(manager.create_hybrid_mesh(2, 4).shape.items()) == [("data", 2), ("model", 4)]
    assert list(manager.create_hybrid_mesh().shape.items()) == [("data", 1), ("model", 1)]
    mesh = manager.create_hybrid_mesh(-1, 2, data_axis="dp", model_axis="tp")
    assert list(mesh.shape.items()) == [("dp", 4), ("tp", 2)]


def test_mesh_info_says_devices_and_axes(manager: mw.DeviceMeshManager) -> None:
    info = {"total_devices": 8, "axes": {"dp": 2, "tp": 4}}
    assert manager.get_mesh_info(mw.mesh("dp:2, tp:4")) == info
    assert manager.get_mesh_info(mw.abstract_mesh("dp:2, tp:4")) == info
    with pytest.raises(mw.errors.MeshError, match="'dp:2, tp:4' is not a mesh"):
        manager.get_mesh_info("dp:2, tp:4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.create_device_mesh({"data": 4, "model": 4}),
        lambda m: m.create_device_mesh([("data", 16), ("model", -1)]),
        lambda m: m.create_data_parallel_mesh(9),
        lambda m: m.create_model_parallel_mesh(100_000),
        lambda m: m.create_hybrid_mesh(8, 2),
        lambda m: m.create_hybrid_mesh(-1, 16),
    ],
)
def test_more_devices_than_there_are_is_not_enough_devices(
    manager: mw.DeviceMeshManager, make: Any
) -> None:
    with pytest.raises(ValueError, match=r"Not enough devices: .* needs .*, there are 8"):
        make(manager)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("data:8", "mesh_shape: 'data:8' is not a dict or a list of pairs"),
        (8, "mesh_shape: 8 is not a dict or a list of pairs"),
        (None, "mesh_shape: None is not a dict or a list of pairs"),
        ((2, 4), r"\(2, 4\): sizes without names"),
        ({}, "the spec has no axes"),
        ({"data": 0}, "axis 'data': size 0 is not allowed"),
        ({"data": "8"}, "axis 'data': size '8' is a str"),
        ({"data": 8.0}, "axis 'data': size 8.0 is a float"),
        ({"data": True}, "axis 'data': size True is a bool"),
        ({"data": -1, "model": -1}, "-1 appears 2 times"),
        ([("data", 2), ("data", 4)], "axis 'data' appears twice"),
        ({"": 8}, "an axis name is empty"),
        ({8: "data"}, "axis name 8 is a int"),
    ],
)
def test_bad_shapes_are_refused(manager: mw.DeviceMeshManager, shape: Any, message: str) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        manager.create_device_mesh(shape)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "there are no devices"),
        (8, "devices: 8 is not a list or tuple"),
        ("cpu", "devices: 'cpu' is not a list or tuple"),
        (["cpu"], "'cpu' is not a JAX device. Pass jax.devices"),
        ([None], "None is not a JAX device"),
        ([[]], r"\[\] is not a JAX device"),
    ],
)
def test_bad_devices_are_refused_at_once(devices: Any, message: str) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.DeviceMeshManager(devices)
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.DeviceMeshManager().create_device_mesh({"data": 1}, devices=devices)


def test_duplicate_devices_are_refused_at_once() -> None:
    with pytest.raises(mw.errors.TopologyError, match="1 of 9 devices appear more than once"):
        mw.DeviceMeshManager([*jax.devices(), jax.devices()[0]])


def test_a_grid_of_devices_is_not_a_list_of_devices() -> None:
    with pytest.raises(mw.errors.TopologyError, match="is not a JAX device"):
        mw.DeviceMeshManager(mw.mesh("dp:2, tp:4").devices)  # type: ignore[arg-type]
