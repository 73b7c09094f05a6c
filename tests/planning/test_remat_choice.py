"""The remat of blocks: every policy computes the same, and the fastest that fits is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright._compat import scan_counts
from meshwright.errors import PlanningError
from meshwright.planning.marked_blocks import POLICIES, Block, MarkedStep, block
from meshwright.planning.remat_blocks import loss_step

TINY = mw.models.model("tiny", remat="full")


def tiny_source():
    return loss_step(TINY.loss, (TINY.shapes()["params"], TINY.batch(8)), TINY.optimizer())


def tiny_arguments():
    params = TINY.init(jax.random.key(0))
    return params, TINY.optimizer().init(params), TINY.example(8)


@pytest.fixture(scope="module")
def plain_step():
    params, state, batch = tiny_arguments()
    state = {"params": params, "opt": state, "step": jnp.zeros((), jnp.int32)}
    new, metrics = jax.jit(TINY.train_step)(state, batch)
    return new["params"], metrics["loss"]


def assert_close(ours, theirs):
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # Adam divides a gradient by its own size: where that is nearly 0, the order of sums shows.
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize(
    "segments",
    [
        *(pytest.param(((name, 4),), marks=pytest.mark.slow) for name in (*POLICIES, "as written")),
        (("nothing", 3), ("dots", 1)),
    ],
    ids=lambda segments: " ".join(f"{name} {runs}" for name, runs in segments),
)
def test_every_policy_takes_the_same_step(segments, plain_step):
    step = tiny_source().function((segments,))
    params, _, (loss, _) = jax.jit(step)(*tiny_arguments())
    assert_close((params, loss), plain_step)


def test_scanned_layers_are_a_block_by_themselves():
    (found,) = tiny_source().blocks
    assert (found.runs, found.splits, found.written) == (4, True, True)
    assert "query_proj" in found.names


def saved_bytes(step, *args):
    """Bytes of the stacks that the forward loop leaves for the backward one."""
    jaxpr = jax.make_jaxpr(step)(*args)
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    forward = scans[0]
    stacks = forward.outvars[scan_counts(forward.params)[1] :]
    return sum(var.aval.size * var.aval.dtype.itemsize for var in stacks)


def test_policies_save_what_they_say():
    source = tiny_source()
    nothing, without_batch, dots, everything = (
        saved_bytes(source.function((((name, 4),),)), *source.args)
        for name in ("nothing", "dots without batch", "dots", "everything")
    )
    assert nothing < without_batch < dots < everything


@pytest.fixture(scope="module")
def roomy_plan():
    return mw.plan(
        TINY.loss, TINY.shapes()["params"], TINY.batch(4096), on="v5e:2x4",
        optimizer=TINY.optimizer(), progress=False, max_axes=1, pipelines=False,
    )  # fmt: skip


def plan_within(bytes_of_device, limit):
    return mw.plan(
        TINY.loss, TINY.shapes()["params"], TINY.batch(4096), on="v5e:2x4",
        optimizer=TINY.optimizer(), progress=False, max_axes=1, pipelines=False,
        memory=bytes_of_device / limit,
    )  # fmt: skip


def test_with_room_everything_is_saved(roomy_plan):
    options = {each.policy: each for each in roomy_plan.remat.options}
    assert roomy_plan.remat.policy == "everything saved"
    assert options["everything saved"].seconds < options["only inputs saved"].seconds
    assert options["everything saved"].bytes > options["only inputs saved"].bytes
    assert "Remat: everything saved, of 4 blocks" in str(roomy_plan)


def test_what_is_offloaded_needs_no_memory_of_the_device(roomy_plan):
    options = {each.policy: each for each in roomy_plan.remat.options}
    assert options["kept on the host"].bytes < options["products saved"].bytes
    assert options["kept on the host"].seconds > options["everything saved"].seconds


def test_with_less_room_less_is_saved_and_it_fits(roomy_plan):
    options = {each.policy: each for each in roomy_plan.remat.options}
    least, most = options["only inputs saved"].bytes, options["everything saved"].bytes
    limit = roomy_plan.limit
    tight = plan_within(1.02 * least, limit)
    assert tight.predicted.bytes <= 1.02 * least
    assert tight.remat.policy in ("only inputs saved", "as written", "kept on the host")
    between = plan_within(0.5 * (least + most), limit)
    assert least < between.predicted.bytes <= 0.5 * (least + most)
    assert between.predicted.seconds <= tight.predicted.seconds


@pytest.mark.slow
def test_a_planned_loss_takes_the_same_step_on_eight_devices(plain_step):
    plan = mw.plan(
        TINY.loss, TINY.shapes()["params"], TINY.batch(8), on="cpu:8",
        optimizer=TINY.optimizer(), progress=False, max_axes=2, pipelines=False,
    )  # fmt: skip
    assert "kept on the host" not in {each.policy for each in plan.remat.options}
    params, _, (loss, _) = plan.jit()(*tiny_arguments())
    assert_close((params, loss), plain_step)


# Marked blocks.


@mw.block
def layer(x, w, *, scale=1.0):
    return x + jnp.tanh(x @ w) * scale


def marked_loss(params, x):
    for w in params:
        x = layer(x, w, scale=0.5)
    return jnp.mean(x**2)


def marked_step(params, x):
    value, grads = jax.value_and_grad(marked_loss)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def marked_arguments(rows=64, width=128, layers=4):
    keys = jax.random.split(jax.random.key(1), layers + 1)
    params = [0.1 * jax.random.normal(key, (width, width)) for key in keys[1:]]
    return params, jax.random.normal(keys[0], (rows, width))


def test_a_marked_function_does_what_it_did():
    params, x = marked_arguments()
    (w, *_) = params
    np.testing.assert_array_equal(layer(x, w), x + jnp.tanh(x @ w))
    assert layer.__name__ == "layer"


@pytest.mark.parametrize("jitted", [False, True])
def test_marked_blocks_of_a_whole_step_are_chosen_for(jitted):
    step = jax.jit(marked_step) if jitted else marked_step
    expected = jax.jit(marked_step)(*marked_arguments())  # its trace is in JAX's caches now
    plan = mw.plan(step, *marked_arguments(), on="cpu:8", progress=False, pipelines=False)
    assert [each.name for each in plan.remat.blocks] == ["layer"] * 4
    assert len(plan.remat.options) == 4
    assert_close(plan.jit()(*marked_arguments()), expected)


def test_marked_blocks_of_a_loss_name_the_users_line():
    params, x = marked_arguments()
    source = loss_step(marked_loss, (params, x), optax.sgd(0.1))
    line = layer.__wrapped__.__code__.co_firstlineno
    assert [each.name for each in source.blocks] == [f"{__file__}:{line} (layer)"] * 4
    plan = mw.plan(marked_loss, params, x, on="v5e:2x4", optimizer=optax.sgd(0.1), pipelines=False)
    assert f"of 4 blocks ({__file__}:{line} (layer))." in plan.remat.lines()[0]


class Module:
    def __call__(self, x, w):
        return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functools.partial(Module.__call__, None), "Module.__call__"),
        (Module(), "Module"),
        (jax.jit(lambda x, w: x @ w), "<lambda>"),
    ],
)
def test_marked_callables_of_other_kinds_name_a_line_too(function, name):
    def loss(params, x):
        return jnp.mean(mw.block(function)(x, params[0]) ** 2)

    (each,) = loss_step(loss, marked_arguments(), optax.sgd(0.1)).blocks
    assert each.name.startswith(__file__)
    assert each.name.endswith(f"({name})")


ALIKE: list[float] = []  # what was traced of the layer below


@mw.block
def counted_layer(x, w, scale):
    ALIKE.append(scale)
    return x + jnp.tanh(x @ w) * scale


def alike_step(params, x, scales=(0.5,) * 6):
    def loss(params):
        value = x
        for w, scale in zip(params, scales, strict=True):
            value = counted_layer(value, w, scale)
        return jnp.mean(value**2)

    return jax.value_and_grad(loss)(params)


def closed_step(params, x):
    """Each layer takes its own weight, and its own number, from around it."""

    def loss(params):
        value = x
        for number, w in enumerate(params):

            @mw.block
            def layer(value):
                return value + jnp.tanh(value @ w) / (1 + number)  # noqa: B023

            value = layer(value)
        return jnp.mean(value**2)

    return jax.value_and_grad(loss)(params)


def under_remat(step, blocks=6):
    return MarkedStep(step, (Block("layer", 1),) * blocks).function(((("nothing", 1),),) * blocks)


@pytest.mark.parametrize(("scales", "traced"), [((0.5,) * 6, 1), ((0.5, 0.25) * 3, 2)])
def test_marked_layers_that_are_alike_are_traced_once(scales, traced):
    args = marked_arguments(layers=6)
    step = functools.partial(alike_step, scales=scales)
    expected = jax.jit(step)(*args)
    ALIKE.clear()
    got = jax.jit(under_remat(step))(*args)
    assert ALIKE == list(dict.fromkeys(scales))
    assert len(ALIKE) == traced
    assert_close(got, expected)


def test_marked_layers_that_take_things_from_around_them_are_each_traced():
    args = marked_arguments(layers=6)
    assert_close(jax.jit(under_remat(closed_step))(*args), jax.jit(closed_step)(*args))


def test_the_last_of_marked_blocks_save_more_where_not_all_can():
    shapes = jax.eval_shape(lambda: marked_arguments(rows=2**16, width=512, layers=8))
    options = {"on": "v5e:2x4", "progress": False, "pipelines": False, "max_axes": 1}
    roomy = mw.plan(marked_step, *shapes, donate_argnums=0, **options)
    of = {each.policy: each for each in roomy.remat.options}
    least, most = of["only inputs saved"].bytes, of["everything saved"].bytes
    assert least < most
    room = (least + most) / 2
    tight = mw.plan(marked_step, *shapes, donate_argnums=0, memory=room / roomy.limit, **options)
    assert tight.predicted.bytes <= room
    assert any(" in " in each.policy for each in tight.remat.options)


def test_a_step_without_blocks_has_no_choice_of_remat():
    plan = mw.plan(
        TINY.train_step, TINY.shapes(), TINY.batch(8), on="cpu:8", progress=False, max_axes=1,
        pipelines=False,
    )  # fmt: skip
    assert plan.remat is None


@pytest.mark.parametrize(
    ("optimizer", "args", "match"),
    [
        ("adam", (jnp.ones(2), jnp.ones(2)), "optimizer: 'adam' has no init and update"),
        (optax.sgd(0.1), (jnp.ones(2),), r"plan\(loss, params, batch, optimizer=...\)"),
        (optax.sgd(0.1), (jnp.ones(2), jnp.ones(2)), "returns no scalar first, so it is no loss"),
    ],
)
def test_what_is_no_loss_with_an_optimizer_is_refused(optimizer, args, match):
    with pytest.raises(PlanningError, match=match):
        mw.plan(lambda *x: x[0] * 2, *args, on="cpu:8", optimizer=optimizer)


def test_only_functions_are_blocks():
    with pytest.raises(PlanningError, match="block: 3 is no function"):
        block(3)
