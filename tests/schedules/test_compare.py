"""Schedules side by side, and the tables of the docs that are made from them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.schedules.named import NAMED

ROOT = Path(__file__).parent.parent.parent
TRAINING = {name for name, named in NAMED.items() if named.training}


def test_every_training_schedule_and_auto_have_a_row():
    comparison = mw.schedules.compare_schedules(4, 3, stages=12, memory=1)
    assert {row.name for row in comparison.rows} == {*TRAINING, "auto"}
    assert len(comparison.rows) == len(TRAINING) + 1


def test_fastest_first_then_smallest_then_what_does_not_fit():
    rows = mw.schedules.compare_schedules(4, 16, memory=5).rows
    fitting = [row for row in rows if row.fits]
    assert list(rows[: len(fitting)]) == fitting
    keys = [(row.timeline.makespan, row.memory) for row in fitting]
    assert keys == sorted(keys)
    assert all(row.memory <= 5 for row in fitting)
    assert all(row.memory > 5 for row in rows[len(fitting) :])


def test_rows_are_what_simulate_says():
    comparison = mw.schedules.compare_schedules(4, 8, costs="F=1,B=1.5,W=0.5", latency=0.25)
    for row in comparison.rows:
        if row.name in NAMED:
            alone = mw.schedules.schedule(row.name, groups=4, microbatches=8)
            assert row.timeline == mw.schedules.simulate(alone, "F=1,B=1.5,W=0.5", 0.25)


def test_auto_is_never_slower_than_the_best():
    comparison = mw.schedules.compare_schedules(3, 7, latency=0.3, memory=3)
    assert comparison.rows[0].name == "auto"
    assert comparison.best is comparison.rows[0].timeline


def test_what_does_not_fit_says_by_how_much():
    reasons = {row.name: row.reason for row in mw.schedules.compare_schedules(4, 16, memory=6).rows}
    assert reasons["zb-h2"] == "group 0 holds 7 microbatches, 1 over the limit of 6"
    assert reasons["zb-h1"] == ""


def test_what_is_not_defined_says_why():
    reasons = {row.name: row.reason for row in mw.schedules.compare_schedules(4, 6, stages=4).rows}
    assert reasons["zb-v"] == "zb-v has 2 stages per group: 4 groups make 8 stages, not 4"
    assert reasons["1f1b"] == ""


def test_nothing_may_fit_and_all_are_still_listed():
    comparison = mw.schedules.compare_schedules(4, 16, memory=0.5)
    assert comparison.best is None
    assert all(row.reason for row in comparison.rows)
    assert "dualpipe-v" in str(comparison) and "gpipe" in str(comparison)


def test_costs_per_stage_decide_the_number_of_stages():
    comparison = mw.schedules.compare_schedules(2, 4, costs=["F=1", "F=2", "F=3", "F=4"], memory=9)
    assert {row.timeline.schedule.stages for row in comparison.rows if row.timeline} == {4}
    assert [row.name for row in comparison.rows if row.timeline is None] == [
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "zb-h1",
        "zb-h2",
    ]


def test_schedules_of_ones_own_stand_beside():
    own = mw.schedules.Schedule(
        "mine", 2, (0,), [[("F", 0, 0), ("BW", 0, 0), ("F", 0, 1), ("BW", 0, 1)]]
    )
    rows = {
        row.name: row for row in mw.schedules.compare_schedules(1, 2, memory=1, also=[own]).rows
    }
    assert rows["mine"].fits and rows["mine"].memory == 1
    rows = {row.name: row for row in mw.schedules.compare_schedules(2, 4, also=[own]).rows}
    assert rows["mine"].reason == "is for 1 group, 2 microbatches"


def test_text_html_and_json_say_the_same():
    comparison = mw.schedules.compare_schedules(4, 6, latency=0.5, memory=4)
    text, page, data = (
        str(comparison),
        comparison._repr_html_(),
        json.loads(json.dumps(comparison.to_json())),
    )
    assert text.splitlines()[0] == (
        "4 groups, 6 microbatches; F=1, B=1, W=1 per group, latency 0.5; "
        "at most 4 microbatches held"
    )
    assert [line.split()[0] for line in text.splitlines()[2:]] == [r.name for r in comparison.rows]
    assert page.count("<tr>") == 1 + len(comparison.rows)
    by_name = {row["name"]: row for row in data["schedules"]}
    assert by_name["dualpipe-v"]["makespan"] is None and not by_name["dualpipe-v"]["fits"]
    assert by_name["1f1b"]["memory"] == [4, 3, 2, 1] and by_name["1f1b"]["reason"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory is the most microbatches a group may hold.*not 0"),
        ({"memory": "6"}, "memory is the most microbatches"),
        ({"memory": float("nan")}, "memory is the most microbatches"),
        ({"latency": -1}, "latency: a time is a number from 0, not -1"),
        ({"costs": "F=x"}, "'F=x' is not kind=time"),
        ({"costs": 5}, "costs are"),
        ({"costs": ["F=1", "F=-1", "F=1", "F=1"]}, "cost F: a time is a number from 0"),
        ({"costs": ["F=1"] * 8, "stages": 4}, "8 costs for 4 stages"),
        ({"groups": 0}, "groups: 0 is not a positive integer"),
        ({"microbatches": 1.5}, "microbatches: 1.5 is not a positive integer"),
    ],
)
def test_nonsense_is_an_error_not_a_row(options, message):
    sizes = {"groups": 4, "microbatches": 8}
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.compare_schedules(**{**sizes, **options})


def _script():
    path = ROOT / "benchmarks" / "schedules.py"
    spec = importlib.util.spec_from_file_location("schedules_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_table_on_the_page_is_what_the_script_makes():
    script = _script()
    page = (ROOT / "docs" / "schedules.md").read_text()
    shown = page.partition(script.BEGIN)[2].partition(script.END)[0]
    assert shown == script.markdown(), "run python benchmarks/schedules.py --write"


def test_the_picture_on_the_page_is_what_the_command_draws():
    drawn = mw.schedules.simulate(mw.schedules.schedule("zb-h1", groups=4, microbatches=16)).svg()
    assert (ROOT / "docs" / "schedule.svg").read_text() == drawn


@pytest.mark.parametrize("groups", [2, 4, 7])
def test_the_formulas_on_the_page_hold(groups):
    p, m = groups, 3 * groups
    says = {  # bubble, held by the first group
        "gpipe": (3 * (p - 1), m),
        "1f1b": (3 * (p - 1), p),
        "eager-1f1b": (3 * (p - 1), 2 * p - 1),
        "interleaved-1f1b": (3 * (p - 1) / 2, p + (p - 1) / 2),
        "looped-bfs": (3 * (p - 1) / 2, m),
        "zb-h1": (p - 1, p),
        "zb-h2": (0, 2 * p - 1),
        "zb-v": (0, p),
        "dualpipe-v": (p - 1, p + 0.5),
        "forward": (0, 1),
    }
    assert set(says) == set(NAMED)
    for name, expected in says.items():
        timeline = mw.schedules.simulate(mw.schedules.schedule(name, groups=p, microbatches=m))
        assert (timeline.bubble, timeline.memory[0]) == expected, name


def test_comparing_starts_no_backend():
    code = (
        "import meshwright as mw\n"
        "mw.schedules.compare_schedules(2, 4)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("also", [3, "1f1b", ["1f1b"], None])
def test_what_is_no_schedule_is_not_compared(also):
    with pytest.raises(mw.errors.ScheduleError, match="is not a list of Schedules") as caught:
        mw.schedules.compare_schedules(2, 4, also=also)
    assert caught.value.option == "also"


def test_one_schedule_is_no_list_of_them():
    own = mw.schedules.schedule("1f1b", groups=2, microbatches=4)
    with pytest.raises(mw.errors.ScheduleError, match=r"is not a list.*Pass \[schedule"):
        mw.schedules.compare_schedules(2, 4, also=own)
