"""Loops that JAX unrolls in full are read as they are lowered: run after run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced_plans import assert_equal_to_one_device, with_lists

import meshwright as mw
from meshwright.planning.traced_step import write_out_loops

LAYERS, WIDE, ROWS = 3, 64, 32


def stack():
    return jax.random.normal(jax.random.key(0), (LAYERS, WIDE, WIDE)) / 8


def data():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDE))


def layers(w, x, *, unroll, reverse=False, wrap=lambda f: f):
    """What every layer makes, and what the last one does; a stack of inputs, one of results."""

    @wrap
    def body(x, given):
        number, w = given
        x = jnp.tanh(x @ w) * (number + 1)
        return x, x.sum()

    given = jnp.arange(len(w)), w
    return jax.lax.scan(body, x, given, unroll=unroll, reverse=reverse)


def primitives(jaxpr):
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            names += primitives(inner) if hasattr(inner, "eqns") else []
    return names


WRAPPED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "saved": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("around", WRAPPED)
@pytest.mark.parametrize("inside", ["plain", "checkpoint"])
def test_a_written_out_loop_computes_the_same_and_so_does_its_gradient(reverse, around, inside):
    run = functools.partial(layers, unroll=True, reverse=reverse, wrap=WRAPPED[inside])

    def loss(w, x):
        last, sums = WRAPPED[around](run)(w, x)
        return last.sum() + (sums * jnp.arange(LAYERS)).sum()

    both = jax.value_and_grad(loss)
    closed = jax.make_jaxpr(both)(stack(), data())
    written = write_out_loops(closed)
    assert "scan" in primitives(closed.jaxpr)
    assert "scan" not in primitives(written.jaxpr)
    got = jax.core.eval_jaxpr(written.jaxpr, written.consts, stack(), data())
    expected = jax.tree.leaves(both(stack(), data()))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0)
    kept = [{"checkpoint", "remat2"} & {*primitives(each.jaxpr)} for each in (closed, written)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("unroll", [False, 1, 2])
def test_other_loops_stay(unroll):
    closed = jax.make_jaxpr(functools.partial(layers, unroll=unroll))(stack(), data())
    assert write_out_loops(closed) is closed


def test_a_loop_of_one_run_is_written_out_as_compilers_do():
    closed = jax.make_jaxpr(functools.partial(layers, unroll=1))(stack()[:1], data())
    assert "scan" not in primitives(write_out_loops(closed).jaxpr)


def test_a_stack_that_only_loops_take_is_never_made():
    def step(w, x):
        def forward(x, w):
            return jnp.tanh(x @ w), x

        _, saved = jax.lax.scan(forward, x, w, unroll=True)
        return jax.lax.scan(lambda g, h: (g @ h.T @ h, None), x, saved, unroll=LAYERS)[0], w

    written = write_out_loops(jax.make_jaxpr(step)(stack(), data()))
    assert primitives(written.jaxpr).count("dot_general") == 3 * LAYERS
    assert "concatenate" not in primitives(written.jaxpr)


def test_a_step_of_unrolled_layers_is_planned():
    tx = optax.sgd(1e-2)

    def step(state, x):
        def loss(w):
            return jnp.mean(layers(w, x, unroll=True)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(state["w"])
        updates, opt = tx.update(grads, state["opt"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    state = {"w": stack(), "opt": tx.init(stack())}
    plan = mw.plan(step, state, data(), mesh="fsdp:4, tp:2", donate_argnums=0, pipelines=False)
    made = [op for op in plan.costs.program.operations if op.primitive == "dot_general"]
    assert len(made) == 3 * LAYERS
    assert {op.times for op in made} == {1}
    assert_equal_to_one_device(with_lists(plan), state, data())
