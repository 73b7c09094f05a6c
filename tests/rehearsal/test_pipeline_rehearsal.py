"""Pipelines rehearsed: every group's tasks compiled, its memory and its time."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.errors import RehearsalError

WIDTH, ROWS, MICRO = 64, 256, 8


def loss(params, x):
    for name in ("a", "b", "c"):
        x = mw.stage_end(jnp.tanh(x @ params[name]))
    return jnp.mean((x @ params["d"]) ** 2)


SHAPE = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
PARAMS = dict.fromkeys("abcd", SHAPE)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def rehearsed(schedule):
    groups = mw.MpmdMesh(mw.mesh("pp:4, dp:2"), "pp")
    step = mw.pipeline(loss, groups, schedule=schedule, microbatches=MICRO)
    return mw.rehearse_pipeline(step, PARAMS, X)


@pytest.fixture(scope="module")
def one_f_one_b():
    return rehearsed("1f1b")


def test_every_groups_tasks_are_compiled_and_timed(one_f_one_b):
    found = one_f_one_b
    assert found.fits
    assert [[task.name for task in group.tasks] for group in found.groups] == [
        [f"{stage}F", f"{stage}BW"] for stage in range(4)
    ]
    product = 2 * (ROWS // MICRO // 2) * WIDTH * WIDTH
    first, last = found.groups[0], found.groups[3]
    assert [task.time.flops for task in first.tasks] == [product, product]
    assert [task.time.flops for task in last.tasks] == [product, 2 * product]
    assert found.timeline.makespan > MICRO * 1e3 * sum(task.time.total for task in last.tasks)


def test_memory_follows_the_schedule(one_f_one_b):
    # The first group reads its inputs from the batch; the others hold what they were sent.
    held = [group.held for group in one_f_one_b.groups[1:]]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[2]
    breadth = rehearsed("gpipe")
    for early, late in zip(one_f_one_b.groups, breadth.groups, strict=True):
        assert late.held > early.held
        assert late.memory.arguments == early.memory.arguments
    # GPipe holds what all microbatches keep and were sent, 1F1B of stage s that of 4 - s.
    first, second = one_f_one_b.explanation.stages[:2]
    kept = (second.kept_bytes + first.sent_on_bytes + second.sent_on_bytes) // 2
    more = breadth.groups[1].held - one_f_one_b.groups[1].held
    assert more == (MICRO - 3) * kept


def test_arguments_stay_whatever_the_schedule():
    # Group 0 needs its weights for the forward alone; the caller holds them to the end.
    early, late = (rehearsed(schedule).groups[0].memory for schedule in ("1f1b", "gpipe"))
    assert late.peak > early.peak
    assert late.peak >= late.arguments + 2 * 4 * WIDTH * WIDTH


def test_weights_and_their_gradients_are_in_it(one_f_one_b):
    weight = 4 * WIDTH * WIDTH
    for group in one_f_one_b.groups:
        assert weight <= group.memory.arguments
        assert group.memory.peak >= 2 * weight


def test_it_shows_itself(one_f_one_b):
    text = str(one_f_one_b)
    assert "group 3: fits: " in text
    assert "largest task" in text
    assert "makespan" in text
    assert "<svg" in one_f_one_b._repr_html_()
    data = one_f_one_b.to_json()
    assert data["fits"] is True
    assert [group["group"] for group in data["groups"]] == [0, 1, 2, 3]


def test_bad_input():
    with pytest.raises(RehearsalError, match="is not what pipeline"):
        mw.rehearse_pipeline(loss, PARAMS, X)
    step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh("pp:4, dp:2"), "pp"), microbatches=2)
    with pytest.raises(RehearsalError, match="pass the step's arguments"):
        mw.rehearse_pipeline(step)
    with pytest.raises(RehearsalError, match="timeout: -1 is not a number of seconds"):
        mw.rehearse_pipeline(step, PARAMS, X, timeout=-1)
    with pytest.raises(RehearsalError, match="cache: 3 is not a folder"):
        mw.rehearse_pipeline(step, PARAMS, X, cache=3)


def test_reprs_are_short(one_f_one_b):
    assert repr(one_f_one_b) == "<PipelineRehearsal of 4 groups, fits>"
    group = one_f_one_b.groups[0]
    assert repr(group).startswith("<GroupRehearsal group 0: fits: ")
    assert repr(group.tasks[0]).startswith("<TaskRehearsal 0F, ")
    assert max(map(len, map(repr, (group, *group.tasks)))) <= 200
