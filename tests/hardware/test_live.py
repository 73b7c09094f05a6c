"""Hardware from devices: the simulated CPUs that are here, and stand-ins for what is not."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import meshwright as mw


@dataclasses.dataclass(eq=False)
class Client:
    """A runtime: it knows all of its devices."""

    all: list = dataclasses.field(default_factory=list, repr=False)

    def devices(self):
        return self.all


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX says about a CPU or GPU."""

    platform: str
    device_kind: str
    id: int
    process_index: int
    client: Client = dataclasses.field(compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Tpu(Device):
    """What JAX says about a TPU."""

    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int


@dataclasses.dataclass(frozen=True)
class FabricGpu(Device):
    """A GPU whose NVLink domain JAX knows."""

    slice_index: int


def tpus(kind, sides, *, slices=1, cores=1, host=(2, 2, 1), slice_index=None):
    """A whole pod of `slices` slices, in the order the vendor's runtime lists it: x fastest."""
    client = Client()
    sides = (*sides, 1, 1)[:3]
    for part in range(slices):
        for z, y, x in itertools.product(*(range(side) for side in reversed(sides))):
            box = [c // h for c, h in zip((x, y, z), host, strict=True)]
            boxes = [-(-s // h) for s, h in zip(sides, host, strict=True)]
            process = box[0] + boxes[0] * (box[1] + boxes[1] * (box[2] + boxes[2] * part))
            for core in range(cores):
                number = part if slice_index is None else slice_index[part]
                client.all.append(
                    Tpu("tpu", kind, len(client.all), process, client, (x, y, z), core, number)
                )
    return client.all


def others(platform, kind, processes):
    """Devices of processes with the given device counts."""
    client = Client()
    for process, count in enumerate(processes):
        for _ in range(count):
            client.all.append(Device(platform, kind, len(client.all), process, client))
    return client.all


def mixed_up(devices):
    return [devices[i] for i in np.random.default_rng(3).permutation(len(devices))]


def wraps(topology):
    return [axis.wraps for axis in topology.axes if axis.kind == "torus"]


def test_live_cpus_are_one_host():
    here = mw.topology(jax.devices())
    assert (here.name, here.chip.name, here.shape) == ("cpu:8", "cpu", (8,))
    assert (here.num_hosts, here.num_slices, here.scattered) == (1, 1, False)
    assert here.devices == tuple(jax.devices())


@pytest.mark.parametrize("wrap", [list, tuple, iter, np.array], ids=lambda wrap: wrap.__name__)
def test_any_sequence_of_devices_will_do(wrap):
    assert mw.topology(wrap(jax.devices())).devices == tuple(jax.devices())


def test_a_part_of_the_devices_is_a_topology():
    some = jax.devices()[2:5]
    here = mw.topology(some)
    assert (here.name, here.num_devices) == ("cpu:3", 3)
    assert here.devices == tuple(some)


def test_the_grid_is_in_order_of_ids_whatever_the_order_of_the_list():
    shuffled = mixed_up(jax.devices())
    here = mw.topology(shuffled)
    assert here.devices == tuple(shuffled)
    assert [here.devices[i] for i in here.index] == jax.devices()


def test_cpus_of_several_processes_are_hosts_on_the_slow_network():
    here = mw.topology(others("cpu", "cpu", [4, 4]))
    assert here.name == "cpu:4x2"
    assert [(a.name, a.kind, a.size) for a in here.axes] == [
        ("host", "network", 2),
        ("cpu", "switch", 4),
    ]
    assert here.host.tolist() == [[0] * 4, [1] * 4]


def test_uneven_processes_are_one_scattered_group():
    here = mw.topology(others("cpu", "cpu", [3, 4]))
    assert (here.shape, here.scattered, here.num_slices, here.num_hosts) == ((7,), True, 1, 2)
    assert str(here).endswith("scattered: these devices fill no box, their links are unknown")


def test_gpus_of_several_hosts_are_domains_per_process():
    here = mw.topology(others("gpu", "NVIDIA H100 80GB HBM3", [8, 8, 8, 8]))
    assert (here.name, here.num_slices, here.num_hosts) == ("h100:8x4", 4, 4)
    assert str(here) == str(mw.topology("h100:8x4"))


def test_the_fabric_tells_domains_of_several_hosts_apart():
    client = Client()
    client.all += [
        FabricGpu("gpu", "NVIDIA GB200", i, i // 4, client, slice_index=i // 72) for i in range(144)
    ]
    here = mw.topology(client.all)
    assert (here.name, here.axes[0].name) == ("gb200:72x2", "domain")
    assert (here.num_slices, here.num_hosts) == (2, 36)


def test_one_host_of_gpus_is_one_domain():
    assert mw.topology(others("gpu", "NVIDIA H200", [8])).shape == (8,)


def test_an_unknown_accelerator_still_has_a_topology():
    here = mw.topology(others("rocm", "AMD Something", [8, 8]))
    assert (here.chip.name, here.name) == ("unknown", "AMD Something:8x2")
    assert here.axes[0].speed < here.axes[1].speed


@pytest.mark.parametrize(
    ("kind", "sides", "name"),
    [
        ("TPU v4", (4, 4, 4), "v4:4x4x4"),
        ("TPU v5 lite", (16, 16), "v5e:16x16"),
        ("TPU v5 lite", (4, 8), "v5e:4x8"),
        ("TPU v5", (2, 2, 4), "v5p:2x2x4"),
        ("TPU v5p", (4, 4, 8), "v5p:4x4x8"),
        ("TPU v6 lite", (8, 16), "v6e:8x16"),
    ],
)
def test_a_whole_pod_equals_the_named_one(kind, sides, name):
    live, named = mw.topology(tpus(kind, sides)), mw.topology(name)
    assert (live.name, live.axes, live.num_slices) == (named.name, named.axes, 1)
    assert (live.host == named.host).all()


def test_hosts_of_a_tpu_slice_share_its_torus_and_are_no_slow_network():
    live = mw.topology(tpus("TPU v5 lite", (16, 16)))
    assert (live.num_hosts, live.num_slices) == (64, 1)
    assert [axis.kind for axis in live.axes] == ["torus", "torus"]


def test_every_grid_point_holds_the_device_with_its_coordinates():
    live = mw.topology(mixed_up(tpus("TPU v5", (4, 4, 8))))
    for point, place in np.ndenumerate(live.index):
        assert live.devices[place].coords == point


def test_slices_are_joined_by_the_slow_network():
    live = mw.topology(tpus("TPU v5 lite", (4, 4), slices=4))
    assert (live.name, live.shape, live.num_slices) == ("v5e:4x4 x 4 slices", (4, 4, 4), 4)
    assert live.axes == mw.topology("v5e:4x4", slices=4).axes
    assert (live.slices == live.axes[0].size - 1).sum() == 16


def test_slices_are_sorted_unless_told_otherwise():
    pod = tpus("TPU v5 lite", (2, 2), slices=3, slice_index=(7, 3, 5))
    in_order = mw.topology(pod)
    as_given = mw.topology(pod, sort_slices=False)
    first = [
        [t.devices[t.index[s, 0, 0]].slice_index for s in range(3)] for t in (in_order, as_given)
    ]
    assert first == [[3, 5, 7], [7, 3, 5]]


def test_a_missing_slice_number_means_one_slice():
    live = mw.topology(tpus("TPU v5 lite", (4, 4), slice_index=(None,)))
    assert (live.num_slices, live.shape) == (1, (4, 4))


def test_a_part_of_a_slice_is_a_ring_only_along_a_whole_side():
    pod = tpus("TPU v5 lite", (16, 16))
    half = mw.topology([d for d in pod if d.coords[0] < 8])
    quarter = mw.topology([d for d in pod if d.coords[0] < 8 and d.coords[1] >= 8])
    assert (half.shape, wraps(half)) == ((8, 16), [False, True])
    assert (quarter.shape, wraps(quarter)) == ((8, 8), [False, False])


def test_whole_cubes_cut_out_of_a_larger_slice_do_not_wrap():
    pod = tpus("TPU v5", (8, 8, 8))
    cube = mw.topology([d for d in pod if all(2 <= c < 6 for c in d.coords)])
    assert (cube.shape, wraps(cube)) == ((4, 4, 4), [False] * 3)
    column = mw.topology([d for d in pod if d.coords[0] < 4 and d.coords[1] < 4])
    assert (column.shape, wraps(column)) == ((4, 4, 8), [False, False, True])


def test_tpus_that_fill_no_box_are_scattered():
    pod = tpus("TPU v5 lite", (4, 4))
    corner = mw.topology([d for d in pod if d.coords[0] < 2 or d.coords[1] < 2])
    assert (corner.shape, corner.scattered, corner.num_slices) == ((12,), True, 1)
    assert [axis.kind for axis in corner.axes] == ["switch"]
    assert "fill no box" in str(corner)


def test_slices_of_unlike_shapes_are_scattered_but_stay_slices():
    two = tpus("TPU v5 lite", (4, 4), slices=2)
    wide = [d for d in two if d.slice_index == 0 and d.coords[0] < 2]
    tall = [d for d in two if d.slice_index == 1 and d.coords[1] < 2]
    live = mw.topology(wide + tall)
    assert (live.shape, live.scattered, live.num_slices) == ((2, 8), True, 2)
    uneven = mw.topology(wide + tall[:4])
    assert (uneven.shape, uneven.scattered) == ((12,), True)


def test_two_cores_share_a_chip():
    live = mw.topology(tpus("TPU7x", (4, 4, 4), cores=2))
    named = mw.topology("tpu7x:4x4x4")
    assert (live.axes, live.num_chips, live.num_devices) == (named.axes, 64, 128)
    one_each = mw.topology([d for d in live.devices if d.core_on_chip == 0])
    assert (one_each.shape, one_each.chip.cores) == ((4, 4, 4), 1)


def test_twisting_is_told_not_guessed():
    pod = tpus("TPU v5", (4, 4, 8))
    assert not any(axis.twisted for axis in mw.topology(pod).axes)
    assert mw.topology(pod, twisted=True).axes == mw.topology("v5p:4x4x8_twisted").axes
    with pytest.raises(mw.errors.TopologyError, match="a 4x4x4 v5p slice cannot be twisted"):
        mw.topology([d for d in pod if d.coords[2] < 4], twisted=True)


def test_a_twisted_slice_cut_out_of_a_larger_one_is_refused():
    pod = tpus("TPU v5", (8, 8, 8))
    part = [d for d in pod if d.coords[0] < 4 and d.coords[1] < 4]
    with pytest.raises(mw.errors.TopologyError, match="a 4x4x8 v5p slice cannot be twisted"):
        mw.topology(part, twisted=True)


def test_speeds_of_your_own_apply_to_live_devices():
    live = mw.topology(tpus("TPU v5 lite", (4, 4), slices=2), speeds={"link": 45, "network": 2})
    assert [axis.speed for axis in live.axes] == [2, 45, 45]


def test_no_devices_are_refused():
    with pytest.raises(mw.errors.TopologyError, match=r"^there are no devices\. Pass at least one"):
        mw.topology([])


@pytest.mark.parametrize("thing", ["cpu:0", 3, None, object()])
def test_what_is_no_device_is_refused(thing):
    with pytest.raises(
        mw.errors.TopologyError, match=r"is not a JAX device\. Pass jax\.devices\(\)"
    ):
        mw.topology([jax.devices()[0], thing])


def test_a_device_twice_is_refused():
    with pytest.raises(mw.errors.TopologyError, match="2 of 10 devices appear more than once"):
        mw.topology([*jax.devices(), *jax.devices()[:2]])


def test_mixed_kinds_are_refused_with_counts():
    mixed = tpus("TPU v5 lite", (4, 4))[:5] + others("cpu", "cpu", [3])
    with pytest.raises(
        mw.errors.TopologyError,
        match=r"devices of 2 kinds in one mesh: 5 of tpu 'TPU v5 lite', 3 of cpu 'cpu'\. Pass",
    ):
        mw.topology(mixed)


def test_devices_of_two_runtimes_are_refused():
    first, second = (tpus("TPU v5 lite", (2, 2)) for _ in range(2))
    with pytest.raises(
        mw.errors.TopologyError, match="the 4 devices belong to 2 different runtimes"
    ):
        mw.topology(first[:2] + second[2:])


@pytest.mark.parametrize("options", [{"slices": 2}, {"chips_per_host": (2, 2, 1)}])
def test_what_devices_say_themselves_is_no_option(options):
    with pytest.raises(
        mw.errors.TopologyError, match="slices and chips_per_host are read off the devic"
    ):
        mw.topology(jax.devices(), **options)


def test_messages_stay_short_with_many_devices():
    many = others("cpu", "cpu", [1] * 5000) + tpus("TPU v4", (16, 16, 16))
    with pytest.raises(
        mw.errors.TopologyError, match="5000 of cpu 'cpu', 4096 of tpu 'TPU v4'"
    ) as error:
        mw.topology(many)
    assert len(str(error.value)) < 300


def test_repr_of_a_topology_does_not_grow_with_its_devices():
    pod = mw.topology("v5p:8x8x8")
    live = dataclasses.replace(pod, devices=tuple("a device with a long name" for _ in range(512)))
    assert repr(live) == repr(pod)
    assert len(repr(dataclasses.replace(pod, name="x" * 1000))) == 200
