"""Models of Flax, Equinox and penzai: sharded they compute what one device does; rehearsals."""

import linecache

import all_models
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import models_brax
import models_equinox
import models_linen
import models_nnx
import models_penzai
import models_transformers
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw

pytestmark = pytest.mark.slow

MESH = mw.mesh("fsdp:4, tp:2")
# The models are small, and so is what stays whole.
BY_SHAPE = {"min_shard_bytes": 1024}
STEPS = {
    "lm1b": models_linen.lm1b,
    "resnet": models_linen.resnet,
    "gemma": models_nnx.gemma,
    "vit": models_equinox.vit,
    "unet": models_equinox.unet,
    "bert": models_equinox.bert,
    "gpt2": models_transformers.gpt2,
    "llama": models_transformers.llama,
    "ppo": models_brax.ppo,
    "neox": models_penzai.neox,
}


@pytest.fixture(scope="module")
def models():
    return all_models.models()


@pytest.fixture(scope="module")
def on_one_device(models):
    """Loss and gradients of each model, computed once."""
    return {
        name: jax.jit(jax.value_and_grad(m.loss))(m.params, m.batch) for name, m in models.items()
    }


def assert_close(got, expected):
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        scale = max(1e-3, float(np.max(np.abs(b), initial=0)))
        off = float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0)) / scale
        assert off < 2e-3, (jax.tree_util.keystr(path), off)


def by_rows(batch):
    return jax.device_put(batch, NamedSharding(MESH, PartitionSpec("fsdp")))


@pytest.mark.parametrize("how", ["shape", "rules"])
@pytest.mark.parametrize("name", all_models.PARTS)
def test_sharded_values_and_gradients_are_those_of_one_device(name, how, models, on_one_device):
    model = models[name]
    options = {"rules": model.hand_rules} if how == "rules" else BY_SHAPE
    params = mw.shard(model.params, MESH, **options)
    # Something is cut: a model that stays whole would prove nothing.
    assert mw.explain(params, MESH).device_bytes < 0.5 * mw.explain(params, MESH).bytes
    got = jax.jit(jax.value_and_grad(model.loss))(params, by_rows(model.batch))
    assert_close(got, on_one_device[name])


def test_lm1b_by_the_names_that_flax_wrote(on_one_device):
    init, loss, tokens, _ = models_linen.lm1b_parts()
    table = models_linen.LM1B_TABLE
    boxed = mw.init(lambda: init(boxed=True), mesh=MESH, logical=table, unmatched="replicate")
    with pytest.raises(mw.errors.PartitionError, match="no rule for logical axis 'kv'"):
        mw.partition(boxed, MESH, logical=table)
    specs = jax.tree.map(lambda x: x.sharding.spec, nn.unbox(boxed))
    assert specs["block_0"]["wi"]["kernel"] == PartitionSpec("fsdp", "tp")
    assert specs["Embed_0"]["embedding"] == PartitionSpec("tp", "fsdp")
    got = jax.jit(jax.value_and_grad(loss))(boxed, by_rows(tokens))
    assert_close(nn.unbox(got), on_one_device["lm1b"])
    # The same by shape where the table says nothing, and by Flax's own reading of the boxes.
    by_shape = nn.unbox(mw.partition(boxed, MESH, logical=table, unmatched="shape"))
    assert by_shape["block_0"]["wi"]["kernel"] == PartitionSpec("fsdp", "tp")
    rules = [*table.items(), ("kv", None)]
    theirs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), MESH, rules)
    placed = nn.unbox(mw.shard(boxed, MESH, theirs))
    pairs = zip(jax.tree.leaves(placed), jax.tree.leaves(nn.unbox(boxed)), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def test_gemma_by_the_names_of_its_variables(models, on_one_device):
    state = mw.shard(models["gemma"].params, MESH, logical=models_nnx.GEMMA_TABLE)
    assert state["embedder"][...].sharding.spec == PartitionSpec("tp", "fsdp")
    got = jax.jit(jax.value_and_grad(models["gemma"].loss))(state, by_rows(models["gemma"].batch))
    assert_close(got, on_one_device["gemma"])


def options_of(name):
    """How each model is sharded for its rehearsal: by its names where it has them."""
    return {
        "lm1b": {"logical": models_linen.LM1B_TABLE, "unmatched": "replicate"},
        "gemma": {"logical": models_nnx.GEMMA_TABLE},
    }.get(name, BY_SHAPE)


@pytest.mark.parametrize("name", STEPS)
def test_the_models_own_step_is_rehearsed(name, tmp_path):
    step, args = STEPS[name]()
    options = {**options_of(name), "cache": tmp_path}
    here = mw.rehearse(step, *args, mesh="fsdp:4, tp:2", on="cpu:8", **options)
    assert here.fits
    if name in ("gemma", "vit"):
        options["compiler"] = "cpu"
        pod = mw.rehearse(step, *args, mesh="fsdp:4, tp:4", on="v5e:4x4", **options)
        assert pod.fits and pod.stand_in
    causes = {"gradient sums", "parameter gathers"}
    if name == "ppo":  # a shuffle of all rows loses their split: brax does it on each device alone
        causes = {"activation exchanges"}
    assert causes <= set(here.collectives.by_cause())
    # The optimizer's moments lie as the parameters do, and so does what the step returns.
    assert here.memory.arguments < 0.5 * sum(x.nbytes for x in arrays_of(args))
    assert here.memory.outputs > 0.5 * here.memory.arguments


def test_the_largest_cost_of_lm1b_is_at_its_logits(tmp_path):
    # With the names that Flax wrote, the rows of the batch come together at the tied table: XLA
    # sums logits of all rows over fsdp, and gathers their gradient.
    step, args = models_linen.lm1b(rows=64, length=32, vocab=2048)
    options = {**options_of("lm1b"), "cache": tmp_path, "compiler": "cpu"}
    r = mw.rehearse(step, *args, mesh="fsdp:4, tp:4", on="v5e:4x4", **options)
    costs = r.costs(check=True)
    first = costs[0]
    assert first.kind in ("activation all-reduced", "batch gathered") and first.over == "fsdp"
    assert "embed.attend" in linecache.getline(first.source.file, first.source.line)
    assert 'with_sharding_constraint(x, P("fsdp", *[P.UNCONSTRAINED] * 2))' in first.write
    # Constraints at all these lines, put into Flax's program from outside, pay.
    together = costs[len(costs) - 1]
    assert together.kind == "together" and not together.failed
    assert together.tried.time.total < 0.8 * r.time.total
    # With rules by somebody who knows the model there is less to save there.
    init, loss, tokens, rules = models_linen.lm1b_parts(rows=64, length=32, vocab=2048)
    by_hand = mw.rehearse(
        jax.value_and_grad(loss),
        init(),
        tokens,
        mesh="fsdp:4, tp:4",
        on="v5e:4x4",
        compiler="cpu",
        rules=rules,
        cache=tmp_path,
    )
    assert sum(c.seconds for c in by_hand.costs()) < sum(c.seconds for c in r.costs())


def arrays_of(args):
    return [leaf for leaf in jax.tree.leaves(args) if eqx.is_array(leaf)]


def place(name, args):
    """Place the arguments of a step as its rehearsal says they are."""
    found = mw.rehearse(
        lambda *args: arrays_of(args)[0], *args, mesh=MESH, cache=False, **options_of(name)
    )
    specs = [row.spec for row in found.arguments.rows]
    flat, treedef = jax.tree.flatten(args)
    numbers = [n for n, leaf in enumerate(flat) if eqx.is_array(leaf)]
    rows = dict(zip(numbers, specs, strict=True))
    return jax.tree.unflatten(
        treedef,
        [
            jax.device_put(leaf, NamedSharding(MESH, rows[n])) if n in rows else leaf
            for n, leaf in enumerate(flat)
        ],
    )


@pytest.mark.parametrize("name", STEPS)
def test_one_step_of_its_own_on_eight_devices_is_that_of_one(name):
    step, args = STEPS[name]()
    placed = place(name, args)
    assert any(len(leaf.sharding.device_set) == 8 for leaf in arrays_of(placed))
    got, expected = step(*placed), step(*args)
    losses = [float(jax.tree.leaves(eqx.filter(out, eqx.is_array))[-1]) for out in (got, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if name == "gemma":  # updated in place
        got, expected = nnx.state(placed[0]), nnx.state(args[0])
        assert not jnp.array_equal(args[0].embedder[...], models_nnx.gemma()[1][0].embedder[...])
    # Adam divides by the size of a gradient: where that is rounding alone, so is the step.
    pairs = zip(arrays_of(got), arrays_of(expected), strict=True)
    assert all(np.allclose(a, b, atol=2.5e-3) for a, b in pairs)


def test_gpt_neox_of_penzai_is_a_stack_and_has_names(models, on_one_device):
    model = models["neox"]
    # A tuple without a word in its paths: what shares the first dim of four is a stack of layers.
    specs = mw.partition(model.params, MESH, **BY_SHAPE)
    leaves = jax.tree.leaves(model.params)
    arrays = zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    stacked = [spec for array, spec in arrays if array.ndim > 1 and array.shape[0] == 4]
    assert len(stacked) > 8 and all(not spec or spec[0] is None for spec in stacked)
    table = models_penzai.NEOX_TABLE
    placed = mw.shard(model.params, MESH, logical=table, unmatched="replicate")
    assert mw.explain(placed, MESH).device_bytes < 0.5 * mw.explain(placed, MESH).bytes
    got = jax.jit(jax.value_and_grad(model.loss))(placed, by_rows(model.batch))
    assert_close(got, on_one_device["neox"])


def is_spec(value):
    return isinstance(value, PartitionSpec)
