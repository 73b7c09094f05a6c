"""Groups with parallelism inside, of different shapes and sizes, and where things lie in them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from pipeline_helpers import assert_close, batch, chain_loss, groups, layers, looped, normal

import meshwright as mw


def wide(count=2):
    """Parameters large enough to be cut by shape."""
    return {f"w{n}": normal(n, 128, 128) / 128**0.5 for n in range(count)}


def check(at, params, data, **options):
    step = mw.pipeline(chain_loss, at, microbatches=2, **options)
    got = step(params, *data)
    on_host = jax.tree.map(np.asarray, params)
    assert_close(got, jax.jit(looped(chain_loss, 2))(on_host, *data))
    return got[1]


def test_data_and_tensor_parallelism_inside_groups():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2, tp:2"), "pp")
    grads = check(at, wide(), batch(8, 128), schedule="zb-h1")
    for n, name in enumerate(("w0", "w1")):
        sharding = grads[name].sharding
        assert sharding.mesh == at.meshes[n]
        assert "tp" in jax.tree.leaves(tuple(sharding.spec))


def test_fully_sharded_groups_by_rules():
    at = mw.MpmdMesh(mw.mesh("pp:2, fsdp:4"), "pp")
    grads = check(at, layers(2, 8), batch(16, 8), rules=[("w0", P(None, "fsdp")), ("w1", P())])
    assert grads["w0"].sharding.spec == P(None, "fsdp")
    assert grads["w1"].sharding.is_fully_replicated


def stacked_loss(params, x, y):
    def layer(h, weights):
        return jnp.tanh(h @ weights["up"] @ weights["down"] + weights["bias"]), None

    h, _ = jax.lax.scan(layer, x, params["first"])
    h, _ = jax.lax.scan(layer, mw.stage_end(h), params["second"])
    return jnp.mean((h - y) ** 2)


def test_stacked_layers_are_cut_as_shard_cuts_them():
    stack = {
        "up": normal(0, 2, 64, 256) / 8,
        "down": normal(1, 2, 256, 64) / 16,
        "bias": normal(2, 2, 64),
    }
    params = {"first": stack, "second": jax.tree.map(lambda leaf: leaf[::-1], stack)}
    at = mw.MpmdMesh(mw.mesh("pp:2, fsdp:2, tp:2"), "pp")
    step = mw.pipeline(stacked_loss, at, microbatches=2)
    got = step(params, *batch(8, 64))
    assert_close(got, jax.jit(looped(stacked_loss, 2))(params, *batch(8, 64)))
    wanted = mw.partition(params, at.meshes[0])
    assert wanted["first"] == {
        "up": P(None, "fsdp", "tp"),
        "down": P(None, "tp", "fsdp"),
        "bias": P(),
    }
    # The first dim, two layers, could be cut by each axis.
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, got[1]) == wanted


def test_groups_of_different_shapes_sizes_and_names():
    devices = jax.devices()
    at = mw.MeshGroups(
        [
            mw.mesh("dp:1", devices=devices[:1]),
            mw.mesh("tp:2", devices=devices[1:3]),
            mw.mesh("fsdp:2, model:2", devices=devices[3:7]),
        ]
    )
    grads = check(at, wide(3), batch(8, 128), schedule="zb-h1")
    assert [len(grads[name].sharding.device_set) for name in ("w0", "w1", "w2")] == [1, 2, 4]


def test_a_list_of_meshes():
    devices = jax.devices()
    meshes = [mw.mesh("dp:2", devices=devices[:2]), mw.mesh("dp:4", devices=devices[4:])]
    check(meshes, layers(2), batch())


def test_tied_weights_across_groups_of_different_sizes():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["tied"]))
        return jnp.mean((x @ params["w"] @ params["tied"].T - y) ** 2)

    devices = jax.devices()
    at = [mw.mesh("tp:2", devices=devices[:2]), mw.mesh("fsdp:4", devices=devices[2:6])]
    params = {"tied": normal(0, 128, 128) / 12, "w": normal(1, 128, 128) / 12}
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))

    def trainer(value_and_grad):
        def train_step(params, state, x, y):
            value, grads = value_and_grad(params, x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return train_step

    step = mw.pipeline(
        trainer(mw.value_and_grad(loss)),
        at,
        schedule="zb-h1",
        microbatches=2,
        donate_argnums=(0, 1),
    )
    by_jit = jax.jit(trainer(looped(loss, 2)))
    theirs = (params, tx.init(params))
    ours = jax.tree.map(jnp.copy, theirs)  # they are donated
    for _ in range(20):
        *ours, value = step(*ours, *batch(8, 128))
        *theirs, expected = by_jit(*theirs, *batch(8, 128))
        assert_close(value, expected)
    assert_close(ours[0], theirs[0], 2e-5)  # adam divides small numbers by small numbers


def test_microbatches_smaller_than_the_data_axis():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    check(at, layers(2), batch(2))
    check(at, layers(2), batch(6))


def test_stacked_and_carried_values_in_groups_of_several_devices():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2, tp:2"), "pp")

    def loss(params, state, x, y):
        h = mw.stage_end(jnp.tanh(x @ params["w0"] + state))
        out = h @ params["w1"]
        return jnp.mean((out - y) ** 2), (state + jnp.mean(h, axis=0), out)

    arguments = (layers(2), jnp.zeros(4), *batch())
    options = {"has_aux": True, "carry": 1}
    step = mw.pipeline(loss, at, microbatches=2, **options)
    assert_close(step(*arguments), jax.jit(looped(loss, 2, **options))(*arguments))


def test_parameters_that_came_placed_stay_as_they_lie():
    at = mw.MpmdMesh(mw.mesh("pp:2, tp:2", devices=jax.devices()[:4]), "pp")
    target = {
        "w0": jax.NamedSharding(at.meshes[0], P(None, "tp")),
        "w1": jax.NamedSharding(at.meshes[1], P("tp")),
    }
    params = jax.device_put(layers(2), target)
    grads = check(at, params, batch())
    assert {name: grad.sharding for name, grad in grads.items()} == target


def test_parameters_placed_in_other_groups_are_brought():
    params = jax.device_put(layers(2), jax.devices()[1])
    grads = check(groups(2), params, batch())
    assert grads["w0"].sharding.device_set == {jax.devices()[0]}


@pytest.mark.parametrize("name", ["looped-bfs", "zb-v"])
def test_several_stages_per_group_of_several_devices(name):
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2", devices=jax.devices()[:4]), "pp")
    check(at, layers(4), batch(), schedule=name)
