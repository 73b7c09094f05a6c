"""What a pipeline refuses, where it points, and what it says to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_helpers import batch, chain_loss, groups, layers

import meshwright as mw


def refused(loss, match, *, at=None, arguments=None, **options):
    options = {"microbatches": 4, **options}
    with pytest.raises(mw.errors.MeshwrightError, match=match):
        step = mw.pipeline(loss, at or groups(2), **options)
        step(*(arguments or (layers(2), *batch())))


def refused_at_once(match, option, **options):
    """Before the step is called, and with the option that is wrong."""
    with pytest.raises(mw.errors.PipelineError, match=match) as caught:
        mw.pipeline(chain_loss, groups(2), **{"microbatches": 4, **options})
    assert caught.value.option == option


def looping(loop):
    """A loss whose only stage end stands inside of some control flow."""

    def loss(params, x, y):
        return jnp.mean((loop(lambda x: mw.stage_end(jnp.tanh(x @ params["w0"])), x) - y) ** 2)

    return loss


LOOPS = {
    "scan": lambda f, x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0],
    "cond": lambda f, x: jax.lax.cond(x[0, 0] > 0, f, jnp.sin, x),
    "while": lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "map": lambda f, x: jax.lax.map(f, x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_stage_ends_inside_of_control_flow_are_refused_with_their_line(name):
    line = looping.__code__.co_firstlineno + 4
    match = rf"test_pipeline_bad_input\.py:{line} is inside of .*cannot be cut"
    refused(looping(LOOPS[name]), match)
    refused(looping(LOOPS[name]), match, schedule="forward")


def test_stage_ends_inside_of_an_inner_gradient_are_refused_with_their_line():
    def loss(params, x, y):
        def inner(x):
            return jnp.sum(mw.stage_end(jnp.tanh(x @ params["w0"])) @ params["w1"])

        return jnp.mean((jax.grad(inner)(x) - y) ** 2)

    refused(loss, r"test_pipeline_bad_input\.py:\d+ is inside of a gradient")
    refused(loss, r"is inside of a gradient", schedule="forward")


def test_a_stage_end_whose_result_is_dropped_is_refused_with_its_line():
    def loss(params, x, y):
        mw.stage_end(jnp.tanh(x @ params["w0"]))
        return chain_loss(params, x, y)

    match = r"test_pipeline_bad_input\.py:\d+: its result is not used.*Write y = stage_end\(y\)"
    refused(loss, match)
    refused(loss, match, schedule="forward")


def test_stage_ends_of_integers_are_refused():
    def loss(params, x, y):
        return chain_loss(params, x, y) + mw.stage_end(jnp.arange(3))[0]

    refused(loss, r"test_pipeline_bad_input\.py:\d+: no array of floating-point numbers")


def test_stage_ends_of_nothing_are_refused():
    with pytest.raises(
        mw.errors.PipelineError,
        match=r"test_pipeline_bad_input\.py:\d+: got an empty tree; pass the arrays",
    ):
        mw.stage_end(())


def test_rows_that_cannot_be_cut():
    match = r"argument 1: 6 rows cannot be cut into 4 microbatches\. Take 4 or 8 rows"
    refused(chain_loss, match, arguments=(layers(2), *batch(6)))
    few = (layers(2), *batch(2))
    refused(chain_loss, "argument 1: 2 rows cannot be cut.* Take 4 ", arguments=few)
    none = (layers(2), *batch(0))
    refused(chain_loss, "argument 1: 0 rows cannot be cut.* Take 4 rows", arguments=none)


def test_a_bad_leaf_of_a_batch_is_named():
    def loss(params, data):
        return chain_loss(params, data["x"], data["y"])

    x, y = batch()
    refused(loss, "argument 1, y: 7 rows", arguments=(layers(2), {"x": x, "y": y[:7]}))


def test_no_stage_ends_with_several_groups():
    def loss(params, x, y):
        return jnp.mean((x @ params["w0"] - y) ** 2)

    match = (
        "2 groups make 2 stages, not 1.* Stage ends in the function: 0; one stage per group takes 1"
    )
    refused(loss, match)


def test_more_stage_ends_than_groups_have_stages():
    arguments = (layers(4), *batch())
    match = (
        "2 groups make 2 stages, not 4.* Stage ends in the function: 3; one stage per group takes 1"
    )
    refused(chain_loss, match, arguments=arguments)
    refused(chain_loss, "3 groups.*not 4|4 stages", at=groups(3), arguments=arguments)
    refused(
        chain_loss,
        "4 stages cannot be dealt out evenly to 3 groups",
        at=groups(3),
        schedule="looped-bfs",
        arguments=arguments,
    )


def test_a_schedule_of_other_sizes():
    other = mw.schedules.schedule("1f1b", groups=4, microbatches=8)
    refused(
        chain_loss,
        "1f1b has 4 groups, 8 microbatches and 4 stages; the pipeline has 2, 4 and 2",
        schedule=other,
    )


def test_unknown_schedules():
    refused(chain_loss, "no schedule is called '1f1c'. Did you mean '1f1b'", schedule="1f1c")
    refused(chain_loss, "schedule", schedule=None)


@pytest.mark.parametrize("count", [0, -1, "4", None])
def test_nonsense_microbatches_are_refused_at_once(count):
    with pytest.raises(mw.errors.MeshwrightError, match="microbatches") as caught:
        mw.pipeline(chain_loss, groups(2), microbatches=count)
    assert caught.value.option == "microbatches"


@pytest.mark.parametrize("count", [2.5, True])
def test_nonsense_microbatches(count):
    refused(chain_loss, "microbatches", microbatches=count)


def test_stage_ends_outside_of_the_differentiated_function():
    def train_step(params, x, y):
        x = mw.stage_end(x * 2)
        return mw.value_and_grad(chain_loss)(params, x, y)

    refused(train_step, r"test_pipeline_bad_input\.py:\d+ is outside of the differentiated")


def test_two_gradients_in_one_step():
    def train_step(params, x, y):
        one, _ = mw.value_and_grad(chain_loss)(params, x, y)
        two, grads = mw.value_and_grad(chain_loss)(params, x, y)
        return one + two, grads

    refused(train_step, "calls value_and_grad 2 times")


def test_gradients_inside_of_a_loop():
    def train_step(params, x, y):
        def body(total, _):
            value, _ = mw.value_and_grad(chain_loss)(params, x, y)
            return total + value, None

        return jax.lax.scan(body, 0.0, None, length=2)[0]

    line = train_step.__code__.co_firstlineno + 2
    match = (
        rf"value_and_grad\(\.\.\.\) at \S*test_pipeline_bad_input\.py:{line} is inside of scan.*"
    )
    refused(train_step, match + r"Call it once in a step, outside of control flow\.")


def test_gradients_inside_of_a_choice():
    def train_step(params, x, y):
        def train(params):
            return mw.value_and_grad(chain_loss)(params, x, y)[1]

        return jax.lax.cond(x[0, 0] > 0, train, lambda params: params, params)

    refused(train_step, r"^value_and_grad\(\.\.\.\) at \S+:\d+ is inside of cond.*Call it once")


def test_a_choice_is_not_called_a_loop():
    refused(looping(LOOPS["cond"]), r"inside of cond.*Choose in Python, or with jnp\.where")
    refused(looping(LOOPS["scan"]), r"inside of scan.*Write the loop out.*a stack for each stage")


@pytest.mark.parametrize("option", ["whole", "cut"])
def test_parameters_are_not_to_be_cut(option):
    match = f"{option}=0: argument 0 holds the parameters"
    refused_at_once(match, option, **{option: 0})
    refused_at_once(match, option, **{option: 0}, schedule="forward")
    refused(chain_loss, match, **{option: "params"})


def test_jax_gradients_instead_of_ours():
    def train_step(params, x, y):
        return jax.value_and_grad(chain_loss)(params, x, y)

    refused(train_step, r"by itself\. Take it with meshwright\.value_and_grad")


def aux_loss(params, x, y):
    value = chain_loss(params, x, y)
    return value, {"value": value}


def test_unknown_words():
    refused(aux_loss, "aux: 'maen' is not one of .*Did you mean 'mean'", has_aux=True, aux="maen")
    match = r"aux: {'other': 'sum'} is not like the outputs, {'value': '\*'}\. Give one word"
    refused(aux_loss, match, has_aux=True, aux={"other": "sum"})
    refused_at_once("reduce: 'max' is not 'mean', 'sum' or 'stack'", "reduce", reduce="max")
    forward = {"schedule": "forward", "outputs": {"other": "sum"}}
    refused(chain_loss, "^outputs: .* is not like the outputs", **forward)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"outputs": "sum"}, "outputs: the step has gradients.*has_aux=True with aux="),
        ({"reduce": "sum", "schedule": "forward"}, "reduce: .*is outputs=, e.g. outputs='sum'"),
        ({"outputs": "sun", "schedule": "forward"}, "outputs: 'sun' is not .*mean 'sum'"),
        ({"outputs": None, "schedule": "forward"}, "outputs: None is not one of"),
        ({"aux": "sum"}, "aux='sum': outputs beside the value are there with has_aux=True only"),
        ({"aux": ["sum", 3], "has_aux": True}, "aux: 3 is not one of"),
        ({"has_aux": "yes"}, "has_aux: 'yes' is not True or False"),
        ({"whole": None}, "whole: None is not an argument: pass its number"),
        ({"whole": [1, 2.5]}, "whole: 2.5 is not an argument"),
        ({"whole": -1}, "whole: -1 is not an argument.*counted from 0"),
        ({"cut": None}, "cut: None is not an argument"),
        ({"cut": True}, "cut: True is not an argument"),
        ({"cut": {1: "x"}}, "cut: 'x' is not a dim of argument 1"),
        ({"cut": {1: -1}}, "cut: -1 is not a dim of argument 1"),
        ({"carry": 1.5}, "carry: 1.5 is not an argument"),
        ({"carry": 1, "whole": 1}, "whole=1 and carry=1: .*Say carry alone"),
        ({"carry": 0}, "carry=0: argument 0 is differentiated"),
        ({"argnums": "0"}, "argnums: '0' is not the number of an argument"),
        ({"argnums": -1}, "argnums: -1 is not the number"),
        ({"argnums": ()}, r"argnums: \(\) names no argument"),
        ({"argnums": (0, 0)}, r"argnums: \(0, 0\) names one twice"),
        ({"donate_argnums": -1}, "donate_argnums: expected an int .*counted from 0, got -1"),
        ({"argnums": (0, 1), "cut": 1}, "cut=1: argument 1 holds the parameters"),
    ],
)
def test_what_is_wrong_by_itself_is_refused_at_once(options, match):
    refused_at_once(match, re.match("[a-z_]+", match)[0], **options)
    if not {"schedule", "outputs", "donate_argnums"} & set(options):
        with pytest.raises(mw.errors.PipelineError, match=match):
            mw.value_and_grad(chain_loss, **options)


def test_a_function_is_differentiated():
    with pytest.raises(mw.errors.PipelineError, match="value_and_grad: 3 is not a function"):
        mw.value_and_grad(3)


def test_names_of_no_argument():
    refused(chain_loss, "whole='mask': the function got no argument of that name", whole="mask")
    refused(chain_loss, "cut='xx': .*Did you mean 'x'", cut="xx")
    refused(chain_loss, "argnums=7: the function got 3 arguments", argnums=7)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("x",), r"test_pipeline_bad_input\.py:\d+: 'x' is no array"),
        (((jnp.ones(2), jnp.tanh),), "is no array. Pass the arrays that the next stage uses"),
        ((jnp.ones(2), 3), "name 3 is not a string"),
        ((jnp.ones(2), jnp.ones(2)), r"Several arrays go in one tuple: stage_end\(\(x, y\)\)"),
    ],
)
def test_stage_ends_of_what_is_no_array(arguments, match):
    with pytest.raises(mw.errors.PipelineError, match=match):
        mw.stage_end(*arguments)


def test_errors_carry_the_option_they_speak_of():
    wrong = {"donate_argnums": "x", "timeout": 0, "schedule": 3, "has_axu": True, "progress": 1}
    for option, value in wrong.items():
        with pytest.raises(mw.errors.PipelineError) as caught:
            mw.pipeline(aux_loss, groups(2), microbatches=4, **{option: value})
        assert caught.value.option == option


def test_unknown_options():
    with pytest.raises((TypeError, mw.errors.PipelineError), match="has_axu"):
        mw.pipeline(aux_loss, groups(2), microbatches=4, has_axu=True)(layers(2), *batch())


def test_a_function_without_the_aux_it_promised():
    refused(chain_loss, "with has_aux or carry it returns a pair", has_aux=True)


def test_a_value_that_is_no_scalar():
    def loss(params, x, y):
        return mw.stage_end(x @ params["w0"]) @ params["w1"]

    with pytest.raises((TypeError, mw.errors.PipelineError), match="scalar"):
        mw.pipeline(loss, groups(2), microbatches=4)(layers(2), *batch())


def test_carries_that_change():
    def loss(params, x, y, state):
        return chain_loss(params, x, y), jnp.concatenate([state, state])

    arguments = (layers(2), *batch(), jnp.zeros(2))
    match = r"carry=3: the function takes .*float32\[2\].* and hands on .*float32\[4\]"
    refused(loss, match, carry=3, arguments=arguments)
    refused(chain_loss, "carry=0: argument 0 is differentiated", carry=0)
    refused(chain_loss, "carry=7: the function got 3 arguments", carry=7)


def test_carries_that_make_microbatches_wait_for_each_other():
    def loss(params, x, y, state):
        h = mw.stage_end(jnp.tanh(x @ params["w0"] + state))
        out = h @ params["w1"]
        return jnp.mean((out - y) ** 2), jnp.mean(out, axis=0)

    arguments = (layers(2), *batch(), jnp.zeros(4))
    refused(loss, "carried", carry=3, arguments=arguments)


def test_deleted_arguments_are_named():
    params = layers(2)
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    step(params, *batch())
    params["w1"].delete()
    with pytest.raises((RuntimeError, mw.errors.PipelineError), match="deleted"):
        step(params, *batch())


def test_donating_an_argument_that_is_not_there():
    refused(chain_loss, "donate_argnums=7", donate_argnums=7)


def test_groups_that_are_none():
    with pytest.raises(mw.errors.MeshwrightError):
        mw.pipeline(chain_loss, [], microbatches=4)
    with pytest.raises((mw.errors.MeshwrightError, TypeError)):
        mw.pipeline(chain_loss, 3, microbatches=4)


def test_a_refused_call_leaves_the_step_usable():
    step = mw.pipeline(chain_loss, groups(2), microbatches=4)
    with pytest.raises(mw.errors.PipelineError, match="rows"):
        step(layers(2), *batch(6))
    value, _ = step(layers(2), *batch())
    x, y = batch()
    whole = np.mean((np.tanh(x @ layers(2)["w0"]) @ layers(2)["w1"] - y) ** 2)
    assert np.isclose(value, whole, rtol=1e-5)


def test_an_array_is_donated_once():
    def train(params, average, x, y):
        _, grads = mw.value_and_grad(chain_loss)(params, x, y)
        return jax.tree.map(jnp.add, params, grads), jax.tree.map(jnp.add, average, grads)

    params = layers(2)
    match = "arguments 0/w0 and 1/w0 are the same array, donated twice. Copy one"
    refused(train, match, arguments=(params, params, *batch()), donate_argnums=(0, 1))
    assert not params["w0"].is_deleted()
    copied = jax.tree.map(jnp.copy, params)
    mw.pipeline(train, groups(2), microbatches=4, donate_argnums=(0, 1))(copied, params, *batch())


def test_what_is_cut_is_not_whole():
    refused(chain_loss, "whole=1 and cut=1: say one of the two", whole=1, cut=1)


def test_compiled_programs_cannot_run_without_jit():
    with jax.disable_jit():
        refused(chain_loss, "jax_disable_jit is set, and a pipeline is made of compiled programs")


def test_debugged_nans_are_said_as_jit_says_them():
    def loss(params, x, y):
        return jnp.mean(mw.stage_end(jnp.log(-jnp.abs(x @ params["w0"]))) - y)

    step = mw.pipeline(loss, groups(2), microbatches=4)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"0F0: an invalid value"):
        step(layers(2), *batch())
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"0F0: an invalid value"):
        step.timeline(layers(2), *batch())


def test_a_pipeline_that_was_closed_is_closed():
    with mw.pipeline(chain_loss, groups(2), microbatches=4) as step:
        step(layers(2), *batch())
    with pytest.raises(mw.errors.PipelineError, match="this pipeline is closed"):
        step(layers(2), *batch())


def test_arrays_of_words_or_objects_are_refused():
    for odd in (np.array([["a"] * 4] * 8), np.array([[None] * 4] * 8)):
        arguments = (layers(2), odd, batch()[1])
        refused(chain_loss, "argument 1: an array of .*arrays of numbers", arguments=arguments)
