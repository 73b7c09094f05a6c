"""`Auto` finds sound schedules that are never slower than the named ones that fit."""

import hypothesis
import hypothesis.strategies as st
import pytest

import meshwright as mw

TRAINING = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v",
    "dualpipe-v",
)  # fmt: skip
TIME = st.sampled_from([0.5, 0.8, 1.0, 1.4, 2.0])


def named(groups, microbatches, costs, latency, memory):
    """Makespans of the named schedules that fit."""
    for name in TRAINING:
        if name != "dualpipe-v" or microbatches >= 2 * groups:
            made = mw.schedules.schedule(name, groups=groups, microbatches=microbatches)
            timeline = mw.schedules.simulate(made, costs, latency)
            if memory is None or max(timeline.memory) <= memory:
                yield timeline.makespan


@hypothesis.given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.tuples(TIME, TIME, TIME),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([None, 1, 2, 3.5, 8]),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_never_slower_than_the_named_and_within_memory(groups, m, costs, latency, memory):
    costs = mw.schedules.Costs(*costs)
    found = mw.schedules.Auto(costs, latency, memory).build(groups, m)
    mw.schedules.check(found)
    timeline = mw.schedules.simulate(found, costs, latency)
    assert memory is None or max(timeline.memory) <= memory
    best = min(named(groups, m, costs, latency, memory), default=float("inf"))
    assert timeline.makespan <= best + 1e-9


def test_uneven_costs_and_latency_are_worth_a_search():
    costs, latency = mw.schedules.Costs(F=1, B=1.4, W=0.8), 0.25
    found = mw.schedules.simulate(mw.schedules.Auto(costs, latency).build(4, 32), costs, latency)
    assert found.makespan < min(named(4, 32, costs, latency, None)) - 0.5


def test_memory_below_every_named_schedule_still_finds_one():
    found = mw.schedules.Auto(memory=1).build(4, 8)
    assert mw.schedules.simulate(found).memory == (1, 1, 1, 1)


@pytest.mark.parametrize(("groups", "stages"), [(3, 7), (4, 9)])
@pytest.mark.parametrize("split", [True, False])
def test_sizes_at_which_every_policy_fills_up_still_have_a_schedule(groups, stages, split):
    best = mw.schedules.Auto(memory=2, split=split).build(groups, 5, stages)
    assert max(mw.schedules.simulate(best).memory) <= 2


@pytest.mark.parametrize("fields", [{"split": 1}, {"costs": 5}, {"memory": 0}])
def test_nonsense_is_named_before_anything_is_built(fields):
    with pytest.raises(mw.errors.ScheduleError) as caught:
        mw.schedules.Auto(**fields)
    assert caught.value.option == next(iter(fields))


def test_whole_backwards_when_asked():
    assert set(mw.schedules.Auto(split=False).build(4, 8).counts) == {"F", "BW"}


def test_costs_per_stage_fix_the_stages():
    slow_end = [mw.schedules.Costs()] * 7 + [mw.schedules.Costs(F=2, B=2, W=2)]
    found = mw.schedules.Auto(slow_end).build(4, 8)
    assert found.stages == 8
    assert mw.schedules.Auto(slow_end[1:]).build(4, 8).stages == 7


def test_the_same_question_has_the_same_answer():
    ask = mw.schedules.Auto("F=1,B=1.3,W=0.7", 0.1, 5)
    assert ask.build(4, 12) == ask.build(4, 12)


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        ({"memory": 0.5}, (4, 8), "memory is how many microbatches a group may hold, from 1"),
        ({"memory": "6"}, (4, 8), "memory is how many microbatches"),
        ({"memory": float("nan")}, (4, 8), "memory is how many microbatches"),
        ({"latency": -1}, (4, 8), "latency: a time is a number from 0"),
        ({"costs": 5}, (4, 8), "costs are Costs, or a list with one per stage, not 5"),
        ({"costs": "F=0"}, (4, 8), "a forward and a whole backward take time"),
        ({"costs": ["F=1", 3]}, (2, 8), "costs are 'F=1,B=1,W=1', a mapping or Costs, not 3"),
        ({"split": "x"}, (4, 8), "split: 'x' is not True or False"),
        ({}, (0, 8), "groups: .*is not a positive integer"),
        ({}, (4, 0), "microbatches: .*is not a positive integer"),
        ({}, (4, 8, 3), "stages: 3 is not an integer of at least 4"),
    ],
)
def test_nonsense_is_named(fields, sizes, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.Auto(**fields).build(*sizes)
