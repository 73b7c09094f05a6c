"""Predicting a step: tasks wait for their group, their inputs, and for their dispatch."""

import dataclasses

import pytest

import meshwright as mw
from meshwright.pipelines.profiling import Dispatch, Record, RecordedDispatch, merge, predict
from meshwright.schedules.types import Costs
from meshwright.schedules.validation import execution_order

COSTS = (Costs(1.0, 1.0, 1.0, 2.0),) * 4
PLAIN = mw.schedules.schedule("1f1b", groups=4, microbatches=8)


def dispatches(schedule, groups, before=0.0, call=0.0, waited=False):
    """What a process does that dispatches the tasks of some groups."""
    return [
        Dispatch(task, before, call, waited)
        for group, first, last in execution_order(schedule)
        if group in groups
        for task in schedule.tasks[group][first:last]
    ]


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_free_dispatching_gives_what_simulate_gives(latency):
    one = [dispatches(PLAIN, range(4))]
    many = [dispatches(PLAIN, [group], waited=True) for group in range(4)]
    expected = mw.schedules.simulate(PLAIN, list(COSTS), latency)
    assert predict(PLAIN, COSTS, latency, one).ends == expected.ends
    assert predict(PLAIN, COSTS, latency, many).ends == expected.ends


def test_one_process_that_is_slower_than_all_groups_bounds_the_step():
    timeline = predict(PLAIN, COSTS, 0.0, [dispatches(PLAIN, range(4), before=2.0, call=3.0)])
    # 64 tasks, one every 5; the last, a backward that takes 2, starts when its turn has come.
    assert timeline.makespan == pytest.approx(63 * 5 + 2)


def test_processes_of_their_own_dispatch_side_by_side():
    several = [dispatches(PLAIN, [group], call=2.0) for group in range(4)]
    together = [dispatches(PLAIN, range(4), call=2.0)]
    assert predict(PLAIN, COSTS, 0.0, several).makespan < 64 * 2
    assert predict(PLAIN, COSTS, 0.0, together).makespan == pytest.approx(63 * 2 + 2)


def test_a_process_that_waits_for_what_comes_dispatches_nothing_meanwhile():
    quick = [dispatches(PLAIN, [group], call=1.5) for group in range(4)]
    asleep = [dispatches(PLAIN, [group], call=1.5, waited=True) for group in range(4)]
    assert predict(PLAIN, COSTS, 0.5, quick).makespan < predict(PLAIN, COSTS, 0.5, asleep).makespan


def test_a_task_of_several_processes_starts_with_the_last_of_them():
    single = mw.schedules.schedule("1f1b", groups=1, microbatches=1)
    pair = [dispatches(single, [0], before=before) for before in (1.0, 4.0)]
    timeline = predict(single, COSTS[:1], 0.0, pair)
    assert timeline.starts == ((0.0, 4.0),)  # the first starts at 4 of the clock, the second at 8


def test_a_task_without_work_passes_on_what_it_would_wait_for():
    """The first stage's B is part of its W: that W waits for the second stage's B."""
    split = mw.schedules.schedule("zb-h1", groups=2, microbatches=2)
    rows = tuple(
        tuple(task for task in row if (task.kind, task.stage) != ("B", 0)) for row in split.tasks
    )
    run = dataclasses.replace(split, tasks=rows, overlapped=())
    order = [
        Dispatch(task, 0.0, 0.0, False)
        for group, first, last in execution_order(split)
        for task in split.tasks[group][first:last]
        if (task.kind, task.stage) != ("B", 0)
    ]
    timeline = predict(run, COSTS[:2], 0.0, [order])
    begun = dict(zip(rows[0], timeline.starts[0], strict=True))
    ended = dict(zip(rows[1], timeline.ends[1], strict=True))
    assert all(begun["W", 0, n] >= ended["B", 1, n] for n in range(2))


def test_records_of_several_processes_become_one():
    one = Record({1: (0.0, 2.0)}, {5: 1.0}, {}, [[RecordedDispatch(1, 0.1, 0.2, False)]])
    two = Record({1: (1.0, 3.0), 2: (3.0, 4.0)}, {5: 0.5}, {6: 2.0}, [[]])
    merged = Record.from_text(merge([one.to_text(), two.to_text()]))
    assert merged.tasks == {1: (0.0, 3.0), 2: (3.0, 4.0)}
    assert (merged.sent, merged.arrived) == ({5: 1.0}, {6: 2.0})
    assert merged.dispatches == [[RecordedDispatch(1, 0.1, 0.2, False)], []]
