"""`mesh(...)` and `abstract_mesh(...)`: one request, any hardware."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright._compat import compiler_installed

without_compiler = pytest.mark.skipif(
    compiler_installed("tpu") or compiler_installed("gpu"), reason="a compiler gives real devices"
)


def test_a_mesh_is_over_the_devices_that_are_here() -> None:
    mesh = mw.mesh("dp:2, tp:-1")
    assert isinstance(mesh, Mesh)
    assert list(mesh.shape.items()) == [("dp", 2), ("tp", 4)]
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("dp:2, tp:4", None),
        ("dp=2,tp=4", None),
        ({"dp": 2, "tp": 4}, None),
        ([("dp", 2), ("tp", -1)], None),
        ((2, 4), ("dp", "tp")),
        ("2,4", ["dp", "tp"]),
        (np.array([2, -1]), ["dp", "tp"]),
        (mw.MeshSpec.parse("dp:-1, tp:4"), None),
    ],
)
def test_every_form_of_a_spec_gives_the_same_mesh_object(spec: Any, names: Any) -> None:
    assert mw.mesh(spec, names=names) is mw.mesh("dp:2, tp:4")


def test_axis_types_come_from_the_spec_or_the_option() -> None:
    auto, explicit, manual = AxisType.Auto, AxisType.Explicit, AxisType.Manual
    for options, wanted in (
        ({}, (auto, explicit)),
        ({"axis_types": "manual"}, (manual, manual)),
        ({"axis_types": AxisType.Explicit}, (explicit, explicit)),
        ({"axis_types": ["explicit", AxisType.Auto]}, (explicit, auto)),
        ({"axis_types": {"dp": "manual"}}, (manual, explicit)),
    ):
        assert mw.mesh("dp:2, tp:4:explicit", **options).axis_types == wanted


def test_a_device_list_is_used_as_on_or_as_devices() -> None:
    half = jax.devices()[4:]
    for options in ({"on": half}, {"devices": half}, {"on": tuple(half)}, {"on": np.array(half)}):
        mesh = mw.mesh("dp:2, tp:-1", **options)
        assert set(mesh.devices.flat) == set(half)
    assert set(mw.mesh("dp:-1", on=iter(half)).devices.flat) == set(half)


def test_the_order_of_a_device_list_does_not_matter() -> None:
    assert mw.mesh("dp:2, tp:4", on=jax.devices()[::-1]) is mw.mesh("dp:2, tp:4")


def test_a_topology_of_devices_gives_a_mesh_of_them() -> None:
    here = mw.topology(jax.devices())
    assert mw.mesh("dp:2, tp:4", on=here) is mw.mesh("dp:2, tp:4")


def test_named_cpus_are_the_simulated_devices() -> None:
    assert mw.mesh("dp:2, tp:4", on="cpu:8") is mw.mesh("dp:2, tp:4")
    four = mw.mesh("dp:2, tp:2", on="cpu:4")
    assert list(four.devices.flat) == jax.devices("cpu")[:4]
    assert mw.mesh("dp:2, tp:2", on=mw.topology("cpu:4")) is four


def test_more_named_cpus_than_there_are_stay_abstract() -> None:
    assert isinstance(mw.mesh("dp:-1", on="cpu:16"), AbstractMesh)
    hosts = mw.mesh("dp:2, tp:-1", on="cpu:4x2")
    assert isinstance(hosts, AbstractMesh)
    assert dict(hosts.shape) == {"dp": 2, "tp": 4}


@without_compiler
@pytest.mark.parametrize(
    ("name", "slices", "devices"),
    [("v5e:16x16", 1, 256), ("v5p:8x8x8", 2, 1024), ("tpu7x:4x4x4", 1, 128), ("h100:8x4", 1, 32)],
)
def test_named_hardware_without_its_compiler_is_abstract(
    name: str, slices: int, devices: int
) -> None:
    mesh = mw.mesh("fsdp:-1, tp:8", on=name, slices=slices, axis_types="explicit")
    assert isinstance(mesh, AbstractMesh)
    assert list(mesh.shape.items()) == [("fsdp", devices // 8), ("tp", 8)]
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    assert mw.mesh("fsdp:-1, tp:8", on=mw.topology(name, slices=slices)).shape == mesh.shape


@without_compiler
def test_an_abstract_mesh_shards_shapes() -> None:
    mesh = mw.mesh("fsdp:-1, tp:8", on="v5e:16x16")
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tp"))
    assert sharding.shard_shape((1024, 4096)) == (32, 512)


def test_fewer_devices_take_a_part_and_say_what_stays_idle() -> None:
    with pytest.warns(
        mw.errors.IdleDevicesWarning,
        match=r"^'dp:3' uses 3 of 8 devices; 5 stay idle\. Put -1 on an axis to use all\.$",
    ) as caught:
        mesh = mw.mesh("dp:3")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert list(mesh.devices.flat) == jax.devices()[:3]


def test_a_part_is_counted_against_the_devices_given() -> None:
    with pytest.warns(
        mw.errors.IdleDevicesWarning, match="'dp:2' uses 2 of 4 devices; 2 stay idle"
    ):
        mesh = mw.mesh("dp:2", on=jax.devices()[4:])
    assert list(mesh.devices.flat) == jax.devices()[4:6]


def test_a_part_fills_whole_hosts() -> None:
    with pytest.warns(
        mw.errors.IdleDevicesWarning,
        match=r"uses 8 of 16 devices; 8 stay idle, 2 whole hosts among them\. Put -1",
    ):
        mw.mesh("dp:2, tp:4", on="cpu:4x4")
    with pytest.warns(mw.errors.IdleDevicesWarning, match="4 stay idle, 1 whole host among them"):
        mw.mesh("dp:4", on="cpu:4x2")


def test_all_devices_warn_nothing() -> None:
    assert mw.mesh("dp:8").size == mw.mesh("dp:-1").size == 8


def test_dcn_fixes_what_crosses_the_slow_network() -> None:
    two = mw.topology("cpu:4x2")
    for dcn in ({"tp": 2}, (1, 2), "tp:2", (1, -1)):
        assert dict(mw.mesh("dp:2, tp:4", on=two, dcn=dcn).shape) == {"dp": 2, "tp": 4}
    with pytest.raises(mw.errors.MeshwrightError, match=r"does not fit .* DCN parts multiply to 1"):
        mw.mesh("dp:2, tp:4", on=two, dcn=(1, 1))


def test_minus_one_over_the_slow_network_takes_all_of_it() -> None:
    assert mw.mesh("dp:-1*8").size == 8
    assert dict(mw.mesh("dp:-1*2, tp:2", on="cpu:4x2").shape) == {"dp": 4, "tp": 2}


def test_the_options_of_place_are_taken() -> None:
    plain = mw.mesh("dp:2, tp:4")
    for options in ({"order": "ring"}, {"order": "grid"}, {"intensity": {"dp": 99}}):
        assert mw.mesh("dp:2, tp:4", **options) == plain
    assert mw.mesh("dp:2, tp:4", allow_split=False) == plain


def test_an_abstract_mesh_needs_no_hardware() -> None:
    mesh = mw.abstract_mesh("dp:2, tp:4:explicit")
    assert isinstance(mesh, AbstractMesh)
    assert (mesh.axis_names, mesh.axis_sizes) == (("dp", "tp"), (2, 4))
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)
    assert mesh == mw.abstract_mesh({"dp": 2, "tp": 4}, axis_types={"tp": "explicit"})
    assert mw.abstract_mesh((2, 4), names=("dp", "tp")).axis_sizes == (2, 4)
    assert mw.abstract_mesh("dp:2*4").axis_sizes == (8,)


def test_an_abstract_mesh_fills_minus_one_from_the_hardware() -> None:
    assert mw.abstract_mesh("fsdp:-1, tp:8", on="v5p:8x8x8").axis_sizes == (64, 8)
    assert mw.abstract_mesh("fsdp:-1, tp:8", on="v5p:8x8x8", slices=2).axis_sizes == (128, 8)
    assert mw.abstract_mesh("dp:-1*1, tp:-1", on="v5e:4x4", slices=2).axis_sizes == (2, 16)
    assert mw.abstract_mesh("dp:-1", on=mw.topology("h100:8x2")).axis_sizes == (16,)
    assert mw.abstract_mesh("dp:-1", on=jax.devices()).axis_sizes == (8,)


def test_an_abstract_mesh_may_use_a_part() -> None:
    assert mw.abstract_mesh("dp:4", on="v5e:4x4").axis_sizes == (4,)
    assert mw.abstract_mesh("dp:8", on="v5e:4x4", slices=3).axis_sizes == (8,)


def test_an_abstract_mesh_must_fit_its_hardware() -> None:
    with pytest.raises(
        mw.errors.SpecError, match="Not enough devices: 'dp:1000' needs 1000, there are"
    ):
        mw.abstract_mesh("dp:1000", on="v5e:4x4")
    with pytest.raises(
        mw.errors.SpecError, match="multiply to 3, which does not divide 16 devices"
    ):
        mw.abstract_mesh("dp:3, tp:-1", on="v5e:4x4")


def test_an_open_abstract_mesh_asks_for_hardware() -> None:
    with pytest.raises(mw.errors.MeshError, match="'dp:-1' is open: say on what hardware"):
        mw.abstract_mesh("dp:-1")
    with pytest.raises(mw.errors.MeshError, match="slices goes with a hardware name"):
        mw.abstract_mesh("dp:8", slices=2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: mw.mesh("fdsp:-1"),
        lambda: mw.abstract_mesh("fdsp:8"),
        lambda: mw.create_mesh((8, 1), ("fdsp", "tp")),
        lambda: mw.create_cpu_mesh((8,), ("fdsp",)),
        lambda: mw.DeviceMeshManager().create_device_mesh({"fdsp": 8}),
    ],
)
def test_a_slip_in_an_axis_name_is_warned_of(build) -> None:
    with pytest.warns(
        mw.errors.AxisNameWarning,
        match=r"^axis 'fdsp' is taken for one of your own, not for 'fsdp' \(model and data.* Did",
    ) as caught:
        assert build().axis_names[0] == "fdsp"
    assert caught[0].filename == __file__


def test_a_slip_in_a_rehearsal_points_at_its_caller() -> None:
    with pytest.warns(mw.errors.AxisNameWarning, match="'fdsp'") as caught:
        mw.rehearse(lambda x: x, 1.0, mesh="fdsp:8", on="cpu:8")
    assert {warning.filename for warning in caught} == {__file__}


def test_too_few_devices_of_one_machine_offer_simulated_ones() -> None:
    hint = (
        r"simulate devices: JAX_NUM_CPU_DEVICES=16 in the environment, or "
        r"jax\.config\.update\('jax_num_cpu_devices', 16\) before JAX's first use\. .* "
        r"on='v5e:16x16'\.$"
    )
    for build in (
        lambda: mw.mesh("dp:2, tp:8"),
        lambda: mw.mesh("dp:16, tp:-1"),
        lambda: mw.create_mesh((2, 8), ("dp", "tp")),
        lambda: mw.DeviceMeshManager().create_device_mesh({"dp": 16}),
    ):
        with pytest.raises(mw.errors.MeshwrightError, match=hint):
            build()


@pytest.mark.parametrize("spec", ["dp:300", "dp:100000"])
def test_too_few_devices_of_named_hardware_offer_none(spec) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match="Not enough devices") as error:
        mw.mesh(spec, on="v5e:16x16")
    assert "simulate" not in str(error.value)


def test_one_device_is_counted_in_the_singular() -> None:
    with pytest.raises(mw.errors.SpecError, match=r"'dp:2' needs 2, there is 1\."):
        mw.mesh("dp:2", devices=jax.devices()[:1])
    with pytest.raises(mw.errors.MeshError, match=r"'dp:2' needs 2, there is 1\."):
        mw.DeviceMeshManager(jax.devices()[:1]).create_device_mesh({"dp": 2})
    one = mw.MpmdMesh(mw.mesh("pp:1", devices=jax.devices()[:1]), "pp")
    assert str(one).startswith("1 group of 1 device, pp:1 cut along pp")
    assert str(mw.MeshGroups([one.jax_mesh])).startswith("1 group, 1 device\n")
