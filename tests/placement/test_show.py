"""A placement prints itself, draws itself, and turns into plain data."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest

import meshwright as mw
from meshwright._text import duration
from meshwright.placement.placement import draw_groups
from meshwright.placement.placer import measure, plain_reshape


def test_a_pod_in_text():
    assert str(mw.place("fsdp:-1, tp:4", "v5e:16x16")).splitlines() == [
        "fsdp:64, tp:4 on v5e:16x16 (256 devices, 64 hosts)",
        "axis  size  made of                 forms  order  GB/s  hops  all-gather  all-reduce  "
        "DCN  weight",
        "fsdp    64  x 8 step 2, y 8 step 2  ring   ring     50     2     21.2 ms     42.3 ms  "
        "no     0.75",
        "tp       4  x 2, y 2                ring   ring    100     1     8.06 ms     16.1 ms  "
        "no       12",
        "cost 113 ms: all-gather of 1 GiB x weight, summed over the axes",
        "runner-up 225 ms (2x): fsdp = x 16, y 4 step 4; tp = y 4",
    ]


def test_two_slices_in_text():
    pod = mw.topology("v5e:16x16", slices=2)
    assert str(mw.place("dp:2, fsdp:-1, tp:4", pod)).splitlines() == [
        "dp:2, fsdp:64, tp:4 on v5e:16x16 x 2 slices (512 devices, 128 hosts, 2 slices)",
        "axis  size  made of                 forms    order  GB/s  hops  all-gather  all-reduce  "
        "DCN                    weight",
        "dp       2  slice 2                 network  line   3.12     -      172 ms      344 ms  "
        "2 parts at 3.12 GB/s  0.00391",
        "fsdp    64  x 8 step 2, y 8 step 2  ring     ring     50     2     21.2 ms     42.3 ms  "
        "no                       0.75",
        "tp       4  x 2, y 2                ring     ring    100     1     8.06 ms     16.1 ms  "
        "no                         12",
        "cost 113 ms: all-gather of 1 GiB x weight, summed over the axes",
        "runner-up 116 ms (1.03x): dp = x 2 step 8; fsdp = slice 2, x 4 step 2, y 8 step 2; "
        "tp = x 2, y 2",
    ]


def test_gpus_in_text():
    assert str(mw.place("dp:-1, ep:1, tp:8", "h100:8x4")).splitlines() == [
        "dp:4, ep:1, tp:8 on h100:8x4 (32 devices, 4 hosts)",
        "axis  size  made of  forms    order  GB/s  hops  all-gather  all-reduce  "
        "DCN                 weight",
        "dp       4  host 4   network  line     50     -     16.2 ms     32.3 ms  "
        "4 parts at 50 GB/s   0.125",
        "ep       1  -        -        -         -     -           -           -  "
        "-                        6",
        "tp       8  gpu 8    switch   line    450     1     2.10 ms     4.20 ms  "
        "no                      12",
        "cost 27.2 ms: all-gather of 1 GiB x weight, summed over the axes",
        "runner-up 54.8 ms (2.01x): dp = host 2 step 2, gpu 2 step 4; tp = host 2, gpu 4",
    ]


def test_domains_are_counted_in_the_headline():
    headline = str(mw.place("dp:-1, tp:8", "gb200:72x4")).splitlines()[0]
    assert headline == "dp:36, tp:8 on gb200:72x4 (288 devices, 72 hosts, 4 domains)"


def test_the_only_layout_has_no_runner_up():
    text = str(mw.place("dp:8", "cpu:8"))
    assert "runner-up" not in text
    assert text.splitlines()[-1].startswith("cost 94.0 ms: ")


def test_a_mesh_that_could_be_better_says_which_layout_is():
    pod, spec = mw.topology("v5e:4x4"), mw.MeshSpec.parse("dp:4, tp:4")
    seen = measure(spec, pod, np.arange(16).reshape(4, 4))
    text = str(dataclasses.replace(seen, runner_up=mw.place(spec, pod).axes))
    assert text.splitlines()[-1] == (
        "a better layout 101 ms (0.51x): dp = x 2 step 2, y 2 step 2; tp = x 2, y 2"
    )


def test_blocks_as_letters():
    assert draw_groups(mw.place("dp:4, tp:4", "v5e:4x4")).splitlines() == [
        "groups of 'tp', a letter each, x down, y across:",
        "  a a b b",
        "  a a b b",
        "  d d c c",
        "  d d c c",
    ]


def test_hosts_as_letters():
    assert draw_groups(mw.place("dp:-1, tp:4", "h100:8x2")).splitlines() == [
        "groups of 'tp', a letter each, host down, gpu across:",
        "  a a a a b b b b",
        "  c c c c d d d d",
    ]


def test_one_host_is_one_row_of_letters():
    assert draw_groups(mw.place("dp:2, tp:3", "cpu:6")).splitlines() == [
        "groups of 'tp', a letter each, cpu across:",
        "  a a a b b b",
    ]


def test_a_large_machine_shows_its_corner():
    drawn = draw_groups(mw.place("dp:-1, tp:8", "gb200:72x36")).splitlines()
    assert drawn[0] == "groups of 'tp', a letter each, domain down, gpu across (its corner):"
    assert len(drawn) == 1 + 16
    assert {len(line.split()) for line in drawn[1:]} == {32}


def test_a_drawing_says_where_the_plane_lies():
    drawn = draw_groups(mw.place("fsdp:-1, tp:8", mw.topology("tpu7x:4x4x4", slices=2)))
    assert drawn.splitlines()[0].endswith("at slice = 0, y = 0, core = 0:")


def test_a_scattered_mesh_can_be_drawn():
    pod, spec = mw.topology("v5e:4x4"), mw.MeshSpec.parse("dp:4, tp:4")
    mixed = np.random.default_rng(0).permutation(16).reshape(4, 4)
    drawn = draw_groups(measure(spec, pod, mixed)).split()[-16:]
    assert sorted(drawn) == sorted("abcd" * 4)


@pytest.mark.parametrize(
    ("spec", "name", "pictures"),
    [
        ("fsdp:-1, tp:4", "v5e:16x16", 4),
        ("dp:2, fsdp:-1, ep:1, tp:8", "v5p:8x8x8", 6),
        ("dp:-1, tp:8", "gb200:72x4", 2),  # as a plain reshape has it: drawn once
        ("dp:1", "cpu:1", 0),
    ],
)
def test_html_has_a_picture_per_axis_beside_a_plain_reshape_and_fetches_nothing(
    spec, name, pictures
):
    placed = mw.place(spec, name)
    page = placed._repr_html_()
    assert page.count('role="img"') == pictures
    assert page.count("http") == page.count("http://www.w3.org/2000/svg") == pictures
    assert "<script" not in page
    assert html.escape(str(placed).splitlines()[0]) in page
    for tag in ("div", "table", "figure", "p", "tr", "td"):
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>")


def cells(page):
    """`(x, y)` of every cell of every picture."""
    return [
        [
            tuple(map(float, at))
            for path in re.findall(r'class="cell" d="([^"]*)"', picture)
            for at in re.findall(r"M([\d.]+) ([\d.]+)", path)
        ]
        for picture in page.split("<svg")[1:]
        if 'role="img"' in picture
    ]


@pytest.mark.parametrize(
    "name", ["v5e:4x8", "v5p:4x4x8", "tpu7x:2x2x2", "h100:8x4", "cpu:20", "cpu:5"]
)
def test_every_device_of_a_small_machine_is_one_cell(name):
    placed = mw.place("dp:-1", name)
    page = placed._repr_html_()
    for picture in cells(page):
        assert len(picture) == len(set(picture)) == placed.topology.num_devices
    assert "not drawn" not in page


def test_a_picture_has_the_directions_the_hosts_and_the_first_group_in_its_order():
    placed = mw.place("dp:4, tp:4", "v5e:4x4")
    pictures = [part for part in placed._repr_html_().split("<svg") if 'role="img"' in part]
    dp, _, tp, plain_tp = pictures
    assert all(">x ↓</text>" in part and ">y →</text>" in part for part in pictures)
    # Four shades of one colour; a ring through the 2 x 2 chips of the first group, closed.
    assert len(set(re.findall(r'fill-opacity="([\d.]*)"', tp))) == 4
    assert len(set(re.findall(r'fill="(#\w+)"', tp))) == 1
    assert set(re.findall(r'fill="(#\w+)"', dp)) != set(re.findall(r'fill="(#\w+)"', tp))
    (ring,) = re.findall(r'class="ring" d="([^"]*)"', tp)
    steps = re.findall(r"M(\S+) (\S+)L([\d.]+) ([\d.]+)", ring)
    assert len(steps) == 4 and steps[0][:2] == steps[-1][2:]
    # By a reshape the group is a line, and its ends do not meet.
    (line,) = re.findall(r'class="ring" d="([^"]*)"', plain_tp)
    assert line.count("L") == 3
    # Four hosts of 2 x 2 chips: three lines of four cells each way.
    (hosts,) = re.findall(r'class="host" d="([^"]*)"', tp)
    assert hosts.count("h") == hosts.count("v") == 3 * 4


def test_both_costs_are_said_beside_the_pictures():
    placed = mw.place("fsdp:-1, tp:4", "v5e:16x16")
    plain = plain_reshape(placed)
    page = placed._repr_html_()
    for axis, by_reshape in zip(placed.axes, plain.axes, strict=True):
        both = [duration(each.cost.all_gather) for each in (axis, by_reshape)]
        assert f"as placed here: <b>{both[0]}</b>" in page
        assert f"by a plain reshape: <b>{both[1]}</b>" in page
    assert "cost 113 ms as placed here, 225 ms by a plain reshape of the device list (2x)" in page
    assert "gives the same mesh" in mw.place("dp:8", "cpu:8")._repr_html_()


def test_planes_of_a_third_direction_are_labelled():
    page = mw.place("fsdp:-1, tp:4", mw.topology("v5p:2x2x4", slices=2))._repr_html_()
    assert [f"slice = {s}, z = {z}<" in page for s in (0, 1, 2) for z in range(4)] == [
        *[True] * 8,
        *[False] * 4,
    ]


@pytest.mark.parametrize("name", ["tpu7x:16x24x24", "v5p:12x12x12", "cpu:100000"])
def test_a_large_machine_is_drawn_in_part_and_says_so(name):
    placed = mw.place("dp:-1", name)
    page = placed._repr_html_()
    picture = cells(page)[0]
    left_out = placed.topology.num_devices - len(picture)
    assert f"{left_out:,} more devices not drawn" in page
    assert len(set(picture)) == len(picture)  # no cell over another
    assert len(picture) < 1200


def test_html_of_9216_chips_is_small():
    placed = mw.place("dp:2, fsdp:-1, tp:8", "tpu7x:16x24x24")
    assert placed.topology.num_chips == 9216
    assert len(placed._repr_html_().encode()) < 400_000


def test_html_escapes_names():
    placed = mw.place({"<b>": 4, "&": 4}, "v5e:4x4")
    page = placed._repr_html_()
    assert "<b>:" not in page
    assert "&lt;b&gt;" in page


@pytest.mark.parametrize(
    ("spec", "name", "slices"),
    [
        ("fsdp:-1, tp:4", "v5e:16x16", 1),
        ("dp:2, fsdp:-1, tp:4", "v5p:4x4x4", 2),
        ("dp:8", "cpu:8", 1),
        ("dp:-1, tp:8", "gb200:72x4", 1),
    ],
)
def test_json_round_trips(spec, name, slices):
    data = mw.place(spec, mw.topology(name, slices=slices)).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_json_holds_what_the_text_says():
    placed = mw.place("fsdp:-1, tp:4", "v5e:16x16")
    data = placed.to_json()
    assert (data["spec"], data["cost_s"]) == ("fsdp:64, tp:4", placed.cost)
    assert data["runner_up_cost_s"] == placed.runner_up_cost
    assert data["topology"] == placed.topology.to_json()
    assert data["axes"][1] == {
        "name": "tp",
        "size": 4,
        "weight": 12.0,
        "made_of": [
            {"direction": "x", "factor": 2, "stride": 1},
            {"direction": "y", "factor": 2, "stride": 1},
        ],
        "forms": "ring",
        "order": "ring",
        "gb_per_s": 100,
        "network_gb_per_s": 0,
        "hops": 1,
        "slow": 1,
        "all_gather_1gib_s": placed.axes[1].cost.all_gather,
        "all_reduce_1gib_s": placed.axes[1].cost.all_reduce,
    }
    assert [axis["name"] for axis in data["runner_up"]] == ["fsdp", "tp"]


def test_json_of_a_scattered_mesh_is_plain_too():
    pod, spec = mw.topology("v5e:4x4"), mw.MeshSpec.parse("dp:4, tp:4")
    mixed = np.random.default_rng(0).permutation(16).reshape(4, 4)
    data = measure(spec, pod, mixed).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["axes"][0]["made_of"] == []
    assert data["runner_up"] == []


@pytest.mark.parametrize(
    ("spec", "on", "shown"),
    [
        (
            "fsdp:-1, tp:8",
            "v5p:8x8x8",
            "<Placement fsdp:64, tp:8 on v5p:8x8x8 (512 devices, 128 hosts)>",
        ),
        ("dp:-1", "cpu:1", "<Placement dp:1 on cpu:1 (1 device, 1 host)>"),
    ],
)
def test_repr_of_a_placement_is_its_headline(spec, on, shown):
    assert repr(mw.place(spec, on)) == shown


def test_repr_of_a_placement_and_its_axes_fits_in_200_characters_however_many_there_are():
    names = [f"an_axis_with_quite_a_long_name_{i}" for i in range(31)]
    placed = mw.place([("tp", 512), *((name, 1) for name in names)], "v5p:8x8x8")
    assert len(repr(placed)) == 200
    assert repr(placed.axes[0]).startswith("<AxisPlan tp:512, grid, all-gather ")
    assert all(len(repr(axis)) <= 200 for axis in placed.axes)
    assert all(
        len(repr(value)) <= 200 for axis in placed.axes for value in (axis.cost, *axis.parts)
    )
