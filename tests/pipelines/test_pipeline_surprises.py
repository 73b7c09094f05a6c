"""What users do that nobody thought of first."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_helpers import assert_close, looped

import meshwright as mw

WIDTH = 16
PARAMS = {"a": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 4, "b": jnp.eye(WIDTH)}
ROWS = jax.random.normal(jax.random.key(1), (16, WIDTH))
PAIR = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")


def loss(params, x):
    return jnp.mean((mw.stage_end(jnp.tanh(x @ params["a"])) @ params["b"]) ** 2)


def stepping(params, x):
    return mw.value_and_grad(loss)(params, x)


def test_gradients_without_a_backward_are_refused():
    step = mw.pipeline(stepping, PAIR, microbatches=4, schedule="forward")
    with pytest.raises(
        mw.errors.PipelineError, match="takes gradients, and the schedule has no backward"
    ):
        step(PARAMS, ROWS)


def test_numbers_inside_of_a_module_are_settings():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        drop: eqx.nn.Dropout
        scale: float

        def __call__(self, x):
            h = mw.stage_end(jax.vmap(self.first)(x))
            return self.scale * self.drop(h, inference=True)

    model = Model(eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), eqx.nn.Dropout(0.5), 2.0)
    step = mw.pipeline(lambda m, x: jnp.mean(m(x) ** 2), PAIR, microbatches=4)
    value, grads = step(model, ROWS)
    expected, wanted = eqx.filter_value_and_grad(lambda m: jnp.mean(m(ROWS) ** 2))(model)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert grads.scale is None
    np.testing.assert_allclose(grads.first.weight, wanted.first.weight, rtol=1e-4, atol=1e-6)


def test_weakly_typed_arguments_have_a_plan_of_their_own():
    def update(params, lr, x):
        _, grads = mw.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - lr * g, params, grads)

    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    step = mw.pipeline(update, PAIR, microbatches=4)
    assert step(half, jnp.asarray(0.1), ROWS)["a"].dtype == jnp.bfloat16
    assert step(half, jnp.float32(0.1), ROWS)["a"].dtype == jnp.float32


def test_statistics_of_every_stage_are_carried():
    def normed(params, state, x):
        h = x @ params["a"]
        first = 0.9 * state["first"] + 0.1 * h.mean(0)
        h = mw.stage_end(jnp.tanh(h - h.mean(0))) @ params["b"]
        last = 0.9 * state["last"] + 0.1 * h.mean(0)
        return jnp.mean((h - h.mean(0)) ** 2), {"first": first, "last": last}

    state = {"first": jnp.zeros(WIDTH), "last": jnp.zeros(WIDTH)}
    step = mw.pipeline(normed, PAIR, microbatches=4, carry=1)
    expected = jax.jit(looped(normed, 4, carry=1))(PARAMS, state, ROWS)
    assert_close(step(PARAMS, state, ROWS), expected)


def test_meshes_with_explicit_axes_are_refused_with_the_fix():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    explicit = jax.make_mesh((2, 4), ("pp", "dp"), axis_types=kinds)
    with pytest.raises(mw.errors.PipelineError, match="axes that are not of type Auto"):
        mw.pipeline(loss, mw.MpmdMesh(explicit, "pp"), microbatches=4)


def test_a_mesh_that_the_caller_has_set_does_no_harm():
    expected = mw.pipeline(loss, PAIR, microbatches=4)(PARAMS, ROWS)
    with jax.set_mesh(mw.mesh("dp:8")):
        assert_close(mw.pipeline(loss, PAIR, microbatches=4)(PARAMS, ROWS), expected)


def test_results_lie_as_the_parameters_they_replace():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2, tp:2"), "pp")
    specs = {"q": P(None, "tp"), "o": P("tp"), "u": P(None, "tp"), "d": P("tp")}
    weights = dict.fromkeys(specs, PARAMS["a"])
    tx = optax.adamw(1e-2)

    def chain(params, x):
        h = mw.stage_end(jnp.tanh(x @ params["q"]) @ params["o"])
        return jnp.mean((jnp.tanh(h @ params["u"]) @ params["d"]) ** 2)

    def train(params, state, x):
        _, grads = mw.value_and_grad(chain)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = mw.pipeline(train, at, microbatches=4, rules=list(specs.items()))
    params, state = step(weights, tx.init(weights), ROWS)
    for name, spec in specs.items():
        assert params[name].sharding.spec == spec
        assert state[0].mu[name].sharding.spec == spec


def test_arrays_that_live_in_several_groups_are_taken():
    placed = mw.to_groups(PARAMS, PAIR, {"a": {0, 1}, "b": 1}, P())
    expected = mw.pipeline(loss, PAIR, microbatches=4)(PARAMS, ROWS)
    assert_close(mw.pipeline(loss, PAIR, microbatches=4)(placed, ROWS), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hasaux": True}, "pipeline has no option 'hasaux'. Did you mean 'has_aux'"),
        ({"schedule": "1f1bb"}, "no schedule is called '1f1bb'. Did you mean '1f1b'"),
        ({"schedule": 3}, "schedule: 3 is not a name, a Schedule or an Auto"),
        ({"timeout": -1}, "timeout: -1 is not a number of seconds"),
        ({"donate": 0}, "pipeline has no option 'donate'. Did you mean 'donate_argnums'"),
        (
            {"donate_argnums": True},
            "donate_argnums: expected an int or a sequence of ints, counted from 0, got True",
        ),
        (
            {"donate_argnums": "params"},
            "donate_argnums: expected an int or a sequence of ints, counted from 0, got 'params'",
        ),
        ({"rules": 3}, "rules: 3 is not a table"),
        ({"unused": "drop"}, "unused: 'drop' is not one of error, allow"),
    ],
)
def test_options_are_checked_at_once(options, message):
    with pytest.raises(mw.errors.MeshwrightError, match=message):
        mw.pipeline(loss, PAIR, microbatches=4, **options)


def test_rules_that_nothing_obeys_are_refused():
    rules = [("a", P("dp")), ("bias", P()), ("**", P())]
    with pytest.raises(mw.errors.PartitionError, match="rule 'bias' matches no leaf"):
        mw.pipeline(loss, PAIR, microbatches=4, rules=rules)(PARAMS, ROWS)
    step = mw.pipeline(loss, PAIR, microbatches=4, rules=rules, unused="allow")
    assert step(PARAMS, ROWS)[1]["a"].sharding.spec == P("dp")


def test_options_of_a_step_that_takes_gradients_itself_are_refused():
    step = mw.pipeline(stepping, PAIR, microbatches=4, reduce="sum")
    with pytest.raises(
        mw.errors.PipelineError, match="reduce: the step calls value_and_grad itself"
    ):
        step(PARAMS, ROWS)


def test_a_forgotten_has_aux_is_named():
    step = mw.pipeline(lambda p, x: (loss(p, x), x), PAIR, microbatches=4)
    with pytest.raises(
        mw.errors.PipelineError, match=r"returned a tuple, not one number.*has_aux=True"
    ):
        step(PARAMS, ROWS)


def test_forward_in_any_case():
    alone = [PAIR.unstack[0]]
    step = mw.pipeline(lambda p, x: x @ p["a"], alone, microbatches=4, schedule="Forward")
    assert step(PARAMS, ROWS).shape == (4, 4, WIDTH)


def test_placed_parameters_stay_where_they_lie():
    placed = jax.device_put(PARAMS["a"], NamedSharding(PAIR.unstack[0], P("dp")))
    _, grads = mw.pipeline(loss, PAIR, microbatches=4)({**PARAMS, "a": placed}, ROWS)
    assert grads["a"].sharding.spec == P("dp")


def test_an_argument_that_is_not_to_be_cut_goes_whole():
    def masked(params, x, mask):
        return loss(params, x @ mask) + jnp.sum(mask)

    mask = jnp.eye(WIDTH)
    step = mw.pipeline(masked, PAIR, microbatches=4, whole=2)
    value, grads = step(PARAMS, ROWS, mask)
    expected, wanted = jax.value_and_grad(masked)(PARAMS, ROWS, mask)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["a"], wanted["a"], rtol=1e-4, atol=1e-6)
    explained = step.explain()
    assert (explained.cut, explained.whole) == (("argument 1",), ("argument 2",))
    assert "cut into 4 microbatches: argument 1; whole in each: argument 2" in str(explained)
    with pytest.raises(mw.errors.PipelineError, match="whole=7: the function got 3 arguments"):
        mw.pipeline(masked, PAIR, microbatches=4, whole=7)(PARAMS, ROWS, mask)


def test_arguments_of_different_lengths_are_refused_until_they_are_named():
    def masked(params, x, y, mask, keys):
        noise = jax.random.normal(keys[0], x.shape)
        return loss(params, (x + y + noise) @ mask[:WIDTH]) + jnp.mean(mask)

    mask, keys = jnp.tile(jnp.eye(WIDTH), (4, 1)), jax.random.split(jax.random.key(0), 4)
    match = (
        r"argument 1 has 16 rows, argument 2 has 16 rows, argument 3 has 64 rows\. Arguments are "
        r"cut .*into 4 .*Pass whole=3 if every microbatch needs all of argument 3, or cut=3 if it "
        r"is to be cut"
    )
    with pytest.raises(mw.errors.PipelineError, match=match):
        mw.pipeline(masked, PAIR, microbatches=4)(PARAMS, ROWS, ROWS, mask, keys)
    cut = mw.pipeline(masked, PAIR, microbatches=4, cut=3)(PARAMS, ROWS, ROWS, mask, keys)
    assert_close(cut, jax.jit(looped(masked, 4))(PARAMS, ROWS, ROWS, mask, keys))
    whole = mw.pipeline(masked, PAIR, microbatches=4, whole=3)(PARAMS, ROWS, ROWS, mask, keys)
    fixed = jax.jit(looped(lambda params, x, y, keys: masked(params, x, y, mask, keys), 4))
    assert_close(whole, fixed(PARAMS, ROWS, ROWS, keys))


def test_one_row_per_microbatch_needs_a_word_unless_it_is_a_key():
    def weighted(params, x, classes, keys):
        noise = jax.random.normal(keys[0], (WIDTH,))
        return loss(params, x + noise) * jnp.sum(classes)

    classes, keys = jnp.array([1.0, 2.0, 3.0, 10.0]), jax.random.split(jax.random.key(0), 4)
    with pytest.raises(mw.errors.PipelineError, match=r"argument 2 has 4 rows.*whole=2 if"):
        mw.pipeline(weighted, PAIR, microbatches=4)(PARAMS, ROWS, classes, keys)
    step = mw.pipeline(weighted, PAIR, microbatches=4, whole=2)
    raw = jax.random.key_data(keys)
    assert_close(step(PARAMS, ROWS, classes, keys), step(PARAMS, ROWS, classes, raw))


def test_where_any_argument_may_be_the_batch_each_is_named():
    def frozen(params, weights, x):
        return loss(params, x) + jnp.mean(weights["bias"])

    weights = {"bias": jnp.arange(8.0)}
    match = (
        r"argument 1, bias has 8 rows, argument 2 has 16 rows\..*Pass whole=1 if every microbatch "
        r"needs all of argument 1, whole=2 if every microbatch needs all of argument 2, or "
        r"cut=\(1, 2\) if each is to be cut"
    )
    with pytest.raises(mw.errors.PipelineError, match=match):
        mw.pipeline(frozen, PAIR, microbatches=4)(PARAMS, weights, ROWS)
    with pytest.raises(
        mw.errors.PipelineError, match=r"Pass whole=1 if .*argument 1, or cut=\(1, 2\)"
    ):
        mw.pipeline(frozen, PAIR, microbatches=4, cut=2)(PARAMS, weights, ROWS)
    value, _ = mw.pipeline(frozen, PAIR, microbatches=4, whole=1)(PARAMS, weights, ROWS)
    np.testing.assert_allclose(value, frozen(PARAMS, weights, ROWS), rtol=1e-5)
    mw.pipeline(frozen, PAIR, microbatches=4, cut=(1, 2))(PARAMS, weights, ROWS)


def test_arguments_go_whole_without_gradients_too():
    def model(params, x, mask):
        return mw.stage_end(x @ params["a"]) @ params["b"] @ mask

    mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    step = mw.pipeline(model, PAIR, microbatches=4, schedule="forward", whole=2)
    assert_close(step(PARAMS, ROWS, mask).reshape(16, WIDTH), jax.jit(model)(PARAMS, ROWS, mask))


def test_parameters_cast_before_the_microbatches_stay_in_their_group():
    def train(params, x):
        half = jax.tree.map(lambda p: (2 * p).astype(jnp.float32), params)
        value, grads = mw.value_and_grad(loss)(half, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    step = mw.pipeline(train, PAIR, microbatches=4)
    params, value = step(PARAMS, ROWS)
    assert_close((params, value), jax.jit(train)(PARAMS, ROWS))
    groups = [set(mesh.devices.flat) for mesh in PAIR.unstack]
    assert [params[name].sharding.device_set for name in "ab"] == groups
    (plan,) = step._plans.values()
    before = [o for o in plan.operations if o.task is None and o.function is not None][:2]
    assert sorted(operation.group for operation in before) == [0, 1]


def augmented(params, key, x):
    key, own = jax.random.split(key)
    value, grads = mw.value_and_grad(loss)(params, x + jax.random.normal(own, x.shape))
    return jax.tree.map(lambda p, g: p - g, params, grads), key, value


def counted(params, count, x):
    count = count + 1
    return mw.value_and_grad(loss)(params, x + count), count


def unscaled(params, count, x):
    scale = (count + 1) * 2
    value, grads = mw.value_and_grad(lambda p, x, s: s * loss(p, x))(params, x, scale)
    return value, jax.tree.map(lambda g: g / scale, grads), scale


def doubled(params, count, x):
    twice = jax.tree.map(lambda p: 2 * p, params)
    value, grads = mw.value_and_grad(loss)(jax.tree.map(lambda p: p + count, twice), x)
    return value, jax.tree.map(lambda p, g: p - g, twice, grads), twice


def centred(params, count, x):
    mean = x.mean(0)
    value, grads = mw.value_and_grad(loss)(params, x - mean)
    return value, grads["b"] - mean, mean


@pytest.mark.parametrize(
    ("train", "second"),
    [
        (augmented, jax.random.PRNGKey(3)),
        (counted, jnp.float32(2)),
        (unscaled, jnp.float32(2)),
        (doubled, jnp.float32(2)),
        (centred, jnp.float32(2)),
    ],
)
def test_values_made_before_the_microbatches_are_there_after_them(train, second):
    step = mw.pipeline(train, PAIR, microbatches=4)
    assert_close(step(PARAMS, second, ROWS), jax.jit(train)(PARAMS, second, ROWS))


def test_keys_split_before_the_microbatches_are_returned():
    key = jax.random.key(3)
    _, new_key, _ = mw.pipeline(augmented, PAIR, microbatches=4)(PARAMS, key, ROWS)
    assert new_key == jax.random.split(key)[0]


def test_whole_numbers_cross_stages_where_there_are_no_gradients():
    def quantized(params, x):
        h = mw.stage_end((x @ params["a"]).astype(jnp.int8))
        return h.astype(jnp.float32) @ params["b"]

    outputs = mw.pipeline(quantized, PAIR, microbatches=4, schedule="forward")(PARAMS, 9 * ROWS)
    assert_close(outputs.reshape(16, WIDTH), jax.jit(quantized)(PARAMS, 9 * ROWS))
