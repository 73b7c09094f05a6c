"""`init`: initialisers computed into their shardings, never whole on one device."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.mesh("fsdp:4, tp:2")


def model(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (64, 256)),
        "down": jax.random.truncated_normal(down, -2, 2, (256, 64)),
        "bias": jnp.zeros(64),
        "step": jnp.zeros((), jnp.int32),
    }


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_values_are_those_of_the_plain_initialiser(kind):
    mesh = mw.mesh("fsdp:4, tp:2", axis_types=kind)
    made = mw.init(model, jax.random.key(3), mesh=mesh)
    plain = jax.jit(model)(jax.random.key(3))
    for path in plain:
        np.testing.assert_array_equal(made[path], plain[path])
        assert made[path].dtype == plain[path].dtype


def test_every_array_is_made_in_its_sharding():
    made = mw.init(model, jax.random.key(3), mesh=MESH)
    specs = mw.partition(jax.eval_shape(model, jax.random.key(3)), MESH)
    for path, array in made.items():
        assert array.sharding == NamedSharding(MESH, specs[path]), path
    for path in ("up", "down"):
        for shard in made[path].addressable_shards:
            assert shard.data.size == made[path].size // 8


def test_the_function_is_only_traced():
    seen = []

    def fn(key):
        made = jax.random.normal(key, (64, 64))
        seen.append(isinstance(made, jax.core.Tracer))
        return {"w": made}

    before = {id(array) for array in jax.live_arrays()}
    made = mw.init(fn, jax.random.key(0), mesh=MESH)["w"]
    assert seen and all(seen)
    new = [array for array in jax.live_arrays() if id(array) not in before and array.size == 4096]
    assert [array is made for array in new] == [True]  # nothing of that size besides the result


def test_specs_and_options_decide():
    by_tree = mw.init(
        model,
        jax.random.key(0),
        mesh=MESH,
        specs={"up": P("tp"), "down": P(None, "tp"), "bias": P("fsdp"), "step": P()},
    )
    assert by_tree["down"].sharding.spec == P(None, "tp")
    assert by_tree["bias"].sharding.spec == P("fsdp")
    by_rules = mw.init(model, jax.random.key(0), mesh=MESH, rules=[("up", "tp"), ("**", None)])
    assert by_rules["up"].sharding.spec == P("tp")
    assert by_rules["down"].sharding.is_fully_replicated
    by_one = mw.init(lambda: jnp.ones((8, 8)), mesh=MESH, specs=P("tp", "fsdp"))
    assert by_one.sharding.spec == P("tp", "fsdp")


def test_arguments_may_be_placed_already():
    batch = mw.shard(np.ones((64, 8), np.float32), MESH, P("fsdp"))
    made = mw.init(lambda x: {"w": x.T @ x}, batch, mesh=MESH, specs=P("tp"))
    np.testing.assert_array_equal(made["w"], np.full((8, 8), 64))


def test_leaves_that_are_no_arrays_come_back():
    class Layer(eqx.Module):
        weight: jax.Array
        act: Callable

    made = mw.init(lambda: Layer(jnp.ones((64, 64)), jnp.tanh), mesh=MESH)
    assert isinstance(made, Layer)
    assert made.act is jnp.tanh
    assert made.weight.addressable_shards[0].data.size == 512
    mixed = mw.init(lambda: {"w": jnp.ones((8, 8)), "n": 3, "s": "x", "none": None}, mesh=MESH)
    assert (mixed["n"], mixed["s"], mixed["none"]) == (3, "x", None)


def test_optimizer_states_are_made_beside_their_parameters():
    params = mw.init(model, jax.random.key(0), mesh=MESH)
    specs = mw.partition(params, MESH)
    zeros = mw.init(lambda p: jax.tree.map(jnp.zeros_like, p), params, mesh=MESH, specs=specs)
    assert all(zeros[path].sharding == params[path].sharding for path in params)


def test_bad_specs_name_the_leaf_before_anything_runs():
    ran = []

    def fn():
        jax.debug.callback(lambda: ran.append(1))
        return {"w": jnp.ones((6, 8))}

    with pytest.raises(mw.PartitionError, match=r"init: 1 problem.*\n  w: dim 0 has size 6"):
        mw.init(fn, mesh=MESH, specs=P("fsdp"))
    with pytest.raises(mw.PartitionError, match="First difference: 'w' has no spec"):
        mw.init(fn, mesh=MESH, specs={"v": P()})
    with pytest.raises(mw.PartitionError, match=r"w: \(6, 8\) matches no rule"):
        mw.init(fn, mesh=MESH, rules=[])
    assert ran == []


@pytest.mark.parametrize(
    ("fn", "mesh", "message"),
    [
        (3, MESH, r"^init: 3 is not a function\.$"),
        ({"w": 1}, MESH, r"^init: \{'w': 1\} is not a function"),
        (model, MESH.abstract_mesh, r"^init computes: it needs a Mesh of devices"),
        (model, "fsdp:8", r"^mesh: 'fsdp:8' is not a jax.sharding.Mesh"),
        (model, None, r"^mesh: None is not a jax.sharding.Mesh"),
    ],
)
def test_bad_input_is_refused(fn, mesh, message):
    with pytest.raises(mw.PartitionError, match=message):
        mw.init(fn, jax.random.key(0), mesh=mesh)
