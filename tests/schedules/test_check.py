"""`check` proves a schedule, or names the first task that is wrong."""

import random

import hypothesis
import hypothesis.strategies as st
import pytest

import meshwright as mw
from meshwright.schedules.types import Task


def changed(rows, name="1f1b", groups=2, microbatches=2):
    """A sound schedule's lists, changed by `rows`."""
    made = mw.schedules.schedule(name, groups=groups, microbatches=microbatches)
    lists = [list(row) for row in made.tasks]
    rows(lists)
    return mw.schedules.Schedule("mine", made.microbatches, made.group_of, lists)


def swap(group, first, second):
    def rows(lists):
        row = lists[group]
        row[first], row[second] = row[second], row[first]

    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda r: r[1].pop(), r"mine: group 1: 1BW1 is missing"),
        (lambda r: r[0].pop(0), r"mine: group 0: 0F0 is missing"),
        (
            lambda r: r[0].append(r[0][0]),
            r"group 0, position 4: 0F0 was already run at group 0, po",
        ),
        (lambda r: r[0].append(r[1].pop()), r"position 4: 1BW1 belongs to group 1, where stage 1"),
        (lambda r: r[0].append(("F", 5, 0)), r"5F0 is outside of 2 stages and 2 microbatches"),
        (lambda r: r[0].append(("F", 0, 9)), r"0F9 is outside of 2 stages and 2 microbatches"),
        (lambda r: r[0].append(("W", 0, 0)), r"0W0 is already part of 0BW0 at group 0, position"),
        (swap(1, 0, 1), r"group 1 waits at 1BW0 \(position 0\) for 1F0, which it would run itself"),
        (
            swap(0, 0, 2),
            r"mine: group 0 waits at 0BW0 \(position 0\) for 0F0, which it would run itself, later",
        ),
    ],
)
def test_a_broken_schedule_names_the_first_offending_task(rows, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.check(changed(rows))


def test_a_deadlock_says_who_waits_for_whom():
    # Group 0 wants the first backward before it sends what group 1 waits for.
    crossed = mw.schedules.Schedule(
        "crossed",
        2,
        (0, 1),
        [
            [("F", 0, 0), ("BW", 0, 0), ("F", 0, 1), ("BW", 0, 1)],
            [("F", 1, 0), ("F", 1, 1), ("BW", 1, 0), ("BW", 1, 1)],
        ],
    )
    with pytest.raises(mw.errors.ScheduleError) as caught:
        mw.schedules.check(crossed)
    assert str(caught.value).startswith(
        "crossed: deadlock. group 0 waits at 0BW0 (position 1) for 1B0; "
        "group 1 waits at 1F1 (position 1) for 0F1."
    )


def test_half_a_split_backward_is_missed():
    with pytest.raises(mw.errors.ScheduleError, match="group 1: 1W0 is missing"):
        mw.schedules.check(changed(lambda r: r[1].remove(mw.schedules.Task("W", 1, 0)), "zb-h1"))
    with pytest.raises(mw.errors.ScheduleError, match="group 1: 1B0 is missing"):
        mw.schedules.check(changed(lambda r: r[1].remove(mw.schedules.Task("B", 1, 0)), "zb-h1"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, (0,), [[]]), "a schedule's name is a word"),
        (("mine", 0, (0,), [[]]), "microbatches: 0 is not a positive integer"),
        (("mine", 1, (0,), []), "no groups"),
        (("mine", 1, (), [[]]), "no stages"),
        (("mine", 1, (0, 2), [[], []]), "stage 1 is in group 2, but there are 2 groups, 0 to 1"),
        (("mine", 1, (0, 0), [[], []]), "group 1 has no stage"),
        (("mine", 1, (0,), None), "mine: tasks is a list, not None"),
        (("mine", 1, None, [[]]), "mine: group_of is a list, not None"),
        (("mine", 1, (0,), [None]), "group 0: its tasks are a list, not None"),
        (("mine", 1, (0,), [["0F0"]]), r"position 0: '0F0' is not \(kind, stage, microbatch\)"),
        (("mine", 1, (0,), [[("X", 0, 0)]]), "kind 'X' is not one of"),
        (("mine", 1, (0,), [[Task("F", 0, -1)]]), "position 0: microbatch: -1 is not an integer"),
        (("mine", 1, (0,), [[Task("F", 0.5, 0)]]), "position 0: stage: 0.5 is not an integer"),
        (("mine", 1, (0,), [[Task("F", True, 0)]]), "position 0: stage: True is not an integer"),
        (("mine", 1, (0,), [[("F", -1, 0)]]), "stage: -1 is not an integer of at least 0"),
        (("mine", 1, (0,), [[("F", 0, 0.5)]]), "microbatch: 0.5 is not an integer of at least 0"),
        (("mine", 1, (0,), [[("F", 0, 0)]], [{0}]), "position 0 cannot be overlapped"),
        (("mine", 1, (0,), [[("F", 0, 0)]], [{0}, {1}]), "overlapped has 2 groups, tasks has 1"),
    ],
)
def test_what_is_no_schedule_is_refused_at_once(fields, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.Schedule(*fields)


def test_only_schedules_are_checked():
    with pytest.raises(mw.errors.ScheduleError, match="check takes a Schedule, not a str"):
        mw.schedules.check("1f1b")
    with pytest.raises(mw.errors.ScheduleError, match="simulate takes a Schedule, not a list"):
        mw.schedules.simulate([])


def test_the_proof_has_an_order_in_which_everything_can_run():
    made = mw.schedules.schedule("interleaved-1f1b", groups=4, microbatches=9)
    order = mw.schedules.check(made).order
    assert sorted(order) == sorted((g, t) for g, row in enumerate(made.tasks) for t in row)
    seen = set()
    for _, (kind, stage, microbatch) in order:
        if kind == "F" and stage:
            assert ("F", stage - 1, microbatch) in seen
        if kind == "BW":
            assert ("F", stage, microbatch) in seen
            assert stage + 1 == made.stages or ("BW", stage + 1, microbatch) in seen
        seen.add((kind, stage, microbatch))


def test_channels_count_what_crosses_between_groups():
    (there, back) = mw.schedules.check(
        mw.schedules.schedule("1f1b", groups=2, microbatches=5)
    ).channels
    assert (there.source, there.target, there.transfers, there.in_order) == (0, 1, 5, True)
    assert (back.source, back.target, back.transfers, back.in_order) == (1, 0, 5, True)


def test_a_channel_that_is_taken_in_another_order_says_so():
    made = mw.schedules.Schedule(
        "turned",
        2,
        (0, 1),
        [[("F", 0, 0), ("F", 0, 1)], [("F", 1, 1), ("F", 1, 0)]],
    )
    (channel,) = mw.schedules.check(made).channels
    assert not channel.in_order and "not in order" in str(mw.schedules.check(made))


@hypothesis.given(st.randoms(use_true_random=False), st.sampled_from(["1f1b", "zb-h1", "zb-v"]))
@hypothesis.settings(deadline=None, max_examples=60)
def test_a_shuffled_schedule_is_sound_or_named_and_simulates_alike(rng: random.Random, name):
    made = mw.schedules.schedule(name, groups=3, microbatches=4)
    lists = [list(row) for row in made.tasks]
    row = rng.choice(lists)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    mixed = mw.schedules.Schedule("mixed", 4, made.group_of, lists)
    try:
        mw.schedules.check(mixed)
    except mw.errors.ScheduleError as error:
        assert "waits at" in str(error)
        with pytest.raises(mw.errors.ScheduleError, match="waits at"):
            mw.schedules.simulate(mixed)
    else:
        assert mw.schedules.simulate(mixed).makespan >= 12
