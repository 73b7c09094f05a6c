"""A list of stage functions is the same pipeline as a function with stage ends."""

import jax
import jax.numpy as jnp
import pytest
from pipeline_helpers import assert_close, batch, groups, looped, normal

import meshwright as mw


def first(params, x, y):
    return jnp.tanh(x @ params["w"]), y


def second(w, given):
    x, y = given
    return jnp.tanh(x @ w), y


def third(params, given):
    x, y = given
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stage_functions(schedule):
    params = [{"w": normal(0, 4, 4)}, normal(1, 4, 4), {"w": normal(2, 4, 4), "b": normal(3, 4)}]

    def loss(params, x, y):
        return third(params[2], second(params[1], first(params[0], x, y)))

    step = mw.pipeline([first, second, third], groups(3), schedule=schedule, microbatches=4)
    assert_close(step(params, *batch()), jax.jit(looped(loss, 4))(params, *batch()))


def embed(w, x):
    return jnp.tanh(x @ w)


def judge(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def test_a_later_function_gets_the_labels_that_it_asks_for():
    params = [normal(n, 4, 4) for n in range(3)]
    x, y = batch()

    def loss(params, x, y):
        return judge(params[2], embed(params[1], embed(params[0], x)), y)

    step = mw.pipeline([embed, embed, judge], groups(3), microbatches=4)
    assert_close(step(params, x, y), jax.jit(looped(loss, 4))(params, x, y))
    notes = step.explain().stages
    assert [note.name for note in notes] == ["embed", "embed", None]
    # Labels do not pass through the stages before: each gets x alone from the one before it.
    assert [note.sent_on_bytes for note in notes] == [2 * 4 * 4, 2 * 4 * 4, 0]


def test_an_argument_that_no_function_takes_is_refused():
    step = mw.pipeline([embed, embed], groups(2), microbatches=4, schedule="forward")
    with pytest.raises(mw.errors.PipelineError, match="argument 2 goes to no stage function"):
        step([normal(0, 4, 4)] * 2, *batch())


@pytest.mark.parametrize("params", [{"a": normal(0, 4, 4), "b": normal(1, 4, 4)}, {}])
def test_parameters_that_are_no_list_are_refused(params):
    step = mw.pipeline([embed, judge], groups(2), microbatches=4)
    with pytest.raises(mw.errors.PipelineError, match=r"the parameters are a dict\. A list of"):
        step(params, *batch())


def test_parameters_for_another_number_of_stages_are_refused():
    step = mw.pipeline([first, second, third], groups(3), microbatches=4)
    with pytest.raises(mw.errors.PipelineError, match="3 stages, but parameters for 2"):
        step([{"w": normal(0, 4, 4)}, normal(1, 4, 4)], *batch())


@pytest.mark.parametrize(
    "functions",
    [
        [],
        [first, "second"],
        3,
    ],
)
def test_what_is_no_function_is_refused(functions):
    with pytest.raises(
        mw.errors.PipelineError, match="not a function or a list of stage functions"
    ):
        mw.pipeline(functions, groups(2), microbatches=4)
