"""Constraints and mapped functions inside stages hold on the mesh of the group that runs them."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_helpers import assert_close, looped, normal

import meshwright as mw
from meshwright.pipelines.task_programs import rewrite_to_group_mesh

WHOLE = mw.mesh("pp:2, dp:2, tp:2")
AT = mw.MpmdMesh(WHOLE, "pp")
PARAMS = {"a": normal(0, 8, 8) / 3, "b": normal(1, 8, 8) / 3}
ROWS = normal(2, 16, 8)
SPEC = P("dp", "tp")
AMBIENT = {
    "whole": lambda: jax.set_mesh(WHOLE),
    "group": lambda: jax.set_mesh(AT.meshes[1]),
    "abstract": lambda: jax.sharding.use_abstract_mesh(WHOLE.abstract_mesh),
}


def constrain(x, spec=SPEC):
    return jax.lax.with_sharding_constraint(x, spec)


def in_scan(layer, x, w):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w[None])[0]


def in_custom_vjp(layer, x, w):
    run = jax.custom_vjp(layer)
    run.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda kept, g: jax.vjp(layer, *kept)[1](g))
    return run(x, w)


WRAPPED = {
    "plain": lambda layer, x, w: layer(x, w),
    "scan": in_scan,
    "jit": lambda layer, x, w: in_scan(jax.jit(layer), x, w),
    "remat": lambda layer, x, w: in_scan(jax.checkpoint(layer), jax.checkpoint(layer)(x, w), w),
    "custom_vjp": in_custom_vjp,
    "cond": lambda layer, x, w: jax.lax.cond(x[0, 0] > 9, jnp.dot, layer, x, w),
}


def loss_with(wrapped, spec=SPEC):
    def layer(x, w):
        return jnp.tanh(constrain(x @ w, spec))

    def loss(params, x):
        x = mw.stage_end(wrapped(layer, x, params["a"]))
        return jnp.mean(wrapped(layer, x, params["b"]) ** 2)

    return loss


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_specs_under_any_mesh_that_is_set(name, ambient):
    loss = loss_with(WRAPPED[name])
    with jax.set_mesh(AT.meshes[0]):
        expected = jax.device_get(jax.jit(looped(loss, 2))(PARAMS, ROWS))
    with AMBIENT[ambient]():
        assert_close(
            mw.pipeline(loss, AT, microbatches=2, schedule="zb-h1")(PARAMS, ROWS), expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("pp", "dp"), "tp")], ids=str)
def test_shardings_of_the_whole_mesh_without_the_axis_that_is_cut(name, spec):
    loss = loss_with(WRAPPED[name], NamedSharding(WHOLE, spec))
    expected = jax.device_get(jax.jit(looped(loss, 2))(PARAMS, ROWS))
    assert_close(mw.pipeline(loss, AT, microbatches=2)(PARAMS, ROWS), expected)


def test_the_compiler_obeys():
    def kept(spec):
        loss = loss_with(WRAPPED["plain"], NamedSharding(WHOLE, spec))
        step = mw.pipeline(loss, AT, microbatches=2)
        step.explain(PARAMS, ROWS)
        (plan,) = step._plans.values()
        tasks = {str(o.task): o.function.compiled for o in plan.operations if o.task is not None}
        return {axis for s in tasks["0F0"].output_shardings for axis in s.spec}

    assert "tp" in kept(P(None, "tp"))
    assert "tp" not in kept(P("dp"))


def test_a_mesh_of_explicit_axes_may_be_set():
    kinds = (jax.sharding.AxisType.Explicit,) * 3
    explicit = jax.make_mesh((2, 2, 2), ("pp", "dp", "tp"), axis_types=kinds)

    def loss(params, x):
        x = mw.stage_end(jnp.tanh(x @ params["a"]))
        return jnp.mean(in_scan(lambda x, w: jnp.tanh(x @ w), x, params["b"]) ** 2)

    with jax.set_mesh(explicit):
        expected = jax.device_get(jax.jit(looped(loss, 2))(PARAMS, ROWS))
        got = mw.pipeline(loss, AT, microbatches=2)(PARAMS, ROWS)
    assert_close(got, expected)


def test_forward_only():
    model = loss_with(WRAPPED["custom_vjp"])
    with jax.set_mesh(WHOLE):
        got = mw.pipeline(model, AT, microbatches=2, schedule="forward")(PARAMS, ROWS)
    with jax.set_mesh(AT.meshes[0]):
        halves = [jax.device_get(jax.jit(model)(PARAMS, rows)) for rows in (ROWS[:8], ROWS[8:])]
    assert_close(got, jnp.stack(halves))


def test_constraints_around_the_microbatches():
    def train(params, x):
        half = jax.tree.map(lambda p: constrain(2 * p), params)
        value, grads = mw.value_and_grad(loss_with(WRAPPED["plain"]))(half, x)
        return jax.tree.map(lambda p, g: constrain(p - g), params, grads), value

    with jax.set_mesh(WHOLE):
        expected = jax.device_get(jax.jit(train)(PARAMS, ROWS))
        got = mw.pipeline(train, AT, microbatches=2)(PARAMS, ROWS)
    assert_close(got, expected)


def test_one_group_after_another_constrains_by_its_own_sizes():
    devices = jax.devices()
    at = [mw.mesh("dp:2", devices=devices[:2]), mw.mesh("dp:4, tp:1", devices=devices[4:])]
    loss = loss_with(WRAPPED["plain"], P("dp"))
    with jax.set_mesh(mw.mesh("dp:8")):
        got = mw.pipeline(loss, at, microbatches=2)(PARAMS, ROWS)
        expected = jax.device_get(jax.jit(looped(loss, 2))(PARAMS, ROWS))
    assert_close(got, expected)


def mapped(layer, x, w):
    def partly(x, w):
        return jax.lax.psum(x @ w, "tp") + 0.0 * jax.lax.axis_index("dp")

    return jnp.tanh(
        jax.shard_map(partly, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp"))(x, w)
    )


def partly_mapped(layer, x, w):
    def partly(x, w):
        return constrain(jax.lax.psum(jnp.tanh(x) @ w, "tp"), P("dp"))

    specs = {"in_specs": (P(None, "tp"), P("tp")), "out_specs": P(), "axis_names": {"tp"}}
    return jax.shard_map(partly, **specs)(x, w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [mapped, partly_mapped, lambda *a: in_scan(lambda x, w: mapped(0, x, w), *a[1:])]
)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_functions_mapped_over_the_group(how, ambient):
    loss = loss_with(how)
    with jax.set_mesh(AT.meshes[0]):
        expected = jax.device_get(jax.jit(looped(loss, 2))(PARAMS, ROWS))
    with AMBIENT[ambient]():
        assert_close(mw.pipeline(loss, AT, microbatches=2)(PARAMS, ROWS), expected)


def refused(match, loss, at=AT, ambient=None, microbatches=2):
    with jax.set_mesh(ambient) if ambient else contextlib.nullcontext():
        with pytest.raises(mw.errors.PipelineError, match=match):
            mw.pipeline(loss, at, microbatches=microbatches)(PARAMS, ROWS)


def test_an_axis_that_a_group_does_not_have():
    devices = jax.devices()
    at = [mw.mesh("dp:2, tp:2", devices=devices[:4]), mw.mesh("dp:4", devices=devices[4:])]
    line = constrain.__code__.co_firstlineno + 1
    match = (
        rf"sharding_constraint at .*test_pipeline_constraints\.py:{line}.*, in group 1: .* names "
        r"the axis 'tp', and the group's mesh has dp\. Use axes that every group has"
    )
    refused(match, loss_with(WRAPPED["plain"]), at, at[0])
    refused(match, loss_with(WRAPPED["scan"]), at, at[0])


def test_a_size_that_does_not_divide():
    match = r"in group 0: dim 0 of float32\[1,8\] has size 1, not divisible by 2 \(axes dp\)"
    refused(match, loss_with(WRAPPED["plain"]), ambient=WHOLE, microbatches=16)


def test_functions_mapped_over_the_axis_that_is_cut():
    def first(fn, spec):
        def loss(params, x):
            x = jax.shard_map(fn, in_specs=spec, out_specs=spec)(x)
            return loss_with(WRAPPED["plain"])(params, x)

        return loss

    match = r"shard_map at .*, in group 0: it is mapped over 'pp' of size 2, which has size 1 there"
    refused(match, first(lambda x: jax.lax.psum(x, "pp"), P("dp")), ambient=WHOLE)
    refused(match, first(jnp.tanh, P("pp")), ambient=WHOLE)


def test_a_program_that_is_called_twice_stays_one():
    layer = jax.jit(lambda x, w: jnp.tanh(constrain(x @ w)))
    with jax.set_mesh(WHOLE):
        traced = jax.make_jaxpr(lambda x, w: (layer(x, w), layer(x, w)))(ROWS, PARAMS["a"])
    first, second = rewrite_to_group_mesh(traced.jaxpr.eqns, AT, 1)
    assert first.params["jaxpr"] is second.params["jaxpr"]
    assert first.params["jaxpr"] is not traced.jaxpr.eqns[0].params["jaxpr"]
    assert first.params["ctx_mesh"] == AT.meshes[1]
