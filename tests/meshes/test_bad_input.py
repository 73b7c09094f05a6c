"""Whatever is wrong with the devices or the options, it is said on one screen."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshwright as mw
from meshwright.errors import LONGEST_MESSAGE
from meshwright.spec.mesh_spec import AxisSpec

HERE = jax.devices()


@dataclass(frozen=True)
class Device:
    """What any device says about itself; kinds that are not here cannot be had otherwise."""

    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    process_index: int = 0
    client: str = "a runtime"


def test_duplicate_devices_are_counted_not_listed() -> None:
    with pytest.raises(
        mw.errors.TopologyError,
        match=r"^2 of 10 devices appear more than once\. Pass each device once\.$",
    ):
        mw.mesh("dp:-1", on=[*HERE, *HERE[:2]])


def test_devices_of_two_kinds_are_counted_not_listed() -> None:
    for call in (lambda d: mw.mesh("dp:-1", on=d), mw.topology, mw.DeviceMeshManager):
        with pytest.raises(
            mw.errors.TopologyError,
            match="devices of 2 kinds in one mesh: 8 of cpu 'cpu', 1 of gpu 'NVIDIA H100",
        ):
            call([*HERE, Device(0)])
        with pytest.raises(
            mw.errors.TopologyError, match=r"2 of gpu 'A', 1 of gpu 'B'\. Pass devices"
        ):
            call(
                [Device(0, device_kind="A"), Device(1, device_kind="A"), Device(2, device_kind="B")]
            )


def test_devices_of_two_runtimes_do_not_mix() -> None:
    with pytest.raises(
        mw.errors.TopologyError, match="the 2 devices belong to 2 different runtimes"
    ):
        mw.topology([Device(0, client="one"), Device(1, client="two")])


def test_devices_of_a_platform_that_is_gone_are_stale() -> None:
    with pytest.raises(
        mw.errors.MeshError, match="these 2 gpu devices belong to a backend that was reset"
    ):
        mw.mesh("dp:2", on=[Device(0), Device(1)])


def test_devices_from_before_a_backend_reset_are_refused() -> None:
    code = """
import jax, jax.extend.backend
import meshwright as mw
old = jax.devices()
manager = mw.DeviceMeshManager()
before, read = mw.mesh("dp:8"), mw.topology(old)
jax.extend.backend.clear_backends()
new = jax.devices()
for call in (
    lambda: mw.mesh("dp:8", on=old),
    lambda: mw.mesh("dp:4", devices=old[:4]),
    lambda: mw.mesh("dp:8", on=read),
    lambda: mw.DeviceMeshManager(old),
    lambda: manager.create_data_parallel_mesh(),
    lambda: manager.create_device_mesh({"dp": 8}, devices=old),
    lambda: mw.mesh("dp:8", on=old[:4] + new[4:]),
    lambda: mw.mesh("dp:8", on=new[:4] + old[4:]),
):
    try:
        print("built", call())
    except mw.errors.MeshwrightError as error:
        print(type(error).__name__, error)
assert set(mw.mesh("dp:8").devices.flat) == set(new)
assert set(mw.create_cpu_mesh().devices.flat) == set(new)
assert set(mw.mesh("dp:8", on="cpu:8").devices.flat) == set(new)
assert manager.create_device_mesh({"dp": 8}, devices=new).size == 8
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    stale = "MeshError these {} cpu devices belong to a backend that was reset. "
    mixed = "TopologyError the 8 devices belong to 2 different runtimes (before and after "
    wanted = [stale.format(8), stale.format(4), *[stale.format(8)] * 4, mixed, mixed]
    said = result.stdout.splitlines()
    assert len(said) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(said, wanted, strict=True)), said


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ([], "there are no devices. Pass at least one, or leave devices out"),
        ([1, 2], "1 is not a JAX device. Pass jax.devices"),
        ([None], "None is not a JAX device"),
        ([[]], r"\[\] is not a JAX device"),
        ([HERE], "is not a JAX device"),
        (8, "cannot read hardware from 8. Pass a name such as 'v5p:8x8x8'"),
        ({}, "cannot read hardware from {}"),
        (object(), "cannot read hardware from <object"),
        ("", "unknown hardware ''. Known: v4, v5e"),
        ("v5q:8x8x8", r"unknown hardware 'v5q:8x8x8'. Did you mean 'v5\w'\?"),
        ("v5p", "'v5p' is not a chip and a shape. Write e.g. 'v5p:4x4x4'"),
        ("cpu:0", "sides must be positive"),
    ],
)
def test_hardware_that_is_none_is_refused(on: Any, message: str) -> None:
    for call in (mw.mesh, mw.abstract_mesh):
        with pytest.raises(mw.errors.TopologyError, match=message):
            call("dp:8", on=on)


@pytest.mark.parametrize("on", [b"cpu:8", set(HERE), np.array(8)])
def test_devices_come_in_an_order(on: Any) -> None:
    with pytest.raises(mw.errors.SpecError, match=r"devices: .* is not a list or tuple"):
        mw.mesh("dp:8", on=on)


def test_a_mesh_is_not_hardware() -> None:
    mesh = mw.mesh("dp:2, tp:4")
    with pytest.raises(mw.errors.TopologyError, match="cannot read hardware from Mesh"):
        mw.mesh("dp:8", on=mesh)
    with pytest.raises(mw.errors.TopologyError, match="is not a JAX device"):
        mw.mesh("dp:8", on=mesh.devices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": HERE, "devices": HERE}, "pass the devices once: either on=... or devices=..."),
        ({"slices": 2}, "slices goes with a hardware name"),
        ({"slices": None}, "slices goes with a hardware name"),
        ({"on": HERE, "slices": 2}, "slices goes with a hardware name"),
        ({"on": mw.topology("cpu:8"), "slices": 2}, "cpu:8 says its slices itself"),
        ({"on": "cpu:8", "slices": 0}, "slices: 0 is not a positive integer"),
        ({"on": "cpu:8", "slices": "2"}, "slices: '2' is not a positive integer"),
        ({"on": "cpu:8", "slices": 1.0}, "slices: 1.0 is not a positive integer"),
        ({"on": "cpu:8", "slices": True}, "slices: True is not a positive integer"),
        ({"on": "cpu:8", "slices": []}, r"slices: \[\] is not a positive integer"),
        ({"names": ("tp",)}, "names were given beside 'dp:8', which has names of its own"),
        ({"axis_types": "fast"}, "axis 'dp': type 'fast' is not an AxisType"),
        ({"axis_types": ("auto", "auto")}, "axis_types has 2 entries for 1 axis"),
        ({"dcn": 2}, "dcn: 2 is not a dict, a sequence or a string"),
        ({"dcn": {"dp": 2}}, "spans 2 parts over DCN, but there is 1"),
        ({"dcn": {"tp": 2}}, "dcn: no axis 'tp' in dp"),
        ({"dcn": (3,)}, "axis 'dp': dcn 3 does not divide its size 8. Use one of 1, 2, 4, 8"),
        ({"intensity": 5}, "intensity: 5 is not a dict such as {'tp': 12}"),
        ({"intensity": {"tp": 5}}, "intensity: no axis 'tp' in dp"),
        ({"intensity": {"dp": -1}}, "intensity of axis 'dp': -1 is not a finite number"),
        ({"intensity": {"dp": []}}, r"intensity of axis 'dp': \[\] is not a finite number"),
        ({"order": "random"}, "order: 'random' is not one of auto, ring, grid"),
        ({"order": []}, r"order: \[\] is not one of auto, ring, grid"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.mesh("dp:8", **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp:16", "Not enough devices: 'dp:16' needs 16, there are 8. Make the sizes"),
        ("dp:3, tp:-1", "multiply to 3, which does not divide 8 devices, so -1 for 'tp' cannot"),
        ("dp:16, tp:-1", "multiply to 16, which does not divide 8 devices"),
        ("dp:-1, tp:-1", "-1 appears 2 times"),
        ("dp:-2, tp:4", "axis 'dp': size -2 is not allowed"),
        ("dp:2, dp:4", "axis 'dp' appears twice"),
        ("dp:2*4", "'dp:2.4' spans 2 parts over DCN, but there is 1"),
        ("dp:-1*4, tp:-1*2", "-1 appears 2 times over DCN"),
        ((2, 4), "sizes without names"),
        (8, "cannot read a mesh spec from 8"),
        (None, "cannot read a mesh spec from None"),
    ],
)
def test_requests_that_do_not_fit_are_refused(spec: Any, message: str) -> None:
    with pytest.raises(mw.errors.SpecError, match=message):
        mw.mesh(spec)


@pytest.mark.parametrize(
    ("dims", "names", "message"),
    [
        (8, ("dp",), "axis_dims: 8 is not a list or tuple"),
        (None, ("dp",), "axis_dims: None is not a list or tuple"),
        ("24", ("dp", "tp"), "axis_dims: '24' is not a list or tuple"),
        ({2, 4}, ("dp", "tp"), "axis_dims: {.*} is not a list or tuple"),
        ({"dp": 2, "tp": 4}, ("dp", "tp"), "axis_dims: {.*} is not a list or tuple"),
        ((2, 4), {"dp", "tp"}, "axis_names: {.*} is not a list or tuple"),
        ((2, 4), "dp", "axis_names: 'dp' is not a list or tuple"),
        ((2, 4), None, "axis_names: None is not a list or tuple"),
        ((2, 4), ("dp",), "2 sizes for 1 names"),
        ((2, 4, 1), ("dp", "tp"), "3 sizes for 2 names"),
        ((), (), "the spec has no axes"),
        ((2, 4), ("dp", ""), "an axis name is empty"),
        ((2, 4), ("dp", "t p"), "axis name 't p' has"),
        ((2, 4), ("dp", 3), "axis name 3 is a int"),
        ((2, 4), ("dp", []), r"axis name \[\] is a list"),
        ((2, []), ("dp", "tp"), r"axis 'tp': \[\] is not a .slow, fast. pair"),
        ((2, "4"), ("dp", "tp"), "axis 'tp': size '4' is a str"),
        ((2, 4.0), ("dp", "tp"), "axis 'tp': size 4.0 is a float"),
        ((2, None), ("dp", "tp"), "axis 'tp': size None is a NoneType"),
        ((0, 8), ("dp", "tp"), "axis 'dp': size 0 is not allowed"),
        ((-1, -1), ("dp", "tp"), "-1 appears 2 times"),
        ((3, -1), ("dp", "tp"), "multiply to 3, which does not divide 8 devices"),
        ((2**40, 1), ("dp", "tp"), "is more than 2147483647"),
        ((1,) * 65, tuple(f"a{i}" for i in range(65)), "65 axes; at most 32"),
    ],
)
@pytest.mark.parametrize("use_jax", [False, True])
def test_create_mesh_refuses_nonsense(dims: Any, names: Any, message: str, use_jax: bool) -> None:
    with pytest.raises(mw.errors.SpecError, match=message):
        mw.create_mesh(dims, names, use_jax=use_jax)


def test_explain_needs_hardware() -> None:
    with pytest.raises(mw.errors.MeshError, match="'dp:8' has no devices: say on what hardware"):
        mw.explain("dp:8")
    with pytest.raises(
        mw.errors.MeshError, match="this AbstractMesh has no devices: say on what hardware"
    ):
        mw.explain(mw.abstract_mesh("never_built:8"))
    with pytest.raises(mw.errors.SpecError, match="cannot read a mesh spec from 8"):
        mw.explain(8, on="cpu:8")  # type: ignore[arg-type]
    with pytest.raises(mw.errors.MeshError, match="the mesh is empty"):
        mw.explain(jax.sharding.Mesh(np.empty((), object), ()))


class Hostile:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, -7, 3, 2.5, float("nan"), 1j, 10**5000, ..., object, Hostile()),
    *("", "x", "dp", "dp:", "dp:2, tp:4", b"dp", "\ud800", "x" * 200, AxisType.Auto),
    *([], (), {}, set(), [[]], [None], [Hostile()], {"dp": []}, {"dp": 2}, {None: 2}, {"a", "b"}),
    *(np.array(3), np.array([2, 4]), np.array([]), np.array([["dp"]]), np.array(["dp", "tp"])),
    *(HERE[0], HERE[:2], [*HERE, None], {"dp": Hostile()}, [("dp", 2), ("tp", [])], iter([2, 4])),
)
MESH, ABSTRACT = mw.mesh("dp:2, tp:4"), mw.abstract_mesh("dp:2, tp:4")
MANAGER = mw.DeviceMeshManager()
TWO = ((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    "call",
    [
        lambda odd: mw.MeshSpec.parse(odd),
        lambda odd: mw.MeshSpec.parse((2, 4), names=odd),
        lambda odd: mw.MeshSpec.parse({"dp": odd}),
        lambda odd: mw.MeshSpec(odd),
        lambda odd: AxisSpec(odd, 2),
        lambda odd: AxisSpec("dp", 2, slow=odd),
        lambda odd: mw.create_mesh(odd, ("dp", "tp")),
        lambda odd: mw.create_mesh((odd, 4), ("dp", "tp")),
        lambda odd: mw.create_mesh((2, 4), odd),
        lambda odd: mw.create_mesh((2, 4), (odd, "tp")),
        lambda odd: mw.create_mesh(*TWO, dcn_mesh_dims=odd),
        lambda odd: mw.create_mesh(*TWO, dcn_mesh_dims=(odd, 1)),
        lambda odd: mw.create_mesh(*TWO, should_sort_granules_by_key=odd),
        lambda odd: mw.create_mesh(*TWO, allow_split_physical_axes=odd),
        lambda odd: mw.create_mesh(*TWO, backend=odd),
        lambda odd: mw.create_mesh(*TWO, use_jax=odd),
        lambda odd: mw.create_mesh(*TWO, axis_types=odd),
        lambda odd: mw.create_cpu_mesh(odd, ("dp", "tp")),
        lambda odd: mw.create_cpu_mesh((2, 4), odd),
        lambda odd: mw.parse_mesh_from_string(odd, ["dp", "tp"]),
        lambda odd: mw.parse_mesh_from_string("dp:2, tp:4", odd),
        lambda odd: mw.parse_mesh_from_string("2, 4", odd),
        lambda odd: mw.calculate_host_mesh_shape(odd, 4, 2),
        lambda odd: mw.calculate_host_mesh_shape((2, 4), odd, 2),
        lambda odd: mw.calculate_host_mesh_shape((2, 4), 4, odd),
        lambda odd: mw.DeviceMeshManager(odd),
        lambda odd: MANAGER.create_device_mesh(odd),
        lambda odd: MANAGER.create_device_mesh({"dp": 2}, devices=odd),
        lambda odd: MANAGER.create_data_parallel_mesh(odd),
        lambda odd: MANAGER.create_model_parallel_mesh(2, odd),
        lambda odd: MANAGER.create_hybrid_mesh(odd, 1),
        lambda odd: MANAGER.get_mesh_info(odd),
        lambda odd: mw.mesh(odd),
        lambda odd: mw.mesh("dp:8", on=odd),
        lambda odd: mw.mesh("dp:8", devices=odd),
        lambda odd: mw.mesh((2, 4), names=odd),
        lambda odd: mw.mesh("dp:8", dcn=odd),
        lambda odd: mw.mesh("dp:8", axis_types=odd),
        lambda odd: mw.mesh("dp:8", slices=odd),
        lambda odd: mw.mesh("dp:8", on="cpu:8", slices=odd),
        lambda odd: mw.mesh("dp:8", intensity=odd),
        lambda odd: mw.mesh("dp:8", allow_split=odd),
        lambda odd: mw.abstract_mesh(odd),
        lambda odd: mw.abstract_mesh("dp:8", slices=odd),
        lambda odd: mw.split_axis(odd, "dp", "a:2"),
        lambda odd: mw.split_axis(MESH, odd, "a:2"),
        lambda odd: mw.split_axis(ABSTRACT, "dp", odd),
        lambda odd: mw.merge_axes(odd, ["dp"], "x"),
        lambda odd: mw.merge_axes(MESH, odd, "x"),
        lambda odd: mw.merge_axes(MESH, ["dp", "tp"], odd),
        lambda odd: mw.rename_axes(odd, {"dp": "x"}),
        lambda odd: mw.rename_axes(MESH, odd),
        lambda odd: mw.rename_axes(MESH, {"dp": odd}),
        lambda odd: mw.check_same_order(MESH, odd),
        lambda odd: mw.check_same_order(MESH, MESH, on_mismatch=odd),
    ],
)
@pytest.mark.filterwarnings("ignore::meshwright.errors.IdleDevicesWarning")
def test_odd_values_raise_nothing_but_our_own_errors(call: Callable[[Any], Any]) -> None:
    refused = 0
    for odd in ODD:
        try:
            call(odd)
        except mw.errors.MeshwrightError as error:
            refused += 1
            assert 0 < len(str(error)) <= LONGEST_MESSAGE
    assert refused > len(ODD) // 2


MANY = 100_000
CROWD = [Device(i) for i in range(MANY)]
POD = mw.topology("v5p:16x20x28", slices=12)  # 107,520 devices


def on_many(spec: Any, **options: Any) -> Callable[[], Any]:
    return lambda: mw.mesh(spec, on=f"cpu:{MANY}", **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (on_many("dp:100001"), "Not enough devices: 'dp:100001' needs 100001, there are 100000"),
        (on_many("dp:7, tp:-1"), "multiply to 7, which does not divide 100000 devices"),
        (on_many("dp:-1", dcn=(7,)), "spans 7 parts over DCN, but there is 1"),
        (on_many("dp:-1", axis_types=["auto"] * MANY), "axis_types has 100,000 entries for 1 axis"),
        (on_many([1] * MANY, names=["x"] * MANY), "100000 axes; at most 32"),
        (on_many((1, 2), names=["x"] * MANY), "2 sizes for 100000 names .* and 99992 more"),
        (on_many("dp:1," * MANY), "the spec has 500000 characters"),
        (on_many("x" * MANY), "the spec has 100000 characters; at most 10000"),
        (on_many({"x" * MANY: 1}), "has 100000 characters; at most 100"),
        (on_many({f"{'x' * 97}{i:03}": 2 for i in range(32)}), "multiply to 4294967296"),
        (on_many({f"{'x' * 97}{i:03}": 1 for i in range(32)} | {"xx": 3, "yy": -1}), "34 axes"),
        (
            on_many({f"{'x' * 97}{i:03}": 1 for i in range(30)} | {"xx": 3, "yy": -1}),
            r"^'x{97}000:1, x{97}001:1.* \.\.\.$",
        ),
        (lambda: mw.abstract_mesh("dp:11, tp:-1", on=POD), "does not divide 107520 devices"),
        (lambda: mw.abstract_mesh("dp:107521", on=POD), "needs 107521, there are 107520"),
        (lambda: mw.place("dp:107519", POD), "uses 107519 of 107520 devices"),
        (
            lambda: mw.place("a:21504, b:5", POD, allow_split=False),
            "splitting is forbidden",
        ),
        (lambda: mw.topology([*CROWD, CROWD[7]]), "1 of 100001 devices appear more than once"),
        (lambda: mw.topology([*CROWD, *HERE]), "100000 of gpu '.*', 8 of cpu 'cpu'"),
        (
            lambda: mw.topology([Device(i, device_kind=f"kind {i}") for i in range(MANY)]),
            "devices of 100000 kinds in one mesh: .* and 99992 more",
        ),
        (lambda: mw.mesh("dp:-1", on=CROWD), "these 100000 gpu devices belong to a backend"),
        (lambda: mw.mesh("dp:-1", on=[CROWD]), r"\[Device.* \.\.\. is not a JAX device"),
        (lambda: mw.mesh("dp:-1", on=range(MANY)), "0 is not a JAX device"),
        (lambda: mw.DeviceMeshManager({1: CROWD}), "devices: {1: .* is not a list or tuple"),  # type: ignore[arg-type]
        (lambda: mw.DeviceMeshManager().create_data_parallel_mesh(MANY), "Not enough devices"),
        (lambda: mw.calculate_host_mesh_shape((2,) * 30, MANY, 3), "has 1073741824 devices, but"),
        (
            lambda: mw.split_axis(mw.abstract_mesh(f"dp:{MANY}"), "dp", "a:3, b:-1"),
            "does not split",
        ),
        (lambda: mw.split_axis(mw.abstract_mesh("dp:8"), "x" * MANY, "a:8"), "no axis 'xxx"),
        (lambda: mw.explain("dp:11, tp:-1", on=POD), "does not divide 107520 devices"),
    ],
)
def test_a_message_fits_on_a_screen_at_a_hundred_thousand_devices(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=message) as caught:
        call()
    said = str(caught.value)
    assert len(said) <= LONGEST_MESSAGE == 1500
    assert said.count("Device(") <= 1
    assert len(said.splitlines()) <= 5


def test_an_idle_warning_fits_on_a_line_at_a_hundred_thousand_devices() -> None:
    with pytest.warns(mw.errors.IdleDevicesWarning, match="99000 stay idle") as caught:
        mw.mesh("dp:1000", on="cpu:100x1000")
    assert [str(w.message) for w in caught] == [
        "'dp:1000' uses 1000 of 100000 devices; 99000 stay idle, 990 whole hosts among them. "
        "Put -1 on an axis to use all."
    ]


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda: mw.mesh("dp:8", dcn={"tp": 2}), "dcn"),
        (lambda: mw.mesh("dp:8", dcn=(3,)), "dcn"),
        (lambda: mw.mesh("dp:8", axis_types=("auto", "auto")), "axis_types"),
        (lambda: mw.mesh("dp:8", intensity={"tp": 2}), "intensity"),
        (lambda: mw.mesh("dp:8", order="snake"), "order"),
        (lambda: mw.mesh("dp:8", slices=2), "slices"),
        (lambda: mw.mesh("dp:8", on="cpu:8", devices=[]), "devices"),
        (lambda: mw.mesh("dp:8", names=("dp",)), "names"),
        (lambda: mw.abstract_mesh("dp:-1"), "on"),
        (lambda: mw.topology("v5p:4x4x4", speeds={"links": 1}), "speeds"),
        (lambda: mw.topology("v5p:4x4x4", chips_per_host=(3,)), "chips_per_host"),
        (lambda: mw.topology("v5e:4x4", twisted=True), "twisted"),
        (lambda: mw.create_mesh(backend="npu"), "backend"),
        (lambda: mw.mesh("dp:8", slices=True), "slices"),
        (lambda: mw.abstract_mesh("dp:8", slices=True), "slices"),
        (lambda: mw.explain(mw.mesh("dp:8"), slices=True), "slices"),
        (lambda: mw.mesh("dp:8", on="cpu:8", slices=0), "slices"),
        (lambda: mw.mesh("dp:8", devices="v5e:4x2"), "devices"),
        (lambda: mw.mesh("dp:8", allow_split="no"), "allow_split"),
        (lambda: mw.create_mesh((8,), "dp"), "axis_names"),
        (lambda: mw.create_mesh((8,), ("dp",), use_jax=1), "use_jax"),
        (lambda: mw.calculate_host_mesh_shape((2, 4), total_devices=0), "total_devices"),
        (lambda: mw.schedules.schedule("gpipe", groups=0, microbatches=4), "groups"),
        (lambda: mw.schedules.schedule("gpipe", groups=2, microbatches=True), "microbatches"),
        (lambda: mw.mesh("dp:16"), None),
    ],
)
def test_an_error_carries_the_option_it_speaks_of(call: Any, option: str | None) -> None:
    with pytest.raises(mw.errors.MeshwrightError, match=option or "Not enough devices") as error:
        call()
    assert error.value.option == option


@pytest.mark.parametrize("slices", [True, 1.0, 2])
def test_devices_and_topologies_take_no_slices(slices: Any) -> None:
    for source in (jax.devices(), mw.topology("cpu:8")):
        with pytest.raises(mw.errors.TopologyError, match="slices"):
            mw.topology(source, slices=slices)


def test_a_name_is_no_list_of_devices() -> None:
    with pytest.raises(mw.errors.MeshError, match=r"devices: 'v5e:4x2' is a name, .* as on="):
        mw.mesh("dp:8", devices="v5e:4x2")  # type: ignore[arg-type]
