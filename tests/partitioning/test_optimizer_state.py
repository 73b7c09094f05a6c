"""States that follow parameters: optimizers, averages, copies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.mesh("fsdp:4, tp:2")
PARAMS = {
    "embed": np.ones((64, 32), np.float32),
    "layers": [{"w": np.full((32, 64), 2.0, np.float32), "b": np.zeros(64, np.float32)}],
}
SPECS = {"embed": P("tp", "fsdp"), "layers": [{"w": P("fsdp", "tp"), "b": P("tp")}]}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adamw, masked decay": optax.adamw(1e-3, mask=matrices),
    "masked adam": optax.masked(optax.adam(1e-3), matrices),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.99)),
    "ema": optax.ema(0.99),
    "momentum": optax.sgd(optax.linear_schedule(1e-2, 1e-3, 100), momentum=0.9),
    "steps": optax.MultiSteps(optax.adamw(1e-3, mask=matrices), every_k_schedule=4),
    "two kinds": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        {"embed": "a", "layers": [{"w": "b", "b": "a"}]},
    ),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def by_path(tree):
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, P)
        )
    ]


def expected(path, shape):
    """By the tail of the path alone; what has another shape is a counter and stays whole."""
    for tail, spec in [("embed", P("tp", "fsdp")), ("layers/0/w", P("fsdp", "tp"))]:
        if path.endswith(tail) and len(shape) == 2:
            return spec
    return P("tp") if path.endswith("layers/0/b") and shape == (64,) else P()


@optimizers
def test_optimizer_states_get_the_specs_of_their_parameters(name):
    state = jax.eval_shape(OPTIMIZERS[name].init, PARAMS)
    specs = mw.partition_like(state, PARAMS, SPECS)
    shapes = dict(by_path(state))
    found = by_path(specs)
    assert len(found) == len(shapes)
    for path, spec in found:
        assert spec == expected(path, shapes[path].shape), path
    assert sum(spec != P() for _, spec in found) >= 2


@optimizers
def test_optimizer_states_are_placed_beside_their_parameters(name):
    params = mw.shard(PARAMS, MESH, SPECS)
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(params)
    placed = mw.shard_like(state, params)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    for (path, leaf), (_, before) in zip(by_path(placed), by_path(state), strict=True):
        assert leaf.sharding == NamedSharding(MESH, expected(path, leaf.shape)), path
        np.testing.assert_array_equal(leaf, before)


@optimizers
def test_a_step_keeps_the_state_where_it_is(name):
    params = mw.shard(PARAMS, MESH, SPECS)
    optimizer = OPTIMIZERS[name]
    state = mw.shard_like(optimizer.init(params), params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    gradients = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(
        lambda g, s, p: optimizer.update(g, s, p)[1], out_shardings=shardings, donate_argnums=1
    )
    after = step(gradients, state, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == shardings


def test_counters_stay_whole():
    state = optax.adam(1e-3).init(PARAMS)
    specs = mw.partition_like(state, PARAMS, SPECS)
    assert specs[0].count == P()
    placed = mw.shard_like(state, mw.shard(PARAMS, MESH, SPECS))
    assert placed[0].count.sharding.is_fully_replicated
    assert placed[0].count.dtype == jnp.int32


def test_copies_follow_whatever_they_are_called():
    state = {"average": PARAMS, "best": (PARAMS, 0.5), "step": np.int32(3), "note": "x"}
    specs = mw.partition_like(state, PARAMS, SPECS)
    assert specs["average"] == specs["best"][0] == SPECS
    assert specs["step"] == P()
    assert (specs["best"][1], specs["note"]) == (0.5, "x")


def test_copies_in_another_type_follow():
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), PARAMS)
    assert mw.partition_like({"half": half}, PARAMS, SPECS)["half"] == SPECS


def test_the_longest_path_wins():
    w = np.ones((8, 8), np.float32)
    params = {"w": w, "inner": {"w": w}}
    specs = {"w": P("fsdp"), "inner": {"w": P("tp")}}
    found = mw.partition_like({"mu": params, "nu": {"deep": params}}, params, specs)
    assert found["mu"] == found["nu"]["deep"] == specs


def test_a_part_of_a_word_is_no_match():
    w = np.ones((8, 8), np.float32)
    state, params, specs = {"mu": {"ww": w}}, {"w": w}, {"w": P("tp")}
    found = mw.partition_like(state, params, specs, unmatched="replicate")
    assert found == {"mu": {"ww": P()}}


def test_a_leaf_with_a_parameters_shape_that_follows_none_is_refused():
    w = np.ones((8, 8), np.float32)
    with pytest.raises(
        mw.errors.PartitionError, match=r"mu/ww: has a parameter's shape \(8, 8\) but no"
    ):
        mw.partition_like({"mu": {"ww": w}}, {"w": w}, {"w": P("tp")})


def test_bad_unmatched_is_refused():
    with pytest.raises(
        mw.errors.PartitionError, match="unmatched: 'shape' is not 'error' or 'replicate'"
    ):
        mw.partition_like({}, {}, P(), unmatched="shape")


def test_another_shape_is_no_match():
    params = {"w": np.ones((8, 16), np.float32)}
    state = {"row": {"w": np.ones(8, np.float32)}, "flip": {"w": np.ones((16, 8), np.float32)}}
    found = mw.partition_like(state, params, {"w": P("fsdp", "tp")})
    assert found == {"row": {"w": P()}, "flip": {"w": P()}}


def test_factored_states_that_have_other_shapes_stay_whole():
    params = {"w": np.ones((256, 512), np.float32)}
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=128).init, params)
    specs = [spec for _, spec in by_path(mw.partition_like(state, params, P("fsdp", "tp")))]
    assert set(specs) == {P()}


def test_memories_of_parameters_keep_their_first_dims_whole():
    state = jax.eval_shape(optax.lbfgs(memory_size=10).init, PARAMS)
    memory = mw.partition_like(state, PARAMS, SPECS)[0].diff_params_memory
    assert memory == {
        "embed": P(None, "tp", "fsdp"),
        "layers": [{"w": P(None, "fsdp", "tp"), "b": P(None, "tp")}],
    }
    placed = mw.shard_like(optax.lbfgs().init(PARAMS), mw.shard(PARAMS, MESH, SPECS))
    assert placed[0].diff_updates_memory["embed"].addressable_shards[0].data.shape == (10, 32, 8)


def test_only_dims_before_the_parameters_shape_are_memories():
    params = {"w": np.ones((8, 16), np.float32), "scale": np.float32(1)}
    specs = {"w": P("fsdp", "tp"), "scale": P()}
    state = {"w": np.ones((8, 16, 4), np.float32), "scale": np.ones(4, np.float32)}
    assert mw.partition_like(state, params, specs) == {"w": P(), "scale": P()}


def test_a_state_that_holds_all_parameters_in_one_vector_is_refused():
    params = {**PARAMS, "embed": np.ones((512, 32), np.float32)}
    state = jax.eval_shape(optax.flatten(optax.adam(1e-3)).init, params)
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"0/mu: \(18496,\) holds as many elements as all parameters together \(18,496\) but "
        r"follows none, .* Keep the state in the parameters' tree \(no optax\.flatten\), give it",
    ):
        mw.partition_like(state, params, SPECS)
    specs = mw.partition_like(state, params, SPECS, unmatched="replicate")
    assert specs[0].mu == P()


def test_a_small_state_that_follows_no_parameter_stays_whole():
    # 16,640 bytes: cutting them would gain nothing.
    state = jax.eval_shape(optax.flatten(optax.adam(1e-3)).init, PARAMS)
    assert mw.partition_like(state, PARAMS, SPECS)[0].mu == P()


def test_parameters_may_be_one_array():
    w = np.ones((8, 8), np.float32)
    state = optax.adam(1e-3).init(w)
    specs = mw.partition_like(state, w, P("fsdp"))
    assert (specs[0].mu, specs[0].nu, specs[0].count) == (P("fsdp"), P("fsdp"), P())


def test_one_spec_may_serve_all_parameters():
    found = mw.partition_like({"mu": PARAMS}, PARAMS, P("tp"))
    assert {spec for _, spec in by_path(found)} == {P("tp")}


def test_specs_of_another_tree_are_refused():
    with pytest.raises(
        mw.errors.PartitionError, match="First difference: 'layers/0/b' has no spec"
    ):
        mw.partition_like(PARAMS, PARAMS, {"embed": P(), "layers": [{"w": P()}]})


def test_abstract_states_and_parameters_follow_too():
    shapes = mw.shard(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), PARAMS), MESH, SPECS
    )
    state = jax.eval_shape(optax.adam(1e-3).init, shapes)
    placed = mw.shard_like(state, shapes)
    assert placed[0].mu["embed"].sharding == NamedSharding(MESH, P("tp", "fsdp"))


def test_a_state_may_follow_to_another_mesh():
    params = mw.shard(PARAMS, MESH, SPECS)
    other = mw.mesh("fsdp:2, tp:4")
    placed = mw.shard_like({"mu": PARAMS}, params, other)
    assert placed["mu"]["embed"].sharding == NamedSharding(other, P("tp", "fsdp"))
    with pytest.raises(
        mw.errors.PartitionError, match=r"mu/embed: dim 0: no mesh axis 'tp' in fsdp"
    ):
        mw.shard_like({"mu": PARAMS}, params, mw.mesh("fsdp:8"))


def test_all_parameters_that_are_not_placed_are_named():
    with pytest.raises(
        mw.errors.PartitionError, match="shard_like: 3 problems, nothing was placed"
    ) as e:
        mw.shard_like({"mu": PARAMS}, PARAMS)
    for path in ("embed", "layers/0/b", "layers/0/w"):
        assert f"\n  {path}: the parameter is not placed on a mesh. Place it first, " in str(
            e.value
        )
    placed = mw.shard(PARAMS, MESH, SPECS)
    mixed = {**placed, "layers": [{"w": jnp.ones((32, 64)), "b": placed["layers"][0]["b"]}]}
    with pytest.raises(
        mw.errors.PartitionError, match=r"1 problem.*\n  layers/0/w: the parameter is not pl"
    ):
        mw.shard_like({"mu": PARAMS}, mixed)


def test_tracers_for_parameters_say_what_to_use_under_jit():
    placed = mw.shard(PARAMS, MESH, SPECS)
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"embed: the parameter is a tracer, .*with_sharding_constraint with the specs of",
    ):
        jax.jit(lambda params: mw.shard_like({"mu": params}, params))(placed)


def test_parameters_on_two_meshes_are_refused():
    w = np.ones((8, 8), np.float32)
    params = {"a": mw.shard(w, MESH), "b": mw.shard(w, mw.mesh("fsdp:8"))}
    with pytest.raises(mw.errors.PartitionError, match="the parameters stand on several meshes"):
        mw.shard_like({"mu": params}, params)


def test_no_parameters_are_nothing_to_follow():
    with pytest.raises(
        mw.errors.PartitionError, match=r"^the parameters hold no arrays, so there is"
    ):
        mw.shard_like({"mu": np.ones(8, np.float32)}, {})


def test_a_state_that_would_be_narrowed_is_refused():
    params = mw.shard(PARAMS, MESH, SPECS)
    with pytest.raises(mw.errors.PartitionError, match="step: int64 would become int32"):
        mw.shard_like({"step": np.int64(3)}, params)


@pytest.mark.parametrize("mesh", [3, "fsdp:8", {"w": 1}])
def test_what_is_no_mesh_is_refused(mesh):
    placed = mw.shard(PARAMS, MESH, SPECS)
    with pytest.raises(
        mw.errors.PartitionError, match=r"^mesh: .* is not a jax\.sharding\.Mesh"
    ) as e:
        mw.shard_like(placed, placed, mesh)
    assert e.value.option == "mesh"
