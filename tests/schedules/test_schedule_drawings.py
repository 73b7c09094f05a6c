"""Timelines as text, pictures and traces: complete, honest about what is left out, and small."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

import meshwright as mw
from meshwright._html import contrast, ink
from meshwright.schedules.compare import Comparison, Row
from meshwright.schedules.named import NAMED
from meshwright.schedules.svg_plot import MOST_BOXES, fill
from meshwright.schedules.timeline import Timeline, chrome_trace
from meshwright.schedules.types import KINDS, TaskKind
from meshwright.schedules.validation import Channel

SVG = "{http://www.w3.org/2000/svg}"


def _timeline(name="zb-h1", groups=4, microbatches=16, **options):
    return mw.schedules.simulate(
        mw.schedules.schedule(name, groups=groups, microbatches=microbatches), **options
    )


def _titles(timeline):
    root = ElementTree.fromstring(timeline.svg())  # noqa: S314
    return [title.text for title in root.iter(f"{SVG}title")]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_task_is_a_box_that_says_what_it_is(name):
    timeline = _timeline(name, 4, 8)
    tasks = sorted(str(task) for row in timeline.schedule.tasks for task in row)
    assert sorted(title.split(":")[0] for title in _titles(timeline)) == tasks


def test_a_box_stands_at_its_time():
    root = ElementTree.fromstring(_timeline("1f1b", 2, 2).svg())  # noqa: S314
    boxes = {
        box.find(f"{SVG}title").text.split(":")[0]: box.find(f"{SVG}rect").attrib
        for box in root.iter(f"{SVG}g")
        if box.find(f"{SVG}title") is not None
    }
    at = {name: float(rect["x"]) for name, rect in boxes.items()}
    unit = at["0F1"] - at["0F0"]
    assert at["1F0"] - at["0F0"] == pytest.approx(unit, abs=0.2)
    assert at["0BW0"] - at["0F0"] == pytest.approx(4 * unit, abs=0.2)
    assert float(boxes["0BW0"]["width"]) == pytest.approx(2 * unit - 1, abs=0.2)


def test_pairs_are_outlined_and_stages_shaded():
    dual = _timeline("dualpipe-v", 2, 8)
    pairs = sum(map(len, dual.schedule.overlapped))
    assert pairs and dual.svg().count('class="pair"') == pairs + 1  # one in the legend
    assert fill("F", 0, 2) in dual.svg() and fill("F", 1, 2) in dual.svg()
    assert 'class="pair"' not in _timeline("zb-v").svg()


def test_a_large_schedule_stays_small_and_says_what_is_left_out():
    timeline = _timeline("1f1b", 16, 512)
    picture = timeline.svg()
    assert len(_titles(timeline)) <= MOST_BOXES
    assert len(picture) < 300_000
    left_out = re.search(r"([\d,.]+) of 1,581 time units left out", picture)
    assert 1000 < float(left_out[1].replace(",", "")) < 1581
    assert "24 groups left out" in _timeline("zb-h2", 40, 100).svg()
    assert "left out" not in _timeline().svg()


def test_pictures_need_nothing_and_know_the_dark():
    picture = _timeline().svg()
    assert "prefers-color-scheme:dark" in picture
    assert picture.count("http") == 1  # the name of the format
    assert "<script" not in picture


def test_names_are_escaped():
    nasty = mw.schedules.Schedule('<b>"&', 1, (0,), [[("F", 0, 0), ("BW", 0, 0)]])
    page = nasty._repr_html_()
    picture = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    ElementTree.fromstring(picture)  # noqa: S314
    assert "<b>" not in page


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_numbers_stand_out_on_every_fill(kind, stages):
    for number in range(stages):
        colour = fill(kind, number, stages)
        assert contrast(colour, ink(colour)) >= 4.5


def test_text_tells_a_whole_backward_from_two_parts():
    assert "bw" in str(_timeline("1f1b", 2, 2)) and "BW" not in str(_timeline("1f1b", 2, 2))
    assert "B  W" in str(_timeline("zb-h1", 2, 2))


@pytest.mark.parametrize(
    ("name", "groups", "microbatches", "options"),
    [
        ("zb-h1", 4, 16, {}),
        ("1f1b", 16, 512, {"latency": 0.3}),
        ("interleaved-1f1b", 8, 64, {"costs": "F=1,B=1.37,W=0.41"}),
        ("gpipe", 200, 3, {}),
        ("zb-h1", 3, 9, {"costs": "F=1,B=1,W=0.001"}),
        ("forward", 1, 1, {"costs": "F=1e-6"}),
        ("zb-v", 4, 40, {"costs": "F=1e6,B=3e6,W=1e5"}),
    ],
)
def test_text_keeps_to_100_columns(name, groups, microbatches, options):
    lines = str(_timeline(name, groups, microbatches, **options)).splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert len(lines) < 80


def test_text_without_cropping_has_every_task():
    timeline = _timeline("zb-h1", 4, 16)
    drawn = "".join(re.findall(r"^group \d (.*)$", str(timeline), re.MULTILINE))
    counts = {kind: drawn.count(kind) for kind in timeline.schedule.counts}
    assert counts == timeline.schedule.counts
    assert drawn.count(".") == sum(timeline.bubbles)


def test_text_says_what_it_leaves_out():
    assert "~ 41 of 129 time units left out" in str(_timeline("1f1b", 4, 40))
    assert "... 24 groups left out" in str(_timeline("gpipe", 40, 2))
    short = str(_timeline("zb-h1", 2, 3, costs="F=1,B=1,W=0.05"))
    assert "6 tasks are too short to be drawn" in short
    assert "left out" not in str(_timeline()) and "too short" not in str(_timeline())


def test_figures_without_the_noise_of_floats():
    assert "makespan 1.2, bubble 0," in str(_timeline("1f1b", 1, 4, costs="F=0.1,B=0.1,W=0.1"))


def test_html_is_the_picture_and_a_line_per_group():
    page = _timeline("zb-v", 4, 8)._repr_html_()
    assert page.count("<svg") == 1 and page.count("<tr>") == 5
    assert "src=" not in page and "<script" not in page
    many = _timeline("gpipe", 100, 1)._repr_html_()
    assert many.count("<tr>") == 65 and "... and 36 more groups" in many


def test_costs_that_differ_are_said():
    schedule = mw.schedules.schedule("gpipe", groups=2, microbatches=2)
    assert "costs differ between groups" in str(mw.schedules.simulate(schedule, ["F=1", "F=2"]))
    assert "W=1, BW=1.5, FB=2 per group" in str(mw.schedules.simulate(schedule, "BW=1.5,FB=2"))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_trace_has_every_task_and_every_transfer(name):
    timeline = _timeline(name, 4, 8, latency=0.25)
    trace = json.loads(json.dumps(timeline.trace()))
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(timeline.schedule.counts.values())
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(1000 * timeline.makespan)
    sent = sum(channel.transfers for channel in mw.schedules.check(timeline.schedule).channels)
    assert [sum(e["ph"] == phase for e in events) for phase in "sf"] == [sent, sent]


def test_every_arrow_begins_and_ends_inside_its_task():
    events = _timeline("dualpipe-v", 4, 8, latency=0.5).trace()["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows = {}
    for event in (event for event in events if event["ph"] in "sf"):
        around = [
            s
            for s in slices
            if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        ]
        assert len(around) == 1
        arrows.setdefault(event["id"], []).append((event["ts"], around[0]["args"]))
    for (sent, giver), (taken, taker) in arrows.values():
        assert taken - sent >= 500
        assert giver["microbatch"] == taker["microbatch"]
        assert abs(giver["stage"] - taker["stage"]) == 1


def test_a_trace_names_groups_and_counts_what_they_hold():
    timeline = _timeline("1f1b", 2, 4)
    events = timeline.trace()["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["group 0", "group 1"]
    held = [e["args"]["held"] for e in events if e["name"] == "activations of group 0"]
    assert max(held) == timeline.memory[0] and held[-1] == 0


def test_a_trace_in_seconds():
    timeline = _timeline("gpipe", 1, 1)
    last = chrome_trace(timeline, microseconds=1e6)["traceEvents"][-1]
    assert last["ts"] == 3e6
    for wrong in (0, -1, float("inf"), True, "ms"):
        with pytest.raises(mw.errors.ScheduleError, match="microseconds is"):
            chrome_trace(timeline, microseconds=wrong)


def test_reprs_fit_in_200_characters_however_large_the_value():
    tasks = tuple(
        tuple(mw.schedules.Task("F", group, i) for i in range(1024)) for group in range(512)
    )
    name = "long " * 100
    large = mw.schedules.Schedule(name, 1024, tuple(range(512)), tasks)
    costs = (mw.schedules.Costs(F=1 / 3, B=2 / 3, W=1e-300),) * 512
    rows = tuple((0.0,) * 1024 for _ in range(512))
    timeline = Timeline(large, costs, 1 / 3, rows, rows)
    channels = tuple(Channel(group, group + 1, 1024, True) for group in range(511))
    comparison = Comparison(512, 1024, 1 / 3, 1 / 3, (Row(name, timeline, name),) * 12)
    for value in (
        large,
        timeline,
        mw.schedules.Proof(large, (), channels, (1,) * 512),
        comparison,
        comparison.rows[0],
        mw.schedules.Auto(costs=[costs[0]] * 512, latency=1 / 3, memory=1e300 / 3),
        costs[0],
        tasks[-1][-1],
    ):
        assert len(repr(value)) <= 200, type(value)
        assert "\n" not in repr(value)


def test_reprs_say_what_the_value_is():
    zb = mw.schedules.schedule("zb-h1", groups=2, microbatches=4)
    assert repr(mw.schedules.simulate(zb)) == (
        "<Timeline zb-h1: 2 groups, 2 stages, 4 microbatches; F=1, B=1, W=1 per group>"
    )
    assert repr(mw.schedules.check(zb)) == (
        "<Proof Schedule('zb-h1', groups=2, stages=2, microbatches=4, tasks=24) is sound: every "
        "task runs once, after what it needs.>"
    )
    comparison = mw.schedules.compare_schedules(2, 4, memory=2)
    assert repr(comparison) == (
        "<Comparison 2 groups, 4 microbatches; F=1, B=1, W=1 per group; "
        "at most 2 microbatches held>"
    )
    assert repr(comparison.rows[0]) == "<Row auto: fits>"


def test_a_task_may_be_written_with_its_kind():
    kind = TaskKind.BACKWARD
    assert mw.schedules.Task(kind, 2, 5) == mw.schedules.Task("BW", 2, 5)
    assert hash(mw.schedules.Task(kind, 2, 5)) == hash(("BW", 2, 5))
    assert str(mw.schedules.Task(kind, 2, 5)) == "2BW5"
    written = mw.schedules.Schedule("mine", 1, (0,), [[(TaskKind.FORWARD, 0, 0), (kind, 0, 0)]])
    plain = mw.schedules.Schedule("mine", 1, (0,), [[("F", 0, 0), ("BW", 0, 0)]])
    assert written == plain and str(written) == str(plain)
    assert written._repr_html_() == plain._repr_html_()
