"""`create_mesh`: the contract, and the faults of the older library that it does not have."""

import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshwright as mw
from meshwright import MeshSpec


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with eight CPU devices."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", **env}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_signature_is_the_contract() -> None:
    said = {name: p.default for name, p in inspect.signature(mw.create_mesh).parameters.items()}
    assert list(said.items()) == [
        ("axis_dims", (1, -1, 1, 1, 1)),
        ("axis_names", ("dp", "fsdp", "ep", "tp", "sp")),
        ("dcn_mesh_dims", None),
        ("should_sort_granules_by_key", True),
        ("allow_split_physical_axes", True),
        ("backend", None),
        ("use_jax", False),
        ("axis_types", None),
    ]


def test_the_default_mesh_puts_every_device_on_fsdp() -> None:
    mesh = mw.create_mesh()
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize("dims", [(2, 4), (-1, 4), (2, -1), [8, 1], (1, 8), np.array([4, 2])])
def test_the_shape_is_exactly_the_one_asked_for(dims: Any) -> None:
    mesh = mw.create_mesh(dims, ("dp", "tp"))
    known = [int(size) for size in dims]
    wanted = [8 // -int(np.prod(known)) if size == -1 else size for size in known]
    assert list(mesh.shape.items()) == list(zip(("dp", "tp"), wanted, strict=True))
    assert mesh.devices.shape == tuple(wanted)


def test_arguments_go_by_position_as_they_did() -> None:
    mesh = mw.create_mesh((2, 4), ("a", "b"), (1, 1), True, True, "cpu", False, "explicit")
    assert dict(mesh.shape) == {"a": 2, "b": 4}
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_any_iterable_in_an_order_gives_dims_and_names() -> None:
    names = {"dp": 0, "tp": 0}
    assert dict(mw.create_mesh((d for d in (2, 4)), names.keys()).shape) == {"dp": 2, "tp": 4}


def test_numpy_integers_are_fine() -> None:
    mesh = mw.create_mesh((np.int64(2), np.int32(4)), ("dp", "tp"))
    assert mesh is mw.create_mesh((2, 4), ("dp", "tp"))


def test_the_same_request_gives_the_same_object() -> None:
    first = mw.create_mesh((2, 4), ("dp", "tp"))
    assert mw.create_mesh([2, 4], ["dp", "tp"]) is first
    assert mw.create_mesh(axis_dims=(2, 4), axis_names=("dp", "tp"), backend="cpu") is first


@pytest.mark.parametrize("use_jax", [False, True])
def test_the_same_request_gives_the_same_object_with_every_option(use_jax: bool) -> None:
    options: dict[str, Any] = {
        "dcn_mesh_dims": (1, 1),
        "should_sort_granules_by_key": False,
        "allow_split_physical_axes": False,
        "backend": "cpu",
        "use_jax": use_jax,
        "axis_types": ["auto", "explicit"],
    }
    mesh = mw.create_mesh((4, 2), ("dp", "tp"), **options)
    assert mw.create_mesh((4, 2), ("dp", "tp"), **options) is mesh
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)
    assert dict(mesh.shape) == {"dp": 4, "tp": 2}


def test_another_request_gives_another_mesh() -> None:
    first = mw.create_mesh((2, 4), ("dp", "tp"))
    for other in (
        mw.create_mesh((4, 2), ("dp", "tp")),
        mw.create_mesh((2, 4), ("tp", "dp")),
        mw.create_mesh((2, 4), ("dp", "tp"), axis_types="explicit"),
    ):
        assert other != first


def test_a_cached_mesh_does_not_let_a_bad_request_through() -> None:
    mw.create_mesh((1, 8), ("d", "p"))
    for dims in ((True, 8), (1.0, 8)):
        with pytest.raises(mw.errors.SpecError, match=r"axis 'd': size .* not an integer"):
            mw.create_mesh(dims, ("d", "p"))
    with pytest.raises(mw.errors.SpecError, match="axis_names: 'dp' is not a list or tuple"):
        mw.create_mesh((1, 8), "dp")
    with pytest.raises(mw.errors.MeshError, match="backend: '' is not one of cpu, gpu, tpu"):
        mw.create_mesh((1, 8), ("d", "p"), backend="")


def test_known_fault_the_cache_ignored_the_devices() -> None:
    result = run(
        """
import jax, jax.extend.backend
import meshwright as mw
first = mw.create_mesh((2, 4), ("dp", "tp"))
assert mw.create_mesh((2, 4), ("dp", "tp")) is first
jax.extend.backend.clear_backends()
second = mw.create_mesh((2, 4), ("dp", "tp"))
assert second is not first
assert second.devices.flat[0].client is jax.devices()[0].client
assert set(second.devices.flat) == set(jax.devices())
assert set(first.devices.flat).isdisjoint(second.devices.flat)
jax.extend.backend.clear_backends()
jax.config.update("jax_num_cpu_devices", 4)
assert dict(mw.create_mesh((2, -1), ("dp", "tp")).shape) == {"dp": 2, "tp": 2}
print("done")
"""
    )
    assert result.stdout == "done\n", result.stderr


@pytest.mark.parametrize("stale", ["2", "0", "", "many"])
def test_known_fault_a_stale_megascale_num_slices_broke_cpu_meshes(
    stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", stale)
    name = f"with_{stale or 'nothing'}"  # a request not made before
    assert dict(mw.create_mesh((2, 4), (name, "tp")).shape) == {name: 2, "tp": 4}
    assert mw.topology(jax.devices()).num_slices == 1


def test_known_fault_a_stale_megascale_num_slices_broke_cpu_meshes_from_the_start() -> None:
    code = "import meshwright as mw; print(dict(mw.create_mesh((2, 4), ('dp', 'tp')).shape))"
    result = run(code, MEGASCALE_NUM_SLICES="4", MEGASCALE_SLICE_ID="3")
    assert result.stdout == "{'dp': 2, 'tp': 4}\n", result.stderr


@pytest.mark.parametrize(
    ("sizes", "dcn"),
    [((4, 8), (2, 1)), ((4, 8), (1, 2)), ((2, 16), (2, 1)), ((32, 1), (2, 1)), ((8, 4), (-1, 1))],
)
def test_known_fault_explicit_dcn_mesh_dims_gave_another_shape(
    sizes: tuple[int, int], dcn: tuple[int, int]
) -> None:
    two = mw.topology("v5e:4x4", slices=2)
    spec = MeshSpec.parse(sizes, names=("dp", "tp")).with_dcn(dcn, two.num_slices)
    placed = mw.place(spec, two)
    assert placed.positions.shape == sizes
    assert sorted(placed.positions.ravel()) == list(range(32))
    wanted = [2 if part == -1 else part for part in dcn]
    assert [axis.slow for axis in placed.axes] == wanted
    # Walking along an axis visits as many slices as its dcn says.
    slices = placed.positions // 16
    for dim, parts in enumerate(wanted):
        visited = np.moveaxis(slices, dim, -1).reshape(-1, sizes[dim])
        assert {len(set(line)) for line in visited.tolist()} == {parts}


def test_an_explicit_dcn_on_two_slices_gives_exactly_the_mesh_asked_for() -> None:
    two = mw.topology("v5e:4x4", slices=2)
    for dcn in ((2, 1), {"dp": 2}, "dp:2", (-1, 1)):
        mesh = mw.mesh("dp:4, tp:8", on=two, dcn=dcn)
        assert dict(mesh.shape) == {"dp": 4, "tp": 8}


def test_a_missing_dcn_is_worked_out() -> None:
    placed = mw.place("dp:2, tp:16", mw.topology("v5e:4x4", slices=2))
    assert {axis.name: axis.slow for axis in placed.axes} == {"dp": 2, "tp": 1}


@pytest.mark.parametrize(
    ("dcn", "message"),
    [
        ((2, 1), "'dp:2.1, tp:1.4' spans 2 parts over DCN, but there is 1"),
        ((3, 1), "axis 'dp': dcn 3 does not divide its size 2. Use one of 1, 2"),
        ((1,), r"dcn has 1 entry for 2 axes \(dp, tp\)"),
        ((0, 1), "axis 'dp': size 0 is not allowed"),
        ((1.0, 1), "axis 'dp': size 1.0 is a float"),
        ((True, 1), "axis 'dp': size True is a bool"),
        (5, "dcn_mesh_dims: 5 is not a list or tuple"),
        ("dp:2", "dcn_mesh_dims: 'dp:2' is not a list or tuple"),
        ({"dp": 2}, "dcn_mesh_dims: {'dp': 2} is not a list or tuple"),
    ],
)
@pytest.mark.parametrize("use_jax", [False, True])
def test_a_dcn_that_does_not_fit_is_refused(dcn: Any, message: str, use_jax: bool) -> None:
    with pytest.raises(mw.errors.SpecError, match=message):
        mw.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=dcn, use_jax=use_jax)


@pytest.mark.parametrize("dcn", [(1, 1), [1, 1], (-1, 1), (1, -1)])
@pytest.mark.parametrize("use_jax", [False, True])
def test_a_dcn_of_one_part_changes_nothing(dcn: Any, use_jax: bool) -> None:
    mesh = mw.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=dcn, use_jax=use_jax)
    assert dict(mesh.shape) == {"dp": 2, "tp": 4}


class Runtime:
    """Stands for the client of a pod that is not here."""

    def __init__(self) -> None:
        self.all: list[Chip] = []

    def devices(self) -> "list[Chip]":
        return self.all


@dataclass(frozen=True)
class Chip:
    """What a TPU device says about itself; none can be had without its compiler."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    slice_index: int
    client: Runtime = field(repr=False, compare=False)
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def pod(slices: int) -> list[Chip]:
    """Slices of 4x4 chips on hosts of 2x2."""
    runtime = Runtime()
    for number in range(16 * slices):
        x, y = number % 4, number // 4 % 4
        host = x // 2 + 2 * (y // 2) + 4 * (number // 16)
        runtime.all.append(Chip(number, (x, y, 0), host, number // 16, runtime))
    return runtime.all


def test_known_fault_hosts_of_one_slice_were_slow_network_granules() -> None:
    named = mw.topology("v5e:16x16")
    assert (named.num_hosts, named.num_slices) == (64, 1)
    read = mw.topology(pod(slices=1))
    assert (read.num_hosts, read.num_slices, read.shape) == (4, 1, (4, 4))
    assert {axis.kind for axis in read.axes} == {"torus"}
    assert all(axis.slow == 1 for axis in mw.place("dp:4, tp:4", read).axes)


def test_slices_are_the_slow_network_granules() -> None:
    read = mw.topology(pod(slices=2))
    assert (read.num_hosts, read.num_slices, read.shape) == (8, 2, (2, 4, 4))


def test_sorting_granules_gives_every_process_the_same_order() -> None:
    chips = pod(slices=2)
    for order in (chips, chips[::-1], chips[16:] + chips[:16]):
        read = mw.topology(order, sort_slices=True)
        assert [order[i].slice_index for i in read.index[:, 0, 0]] == [0, 1]
    unsorted = mw.topology(chips[::-1], sort_slices=False)
    assert [chips[::-1][i].slice_index for i in unsorted.index[:, 0, 0]] == [1, 0]


def test_splitting_a_physical_axis_can_be_forbidden() -> None:
    assert dict(mw.mesh("dp:64, tp:4", on="v5e:16x16").shape) == {"dp": 64, "tp": 4}
    with pytest.raises(
        mw.errors.PlacementError, match=r"splitting is forbidden\. Near shapes that do"
    ):
        mw.mesh("dp:64, tp:4", on="v5e:16x16", allow_split=False)


@pytest.mark.parametrize("option", [True, False])
def test_splitting_and_sorting_options_change_nothing_on_one_host(option: bool) -> None:
    mesh = mw.create_mesh(
        (2, 4),
        ("dp", "tp"),
        should_sort_granules_by_key=option,
        allow_split_physical_axes=option,
    )
    assert mesh == mw.create_mesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, (AxisType.Auto, AxisType.Auto)),
        ("auto", (AxisType.Auto, AxisType.Auto)),
        ("explicit", (AxisType.Explicit, AxisType.Explicit)),
        ("manual", (AxisType.Manual, AxisType.Manual)),
        ("Explicit", (AxisType.Explicit, AxisType.Explicit)),
        (AxisType.Explicit, (AxisType.Explicit, AxisType.Explicit)),
        (("auto", "manual"), (AxisType.Auto, AxisType.Manual)),
        (["explicit"], (AxisType.Explicit, AxisType.Explicit)),
        ((AxisType.Manual,), (AxisType.Manual, AxisType.Manual)),
        (["explicit", "auto"], (AxisType.Explicit, AxisType.Auto)),
        ((AxisType.Manual, "explicit"), (AxisType.Manual, AxisType.Explicit)),
        ((None, AxisType.Explicit), (AxisType.Auto, AxisType.Explicit)),
        ({"tp": "explicit"}, (AxisType.Auto, AxisType.Explicit)),
    ],
)
@pytest.mark.parametrize("use_jax", [False, True])
def test_axis_types_are_words_or_values_for_all_or_each(
    given: Any, wanted: tuple[AxisType, ...], use_jax: bool
) -> None:
    mesh = mw.create_mesh((2, 4), ("dp", "tp"), axis_types=given, use_jax=use_jax)
    assert mesh.axis_types == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("explict", r"axis 'dp': type 'explict' .*Did you mean 'explicit'\?"),
        (7, "axis 'dp': type 7 is not an AxisType or one of auto, explicit, manual"),
        (("auto",) * 3, "axis_types has 3 entries for 2 axes"),
        ([], "axis_types has 0 entries for 2 axes"),
        (["fast"], "axis 'dp': type 'fast' is not an AxisType"),
        (("auto", "fast"), "axis 'tp': type 'fast' is not an AxisType"),
        ({"sp": "auto"}, "axis_types: no axis 'sp' in dp, tp"),
    ],
)
def test_bad_axis_types_are_named(given: Any, message: str) -> None:
    with pytest.raises(mw.errors.SpecError, match=message):
        mw.create_mesh((2, 4), ("dp", "tp"), axis_types=given)


def test_backend_chooses_the_devices() -> None:
    assert mw.create_mesh((8,), ("dp",), backend="cpu").devices.flat[0].platform == "cpu"


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_backend_without_devices_is_an_error(backend: str) -> None:
    # A RuntimeError as JAX's own, which callers of the older library catch.
    with pytest.raises(RuntimeError, match=f"backend '{backend}' has no devices here") as error:
        mw.create_mesh((8,), ("dp",), backend=backend)
    assert isinstance(error.value, mw.errors.MeshError)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "backend: 'cuda' is not one of cpu, gpu, tpu"),
        ("tpuu", r"backend: 'tpuu' is not one of cpu, gpu, tpu\. Did you mean 'tpu'\?"),
        (5, "backend: 5 is not one of cpu, gpu, tpu"),
        (["cpu"], r"backend: \['cpu'\] is not one of"),
    ],
)
def test_an_unknown_backend_is_refused(backend: Any, message: str) -> None:
    with pytest.raises(mw.errors.MeshError, match=message):
        mw.create_mesh((8,), ("dp",), backend=backend)


@pytest.mark.parametrize(
    "option", ["should_sort_granules_by_key", "allow_split_physical_axes", "use_jax"]
)
def test_switches_are_true_or_false(option: str) -> None:
    assert mw.create_mesh((2, 4), ("dp", "tp"), **{option: np.True_}).size == 8
    for bad in (None, 1, "yes", []):
        with pytest.raises(mw.errors.SpecError, match=rf"{option}: .* is not True or False"):
            mw.create_mesh((2, 4), ("dp", "tp"), **{option: bad})


def test_use_jax_gives_what_jax_gives() -> None:
    ours = mw.create_mesh((2, 4), ("dp", "tp"), use_jax=True)
    theirs = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    assert ours == theirs


def test_use_jax_fills_minus_one() -> None:
    mesh = mw.create_mesh(use_jax=True)
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}


@pytest.mark.parametrize("use_jax", [False, True])
def test_fewer_devices_take_the_first_ones_and_warn(use_jax: bool) -> None:
    name = f"first_{use_jax}"  # a request not made before: a cached mesh has warned already
    with pytest.warns(
        mw.errors.IdleDevicesWarning,
        match=rf"'{name}:2, tp:2' uses 4 of 8 devices; 4 stay idle\. Put -1 on an axis to use all",
    ) as caught:
        mesh = mw.create_mesh((2, 2), (name, "tp"), use_jax=use_jax)
    assert caught[0].filename == __file__
    assert list(mesh.devices.flat) == jax.devices()[:4]


@pytest.mark.parametrize("use_jax", [False, True])
def test_more_devices_than_there_are_is_an_error(use_jax: bool) -> None:
    with pytest.raises(ValueError, match="Not enough devices: 'dp:4, tp:4' needs 16, there are 8"):
        mw.create_mesh((4, 4), ("dp", "tp"), use_jax=use_jax)


@pytest.mark.parametrize("use_jax", [False, True])
def test_known_fault_minus_two_was_mishandled(use_jax: bool) -> None:
    with pytest.raises(ValueError, match="axis 'dp': size -2 is not allowed"):
        mw.create_mesh((-2, 4), ("dp", "tp"), use_jax=use_jax)


@pytest.mark.parametrize("use_jax", [False, True])
def test_known_fault_duplicate_names_were_mishandled(use_jax: bool) -> None:
    with pytest.raises(ValueError, match="axis 'dp' appears twice"):
        mw.create_mesh((2, 4), ("dp", "dp"), use_jax=use_jax)


def test_arrays_can_be_placed_on_the_mesh() -> None:
    mesh = mw.create_mesh((2, 4), ("dp", "tp"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp", "tp"))
    array = jax.device_put(np.arange(32.0).reshape(4, 8), sharding)
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 2)}
    assert float(jax.jit(lambda x: x.sum())(array)) == 496.0
