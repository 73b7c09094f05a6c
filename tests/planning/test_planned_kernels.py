"""Planned steps with Pallas kernels, interpreted: each device runs a part of every grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forced_plans import with_lists
from jax.experimental import pallas as pl
from jax.sharding import Mesh

import meshwright as mw
from meshwright._compat import old_ambient_mesh, tpu_attention
from meshwright.errors import PlanningError

BATCH, HEADS, LENGTH, HEAD, WIDTH = 8, 4, 128, 16, 64
random = np.random.default_rng(0)


def some(*shape):
    return jnp.asarray(random.normal(size=shape) * 0.1, jnp.float32)


WEIGHTS = {
    **{name: some(2, WIDTH, HEADS, HEAD) for name in ("query", "key", "value")},
    "out": some(2, HEADS, HEAD, WIDTH),
}
X = some(BATCH, LENGTH, WIDTH)


def attend_body(q, k, v, out):
    scores = jnp.exp(q[...] @ k[...].T)
    out[...] = scores @ v[...] / scores.sum(1, keepdims=True)


def gradient_body(q, k, v, g, dq, dk, dv):
    scores = jnp.exp(q[...] @ k[...].T)
    p = scores / scores.sum(1, keepdims=True)
    dp = g[...] @ v[...].T
    ds = p * (dp - (dp * p).sum(1, keepdims=True))
    dq[...], dk[...], dv[...] = ds @ k[...], ds.T @ q[...], p.T @ g[...]


def over_heads(body, results):
    """A kernel over heads, a head at a time."""
    shape = jax.ShapeDtypeStruct((HEADS, LENGTH, HEAD), jnp.float32)
    block = pl.BlockSpec((None, LENGTH, HEAD), lambda h: (h, 0, 0))

    def run(*operands):
        return pl.pallas_call(
            body,
            grid=(HEADS,),
            in_specs=[block] * len(operands),
            out_specs=[block] * results,
            out_shape=[shape] * results,
            interpret=True,
            name=body.__name__,
        )(*operands)

    return jax.vmap(run)


@jax.custom_vjp
def attend(q, k, v):
    return over_heads(attend_body, 1)(q, k, v)[0]


attend.defvjp(
    lambda *qkv: (attend(*qkv), qkv),
    lambda qkv, g: tuple(over_heads(gradient_body, 3)(*qkv, g)),
)


def step_with(attention, checkpoint=jax.checkpoint):
    """A train step with a scan over layers, checkpointed or not."""

    def layer(x, w):
        q, k, v = (jnp.einsum("bse,ehd->bhsd", x, w[n]) for n in ("query", "key", "value"))
        return x + jnp.einsum("bhsd,hde->bse", attention(q, k, v), w["out"]), None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(checkpoint(layer), x, weights)[0] ** 2)

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    return step


def planned(step, mesh, *args):
    """The plan that cuts rows on the first axis, and heads on the second if there is one."""
    plan = mw.plan(step, *args, mesh=mesh)
    layout = plan.costs.groups.layout
    weight, data = (
        next(v for v in plan.costs.program.arguments if plan.costs.program.shapes[v] == x.shape)
        for x in (args[0]["query"], args[1])
    )
    groups = [plan.groups[layout[data][0][0]], plan.groups[layout[weight][2][0]]]
    return with_lists(plan, [[group] for group, _ in zip(groups, plan.axes, strict=False)])


def grids(function, *args):
    """The grid of every kernel of a step, as it is run."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                found.append(eqn.params["grid_mapping"].grid)
                continue
            for param in eqn.params.values():
                for inner in param if isinstance(param, tuple | list) else (param,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return set(found)


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mesh", "grid"), [("dp:8", (1, 4)), ("dp:2, tp:4", (4, 1))])
def test_kernels_with_rows_and_heads_cut_give_the_numbers_of_one_device(mesh, grid):
    step = step_with(attend)
    plan = planned(step, mesh, WEIGHTS, X)
    jitted = plan.jit()
    assert grids(jitted, WEIGHTS, X) == {grid}
    assert_same(jitted(WEIGHTS, X), jax.jit(step)(WEIGHTS, X))
    assert not any("gathered operands" in note for note in plan.notes)


def test_the_search_cuts_kernels_by_itself_and_counts_their_parts():
    plan = mw.plan(step_with(attend), WEIGHTS, X, mesh="dp:8")
    assert grids(plan.jit(), WEIGHTS, X) == {(1, 4)}
    kernels = [each for each in plan.costs.program.operations if each.primitive == "pallas_call"]
    assert len(kernels) == 3  # forward, again for the backward pass, and backward
    products = 2 * BATCH * HEADS * LENGTH * LENGTH * HEAD
    assert sorted(each.flops for each in kernels) == [2 * products, 2 * products, 5 * products]
    for each in kernels:
        assert each.times == 2
        work = plan.costs.work(each)
        alone = plan.costs.way(work, ((),)).compute
        assert plan.costs.way(work, plan.lists).compute == pytest.approx(alone / 8, rel=0.2)


def test_rules_say_which_specs_a_shard_map_around_a_kernel_takes():
    rules = planned(step_with(attend), "dp:2, tp:4", WEIGHTS, X).rules()
    of_kernels = [each for each in rules.constraints if "attend_body" in each.array]
    assert [each.array.partition(" [")[0] for each in of_kernels] == [
        *(f"operand {number} of attend_body" for number in range(3)),
        "result of attend_body",
    ]
    assert of_kernels[0].code() == "jax.shard_map(..., in_specs=(..., P('dp', 'tp'), ...))"
    assert of_kernels[-1].code() == "jax.shard_map(..., out_specs=(..., P('dp', 'tp'), ...))"
    assert "jax.shard_map with these specs around kernels" in str(rules)


def test_without_a_mesh_the_one_around_the_call_is_taken():
    step = step_with(attend, checkpoint=lambda f: f)
    plan = planned(step, "dp:4, tp:2", WEIGHTS, X)
    for around in (jax.set_mesh, old_ambient_mesh):
        with around(plan.mesh):
            assert grids(plan.function(), WEIGHTS, X) == {(2, 2)}
    text = plan.rehearse(compiler="cpu").text
    assert f"f32[2,2,{LENGTH},{HEAD}]" in text


def jax_attention(kernel, monkeypatch):
    """JAX's own kernels for TPUs, interpreted, over (batch, heads, length, head)."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    if kernel == "flash":
        return functools.partial(tpu_attention("flash_attention").flash_attention, causal=True)
    splash = tpu_attention("splash_attention")
    sizes = splash.BlockSizes(*[LENGTH] * 6, None, None, use_fused_bwd_kernel=True)
    attention = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((LENGTH, LENGTH))] * 4),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=True,
    )
    # Two heads of keys and values for four of queries.
    return lambda q, k, v: jax.vmap(attention)(q, k[:, ::2], v[:, ::2])


@pytest.mark.parametrize("kernel", ["flash", "splash"])
def test_jaxs_own_attention_is_cut_by_rows_and_heads(kernel, monkeypatch):
    wide = {name: some(1, WIDTH, 4, 128) for name in ("query", "key", "value")}
    weights = {**wide, "out": some(1, 4, 128, WIDTH)}
    step = step_with(jax_attention(kernel, monkeypatch), checkpoint=lambda f: f)
    plan = planned(step, "dp:4, tp:2", weights, X)
    assert {tuple(sorted(grid)[-2:]) for grid in grids(step, weights, X)} == {(4, 8)}
    assert {tuple(sorted(grid)[-2:]) for grid in grids(plan.jit(), weights, X)} == {(2, 2)}
    assert_same(plan.jit()(weights, X), jax.jit(step)(weights, X))


def numbered_body(x, out):
    out[...] = x[...] + jnp.float32(pl.program_id(0))


def test_a_kernel_that_cannot_be_cut_is_run_whole_and_named():
    block = pl.BlockSpec((1, 256), lambda i: (i, 0))

    def step(w, x):
        h = x @ w
        h = pl.pallas_call(
            numbered_body,
            grid=(32,),
            in_specs=[block],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype),
            interpret=True,
        )(h)
        return (h @ w).sum(0)

    w, x = some(256, 256), some(32, 256)
    plan = with_lists(mw.plan(step, w, x, mesh="dp:8"), [["batch"]])
    (note,) = [note for note in plan.notes if "numbered_body" in note]
    assert note.startswith("Every device runs all of numbered_body (test_planned_kernels.py:")
    assert note in str(plan).replace("\n  ", " ")
    assert grids(plan.jit(), w, x) == {(32,)}
    assert_same(plan.jit()(w, x), step(w, x))


def test_kernels_in_a_shard_map_of_the_steps_own_stay_as_they_are_and_are_named():
    mesh = Mesh(np.array(jax.devices()[::-1]), ("dp",))

    def attention(q, k, v):
        rows = jax.P("dp")
        return jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(
            q, k, v
        )

    step = step_with(attention, checkpoint=lambda f: f)
    with pytest.raises(PlanningError, match=r"a shard_map over dp:8.*mesh='dp:8'"):
        mw.plan(step, WEIGHTS, X)
    plan = mw.plan(step, WEIGHTS, X, mesh="dp:8")
    (note,) = [note for note in plan.notes if "by hand" in note]
    assert "with attend_body)" in note
    assert "test_planned_kernels.py:" in note
    assert grids(plan.jit(mesh), WEIGHTS, X) == {(HEADS,)}
    with pytest.raises(PlanningError, match=r"a mesh of its own.*p\.jit\(mesh\)"):
        plan.jit()
