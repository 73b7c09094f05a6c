"""Loops that JAX unrolls in full are read run after run, and rows are added to tables at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced_plans import assert_equal_to_one_device, with_lists

import meshwright as mw
from meshwright.planning.written_forms import in_better_form, rows_by_slices

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
    written = in_better_form(closed)
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
    assert in_better_form(closed) is closed


def test_a_loop_of_one_run_is_written_out_as_compilers_do():
    closed = jax.make_jaxpr(functools.partial(layers, unroll=1))(stack()[:1], data())
    assert "scan" not in primitives(in_better_form(closed).jaxpr)


def test_a_stack_that_only_loops_take_is_never_made():
    def step(w, x):
        def forward(x, w):
            return jnp.tanh(x @ w), x

        _, saved = jax.lax.scan(forward, x, w, unroll=True)
        return jax.lax.scan(lambda g, h: (g @ h.T @ h, None), x, saved, unroll=LAYERS)[0], w

    written = in_better_form(jax.make_jaxpr(step)(stack(), data()))
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


WORDS = 11


def rows_looked_up(table, ids):
    """As `vmap(equinox.nn.Embedding)` looks them up: slices of one row."""
    return jax.vmap(lambda word: jax.lax.dynamic_index_in_dim(table, word, keepdims=False))(ids)


def columns_looked_up(table, ids):
    """As penzai does, in a table whose rows lie along its last dim."""
    slices = jax.vmap(lambda word: jax.lax.dynamic_slice_in_dim(table.T, word, 1, axis=1))(ids)
    return slices[..., 0]


def in_a_loop(table, ids):
    _, rows = jax.lax.scan(lambda _, each: (0, rows_looked_up(table, each)), 0, ids.reshape(4, -1))
    return rows.reshape(-1, table.shape[1])


LOOKUPS = {
    "rows": rows_looked_up,
    "columns": columns_looked_up,
    "jit": jax.jit(rows_looked_up),
    "loop": in_a_loop,
    "checkpoint": jax.checkpoint(rows_looked_up),
}


def dims_added(jaxpr):
    """For everything that is added to a table, whether the dims that say where are rows."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scatter-add":
            numbers = eqn.params["dimension_numbers"]
            yield set(numbers.scatter_dims_to_operand_dims) <= set(numbers.inserted_window_dims)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            yield from dims_added(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("how", LOOKUPS)
def test_rows_that_vmap_adds_slice_by_slice_are_added_at_once(how):
    ids = jnp.array([0, 3, 3, WORDS - 1, WORDS + 5, -2, 7, 3])  # some are outside
    table = jax.random.normal(jax.random.key(0), (WORDS, 6))
    weights = jax.random.normal(jax.random.key(1), (len(ids), 6))

    def gradient(table, ids):
        return jax.grad(lambda table: (LOOKUPS[how](table, ids) * weights).sum())(table)

    closed = jax.make_jaxpr(gradient)(table, ids)
    written = in_better_form(closed)
    assert not all(dims_added(closed.jaxpr))
    assert list(dims_added(written.jaxpr)) == [True]
    (got,) = jax.core.eval_jaxpr(written.jaxpr, written.consts, table, ids)
    np.testing.assert_allclose(got, gradient(table, ids), rtol=1e-5)


def slices_of_two_rows(table, ids, rows):
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
    clip = jax.lax.GatherScatterMode.CLIP
    return jax.lax.scatter_add(table, ids[:, None], rows, numbers, mode=clip)


def what_is_outside_is_dropped(table, ids, rows):
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
    return jax.lax.scatter_add(table, ids[:, None], rows[:, :1], numbers)


def rows_added(table, ids, rows):
    return table.at[ids].add(rows[:, 0])


@pytest.mark.parametrize("added", [slices_of_two_rows, what_is_outside_is_dropped, rows_added])
def test_other_sums_stay(added):
    args = jnp.zeros((WORDS, 6)), jnp.arange(4), jnp.ones((4, 2, 6))
    closed = jax.make_jaxpr(added)(*args)
    assert in_better_form(closed) is closed


def test_a_plan_for_tpus_says_that_it_adds_rows_at_once():
    def step(table, ids):
        gradient = jax.grad(lambda table: (rows_looked_up(table, ids) ** 2).sum())(table)
        return table - 0.1 * gradient

    args = jax.ShapeDtypeStruct((4096, 256), "float32"), jax.ShapeDtypeStruct((4096,), "int32")
    options = {"donate_argnums": 0, "pipelines": False, "progress": False}
    plan = mw.plan(step, *args, on="v5e:2x4", **options)
    (note,) = (note for note in plan.notes if "slice by slice" in note)
    assert "test_written_forms.py" in note
    assert "4,096 runs" in note
    assert "table[ids]" in note
    other = mw.plan(step, *args, on="h100:8", **options)
    assert not any("slice by slice" in note for note in other.notes)


def test_the_planned_step_adds_rows_at_once():
    tx = optax.sgd(0.1)
    table = jax.random.normal(jax.random.key(0), (64, 32))
    ids = jax.random.randint(jax.random.key(1), (32,), 0, 64)

    def step(state, ids):
        def loss(table):
            return (rows_looked_up(table, ids) @ state["w"]).var()

        updates, opt = tx.update(jax.grad(loss)(state["table"]), state["opt"])
        table = optax.apply_updates(state["table"], updates)
        return {"table": table, "opt": opt, "w": state["w"]}

    state = {"table": table, "opt": tx.init(table), "w": jnp.ones((32, 16)) / 8}
    plan = mw.plan(step, state, ids, mesh="fsdp:4, tp:2", donate_argnums=0, pipelines=False)
    assert all(dims_added(jax.make_jaxpr(plan.jit())(state, ids).jaxpr))
    assert_equal_to_one_device(with_lists(plan), state, ids)


def test_a_loop_under_two_checkpoints_is_known():
    def loss(w, x):
        return layers(w, x, unroll=1, wrap=jax.checkpoint)[0].sum()

    plan = mw.plan(jax.grad(jax.checkpoint(loss)), stack(), data(), mesh="dp:8", pipelines=False)
    assert not plan.unknown


@pytest.mark.parametrize(
    ("column", "sorts", "unique"), [((0, 1), True, False), ((1, 0), False, False)]
)
def test_what_is_promised_of_indices_holds_only_as_far_as_they_are_kept(column, sorts, unique):
    numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), column)

    def added(table, ids, rows):
        promises = {"indices_are_sorted": True, "unique_indices": True}
        clip = jax.lax.GatherScatterMode.CLIP
        return jax.lax.scatter_add(table, ids, rows, numbers, mode=clip, **promises)

    args = jnp.zeros((WORDS, 6)), jnp.zeros((4, 2), "int32"), jnp.ones((4, 1, 6))
    (eqn,) = in_better_form(jax.make_jaxpr(added)(*args)).jaxpr.eqns[-1:]
    assert eqn.invars[1].aval.shape == (4, 1)
    assert (eqn.params["indices_are_sorted"], eqn.params["unique_indices"]) == (sorts, unique)


def test_a_jit_stays_one_with_its_shardings():
    def step(w, x):
        return jax.grad(lambda w: layers(w, x, unroll=True)[0].sum())(w)

    mesh = mw.mesh("dp:8")
    cut = jax.NamedSharding(mesh, jax.P("dp"))
    jitted = jax.jit(step, in_shardings=(None, cut))
    plan = mw.plan(jitted, stack(), data(), mesh="dp:8", pipelines=False)
    assert any("in_shardings" in note for note in plan.notes)


def test_rows_in_a_loop_count_in_every_run():
    def gradient(table, ids):
        return jax.grad(lambda table: in_a_loop(table, ids).sum())(table)

    closed = jax.make_jaxpr(gradient)(jnp.zeros((WORDS, 6)), jnp.zeros(8, "int32"))
    assert list(rows_by_slices(closed).values()) == [8]
