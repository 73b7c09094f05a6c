"""A pipeline says what became of the function, and when its tasks ran."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.pipelines.profiling import record
from meshwright.pipelines.step_graph import Operation
from meshwright.schedules.types import Task

WIDTH = 8


def groups(count=2):
    return mw.MpmdMesh(mw.mesh(f"pp:{count}", devices=jax.devices()[:count]), "pp")


def loss(params, x):
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    h = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def looping(params, x):
    h = mw.stage_end(x @ params["a"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["b"][None])
    return jnp.mean(h**2)


PARAMS = {"a": jnp.eye(WIDTH), "b": jnp.eye(WIDTH)}
ROWS = jnp.ones((8, WIDTH))


@pytest.fixture(scope="module")
def step():
    return mw.pipeline(loss, groups(), schedule="zb-h1", microbatches=4)


def test_stages_name_their_parameters_and_what_they_send(step):
    explained = step.explain(PARAMS, ROWS)
    assert [note.parameters for note in explained.stages] == [("a",), ("b",)]
    assert [note.parameter_bytes for note in explained.stages] == [4 * WIDTH * WIDTH] * 2
    row = 2 * WIDTH * 4
    assert [(note.sent_on_bytes, note.sent_back_bytes) for note in explained.stages] == [
        (row, 0),
        (0, row),
    ]
    assert all(note.forward_flops > 0 and note.backward_flops > 0 for note in explained.stages)


def test_parameters_that_are_cast_first_are_named_where_they_are_used():
    def train(params, scale, x):
        half = jax.tree.map(lambda w: (scale * w).astype(jnp.bfloat16), params)
        half["c"] = jnp.concatenate([half["c"], half["c"]])[:1] + half["t"]

        def scaled(params, x):
            return loss({"a": params["a"], "b": params["b"] * params["c"] * params["t"]}, x)

        return mw.value_and_grad(scaled)(half, x)

    params = {**PARAMS, "c": jnp.ones(2), "t": jnp.float32(1)}
    explained = mw.pipeline(train, groups(), microbatches=4).explain(params, 2.0, ROWS)
    assert [note.parameters for note in explained.stages] == [("a",), ("b", "c", "t", "1")]
    assert explained.stages[0].parameter_bytes == 2 * WIDTH * WIDTH


def test_stages_are_called_as_their_marks_say():
    def named(params, x):
        h = mw.stage_end(jnp.tanh(x @ params["a"]), "encoder")
        return jnp.mean((h @ params["b"]) ** 2)

    explained = mw.pipeline(named, groups(), microbatches=4).explain(PARAMS, ROWS)
    assert [note.name for note in explained.stages] == ["encoder", None]
    assert "0 encoder" in str(explained)


def test_casts_of_parameters_are_recomputed_and_said(step):
    explained = step.explain(PARAMS, ROWS)
    assert explained.stages[1].recomputed["convert_element_type"] >= 2
    assert "recomputed: equations that depend only on parameters" in str(explained)


def test_a_backward_that_is_not_split_says_why(step):
    explained = step.explain(PARAMS, ROWS)
    assert "whole in W, and B is empty: no stage waits" in explained.stages[0].whole
    assert "stage 0: backward runs whole in W" in str(explained)
    assert explained.stages[1].whole is None
    scanned = mw.pipeline(looping, groups(), schedule="zb-h1", microbatches=4)
    explained = scanned.explain(PARAMS, ROWS)
    assert "scan runs whole in B" in explained.stages[1].whole
    assert "Unroll it" in str(explained)


def test_nothing_to_explain_before_the_first_call():
    fresh = mw.pipeline(loss, groups(), microbatches=4)
    with pytest.raises(mw.errors.PipelineError, match=r"explain\(\) before the first call"):
        fresh.explain()
    fresh(PARAMS, ROWS)
    assert len(fresh.explain().stages) == 2


def test_the_explanation_is_plain_data_and_a_picture(step):
    explained = step.explain(PARAMS, ROWS)
    assert json.loads(json.dumps(explained.to_json()))["stages"][1]["group"] == 1
    assert "<svg" in explained._repr_html_()


def test_reprs_are_one_short_line_however_long_the_names(step):
    timeline, explained = step.timeline(PARAMS, ROWS), step.explain(PARAMS, ROWS)
    assert repr(step) == "<PipelineStep loss: zb-h1, 2 groups, 4 microbatches>"
    assert repr(explained) == "<Explanation 2 stages in 2 groups, zb-h1, 4 microbatches>"
    assert repr(timeline).startswith("<MeasuredTimeline zb-h1: ")
    long = dataclasses.replace(timeline.measured.schedule, name="n" * 500)
    measured = dataclasses.replace(timeline.measured, schedule=long)
    many = tuple("p" * 500 for _ in range(10))
    values = (
        step.plan_of(PARAMS, ROWS),
        dataclasses.replace(explained.stages[0], parameters=many),
        dataclasses.replace(explained, cut=many, timeline=measured),
        dataclasses.replace(timeline, measured=measured),
        mw.pipeline(loss, groups(), schedule=long, microbatches=4),
    )
    for value in (step, explained, timeline, *values):
        assert len(repr(value)) <= 200 and "\n" not in repr(value)


def test_the_timeline_has_every_task_in_its_group_s_order(step):
    timeline = step.timeline(PARAMS, ROWS)
    assert [len(row) for row in timeline.measured.schedule.tasks] == [8, 12]
    for starts, ends in zip(timeline.measured.starts, timeline.measured.ends, strict=True):
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert list(ends) == sorted(ends)
    assert timeline.predicted.makespan > 0 and timeline.ratio > 0


def test_a_first_stage_that_only_has_weights_runs_as_predicted(step):
    """Nobody waits for its B, so all is W, which a schedule may put off."""
    predicted = step.explain(PARAMS, ROWS).timeline
    assert predicted.costs[0].B == 0 and predicted.costs[0].W > 0
    timeline = step.timeline(PARAMS, ROWS)
    assert {task.kind for task in timeline.measured.schedule.tasks[0]} == {"F", "W"}
    assert timeline.predicted.costs[0].B == 0 and timeline.predicted.costs[0].W > 0


def test_the_timeline_shows_itself(step):
    timeline = step.timeline(PARAMS, ROWS)
    assert "predicted / measured" in str(timeline)
    assert timeline.svg().startswith("<svg")
    arrows = [event for event in timeline.trace()["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * 4  # each microbatch goes on once, and comes back once
    assert json.loads(json.dumps(timeline.to_json()))["measured"]["groups"] == 2
    assert "predicted" in timeline._repr_html_()


def test_the_timeline_does_not_eat_donated_arguments():
    donating = mw.pipeline(loss, groups(), microbatches=4, donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    donating.timeline(params, ROWS)
    assert not params["a"].is_deleted()


class Failing:
    """An array that cannot be waited for."""

    def __init__(self, message):
        self.message = message

    def is_deleted(self):
        return False

    def block_until_ready(self):
        raise RuntimeError(self.message)


def recorded(value):
    """The record of a single task that makes a value."""
    operation = Operation(0, "0F0", (), (0,), task=Task("F", 0, 0), call=lambda: [value], number=3)
    return record([operation], [None], lambda _: None)


def test_a_result_that_is_being_given_up_counts_as_done():
    recording = recorded(Failing("BlockHostUntilReady() called on deleted or donated buffer"))
    assert list(recording.tasks) == [3]


def test_a_task_that_fails_while_it_is_timed_says_so_to_the_caller():
    with pytest.raises(RuntimeError, match="disk full"):
        recorded(Failing("disk full"))


def test_a_timeline_needs_arguments(step):
    with pytest.raises(
        mw.errors.PipelineError, match=r"timeline\(\) runs a step: pass its arguments"
    ):
        step.timeline()


def test_shapes_can_be_explained_but_not_run(step):
    shapes = jax.eval_shape(lambda: PARAMS)
    assert len(step.explain(shapes, ROWS).stages) == 2
    match = r"argument 0/a: a shape without data\. Pass arrays, or ask explain\(\.\.\.\)"
    with pytest.raises(mw.errors.PipelineError, match=match):
        step(shapes, ROWS)
    with pytest.raises(mw.errors.PipelineError, match=match):
        step.timeline(shapes, ROWS)
