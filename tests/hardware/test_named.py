"""Hardware by name: shapes, counts, wraparound, speeds, and what is refused."""

import json

import numpy as np
import pytest

import meshwright as mw
from meshwright.hardware.chips import CHIPS

# bf16 TFLOP/s, HBM GB, HBM TB/s, GB/s a link, links, devices a host, network GB/s a host,
# chips of the largest slice.
TPUS = {
    "v4": (275, 32, 1.2, 50, 6, 4, 25, 16 * 16 * 16),
    "v5e": (197, 16, 0.82, 50, 4, 8, 25, 16 * 16),
    "v5p": (459, 95, 2.765, 100, 6, 4, 25, 16 * 20 * 28),
    "v6e": (918, 32, 1.6, 100, 4, 8, 100, 16 * 16),
    "tpu7x": (2307, 192, 7.38, 100, 6, 4, 50, 9216),
}
# bf16 TFLOP/s, HBM GB, HBM TB/s, NVLink GB/s, domain, GB/s out of the domain.
GPUS = {
    "a100": (312, 80, 2.0, 300, 8, 200),
    "h100": (990, 80, 3.35, 450, 8, 400),
    "h200": (990, 141, 4.8, 450, 8, 400),
    "b200": (2250, 192, 8, 900, 8, 400),
    "gb200": (2500, 186, 8, 900, 72, 3600),
}
PLANAR = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
DOCUMENTED = {
    "v4": (*SMALL, *CUBES, "4x4x12", "8x8x12", "16x16x16"),
    "v5e": PLANAR,
    "v5p": (*SMALL, *CUBES, "4x4x20", "4x4x28", "4x12x12", "16x16x16", "16x16x24", "16x20x28"),
    "v6e": PLANAR,
    "tpu7x": ("1x1x1", *SMALL, *CUBES, "16x16x16", "16x24x24"),
}
SHAPES = [f"{chip}:{shape}" for chip, shapes in DOCUMENTED.items() for shape in shapes]


def sides(name):
    return [int(side) for side in name.split(":")[1].split("x")]


def torus(topology):
    return [axis for axis in topology.axes if axis.kind == "torus"]


@pytest.mark.parametrize("name", TPUS)
def test_tpu_figures_are_the_published_ones(name):
    tflops, memory, bandwidth, link, links, per_host, network, largest = TPUS[name]
    chip = CHIPS[name]
    assert (chip.family, chip.tflops, chip.memory_gb, chip.memory_tbps) == (
        "tpu",
        tflops,
        memory,
        bandwidth,
    )
    assert (chip.link, 2 * chip.torus, chip.pod) == (link, links, largest)
    assert chip.network * per_host == pytest.approx(network)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_figures_are_the_published_ones(name):
    tflops, memory, bandwidth, link, domain, network = GPUS[name]
    chip = CHIPS[name]
    assert (chip.family, chip.tflops, chip.memory_gb, chip.memory_tbps) == (
        "gpu",
        tflops,
        memory,
        bandwidth,
    )
    assert (chip.link, chip.domain, chip.torus) == (link, domain, 0)
    assert chip.network * domain == pytest.approx(network)


def test_every_chip_of_the_table_is_tested_here():
    assert set(CHIPS) == {*TPUS, *GPUS, "cpu"}


@pytest.mark.parametrize("name", SHAPES)
def test_documented_shape_builds(name):
    pod = mw.topology(name)
    chips = int(np.prod(sides(name)))
    cores = 2 if name.startswith("tpu7x") else 1
    assert pod.name == name
    assert (pod.num_chips, pod.num_devices, pod.num_slices) == (chips, chips * cores, 1)
    assert pod.shape == (*sides(name), *([2] if cores == 2 else []))
    assert pod.host.shape == pod.index.shape == pod.shape
    assert pod.index.ravel().tolist() == list(range(pod.num_devices))
    assert sorted(set(pod.host.ravel().tolist())) == list(range(pod.num_hosts))
    assert pod.devices is None
    assert not pod.scattered


@pytest.mark.parametrize(
    ("name", "slices", "devices", "hosts"),
    [
        ("v4:2x2x1", 1, 4, 1),
        ("v4:2x2x4", 1, 16, 4),
        ("v4:16x16x16", 1, 4096, 1024),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 1, 8, 1),
        ("v5e:4x4", 1, 16, 4),
        ("v5e:16x16", 4, 1024, 256),
        ("v5p:4x4x8", 2, 256, 64),
        ("v5p:16x20x28", 1, 8960, 2240),
        ("v6e:2x2", 2, 8, 2),
        ("v6e:8x16", 1, 128, 32),
        ("tpu7x:2x2x1", 1, 8, 1),
        ("tpu7x:4x4x4", 2, 256, 32),
        ("tpu7x:16x24x24", 1, 18432, 2304),
        ("h100:8", 1, 8, 1),
        ("h100:4", 1, 4, 1),
        ("h100:8x4", 1, 32, 4),
        ("h200:8", 4, 32, 4),
        ("gb200:72x4", 1, 288, 72),
        ("gb200:36x2", 1, 72, 18),
        ("cpu:8", 1, 8, 1),
        ("cpu:4x2", 1, 8, 2),
        ("cpu:100000", 1, 100_000, 1),
    ],
)
def test_counts_of_devices_hosts_and_slices(name, slices, devices, hosts):
    pod = mw.topology(name, slices=slices)
    assert (pod.num_devices, pod.num_hosts) == (devices, hosts)
    per_slice = pod.slices.reshape(pod.num_slices, -1)
    assert (per_slice == np.arange(pod.num_slices)[:, None]).all()
    # No host is in two slices.
    for part in range(pod.num_slices - 1):
        last, following = (pod.host[pod.slices == p] for p in (part, part + 1))
        assert last.max() < following.min()


def test_hosts_are_boxes_of_four_chips_numbered_along_x():
    assert mw.topology("v5e:4x4").host.tolist() == [
        [0, 0, 2, 2],
        [0, 0, 2, 2],
        [1, 1, 3, 3],
        [1, 1, 3, 3],
    ]
    assert mw.topology("v5p:2x2x2").host.tolist() == [[[0, 1], [0, 1]], [[0, 1], [0, 1]]]


@pytest.mark.parametrize("name", [n for n in SHAPES if n.startswith(("v5e", "v6e"))])
def test_planar_chips_wrap_a_side_of_16_only(name):
    assert [axis.wraps for axis in torus(mw.topology(name))] == [s == 16 for s in sides(name)]


@pytest.mark.parametrize("name", [n for n in SHAPES if n.startswith(("v4", "v5p", "tpu7x"))])
def test_three_dimensional_chips_wrap_once_they_are_whole_cubes(name):
    cubes = all(side % 4 == 0 for side in sides(name))
    assert [axis.wraps for axis in torus(mw.topology(name))] == [cubes] * 3


def test_a_slice_below_a_cube_wraps_nowhere():
    assert not any(axis.wraps for axis in mw.topology("v5p:2x4x4").axes)


@pytest.mark.parametrize(
    ("name", "twisted"),
    [
        ("v5p:4x4x8_twisted", "xy"),
        ("v4:4x8x8_twisted", "x"),
        ("v4:8x8x4_twisted", "z"),
        ("tpu7x:8x8x16_twisted", "xy"),
        ("v5p:4x4x8_untwisted", ""),
        ("v5p:4x4x8", ""),
    ],
)
def test_the_short_sides_of_a_twisted_torus_are_twisted(name, twisted):
    pod = mw.topology(name)
    assert "".join(axis.name for axis in pod.axes if axis.twisted) == twisted
    assert all(axis.wraps for axis in torus(pod))


def test_twisted_can_be_said_in_the_name_or_as_an_option():
    said, asked = mw.topology("v5p:4x4x8_twisted"), mw.topology("v5p:4x4x8", twisted=True)
    assert (said.name, said.axes) == (asked.name, asked.axes)
    assert not any(axis.twisted for axis in mw.topology("v5p:4x4x8_untwisted", twisted=False).axes)


@pytest.mark.parametrize("name", ["v5p:4x4x4", "v5p:4x4x12", "v5p:2x2x4", "v5e:8x16"])
def test_only_some_shapes_can_be_twisted(name):
    with pytest.raises(
        mw.errors.TopologyError, match=rf"^{name} cannot be twisted: only n x n x 2n"
    ):
        mw.topology(name, twisted=True)


def test_name_and_option_must_agree_about_twisting():
    with pytest.raises(
        mw.errors.TopologyError,
        match=r"'v5p:4x4x8_twisted' and twisted=False contradict each other",
    ):
        mw.topology("v5p:4x4x8_twisted", twisted=False)


def test_tpu7x_has_two_devices_a_chip_that_share_the_network():
    pod = mw.topology("tpu7x:4x4x4", slices=2)
    core = pod.axes[-1]
    assert (core.name, core.kind, core.size, core.speed) == ("core", "core", 2, 600)
    assert pod.axes[0].speed == 50 / 4 / 2
    assert (pod.host[..., 0] == pod.host[..., 1]).all()


def test_gpus_are_domains_joined_by_the_slow_network():
    pod = mw.topology("h100:8x4")
    assert [(a.name, a.kind, a.size, a.speed) for a in pod.axes] == [
        ("host", "network", 4, 50),
        ("gpu", "switch", 8, 450),
    ]
    assert pod.host.tolist() == [[host] * 8 for host in range(4)]


def test_a_gb200_domain_holds_18_hosts_of_4():
    pod = mw.topology("gb200:72x4")
    assert pod.axes[0].name == "domain"
    assert [np.unique(row).size for row in pod.host] == [18] * 4
    assert np.bincount(pod.host.ravel()).tolist() == [4] * 72


def test_slices_of_gpus_are_domains():
    assert str(mw.topology("h100:8", slices=4)) == str(mw.topology("h100:8x4"))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("v5litepod:4x4", "v5e:4x4"),
        ("V5P:4x4x4", "v5p:4x4x4"),
        (" v6e:2x2 ", "v6e:2x2"),
        ("trillium:4x4", "v6e:4x4"),
        ("ironwood:2x2x1", "tpu7x:2x2x1"),
        ("v7x:2x2x1", "tpu7x:2x2x1"),
    ],
)
def test_a_chip_has_other_names(alias, name):
    assert mw.topology(alias).name == name


def test_speeds_of_your_own_replace_the_table():
    pod = mw.topology(
        "tpu7x:4x4x4", slices=2, speeds={"link": 90, "network": 8, "core": 500, "memory_gb": 190}
    )
    assert [axis.speed for axis in pod.axes] == [4, 90, 90, 90, 500]
    assert pod.chip.memory_gb == 190
    assert CHIPS["tpu7x"].link == 100
    assert mw.topology("h100:8x2", speeds={"network": 25.5}).axes[0].speed == 25.5


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "fast", None])
def test_a_speed_is_a_number_above_zero(value):
    with pytest.raises(
        mw.errors.TopologyError, match=r"^speeds: link = .* is not a number above 0\.$"
    ):
        mw.topology("v5p:4x4x4", speeds={"link": value})


def test_a_misspelt_speed_suggests_the_near_one():
    with pytest.raises(mw.errors.TopologyError, match=r"speeds: no 'linc'\. Did you mean 'link'\?"):
        mw.topology("v5p:4x4x4", speeds={"linc": 1})


@pytest.mark.parametrize(
    ("name", "per_host", "hosts"),
    [
        ("v5p:4x4x4", (1, 1, 1), 64),
        ("v5p:4x4x4", (4, 4, 4), 1),
        ("v5p:4x4x4", (2, 2), 16),
        ("v5e:16x16", (2, 4), 32),
        ("v5e:16x16", (2, 4, 1), 32),
        ("v5e:2x4", (2, 2), 2),
        ("tpu7x:2x2x2", (2, 2, 2), 1),
    ],
)
def test_chips_per_host_cuts_the_slice_into_other_hosts(name, per_host, hosts):
    assert mw.topology(name, chips_per_host=per_host).num_hosts == hosts


@pytest.mark.parametrize("per_host", [(3, 1, 1), (8, 1, 1), (1, 1, 1, 2)])
def test_chips_per_host_must_divide_the_slice(per_host):
    with pytest.raises(
        mw.errors.TopologyError, match=r"does not divide the slice 4x4x4\. Default: 2x2x1"
    ):
        mw.topology("v5p:4x4x4", chips_per_host=per_host)


@pytest.mark.parametrize("bad", [0, 1.5, True, "2"])
def test_chips_per_host_are_counts(bad):
    with pytest.raises(
        mw.errors.TopologyError, match=r"^chips_per_host: .* is not a positive integer"
    ):
        mw.topology("v5p:4x4x4", chips_per_host=(bad, 1, 1))


@pytest.mark.parametrize("options", [{"chips_per_host": (2, 2)}, {"twisted": True}])
def test_tpu_options_are_refused_for_gpus(options):
    with pytest.raises(mw.errors.TopologyError, match="twisted and chips_per_host are for TPUs"):
        mw.topology("h100:8", **options)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v5pp:4x4x4", "v5p"),
        ("v5:4x4", "v5p|v5e"),
        ("h10:8", "h100"),
        ("gb20:72", "gb200"),
        ("cpus:8", "cpu"),
    ],
)
def test_a_misspelt_chip_suggests_the_near_one(name, hint):
    with pytest.raises(
        mw.errors.TopologyError, match=rf"^unknown hardware '{name}'\. Did you mean '({hint})'\?"
    ):
        mw.topology(name)


def test_a_name_like_nothing_lists_what_is_known():
    with pytest.raises(
        mw.errors.TopologyError, match=r"Known: v4, v5e, v5p, .*'h100:8x4' or 'cpu:8'"
    ):
        mw.topology("zzzz:8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", r"'v5p' is not a chip and a shape\. Write e\.g\. 'v5p:4x4x4'"),
        ("v5e:4by4", r"is not a chip and a shape\. Write e\.g\. 'v5e:4x4'"),
        ("tpu7:x", r"is not a chip and a shape\. Write e\.g\. 'tpu7x:4x4x4'"),
        ("h100:", r"is not a chip and a shape\. Write e\.g\. 'h100:8'"),
        ("v5p:4x4x4x", "is not a chip and a shape"),
        ("v5p:4x-4x4", "is not a chip and a shape"),
        ("v5p:4x4", r"v5p:4x4 has 2 sides; v5p shapes have 3, e\.g\. v5p:4x4x4"),
        ("v5e:4x4x4", r"v5e:4x4x4 has 3 sides; v5e shapes have 2, e\.g\. v5e:4x4"),
        ("v5e:3x5", r"v5e does not come in 3x5\. Its shapes: 1x1, 2x2, 2x4, 4x4, .*16x16"),
        ("v6e:32x32", "v6e does not come in 32x32"),
        ("v5p:3x5x7", r"every side is a multiple of 4\. Smaller shapes: .*Near: 4x4x8"),
        ("v4:16x16x20", "it has 5120 chips and a pod has 4096"),
        ("v5p:16x20x32", "it has 10240 chips and a pod has 8960"),
        ("tpu7x:32x32x32", "it has 32768 chips and a pod has 9216"),
        ("h100:16", r"16 GPUs in one NVLink domain; it holds 8\. Write h100:8x2"),
        ("gb200:144x2", r"it holds 72\. Write gb200:72x4"),
        ("gb200:10", r"10 GPUs do not fill hosts of 4\. Use one of 4, 8, 12, .*72\."),
        ("h100:8x2x2", r"has 3 sides; write devices per NVLink domain x how many"),
        ("cpu:8x2x2", r"has 3 sides; write devices per host x how many, e\.g\. cpu:8x4"),
        ("cpu:0", r"sides must be positive and hold at most"),
        ("cpu:99999999999", r"sides must be positive and hold at most"),
        ("v5p:0x4x4", r"sides must be positive"),
    ],
)
def test_a_shape_that_does_not_exist_is_refused(name, message):
    with pytest.raises(mw.errors.TopologyError, match=message):
        mw.topology(name)


def test_two_ways_to_say_how_many_domains_are_refused():
    with pytest.raises(mw.errors.TopologyError, match=r"h100:8x4 already says 4; leave slices out"):
        mw.topology("h100:8x4", slices=2)


@pytest.mark.parametrize("slices", [0, -1, 1.5, True, "2", None])
def test_slices_are_a_count(slices):
    with pytest.raises(mw.errors.TopologyError, match=r"^slices: .* is not a positive integer"):
        mw.topology("v5e:4x4", slices=slices)


@pytest.mark.parametrize(("name", "slices"), [("v5e:16x16", 100_000), ("h100:8", 4_000_000)])
def test_more_devices_than_any_machine_has_are_refused(name, slices):
    with pytest.raises(mw.errors.TopologyError, match=r"devices; at most \d+ are supported"):
        mw.topology(name, slices=slices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"twisted": "yes"}, "^twisted: 'yes' is not True, False or None"),
        ({"speeds": [("link", 90)]}, r"^speeds: .* is not a dict such as {'link': 90}"),
        ({"chips_per_host": "2x2"}, "^chips_per_host: '2x2' is not a list such as"),
        ({"chips_per_host": 4}, "^chips_per_host: 4 is not a list such as"),
    ],
)
def test_an_option_of_another_type_is_refused(options, message):
    with pytest.raises(mw.errors.TopologyError, match=message):
        mw.topology("v5p:4x4x8", **options)


def test_a_ready_topology_passes_through_but_takes_no_options():
    pod = mw.topology("v5e:4x4")
    assert mw.topology(pod) is pod
    for options in ({"slices": 2}, {"speeds": {"link": 1}}, {"twisted": False}):
        with pytest.raises(
            mw.errors.TopologyError, match=r"^v5e:4x4: a ready topology takes no further"
        ):
            mw.topology(pod, **options)


@pytest.mark.parametrize("source", [5, None, {"v5e": 4}, 2.5])
def test_what_is_neither_a_name_nor_devices_is_refused(source):
    with pytest.raises(mw.errors.TopologyError, match=r"^cannot read hardware from .*'v5p:8x8x8'"):
        mw.topology(source)


@pytest.mark.parametrize(
    ("name", "slices", "text"),
    [
        (
            "v5e:16x16",
            1,
            "v5e:16x16: 256 devices on 64 hosts\n"
            "  x 16 wraps, 50 GB/s a link\n"
            "  y 16 wraps, 50 GB/s a link",
        ),
        (
            "v5p:4x4x8_twisted",
            1,
            "v5p:4x4x8_twisted: 128 devices on 32 hosts\n"
            "  x 4 twisted, 100 GB/s a link\n"
            "  y 4 twisted, 100 GB/s a link\n"
            "  z 8 wraps, 100 GB/s a link",
        ),
        (
            "tpu7x:2x2x1",
            2,
            "tpu7x:2x2x1 x 2 slices: 16 devices = 8 chips on 2 hosts\n"
            "  2 slices over DCN, 6.25 GB/s a device\n"
            "  x 2, 100 GB/s a link\n"
            "  y 2, 100 GB/s a link\n"
            "  z 1, 100 GB/s a link\n"
            "  core 2, 600 GB/s between cores",
        ),
        (
            "gb200:72x4",
            1,
            "gb200:72x4: 288 devices on 72 hosts\n"
            "  4 domains over DCN, 50 GB/s a device\n"
            "  gpu 72, 900 GB/s a device",
        ),
        ("cpu:1", 1, "cpu:1: 1 device on 1 host\n  cpu 1, 10 GB/s a device"),
    ],
)
def test_a_topology_prints_itself(name, slices, text):
    assert str(mw.topology(name, slices=slices)) == text


def test_a_topology_is_plain_data_as_json():
    pod = mw.topology("v5p:4x4x8_twisted", slices=2)
    assert json.loads(json.dumps(pod.to_json())) == {
        "name": "v5p:4x4x8_twisted x 2 slices",
        "chip": "v5p",
        "devices": 256,
        "chips": 256,
        "hosts": 64,
        "slices": 2,
        "scattered": False,
        "axes": [
            {
                "name": name,
                "size": size,
                "kind": kind,
                "gb_per_s": speed,
                "wraps": wraps,
                "twisted": twisted,
            }
            for name, size, kind, speed, wraps, twisted in [
                ("slice", 2, "network", 6.25, False, False),
                ("x", 4, "torus", 100, True, True),
                ("y", 4, "torus", 100, True, True),
                ("z", 8, "torus", 100, True, False),
            ]
        ],
        "memory_gb": 95,
        "bf16_tflops": 459,
        "speeds": "meshwright's table of v5p",
    }


def test_a_topology_draws_itself_in_a_notebook():
    drawn = mw.topology("cpu:4x2")._repr_html_()
    assert drawn.startswith('<div class="mw"><style>') and drawn.endswith("</div>")
    assert drawn.partition("</style>")[2] == (
        "<b>cpu:4x2: 8 devices on 2 hosts</b>"
        '<p class="note"><span>  2 hosts over DCN, 1 GB/s a device</span><br>'
        "<span>  cpu 4, 10 GB/s a device</span></p></div>"
    )


def test_coordinates_run_in_grid_order():
    pod = mw.topology("v5e:2x4")
    assert pod.coords.shape == (8, 2)
    assert pod.coords[5].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "slices", "shown"),
    [
        ("v5p:8x8x8", 1, "<Topology v5p:8x8x8: 512 devices on 128 hosts>"),
        (
            "tpu7x:4x4x4",
            2,
            "<Topology tpu7x:4x4x4 x 2 slices: 256 devices = 128 chips on 32 hosts>",
        ),
        ("cpu:1", 1, "<Topology cpu:1: 1 device on 1 host>"),
    ],
)
def test_repr_of_a_topology_is_its_headline(name, slices, shown):
    assert repr(mw.topology(name, slices=slices)) == shown


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_repr_of_a_chip_or_direction_fits_in_a_line(chip):
    assert repr(chip).startswith(f"<Chip {chip.name}: ")
    assert len(repr(chip)) <= 100
    assert len(repr(mw.topology("v5p:4x4x8_twisted").axes[0])) <= 200
