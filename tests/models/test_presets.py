"""Models by name: published sizes, nothing computed, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.models.presets import ModelSettings
from meshwright.models.weights import count_parameters

PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "resnet50": 25_557_032,
    # The class token and its place are not there: the patches' mean stands for them.
    "vit-b16": 86_567_656 - 2 * 768,
    "vit-l16": 304_326_632 - 2 * 1024,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    assert mw.models.model(name).parameters == PUBLISHED[name]


def test_experts_at_rest_are_not_active():
    assert mw.models.model("mixtral-8x7b").active_parameters == pytest.approx(12.88e9, rel=1e-3)
    many = mw.models.model("moe-256")
    assert many.parameters == pytest.approx(689e9, rel=1e-2)
    assert many.active_parameters == pytest.approx(33.7e9, rel=1e-2)
    assert mw.models.model("llama3-8b").active_parameters == PUBLISHED["llama3-8b"]


@pytest.mark.parametrize("name", mw.models.names())
def test_every_model_is_abstract_until_asked(name):
    model = mw.models.model(name)
    state = model.shapes()
    batch = model.batch(16)
    after, metrics = jax.eval_shape(model.train_step, state, batch)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    assert after == state
    assert all(leaf.shape == () for leaf in jax.tree.leaves(metrics))
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.float32.dtype}
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == model.parameters


@pytest.mark.parametrize("name", mw.models.names())
def test_products_are_computed_as_asked(name):
    model = mw.models.model(name)
    text = jax.make_jaxpr(model.loss)(model.shapes()["params"], model.batch(8)).pretty_print()
    products = [line for line in text.splitlines() if "= dot_general" in line]
    wide = [line for line in products if ":f32" in line.split("=")[0]]
    if model.config.compute == "bfloat16":
        assert len(wide) <= 4, wide  # scores of attention and of routers alone
    else:
        assert len(wide) == len(products)


@pytest.mark.parametrize("name", [name for name in mw.models.names() if "tiny" in name])
def test_examples_have_the_shapes_of_a_batch_and_follow_their_seed(name):
    model = mw.models.model(name)
    batch = model.example(4)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), model.batch(4)
    )
    again, other = model.example(4), model.example(4, seed=1)
    assert all(np.array_equal(batch[key], again[key]) for key in batch)
    assert not all(np.array_equal(batch[key], other[key]) for key in batch)


@pytest.mark.slow
def test_layers_begin_the_same_in_any_number_of_stages():
    models = [mw.models.model("tiny", layers=2, stages=stages) for stages in (1, 2)]
    quick = {"xla_backend_optimization_level": 0}
    one, two = (jax.jit(m.init, compiler_options=quick)(jax.random.key(7)) for m in models)
    joined = jax.tree.map(lambda *each: jnp.concatenate(each), *two["stages"])
    jax.tree.map(np.testing.assert_array_equal, joined, one["stages"][0])
    np.testing.assert_array_equal(one["head"]["kernel"], two["head"]["kernel"])
    layers = one["stages"][0]["mlp"]["up"]
    assert not np.allclose(layers[0], layers[1])


def test_matrices_alone_decay():
    model = mw.models.model("tiny")
    decaying = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, weight in jax.tree.leaves_with_path(model.weights())
        if weight.decays
    }
    assert not any("norm" in path for path in decaying)
    assert count_parameters(model.weights()) == model.parameters
    assert "stages/0/mlp/up" in decaying


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "lama3-8b",
            {},
            r"no model 'lama3-8b'\. Did you mean 'llama3-8b'\? Known: tiny, .*resnet50",
        ),
        (8, {}, r"no model 8\."),
        (
            "tiny",
            {"layer": 2},
            r"tiny has no setting 'layer'\. Did you mean 'layers'\? Its settings",
        ),
        (
            "tiny",
            {"layers": 4, "stages": 3},
            r"layers=4 is not divisible by stages=3.*Use stages of 1, 2, 4",
        ),
        ("tiny", {"layers": 0}, r"layers: 0 is not a positive integer"),
        ("tiny", {"layers": 2.0}, r"layers: 2\.0 is not a positive integer"),
        ("tiny", {"kv_heads": 3}, r"heads=4 is not divisible by kv_heads=3"),
        ("tiny", {"head": 15}, r"head=15 is odd"),
        (
            "tiny",
            {"remat": "ful"},
            r"remat: 'ful' is not one of none, full, minimal, dots, .*\. Did you mean 'full'",
        ),
        ("tiny", {"compute": "int8"}, r"compute: 'int8' is no dtype"),
        ("tiny", {"compute": "float23"}, r"compute: 'float23' is no dtype"),
        ("tiny", {"params": 4}, r"params: 4 is not a string"),
        ("tiny", {"learning_rate": -1.0}, r"learning_rate: -1\.0 is not a finite number"),
        ("tiny", {"warmup": 2000}, r"warmup: 2000 steps of 1000 in all"),
        ("moe-tiny", {"chosen": 9}, r"chosen=9 of experts=8"),
        ("vit-b16", {"image": 225}, r"image=225 is not divisible by patch=16"),
        ("conv-tiny", {"depths": (1, 0)}, r"depths\[1\]: 0 is not a positive integer"),
        ("conv-tiny", {"depths": 2}, r"depths: 2 is not a tuple of integers"),
        ("moe-tiny", {"shared": -1}, r"shared: -1 is not an integer of at least 0"),
        ("resnet50", {"stages": 3}, r"4 levels are not divisible by stages=3"),
    ],
)
def test_bad_requests_are_refused(name, overrides, message):
    with pytest.raises(mw.errors.ModelError, match=message):
        mw.models.model(name, **overrides)


@pytest.mark.parametrize("ask", ["batch", "example", "flops"])
@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("tiny", (4, 65), r"tiny: a sequence of 65 is longer than 64\. .*model\('tiny', seq=65\)"),
        ("tiny", (0, 8), r"tiny: batch: 0 is not a positive integer"),
        ("tiny", (4, 0), r"tiny: seq: 0 is not a positive integer"),
        ("vit-tiny", (4, 16), r"vit-tiny: takes images, which have no seq"),
        ("conv-tiny", (True,), r"conv-tiny: batch: True is not a positive integer"),
    ],
)
def test_bad_batches_are_refused(name, sizes, message, ask):
    with pytest.raises(mw.errors.ModelError, match=message):
        getattr(mw.models.model(name), ask)(*sizes)


def test_too_long_rows_are_refused_by_the_loss_as_well():
    model = mw.models.model("tiny", seq=8)
    batch = mw.models.model("tiny").batch(4, 16)
    with pytest.raises(mw.errors.ModelError, match="a sequence of 16 is longer than 8"):
        jax.eval_shape(model.loss, model.shapes()["params"], batch)


def test_a_batch_that_does_not_divide_names_the_sizes():
    mesh = mw.mesh("dp:2, fsdp:4")
    model = mw.models.model("tiny")
    with pytest.raises(mw.errors.PartitionError, match=r"dim 0 has size 12, not divisible by 8"):
        mw.shard(model.example(12), mesh, model.batch_spec(mesh))


def test_every_setting_of_every_model_is_typed():
    types = {}
    for name in mw.models.names():
        for field in dataclasses.fields(mw.models.model(name).config):
            types.setdefault(field.name, field.type)
    written = {key: kind.__forward_arg__ for key, kind in ModelSettings.__annotations__.items()}
    assert written == types


@pytest.mark.parametrize("name", mw.models.names())
def test_reprs_fit_in_200_characters(name):
    model = mw.models.model(name)
    assert len(repr(model)) <= 200 and len(repr(model.config)) <= 200
    assert name in repr(model)


def test_reprs_say_what_the_value_is():
    model = mw.models.model("tiny", layers=2)
    assert repr(model) == f"<Decoder tiny, {model.parameters:,} parameters>"
    assert repr(model.config).startswith("<DecoderConfig learning_rate=0.01, warmup=4, steps=1000")
    assert "layers=2, embed=64" in repr(model.config)
    assert "clip" not in repr(model.config)  # as it is by default
