"""A pipeline says what became of the function, and when its tasks ran."""

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
    found = step.explain(PARAMS, ROWS)
    assert [note.parameters for note in found.stages] == [("a",), ("b",)]
    assert [note.parameter_bytes for note in found.stages] == [4 * WIDTH * WIDTH] * 2
    row = 2 * WIDTH * 4
    assert [(note.sent_on_bytes, note.sent_back_bytes) for note in found.stages] == [
        (row, 0),
        (0, row),
    ]
    assert all(note.forward_flops > 0 and note.backward_flops > 0 for note in found.stages)


def test_parameters_that_are_cast_first_are_named_where_they_are_used():
    def train(params, scale, x):
        half = jax.tree.map(lambda w: (scale * w).astype(jnp.bfloat16), params)
        half["c"] = jnp.concatenate([half["c"], half["c"]])[:1] + half["t"]

        def scaled(params, x):
            return loss({"a": params["a"], "b": params["b"] * params["c"] * params["t"]}, x)

        return mw.value_and_grad(scaled)(half, x)

    params = {**PARAMS, "c": jnp.ones(2), "t": jnp.float32(1)}
    found = mw.pipeline(train, groups(), microbatches=4).explain(params, 2.0, ROWS)
    assert [note.parameters for note in found.stages] == [("a",), ("b", "c", "t", "1")]
    assert found.stages[0].parameter_bytes == 2 * WIDTH * WIDTH


def test_stages_are_called_as_their_marks_say():
    def named(params, x):
        h = mw.stage_end(jnp.tanh(x @ params["a"]), "encoder")
        return jnp.mean((h @ params["b"]) ** 2)

    found = mw.pipeline(named, groups(), microbatches=4).explain(PARAMS, ROWS)
    assert [note.name for note in found.stages] == ["encoder", None]
    assert "0 encoder" in str(found)


def test_casts_of_parameters_are_cloned_and_said(step):
    found = step.explain(PARAMS, ROWS)
    assert found.stages[1].cloned["convert_element_type"] >= 2
    assert "cloned: equations that depend only on parameters" in str(found)


def test_a_backward_that_is_not_split_says_why(step):
    found = step.explain(PARAMS, ROWS)
    assert "whole in W, and B is empty: no stage waits" in found.stages[0].whole
    assert "stage 0: backward runs whole in W" in str(found)
    assert found.stages[1].whole is None
    scanned = mw.pipeline(looping, groups(), schedule="zb-h1", microbatches=4)
    found = scanned.explain(PARAMS, ROWS)
    assert "scan runs whole in B" in found.stages[1].whole
    assert "Unroll it" in str(found)


def test_nothing_to_explain_before_the_first_call():
    fresh = mw.pipeline(loss, groups(), microbatches=4)
    with pytest.raises(mw.errors.PipelineError, match=r"explain\(\) before the first call"):
        fresh.explain()
    fresh(PARAMS, ROWS)
    assert len(fresh.explain().stages) == 2


def test_the_explanation_is_plain_data_and_a_picture(step):
    found = step.explain(PARAMS, ROWS)
    assert json.loads(json.dumps(found.to_json()))["stages"][1]["group"] == 1
    assert "<svg" in found._repr_html_()


def test_the_timeline_has_every_task_in_its_group_s_order(step):
    made = step.timeline(PARAMS, ROWS)
    assert [len(row) for row in made.measured.schedule.tasks] == [8, 12]
    for starts, ends in zip(made.measured.starts, made.measured.ends, strict=True):
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert list(ends) == sorted(ends)
    assert made.predicted.makespan > 0 and made.ratio > 0


def test_a_first_stage_that_only_has_weights_runs_as_predicted(step):
    """Nobody waits for its B, so all is W, which a schedule may put off."""
    predicted = step.explain(PARAMS, ROWS).timeline
    assert predicted.costs[0].B == 0 and predicted.costs[0].W > 0
    made = step.timeline(PARAMS, ROWS)
    assert {task.kind for task in made.measured.schedule.tasks[0]} == {"F", "W"}
    assert made.predicted.costs[0].B == 0 and made.predicted.costs[0].W > 0


def test_the_timeline_shows_itself(step):
    made = step.timeline(PARAMS, ROWS)
    assert "predicted / measured" in str(made)
    assert made.svg().startswith("<svg")
    arrows = [event for event in made.trace()["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * 4  # each microbatch goes on once, and comes back once
    assert json.loads(json.dumps(made.to_json()))["measured"]["groups"] == 2
    assert "predicted" in made._repr_html_()


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
    found = recorded(Failing("BlockHostUntilReady() called on deleted or donated buffer"))
    assert list(found.tasks) == [3]


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
