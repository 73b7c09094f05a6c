"""`simulate` starts every task as soon as it can, and not before."""

import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest

import meshwright as mw

NAMES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v")
TIME = st.floats(0.1, 4)


def spans(timeline):
    """Start and end of every task, by name; a whole backward under the name of its input part."""
    made = timeline.schedule
    return {
        ("B" if task.kind == "BW" else task.kind, task.stage, task.microbatch): (group, start, end)
        for group, rows in enumerate(zip(made.tasks, timeline.starts, timeline.ends, strict=True))
        for task, start, end in zip(*rows, strict=True)
    }


@hypothesis.given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.tuples(TIME, TIME, TIME),
    st.floats(0, 2),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_no_task_starts_before_its_inputs_or_while_its_group_works(name, groups, m, costs, latency):
    made = mw.schedules.schedule(name, groups=groups, microbatches=m)
    timeline = mw.schedules.simulate(made, mw.schedules.Costs(*costs), latency)
    found = spans(timeline)
    free = dict.fromkeys(range(groups), 0.0)
    for (kind, stage, i), (group, start, _) in found.items():
        inputs = {
            "F": [("F", stage - 1, i)],
            "B": [("F", stage, i), ("B", stage + 1, i)],
            "W": [("B", stage, i)],
        }[kind]
        there = [
            found[one][2] + latency * (found[one][0] != group) for one in inputs if one in found
        ]
        assert start == pytest.approx(max([free[group], *there]), abs=1e-9)
        free[group] = found[kind, stage, i][2]


def test_work_is_the_same_however_it_is_cut():
    for name in NAMES:
        timeline = mw.schedules.simulate(mw.schedules.schedule(name, groups=4, microbatches=8))
        assert timeline.busy == pytest.approx((24,) * 4)


def test_costs_may_differ_from_stage_to_stage():
    made = mw.schedules.schedule("1f1b", groups=2, microbatches=3)
    slow = mw.schedules.simulate(made, [mw.schedules.Costs(F=1, BW=2), {"F": 5, "BW": 10}])
    assert slow.busy == (9, 45) and slow.makespan == 1 + 45 + 2
    assert slow.bubbles == (39, 0) and slow.bubble == 39


def test_idle_counts_late_starts_and_bubble_does_not():
    zb = mw.schedules.simulate(mw.schedules.schedule("zb-h2", groups=4, microbatches=32))
    assert zb.bubble == 0 and zb.makespan == 99
    assert zb.idle == pytest.approx(3 / 99)


def test_memory_is_in_shares_of_a_group():
    looped = mw.schedules.simulate(
        mw.schedules.schedule("looped-bfs", groups=2, microbatches=6, stages=8)
    )
    assert looped.memory == (6, 6)


def test_an_overlapped_pair_gives_its_results_at_its_end():
    rows = [[("F", 0, 0), ("F", 0, 1), ("BW", 0, 0), ("F", 0, 2), ("BW", 0, 1), ("BW", 0, 2)]]
    alone = mw.schedules.Schedule("alone", 3, (0,), rows)
    paired = mw.schedules.Schedule("paired", 3, (0,), rows, [{1, 3}])
    costs = mw.schedules.Costs(F=1, B=1, W=1, FB=2.4)
    assert mw.schedules.simulate(alone, costs).makespan == 9
    timeline = mw.schedules.simulate(paired, costs)
    assert timeline.makespan == pytest.approx(1 + 2.4 + 2.4 + 2)
    assert timeline.ends[0][2] == pytest.approx(1 + 2.4)


def test_the_timeline_is_plain_data():
    data = json.loads(
        json.dumps(
            mw.schedules.simulate(mw.schedules.schedule("zb-v", groups=2, microbatches=3)).to_json()
        )
    )
    assert data["makespan"] == 9.5 and len(data["tasks"]) == 3 * 4 * 3
    assert data["tasks"][0] == {"group": 0, "task": "0F0", "start": 0.0, "end": 0.5}


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("F=-1", "cost F: a time is a number from 0, not -1.0"),
        ("F=0", "F=0, BW=2: a forward and a whole backward take time"),
        ("B=0,W=0", "BW=0: a forward and a whole backward take time"),
        ("F=nan", "cost F: a time is a number from 0, not nan"),
        ("F=inf", "cost F: a time is a number from 0, not inf"),
        ("F", "'F' is not kind=time"),
        ("F=1,F=2", "costs: F is given twice in 'F=1,F=2'"),
        ("F=one", "'F=one' is not kind=time"),
        ("X=1", r"'X' is not one of \['F', 'B', 'W', 'BW', 'FB'\]"),
        ({"f": 1}, "'f' is not one of"),
        (7, "costs are Costs, or a list with one per stage, not 7"),
        ([{"F": 1}], "1 costs for 2 stages"),
        ([1, 2], "costs are 'F=1,B=1,W=1', a mapping or Costs, not 1"),
        ({"F": "1"}, "cost F: a time is a number from 0, not '1'"),
        ({"F": True}, "cost F: a time is a number from 0, not True"),
    ],
)
def test_nonsense_costs_are_named(costs, message):
    made = mw.schedules.schedule("1f1b", groups=2, microbatches=2)
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.simulate(made, costs)


@pytest.mark.parametrize("latency", [-1, math.nan, "1", None])
def test_nonsense_latency_is_named(latency):
    made = mw.schedules.schedule("1f1b", groups=2, microbatches=2)
    with pytest.raises(mw.errors.ScheduleError, match="latency: a time is a number from 0"):
        mw.schedules.simulate(made, latency=latency)
