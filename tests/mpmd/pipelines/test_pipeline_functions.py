"""A list of stage functions is the same pipeline as a function with marks."""

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


def test_parameters_for_another_number_of_stages_are_refused():
    step = mw.pipeline([first, second, third], groups(3), microbatches=4)
    with pytest.raises(mw.PipelineError, match="3 stages, but parameters for 2"):
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
    with pytest.raises(mw.PipelineError, match="not a function or a list of stage functions"):
        mw.pipeline(functions, groups(2), microbatches=4)
