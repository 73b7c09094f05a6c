"""Steps as the users of Flax and Equinox write them, against the same step in plain `jax.jit`."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state

import meshwright as mw
from meshwright.errors import RehearsalError

pytestmark = pytest.mark.slow

HERE = {"mesh": "fsdp:4, tp:2", "on": "cpu:8"}
TPU = {"mesh": "fsdp:8, tp:2", "on": "v5e:4x4", "compiler": "cpu"}
both = pytest.mark.parametrize("where", [HERE, TPU], ids=["here", "named hardware"])
X = jax.ShapeDtypeStruct((64, 128), "float32")
TX = optax.adam(1e-2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def assert_same_program(found, plain):
    """Memory, collectives and work are those of the plain step."""
    assert found.memory.arguments == plain.memory.arguments
    assert found.memory.outputs == plain.memory.outputs
    assert found.memory.aliased == plain.memory.aliased
    assert ledger(found) == ledger(plain) != []
    assert found.flops == plain.flops > 0


def ledger(found):
    return sorted((entry.kind, entry.bytes, entry.times.count) for entry in found.collectives)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(128, 256, rngs=rngs)
        self.down = nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def nnx_loss(model, x):
    return jnp.mean((model(x) - x) ** 2)


def nnx_update(model, optimizer, x):
    value, grads = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, grads)
    return value


def nnx_state():
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def plain_nnx_step(donate=()):
    """The update as a function of arrays, written with JAX and optax alone."""
    model, _ = nnx_state()
    graph, params = nnx.split(model)

    def update(params, state, count, x):
        value, grads = jax.value_and_grad(lambda p: nnx_loss(nnx.merge(graph, p), x))(params)
        updates, state = TX.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state, count + 1

    state = TX.init(params)
    return jax.jit(update, donate_argnums=donate), (params, state, jnp.zeros((), "uint32"), X)


@both
def test_an_nnx_jit_step_that_updates_model_and_optimizer_in_place(where, cache):
    plain, args = plain_nnx_step()
    expected = mw.rehearse(plain, *args, data=(2, 3), cache=cache, **where)
    found = mw.rehearse(nnx.jit(nnx_update), *nnx_state(), X, cache=cache, **where)
    assert_same_program(found, expected)
    assert found.name == "nnx_update"
    specs = {row.path: row.spec for row in found.arguments.rows}
    moments = [path for path in specs if "/mu/up/kernel" in path]
    assert len(moments) == 1
    assert specs[moments[0]] == specs["model/up/kernel/value"] != jax.P()
    assert specs["x"] == jax.P("fsdp")
    # Its variables are named by their paths, as those of a step without nnx.jit.
    buffers = found.memory.buffers
    named = {buffer.op_name for buffer in buffers if "/" not in buffer.op_name}
    assert {"model.up.kernel", "model.down.kernel", "optimizer.opt_state[0].mu.up.kernel"} <= named
    assert not any("states" in name for name in named)
    assert {"model/up", "optimizer/opt_state/0/nu/down"} <= {buffer.layer for buffer in buffers}


def test_donation_of_nnx_jit_is_kept(cache):
    plain, args = plain_nnx_step(donate=(0, 1, 2))
    expected = mw.rehearse(plain, *args, data=(2, 3), cache=cache, **HERE)
    step = nnx.jit(nnx_update, donate_argnums=(0, 1))
    found = mw.rehearse(step, *nnx_state(), X, cache=cache, **HERE)
    assert found.memory.aliased > 0
    assert_same_program(found, expected)


def test_an_nnx_step_without_a_jit_or_with_options_is_updated_in_place_too(cache):
    expected = mw.rehearse(nnx.jit(nnx_update), *nnx_state(), X, cache=cache, **HERE)
    bare = mw.rehearse(nnx_update, *nnx_state(), X, cache=cache, **HERE)
    assert_same_program(bare, expected)
    donated = mw.rehearse(
        nnx.jit(nnx_update), *nnx_state(), X, donate_argnums=(0, 1), cache=cache, **HERE
    )
    assert donated.memory.aliased > 0.9 * (bare.memory.outputs - 4)
    whole = mw.rehearse(nnx_update, *nnx_state(), X, out_shardings=jax.P(), cache=cache, **HERE)
    assert ledger(whole)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (256, 128)))
        self.head = self.embed

    def __call__(self, tokens):
        return self.embed[...][tokens] @ self.head[...].T


def test_tied_weights_are_one_array(cache):
    def step(model, tokens):
        return nnx.grad(lambda m: jnp.mean(m(tokens) ** 2))(model)

    tokens = jax.ShapeDtypeStruct((64,), "int32")
    found = mw.rehearse(nnx.jit(step), Tied(nnx.Rngs(0)), tokens, cache=cache, **HERE)
    assert found.memory.arguments == 256 * 128 * 4 // 8 + 64 * 4 // 4
    with pytest.raises(RehearsalError, match=r"the same variable as.*decorate the step with nnx"):
        mw.rehearse(step, Tied(nnx.Rngs(0)), tokens, cache=cache, **HERE)


class Scaled(eqx.Module):
    """Functions, numbers and flags among the leaves."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: callable
    scale: float = 2.0
    centred: bool = True

    def __call__(self, x):
        x = self.down(self.activation(self.up(x))) * self.scale
        return x - x.mean() if self.centred else x


def scaled():
    one, two = jax.random.split(jax.random.key(0))
    return Scaled(eqx.nn.Linear(128, 256, key=one), eqx.nn.Linear(256, 128, key=two), jax.nn.gelu)


def eqx_loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def eqx_update(model, state, x):
    value, grads = eqx.filter_value_and_grad(eqx_loss)(model, x)
    updates, state = TX.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, value


def eqx_arguments():
    model = scaled()
    return model, TX.init(eqx.filter(model, eqx.is_inexact_array)), X


def plain_eqx_step(donate=()):
    model, state, x = eqx_arguments()
    params, static = eqx.partition(model, eqx.is_array)

    def update(params, state, x):
        loss = lambda params: eqx_loss(eqx.combine(params, static), x)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(update, donate_argnums=donate), (params, state, x)


@both
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["filter_jit", "bare"])
def test_an_equinox_step_of_whole_modules(jit, where, cache):
    plain, args = plain_eqx_step()
    expected = mw.rehearse(plain, *args, cache=cache, **where)
    found = mw.rehearse(jit(eqx_update), *eqx_arguments(), cache=cache, **where)
    assert_same_program(found, expected)
    specs = {row.path: row.spec for row in found.arguments.rows}
    assert specs["state/0/mu/up/weight"] == specs["model/up/weight"] != jax.P()


def test_results_of_modules_lie_as_asked(cache):
    model, state, x = eqx_arguments()
    specs = mw.partition(model, mw.abstract_mesh(HERE["mesh"]))  # functions pass through it
    asked = (specs, None, jax.P())
    for step in (eqx_update, eqx.filter_jit(eqx_update)):
        found = mw.rehearse(step, model, state, x, out_shardings=asked, cache=cache, **HERE)
        whole = mw.rehearse(step, model, state, x, out_shardings=jax.P(), cache=cache, **HERE)
        assert found.memory.outputs < whole.memory.outputs / 7
    with pytest.raises(
        RehearsalError, match=r"(?s)out_shardings: .*1/0/count: P\('tp',\) has 1 entr"
    ):
        mw.rehearse(eqx_update, model, state, x, out_shardings=(specs, jax.P("tp"), None), **HERE)


def test_a_step_may_return_nothing_beside_arrays(cache):
    found = mw.rehearse(
        lambda x: (x + 1, None), X, out_shardings=(jax.P("tp"), None), cache=cache, **HERE
    )
    assert found.memory.outputs == 64 * 128 * 4 // 2
    assert len(found.results) == 1


@pytest.mark.parametrize(
    ("donate", "numbers"),
    [("all", (0, 1, 2)), ("all-except-first", (1, 2)), ("none", ())],
)
def test_donation_of_filter_jit_is_kept(donate, numbers, cache):
    plain, args = plain_eqx_step(donate=numbers)
    expected = mw.rehearse(plain, *args, data=2, cache=cache, **HERE)
    step = eqx.filter_jit(eqx_update, donate=donate)
    found = mw.rehearse(step, *eqx_arguments(), cache=cache, **HERE)
    assert_same_program(found, expected)
    assert bool(found.memory.aliased) == bool(numbers)


def test_a_partial_of_a_jitted_step_keeps_its_donation(cache):
    params = {"w": jnp.ones((128, 128))}

    def update(params, x, mask=None, *, train):
        return {"w": params["w"] + (x.T @ x if train else 0) * (1 if mask is None else mask)}

    def aliased(step):
        return mw.rehearse(step, params, X, cache=cache, **HERE).memory.aliased

    jitted = jax.jit(update, donate_argnums=0, static_argnames="train")
    whole = 128 * 128 * 4 // 8
    assert aliased(functools.partial(jitted, train=True)) == whole
    # What is bound may be data too: a constant of the program, and no argument.
    assert aliased(functools.partial(jitted, train=True, mask=jnp.ones(128))) == whole

    def in_place(model, optimizer, x, *, train):
        return nnx_update(model, optimizer, x) if train else 0.0

    nnx_step = nnx.jit(in_place, donate_argnums=(0, 1), static_argnames="train")
    bound = functools.partial(nnx_step, train=True)
    assert mw.rehearse(bound, *nnx_state(), X, cache=cache, **HERE).memory.aliased > whole
    equinox_step = eqx.filter_jit(update, donate="all")
    assert aliased(functools.partial(equinox_step, train=True)) == whole
    by_number = functools.partial(
        jax.jit(lambda rate, p, x, n: (rate * p["w"], n), donate_argnums=1, static_argnums=3), 0.5
    )
    with pytest.raises(mw.errors.RehearsalError, match=r"binds data by functools\.partial"):
        mw.rehearse(by_number, params, X, 3, cache=cache, **HERE)


class Dense(nn.Module):
    annotate: callable = lambda init, names: init
    names: tuple = ("embed", "mlp")

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        y = nn.Dense(256, kernel_init=self.annotate(init, self.names))(x)
        return nn.Dense(128, kernel_init=self.annotate(init, self.names[::-1]))(nn.relu(y))


def linen_step(*annotation):
    model = Dense(*annotation)
    params = model.init(jax.random.key(0), jnp.zeros((1, 128)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    @jax.jit
    def step(state, x):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return step, (state, X)


def plain_linen_step():
    _, (state, x) = linen_step()

    def update(params, opt_state, x, count):
        def loss(params):
            return jnp.mean((Dense().apply({"params": params}, x) - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, count + 1

    return jax.jit(update), (state.params, state.opt_state, x, 0)


@both
def test_a_linen_train_state(where, cache):
    plain, args = plain_linen_step()
    expected = mw.rehearse(plain, *args, cache=cache, **where)
    step, args = linen_step()
    found = mw.rehearse(step, *args, cache=cache, **where)
    assert_same_program(found, expected)


RULES = [("Dense_0/kernel", ("fsdp", "tp")), ("Dense_1/kernel", ("tp", "fsdp")), ("**", None)]


@both
@pytest.mark.parametrize(
    ("annotation", "table"),
    [
        ((nn.with_partitioning, ("fsdp", "tp")), {}),
        ((nn.with_logical_partitioning, ("embed", "mlp")), {"embed": "fsdp", "mlp": "tp"}),
    ],
    ids=["mesh axes", "logical axes"],
)
def test_a_linen_train_state_of_boxed_parameters(annotation, table, where, cache):
    plain, args = linen_step()
    expected = mw.rehearse(plain, *args, rules=RULES, cache=cache, **where)
    step, args = linen_step(*annotation)
    found = mw.rehearse(step, *args, logical=table, unmatched="replicate", cache=cache, **where)
    assert_same_program(found, expected)
    # The shardings that Flax itself works out are those of the tree without its boxes.
    mesh = mw.abstract_mesh(where["mesh"], on=where["on"])
    rules = list(table.items())
    specs = nn.get_partition_spec(args[0])
    unboxed = nn.logical_to_mesh_sharding(specs, mesh, rules) if rules else specs
    given = mw.rehearse(step, *args, in_shardings=(unboxed, None), cache=cache, **where)
    assert given.arguments.rows == found.arguments.rows
