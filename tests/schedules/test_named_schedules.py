"""The named schedules are sound, and stand idle exactly as long as their formulas say."""

import hypothesis
import hypothesis.strategies as st
import pytest

import meshwright as mw

LINE = ("gpipe", "1f1b", "eager-1f1b")
TRAINING = (*LINE, "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
TIMES = st.integers(1, 8)
GROUPS = range(1, 9)
MICROBATCHES = range(1, 65)


def bubble(name, groups, microbatches, costs="F=1,B=1,W=1", stages=None):
    made = mw.schedules.schedule(name, groups=groups, microbatches=microbatches, stages=stages)
    return mw.schedules.simulate(made, costs).bubble


@pytest.mark.parametrize("name", LINE)
@pytest.mark.parametrize("groups", GROUPS)
def test_lines_with_whole_backwards_wait_for_one_microbatch_per_group_behind(name, groups):
    for m in MICROBATCHES:
        assert bubble(name, groups, m) == (groups - 1) * (1 + 2)


@hypothesis.given(st.sampled_from(LINE), st.integers(1, 8), st.integers(1, 64), TIMES, TIMES)
@hypothesis.settings(deadline=None, max_examples=100)
def test_that_formula_holds_for_any_costs_of_gpipe_and_1f1b(name, groups, m, forward, backward):
    costs = mw.schedules.Costs(F=forward, BW=backward)
    if name == "eager-1f1b":
        hypothesis.assume(forward <= backward)  # runs ahead of backwards that come sooner
    assert bubble(name, groups, m, costs) == (groups - 1) * (forward + backward)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_several_stages_per_group_divide_the_bubble(name, groups, chunks):
    for m in (m for m in MICROBATCHES if m >= groups):
        found = bubble(name, groups, m, stages=chunks * groups)
        assert found == pytest.approx((groups - 1) * 3 / chunks)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("groups", [2, 5, 8])
def test_fewer_microbatches_than_groups_wait_once_more_per_stage_and_microbatch(name, groups):
    for m in range(1, groups):
        expected = 3 * (groups - 1) / 2 + 3 * (groups - m) / 2
        assert bubble(name, groups, m) == pytest.approx(expected)


@pytest.mark.parametrize("groups", GROUPS)
def test_zb_h1_fills_waits_with_weight_gradients(groups):
    for m in MICROBATCHES:
        # (p-1)(F+B-2W) with B the whole backward, once there is a weight gradient for each wait.
        assert bubble("zb-h1", groups, m) == 2 * (groups - 1) - min(m - 1, groups - 1)


@hypothesis.given(st.integers(1, 8), st.integers(8, 64), TIMES)
@hypothesis.settings(deadline=None, max_examples=60)
def test_zb_h1_equals_its_formula_for_other_costs(groups, m, unit):
    for forward, b, w in ((1, 1, 1), (2, 3, 2), (3, 4, 2)):
        costs = mw.schedules.Costs(F=forward * unit, B=b * unit, W=w * unit)
        whole = (b + w) * unit
        assert bubble("zb-h1", groups, m, costs) == (groups - 1) * (
            forward * unit + whole - 2 * w * unit
        )


@pytest.mark.parametrize("groups", GROUPS)
def test_zb_h2_has_no_bubble_with_enough_microbatches(groups):
    for m in MICROBATCHES:
        assert bubble("zb-h2", groups, m) == max(0, 2 * (groups - 1) - (m - 1))


@pytest.mark.parametrize("groups", GROUPS)
def test_zb_v_has_no_bubble_with_enough_microbatches(groups):
    for m in MICROBATCHES:
        if m >= 2 * groups - 1:
            assert bubble("zb-v", groups, m) == 0
        else:
            assert bubble("zb-v", groups, m) <= bubble("1f1b", groups, m)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("overlap", [1.0, 0.9])
def test_dualpipe_v_equals_its_formula(groups, overlap):
    stage = mw.schedules.Costs(F=1, B=1, W=1, FB=3 * overlap)
    for m in (m for m in MICROBATCHES if m >= 2 * groups):
        made = mw.schedules.schedule("dualpipe-v", groups=groups, microbatches=m)
        found = mw.schedules.simulate(made, [stage] * made.stages).bubble
        if overlap == 1.0:
            # (PP/2-1)(F&B+B-3W) for PP stages on PP/2 groups, B the whole backward.
            assert found == (groups - 1) * (3 + 2 - 3)
        else:
            assert found <= (groups - 1) * (3 * overlap + 2 - 3) + 1e-9


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("groups", GROUPS)
def test_every_schedule_is_sound_for_every_count_it_is_defined_for(name, groups):
    least = 2 * groups if name == "dualpipe-v" else 1
    for m in (m for m in MICROBATCHES if m >= least):
        mw.schedules.check(mw.schedules.schedule(name, groups=groups, microbatches=m))


def live(name, groups, m):
    return mw.schedules.check(mw.schedules.schedule(name, groups=groups, microbatches=m)).live


def test_live_activations_are_those_of_the_papers():
    for p in GROUPS:
        m = 4 * p
        assert live("gpipe", p, m) == (m,) * p
        assert live("1f1b", p, m) == tuple(p - g for g in range(p))
        assert live("eager-1f1b", p, m) == tuple(2 * (p - g) - 1 for g in range(p))
        assert max(live("zb-h1", p, m)) == p
        assert max(live("zb-h2", p, m)) == 2 * p - 1
        assert max(live("zb-v", p, m)) == 2 * p  # of half a group's share each
        assert max(live("dualpipe-v", p, m)) == 2 * p + 1


@pytest.mark.parametrize(
    ("name", "at_once", "with_latency"),
    [
        ("1f1b", 8.6, 18.6),
        ("eager-1f1b", 8.6, 9.9),
        ("interleaved-1f1b", 4.5, 7.7),
        ("zb-h1", 3.0, 5.9),
    ],
)
def test_latency_changes_the_ranking_as_measured(name, at_once, with_latency):
    made = mw.schedules.schedule(name, groups=4, microbatches=32)
    idle = [round(100 * mw.schedules.simulate(made, latency=late).idle, 1) for late in (0, 0.25)]
    assert idle == [at_once, with_latency]


def test_forward_only_has_no_backward():
    made = mw.schedules.schedule("forward", groups=3, microbatches=4)
    assert made.counts == {"F": 12} and made.forward_only
    assert mw.schedules.check(made).live == (1, 1, 1)
    assert mw.schedules.simulate(made).makespan == 4 + 2


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("zbh1", (4, 8), r"no schedule is called 'zbh1'. Did you mean 'zb-h1'\?"),
        (3, (4, 8), "no schedule is called 3"),
        ("gpipe", (0, 8), "groups: 0 is not a positive integer"),
        ("gpipe", (10**9, 1), "make more than 10,000,000 forwards. Take fewer"),
        ("auto", (2, 1), r"For the best one found use Auto\(...\)"),
        ("gpipe", (2, -1), "microbatches: .*is not a positive integer"),
        ("gpipe", (2.5, 1), "groups: 2.5 is not a positive integer"),
        ("gpipe", (True, 1), "groups: .*is not a positive integer"),
        ("1f1b", (4, 8, 8), "4 groups make 4 stages, not 8"),
        ("zb-v", (4, 8, 4), "4 groups make 8 stages, not 4"),
        ("looped-bfs", (4, 8, 6), "6 stages cannot be dealt out evenly to 4 groups. Take 4 or 8"),
        ("dualpipe-v", (4, 7), "defined from 2 microbatches per group: 4 groups need 8, not 7"),
    ],
)
def test_what_is_not_defined_says_why(name, sizes, message):
    with pytest.raises(mw.errors.ScheduleError, match=message):
        mw.schedules.schedule(
            name, **dict(zip(("groups", "microbatches", "stages"), sizes, strict=False))
        )
