"""Options of models: what the backward pass keeps, layers of other kinds, dtypes of moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import close, fresh, fresh_state

import meshwright as mw
from meshwright.errors import ModelError
from meshwright.models.remat import NAMES, POLICIES

QUICK = {"xla_backend_optimization_level": 0}


def tiny(**settings):
    return mw.models.model("tiny", layers=2, seq=32, **settings)


def loss_and_gradients(model, params=None, batch=None):
    params = fresh(model.weights()) if params is None else params
    batch = model.example(2) if batch is None else batch
    step = jax.jit(jax.value_and_grad(model.loss, has_aux=True), compiler_options=QUICK)
    (value, _), gradients = step(params, batch)
    return value, gradients


def kept(model):
    """Shapes of what the forward pass of a scan over layers hands to the backward pass."""
    shapes = model.shapes()["params"], model.batch(3)  # 3 rows, not as many as layers
    jaxpr = jax.make_jaxpr(jax.grad(lambda p, b: model.loss(p, b)[0]))(*shapes)
    forward = next(eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [var.aval for var in forward.outvars if var.aval.shape[:1] == (2,)]
    return sorted(str(aval) for aval in stacked)


INPUT = "float32[2,3,32,64]"
QKV = ["float32[2,3,32,2,16]", "float32[2,3,32,2,16]", "float32[2,3,32,4,16]"]
OUT = INPUT
WIDE = "float32[2,3,32,192]"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("none", "custom")])
def test_every_policy_computes_the_same(policy):
    close(loss_and_gradients(tiny(remat=policy)), loss_and_gradients(tiny()), rtol=1e-4, atol=1e-6)


def test_policies_keep_what_they_say():
    assert kept(tiny(remat="full")) == [INPUT]
    assert kept(tiny(remat="save_qkv")) == sorted([INPUT, *QKV])
    # A layer's last product is summed at once, and the backward pass does not need it.
    assert kept(tiny(remat="minimal")) == sorted([INPUT, *QKV, OUT, WIDE, WIDE])
    assert kept(tiny(remat="dots")) == kept(tiny(remat="minimal"))
    assert len(kept(tiny())) > 20
    custom = tiny(remat="custom", saved=("context", "decoder_layer_input"))
    assert kept(custom) == sorted([INPUT, "float32[2,3,32,4,16]"])


def test_offloaded_values_wait_on_the_host():
    model = tiny(remat="custom", offloaded=("decoder_layer_input", "query_proj"))
    assert kept(model) == ["float32<host>[2,3,32,4,16]", "float32<host>[2,3,32,64]"]


def test_unnamed_values_and_policies_are_refused():
    with pytest.raises(ModelError, match="'ful' is not one of none, full") as caught:
        tiny(remat="ful")
    assert caught.value.option == "remat"
    with pytest.raises(ModelError, match=r"no value is called 'query'.*Did you mean"):
        tiny(remat="custom", saved=("query",))
    with pytest.raises(ModelError, match="is in saved and in offloaded"):
        tiny(remat="custom", saved=("context",), offloaded=("context",))
    with pytest.raises(ModelError, match="1 name in saved and offloaded, and remat='full'"):
        tiny(remat="full", saved=("context",))
    with pytest.raises(ModelError, match="there are none"):
        tiny(remat="custom")
    with pytest.raises(ModelError, match="saved: 'context' is not a tuple of names"):
        tiny(remat="custom", saved="context")
    with pytest.raises(ModelError, match="convolutions do not have"):
        mw.models.model("conv-tiny", remat="minimal")
    assert len(set(NAMES)) == len(NAMES)


def test_layers_of_other_kinds_have_their_weights_and_learn():
    model = tiny(gated=False, activation="relu", parallel=True, tied=True, lookup="one_hot")
    params = fresh(model.weights())
    assert sorted(params["stages"][0]["mlp"]) == ["down", "up"]
    assert "kernel" not in params["head"]
    value, gradients = loss_and_gradients(model, params)
    assert np.isfinite(value)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


def test_a_parallel_layer_is_written_out():
    model = tiny(gated=False, activation="relu", parallel=True)
    layer = fresh(model._layer_weights())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32, 64)), "float32")
    plain = tiny(gated=False, activation="relu")
    out, _ = model._block(x, layer)
    # The sum of both halves, each of them alone on the one norm.
    silent = jax.tree.map(jnp.zeros_like, layer["mlp"])
    attention, _ = model._block(x, layer | {"mlp": silent})
    quiet = layer["attention"] | {"out": jnp.zeros_like(layer["attention"]["out"])}
    mlp = layer["mlp"] | {"norm": layer["attention"]["norm"]}
    forward, _ = plain._block(x, {"attention": quiet, "mlp": mlp})
    np.testing.assert_allclose(out, attention + forward - x, atol=1e-5)


@pytest.mark.slow
def test_one_hot_lookups_and_tiles_change_no_result():
    base = tiny()
    wanted = loss_and_gradients(base)
    for model in (tiny(lookup="one_hot"), tiny(tiles=4)):
        close(loss_and_gradients(model), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_tiles_keep_a_part_of_the_logits():
    def largest(model):
        grad = jax.jit(jax.grad(lambda p, b: model.loss(p, b)[0]))
        compiled = grad.lower(model.shapes()["params"], model.batch(8)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few = mw.models.model("tiny", layers=1, vocab=8192, seq=64)
    assert (
        largest(mw.models.model("tiny", layers=1, vocab=8192, seq=64, tiles=8)) < largest(few) / 2
    )


def test_tied_tables_count_once():
    tied, untied = tiny(tied=True), tiny()
    assert untied.parameters - tied.parameters == 256 * 64
    assert tied.flops(2) == untied.flops(2)


@pytest.mark.slow
@pytest.mark.parametrize(("products", "error"), [("int8", 0.03), ("fp8", 0.06)])
def test_products_in_eight_bits_are_near(products, error):
    value, gradients = loss_and_gradients(tiny(products=products))
    wanted, wanted_gradients = loss_and_gradients(tiny())
    assert float(value) == pytest.approx(float(wanted), rel=error)
    up, wanted_up = (tree["stages"][0]["mlp"]["up"] for tree in (gradients, wanted_gradients))
    difference = np.linalg.norm(up - wanted_up) / np.linalg.norm(wanted_up)
    assert 0 < difference < 3 * error


@pytest.mark.parametrize(
    ("products", "dtypes"), [("int8", {"i8"}), ("fp8", {"f8E4M3FN", "f8E5M2"})]
)
def test_products_in_eight_bits_are_in_the_program(products, dtypes):
    model = tiny(products=products)
    grad = jax.jit(jax.grad(lambda p, b: model.loss(p, b)[0]))
    text = grad.lower(model.shapes()["params"], model.batch(2)).as_text()
    found = [line for line in text.splitlines() if "dot_general" in line]
    for dtype in dtypes:
        assert any(f"x{dtype}>" in line for line in found), dtype


@pytest.mark.slow
def test_moments_are_stored_as_asked():
    model = tiny(moments="bfloat16")
    moments = model.shapes()["opt"][1][0]
    assert {leaf.dtype for leaf in jax.tree.leaves((moments.mu, moments.nu))} == {
        jnp.dtype("bfloat16")
    }
    assert moments.count.dtype == jnp.int32
    step = jax.jit(model.train_step, compiler_options=QUICK)
    after, _ = step(fresh_state(model), model.example(2))
    exact, _ = jax.jit(tiny().train_step, compiler_options=QUICK)(
        fresh_state(tiny()), model.example(2)
    )
    close(after["params"], exact["params"], atol=1e-3)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), exact["opt"][1][0].mu)
    close(
        jax.tree.map(lambda leaf: leaf.astype("float32"), after["opt"][1][0].mu),
        jax.tree.map(lambda leaf: leaf.astype("float32"), rounded),
        rtol=0.01,
    )


@pytest.mark.slow
def test_a_batch_in_parts_is_the_same_step():
    model, whole = tiny(accumulation=2), tiny()
    batch = model.example(4)
    after, metrics = jax.jit(model.train_step, compiler_options=QUICK)(fresh_state(model), batch)
    exact, expected = jax.jit(whole.train_step, compiler_options=QUICK)(fresh_state(whole), batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    close(after["opt"][1][0].mu, exact["opt"][1][0].mu, rtol=1e-3, atol=1e-6)
    with pytest.raises(ModelError, match="accumulation=2 does not divide the 3 rows") as caught:
        jax.eval_shape(model.train_step, model.shapes(), model.batch(3))
    assert caught.value.option == "accumulation"
    with pytest.raises(ModelError, match="a pipeline cuts the batch itself") as caught:
        tiny(accumulation=2, stages=2)
    assert caught.value.option == "accumulation"


def test_other_options_are_refused_by_name():
    for option, value, message in [
        ("attention", "flsh", "Did you mean 'flash'"),
        ("activation", "tanh", "not one of silu, gelu, relu"),
        ("lookup", "onehot", "Did you mean 'one_hot'"),
        ("products", "int4", "not one of compute, int8, fp8"),
        ("gated", 1, "gated: 1 is not True or False"),
        ("moments", "int8", "moments: 'int8' is no dtype"),
        ("accumulation", 0, "accumulation: 0"),
        ("blocks", 512, "blocks: 512 is not a Blocks"),
        ("tiles", 5, "seq=32 is not divisible by tiles=5"),
    ]:
        with pytest.raises(ModelError, match=message) as caught:
            tiny(**{option: value})
        assert caught.value.option == option
    with pytest.raises(ModelError, match="the first and the last stage would share"):
        tiny(tied=True, stages=2)
    with pytest.raises(ModelError, match="mixtures of experts have products='compute' alone"):
        mw.models.model("moe-tiny", products="int8")


@pytest.mark.slow
def test_the_stream_between_layers_can_be_split():
    model = mw.models.model("tiny", layers=1, split_embed=True)
    with jax.sharding.use_abstract_mesh(mw.abstract_mesh("fsdp:2, tp:4")):
        jaxpr = jax.make_jaxpr(model.loss)(model.shapes()["params"], model.batch(8))
    assert "PartitionSpec('fsdp', None, 'tp')" in str(jaxpr) or "P('fsdp', None, 'tp')" in str(
        jaxpr
    )
    close(loss_and_gradients(tiny(split_embed=True)), loss_and_gradients(tiny()), rtol=1e-5)
