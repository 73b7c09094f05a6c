"""`p.jit()` with every kind of argument, and programs with every kind of control flow."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from forced_plans import assert_equal_to_one_device, with_lists

import meshwright as mw
from meshwright.errors import PlanningError

MESH = "fsdp:4, tp:2"
TX = optax.sgd(1e-2, momentum=0.9)  # Adam would blow up what is rounding
WIDE, ROWS = 256, 32
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDE)), "float32")


def weights(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "up": jax.random.normal(keys[0], (WIDE, 2 * WIDE)) / 16,
        "down": jax.random.normal(keys[1], (2 * WIDE, WIDE)) / 16,
    }


def predict(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params, x):
    return jnp.mean((predict(params, x) - x) ** 2)


def state():
    params = weights()
    return {"params": params, "opt": TX.init(params), "step": jnp.zeros((), "int32")}


def update(state, x, loss=loss):
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, value


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def megatron(function, *args, **options):
    """FSDP and Megatron's cut, whatever the search would find best."""
    plan = mw.plan(function, *args, mesh=MESH, **options)
    costs = plan.costs
    data = next(v for v in costs.program.arguments if costs.program.shapes[v] == X.shape)
    rows, width = (plan.groups[kind] for kind, _ in costs.groups.layout[data])
    inner = [name for name in plan.groups if name not in (rows, width)]
    return with_lists(plan, [[rows, width], inner])


@pytest.fixture(scope="module")
def plan():
    return megatron(update, state(), X, donate_argnums=0)


def test_a_loop_of_planned_steps_compiles_once_and_donates(plan):
    assert plan.in_specs[0]["params"]["up"] == jax.P("fsdp", "tp")
    step = plan.jit()
    placed = jax.device_put((state(), X), plan.in_shardings)
    given = placed[0]["params"]["up"]
    assert given.sharding.shard_shape(given.shape) == (WIDE // 4, WIDE)
    expected, now = state(), placed[0]
    for _ in range(3):
        expected, value = jax.jit(update)(expected, X)
        now, planned_value = step(now, placed[1])
    assert given.is_deleted()
    assert step._cache_size() == 1
    assert_close((now, planned_value), (expected, value))
    specs = jax.tree.map(lambda array: array.sharding.spec, now)
    assert specs == plan.in_specs[0] == plan.out_specs[0]


def test_it_is_lowered_and_rehearsed_as_a_jit(plan):
    compiled = plan.jit().lower(state(), X).compile()
    assert compiled.input_shardings[0][0]["params"]["up"].spec == jax.P("fsdp", "tp")
    rehearsed = mw.rehearse(plan.jit(), state(), X, mesh=plan.mesh, cache=False)
    direct = plan.rehearse(cache=False)
    assert rehearsed.memory.arguments == direct.memory.arguments
    assert ledger(rehearsed) == ledger(direct) != []
    # Their lines are the user's, not the planner's.
    sources = [entry.source for entry in direct.collectives if entry.source is not None]
    assert sources and all(source.file.endswith("test_planned_step.py") for source in sources)


def ledger(found):
    return sorted((entry.kind, entry.bytes, entry.times.count) for entry in found.collectives)


def test_its_scopes_are_those_of_the_step():
    @jax.jit
    def inner(params, x):
        with jax.named_scope("second"):
            return predict(params, x)

    def scoped(params, x):
        with jax.named_scope("first"):
            return inner(params, x)

    text = megatron(scoped, weights(), X).jit().lower(weights(), X).compile().as_text()
    assert "first/second/dot_general" in text


def test_a_plan_verifies_itself(plan):
    verified = plan.verify(state(), X)
    assert verified.ok
    paths = {row.path for row in verified.rows}
    assert "0/params/up" in paths and "1" in paths
    by_hand = mw.verify(plan.function(), state(), X, mesh=plan.mesh, in_shardings=plan.in_specs)
    assert by_hand.ok


def test_another_mesh_of_its_axes(plan):
    reverse = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(4, 2), plan.mesh.axis_names)
    got = plan.jit(reverse)(state(), X)
    assert_close(got, update(state(), X))
    with pytest.raises(PlanningError, match=r"mesh: the plan is for fsdp:4, tp:2, not for"):
        plan.jit(jax.make_mesh((8,), ("fsdp",)))


def test_hardware_that_is_not_here_is_lowered_but_not_called():
    plan = mw.plan(update, state(), X, on="v5e:2x4", donate_argnums=0)
    with pytest.raises(PlanningError, match="planned for v5e:2x4, which is not here"):
        plan.jit()(state(), X)
    assert "sdy.sharding" in plan.jit().lower(state(), X).as_text()
    on_these = plan.jit(mw.mesh(plan.spec))
    assert_close(on_these(state(), X), update(state(), X))


def test_keys_numbers_flags_functions_and_nothing_among_the_arguments():
    def step(params, settings, key, rate, x):
        noise = jax.random.normal(key, x.shape)
        new = predict(params, x + noise * rate)
        if settings["train"]:
            new = settings["activation"](new)
        return {"params": jax.tree.map(lambda w: w * rate, params), "none": None}, new, key

    args = (
        weights(),
        {"train": True, "activation": jnp.tanh, "name": "x", "none": None},
        jax.random.key(3),
        0.5,
        X,
    )
    plan = megatron(step, *args)
    got = plan.jit()(*args)
    expected = step(*args)
    assert got[0]["none"] is None
    assert jnp.array_equal(jax.random.key_data(got[2]), jax.random.key_data(args[2]))
    assert_close(got[:2], expected[:2])
    # A number alone is data: another one is no other program.
    again = plan.jit()(*args[:3], 0.25, X)
    assert_close(again[:2], step(*args[:3], 0.25, X)[:2])
    changed = {**args[1], "train": False}
    with pytest.raises(
        PlanningError, match=r"settings/train: False here, True when it was planned"
    ):
        plan.jit()(args[0], changed, *args[2:])
    with pytest.raises(PlanningError, match="settings: another structure"):
        plan.jit()(args[0], {}, *args[2:])
    with pytest.raises(PlanningError, match=r"takes 5 arguments .* not 2"):
        plan.jit()(*args[:2])
    assert plan.verify(*args).ok


def test_shardings_of_the_steps_own_jit_are_told_not_to_be_used():
    by_rows = jax.sharding.NamedSharding(mw.mesh("dp:8"), jax.sharding.PartitionSpec("dp"))
    inner = jax.jit(predict, out_shardings=by_rows)
    for step, names in (
        (jax.jit(predict, in_shardings=(None, by_rows)), "predict"),
        (lambda params, x: inner(params, x) * 2, "predict"),
        (predict, ""),
        (jax.jit(predict), ""),
    ):
        plan = mw.plan(step, weights(), X, on="v5e:2x4", mesh="dp:8")
        notes = [note for note in plan.notes if "are not used" in note]
        assert len(notes) == bool(names)
        assert all(f"of the jit of {names} are not used" in note for note in notes)


def test_what_the_plan_of_a_loss_donates_is_gone_after_a_call():
    params, opt = weights(), TX.init(weights())
    plan = mw.plan(loss, params, X, optimizer=TX, mesh=MESH, pipelines=False)
    assert plan.step.donate_argnums == (0, 1)
    placed = jax.device_put((params, opt, X), plan.in_shardings)
    plan.jit()(*placed)
    assert all(each.is_deleted() for each in jax.tree.leaves(placed[0]))


def test_a_count_that_is_a_python_number_stays_as_it_was():
    def counted(state, x):
        return {**update(state, x)[0], "count": state["count"] + 1}

    plan = mw.plan(counted, {**state(), "count": 0}, X, mesh=MESH)
    first = plan.jit()({**state(), "count": 0}, X)
    with pytest.raises(PlanningError, match=r"state/count: .* here, 0 when it was planned"):
        plan.jit()(first, X)


def test_plain_data_say_which_seconds_are_whose(plan):
    data = plan.to_json()
    assert data["seconds"] == data["predicted_seconds"] == plan.predicted.seconds
    assert data["planning_seconds"] == plan.seconds


def test_other_shapes_than_were_planned_for_are_named(plan):
    with pytest.raises(
        PlanningError, match=r"x: float32\[16,256\] here, float32\[32,256\] planned"
    ):
        plan.jit()(state(), X[:16])


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDE, 2 * WIDE, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDE, rngs=rngs)
        self.down = nnx.Linear(2 * WIDE, WIDE, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def nnx_update(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def nnx_state():
    model = Mlp(nnx.Rngs(0, dropout=jax.random.key(1)))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@pytest.mark.parametrize("jit", [lambda step: step, nnx.jit], ids=["bare", "nnx.jit"])
def test_nnx_modules_are_updated_in_place(jit):
    plan = megatron(jit(nnx_update), *nnx_state(), X)
    model, optimizer = nnx_state()
    expected, its_optimizer = nnx_state()
    step = plan.jit()
    for _ in range(2):
        value = step(model, optimizer, X)
        expected_value = nnx_update(expected, its_optimizer, X)
    assert_close(value, expected_value)
    assert_close(nnx.state(model, nnx.Param), nnx.state(expected, nnx.Param))
    assert_close(nnx.state(model, nnx.BatchStat), nnx.state(expected, nnx.BatchStat))
    assert int(model.dropout.rngs.count[...]) == int(expected.dropout.rngs.count[...]) > 0
    assert_close(nnx.state(optimizer), nnx.state(its_optimizer))
    # What is left there lies as it is wanted by the next step.
    planned = plan.in_specs[0].up.kernel.get_raw_value()
    assert model.up.kernel[...].sharding.spec == planned != jax.P()
    assert step._jitted._cache_size() <= 2  # the first call's arguments lay on one device


def test_an_equinox_step():
    def step(model, opt, x):
        def cost(model):
            return jnp.mean((jax.vmap(model)(x) - x) ** 2)

        value, grads = eqx.filter_value_and_grad(cost)(model)
        updates, opt = TX.update(grads, opt, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt, value

    model = eqx.nn.MLP(WIDE, WIDE, 2 * WIDE, 2, key=jax.random.key(0))
    opt = TX.init(eqx.filter(model, eqx.is_array))
    jitted = eqx.filter_jit(step, donate="all")
    plan = megatron(jitted, model, opt, X)
    assert plan.step.donate_argnums == (0, 1, 2)
    plan = megatron(step, model, opt, X)
    got = plan.jit()(model, opt, X)
    expected = step(model, opt, X)
    assert got[0].activation is model.activation
    assert_close(eqx.filter(got, eqx.is_array), eqx.filter(expected, eqx.is_array))


def test_what_the_steps_own_jit_says_of_arguments_holds():
    def step(layers, state, x, rate):
        new = x
        for _ in range(layers):
            new = predict(state, new)
        return jax.tree.map(lambda w: w * rate["rate"], state), new

    jitted = jax.jit(step, static_argnums=0, donate_argnums=1)
    plan = megatron(jitted, 2, weights(), X, {"rate": 0.5})
    assert plan.step.donate_argnums == (1,)
    expected = step(2, weights(), X, {"rate": 0.25})
    # A number inside of a tree is data to `jax.jit`.
    assert_close(plan.jit()(2, weights(), X, {"rate": 0.25}), expected)
    with pytest.raises(PlanningError, match=r"layers: 3 here, 2 when"):
        plan.jit()(3, weights(), X, {"rate": 0.25})
    bound = megatron(functools.partial(jitted, 2), weights(), X, {"rate": 0.25})
    assert bound.step.donate_argnums == (0,) and bound.step.names == ("state", "x", "rate")
    assert_close(bound.jit()(weights(), X, {"rate": 0.25}), expected)


def loops(params, x):
    """Loops of every kind, within each other."""
    stacked = jax.tree.map(lambda w: jnp.stack([w, w * 0.5]), params)

    def layer(x, params):
        return predict(params, x), jnp.mean(x)

    def twice(carry):
        count, x = carry
        return count + 1, jax.lax.cond(jnp.sum(x) > 0, lambda x: x * 0.5, lambda x: -x @ square, x)

    square = params["up"][:, :WIDE]
    x, means = jax.lax.scan(layer, x, stacked, reverse=True)
    x, _ = jax.lax.scan(lambda x, _: (predict(params, x), None), x, None, length=3, unroll=2)
    x, _ = jax.lax.scan(lambda x, _: (jax.lax.scan(layer, x, stacked)[0], None), x, None, length=2)
    _, x = jax.lax.while_loop(lambda carry: carry[0] < 2, twice, (0, x))
    x = jax.lax.switch(2, [lambda x: x, lambda x: x @ square, lambda x: x @ square.T], x)
    return jnp.mean(x**2) + jnp.sum(means)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 8) / 8


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


def others(params, x):
    """Custom derivatives, vmap, dropout, sorts, and a callback."""
    jax.debug.callback(lambda value: None, jnp.mean(x))
    hidden = straight_through(jax.vmap(lambda row: predict(params, row))(x))
    hidden = jax.nn.relu(jax.nn.gelu(hidden))
    kept = jax.random.bernoulli(jax.random.key(1), 0.5, hidden.shape)
    rows = jnp.take_along_axis(hidden, jnp.argsort(x, axis=1), axis=1)
    return jnp.mean(jnp.where(kept, rows, 0.0) ** 2)


def constrained(params, x):
    x = jax.lax.with_sharding_constraint(x, jax.P("tp"))
    return loss(params, x)


@pytest.mark.parametrize("cost", [loops, others], ids=lambda f: f.__name__)
def test_control_flow_and_custom_derivatives_give_equal_gradients(cost):
    if cost is loops:  # JAX differentiates no while loop backwards

        def step(params, x):
            return jax.jvp(lambda p: loops(p, x), (params,), (params,))
    else:
        step = jax.value_and_grad(cost)
    plan = megatron(step, weights(), X)
    assert_close(plan.jit()(weights(), X), jax.jit(step)(weights(), X))


def test_constraints_of_the_step_give_way_to_the_plans():
    with pytest.raises(RuntimeError, match="mesh") as caught:
        mw.plan(jax.value_and_grad(constrained), weights(), X)
    assert "Plan for it: mesh=" in "".join(caught.value.__notes__)
    plan = megatron(jax.value_and_grad(constrained), weights(), X)
    assert plan.in_specs[1] == jax.P("fsdp")
    assert_close(plan.jit()(weights(), X), jax.value_and_grad(loss)(weights(), X))


def test_a_shard_map_of_the_steps_own_needs_its_mesh():
    def step(params, x):
        mesh = jax.sharding.get_abstract_mesh()
        halved = jax.shard_map(
            lambda x: x * jax.lax.axis_size("tp") * 0.25,
            mesh=mesh if mesh.shape else mw.mesh(MESH),
            in_specs=jax.P("fsdp", "tp"),
            out_specs=jax.P("fsdp", "tp"),
        )
        return loss(params, halved(x))

    grad = jax.value_and_grad(step)
    with pytest.raises(PlanningError, match=r"a shard_map over fsdp:4, tp:2.*mesh='fsdp:4, tp:2'"):
        mw.plan(grad, weights(), X)
    plan = megatron(grad, weights(), X)
    assert_close(plan.jit()(weights(), X), jax.value_and_grad(loss)(weights(), X * 0.5))


def deep(policy):
    def cost(params, x):
        layer = jax.checkpoint(lambda x: jnp.sin(jnp.cos(predict(params, x))), policy=policy)
        for _ in range(6):
            x = layer(x)
        return jnp.mean(x**2)

    return jax.value_and_grad(cost)


def test_what_remat_keeps_is_what_a_planned_step_keeps():
    rows = jnp.tile(X, (64, 1))
    by_rows = jax.NamedSharding(mw.mesh(MESH), jax.P("fsdp"))

    def temporary(jitted):
        return jitted.lower(weights(), rows).compile().memory_analysis().temp_size_in_bytes

    policies, kept = jax.checkpoint_policies, 0
    for policy in (policies.everything_saveable, policies.nothing_saveable):
        step = deep(policy)
        planned = with_lists(mw.plan(step, weights(), rows, mesh=MESH), [["batch"], []])
        plain = temporary(jax.jit(step, in_shardings=(None, by_rows)))
        assert temporary(planned.jit()) == pytest.approx(plain, rel=0.1)
        kept = max(kept, plain)
    # The last of the two computes again what the first one keeps.
    assert plain < 0.75 * kept


def after_products(function, *args):
    """What comes after each product of a planned step."""
    plan = megatron(function, *args)
    with jax.set_mesh(plan.mesh):
        program = jax.make_jaxpr(plan.function())(*args)
    names = [eqn.primitive.name for eqn in program.eqns]
    return [then for name, then in itertools.pairwise(names) if name == "dot_general"]


def test_a_product_is_pinned_where_its_operands_do_not_say_how_it_lies():
    # Both operands have the rows; weights that lie cut are gathered because the result is pinned.
    assert after_products(lambda x: jnp.tanh(jnp.einsum("bi,bj->bij", x, x)), X) == ["tanh"]
    assert after_products(predict, weights(), X) == ["sharding_constraint", "sharding_constraint"]


@pytest.mark.slow
def test_all_weights_as_one_entry_cuts_each_and_computes_the_same():
    widths = [16, 24, 40, 56, 72, 88, 104, 120, 136, 152, 168, 184, 200, 216, 232, 248, 8]

    def train(weights, batch):
        def loss(weights):
            x = batch
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    keys = jax.random.split(jax.random.key(0), len(widths))
    pairs = list(itertools.pairwise(widths))
    weights = [
        jax.random.normal(key, pair) / pair[0] ** 0.5
        for key, pair in zip(keys, pairs, strict=False)
    ]
    batch = jax.random.normal(keys[-1], (64, 16))
    plan = mw.plan(train, weights, batch, mesh="fsdp:8", donate_argnums=0, progress=False)
    assert len(plan.costs.groups.weights) > len(plan.groups)  # more widths than a plan can list
    forced = with_lists(plan, [["batch", "all weights"]])
    assert all(any(spec) for spec in forced.in_specs[0])
    assert forced.in_specs[1] == jax.P("fsdp")
    assert_equal_to_one_device(forced, weights, batch)
    assert "all weights" in str(forced)


def test_small_labels_do_not_decide_how_logits_lie():
    """The rows' lengths are odd once shifted: labels that came cut had the logits sent for them."""
    vocab, width, shape = 512, 32, (64, 256)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(vocab, width)), "float32") / width
    tokens = jnp.asarray(rng.integers(vocab, size=shape), "int32")  # 64 KiB: cut as an argument

    def language_loss(table, tokens):
        logits = (jnp.tanh(table[tokens]) @ table.T)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train(table, tokens):
        value, gradient = jax.value_and_grad(language_loss)(table, tokens)
        return table - gradient, value

    plan = mw.plan(train, table, tokens, mesh="fsdp:4, tp:2")
    plan = with_lists(plan, [["batch"], ["vocab", "seq"]], smallest=64 * 1024)
    assert_equal_to_one_device(plan, table, tokens)
    sent = [each for each in plan.rehearse().collectives if "permute" in each.kind]
    assert all(each.bytes < tokens.nbytes // 16 for each in sent), sent
