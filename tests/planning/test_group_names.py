"""What groups of dims are called: by the part that they play, however a model is written."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.planning.dim_groups import find_groups
from meshwright.planning.group_names import data_values, name_kinds
from meshwright.planning.jit_options import read_arguments
from meshwright.planning.traced_program import read_program
from meshwright.planning.traced_step import trace_step

ROWS, SEQ, WIDTH, HEADS, DEPTH, VOCAB = 8, 64, 256, 4, 32, 512


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def names_of(loss, params, batch):
    """The name of every dim of the arguments of a train step, by path; and all names."""

    def step(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    names = ("params", "batch")
    parts, donated = read_arguments(step, (params, batch), names, 0)
    traced = trace_step(step, parts, names, donated)
    program = read_program(traced.closed)
    groups = find_groups(program, data_values(traced, program))
    every = name_kinds(traced, program, groups)
    dims = {
        path: [every[kind] if kind >= 0 else None for kind, _ in groups.layout[value]]
        for path, value in zip(traced.paths, program.arguments, strict=True)
    }
    return dims, every


def attend(x, w):
    """Attention as Linen has it: biases of heads and depth, and none of the width."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) + w[f"{n}_bias"] for n in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return x + jnp.einsum("bhst,bthd,hde->bse", scores, v, w["out"])


LAYER = {name: shape(WIDTH, HEADS, DEPTH) for name in ("q", "k", "v")}
LAYER |= {f"{name}_bias": shape(HEADS, DEPTH) for name in ("q", "k", "v")}
LAYER |= {"out": shape(HEADS, DEPTH, WIDTH)}
UNROLLED = {"table": shape(VOCAB, WIDTH), "layers": [LAYER] * 3}
TOKENS = shape(ROWS, SEQ, dtype="int32")


def unrolled(params, tokens):
    x = params["table"][tokens]
    for w in params["layers"]:
        x = attend(x, w)
    return jnp.mean(jax.nn.logsumexp(x @ params["table"].T, axis=-1))


def test_embed_is_the_width_where_heads_have_more_weights():
    dims, _ = names_of(unrolled, UNROLLED, TOKENS)
    assert dims["params/table"] == ["vocab", "embed"]
    assert dims["params/layers/0/q"][0] == dims["params/layers/2/out"][2] == "embed"
    assert dims["params/layers/0/q"][1] not in ("embed", None)
    assert dims["batch"] == ["batch", "seq"]


def test_names_are_unique_and_those_of_every_trace():
    _, first = names_of(unrolled, UNROLLED, TOKENS)
    _, second = names_of(unrolled, UNROLLED, TOKENS)
    assert first == second
    assert len(set(first)) == len(first)


def test_a_scale_along_the_width_makes_no_experts_of_it():
    def scaled(params, tokens):
        x = jnp.einsum("bse,e->bse", params["table"][tokens], params["scale"])
        return jnp.mean(jax.nn.logsumexp(attend(x, params["layer"]) @ params["table"].T, axis=-1))

    params = {"table": UNROLLED["table"], "layer": LAYER, "scale": shape(WIDTH)}
    dims, every = names_of(scaled, params, TOKENS)
    assert dims["params/scale"] == ["embed"]
    assert "experts" not in every


def test_seq_is_what_attention_goes_along_and_no_channels_of_images():
    def patches(params, images):
        rows, channels, *_ = images.shape
        x = images.reshape(rows, channels, SEQ, -1)
        x = jnp.einsum("bcsp,cpe->bse", x, params["patches"])
        return jnp.mean(attend(x, params["layer"]) ** 2)

    params = {"patches": shape(3, 16, WIDTH), "layer": LAYER}
    dims, every = names_of(patches, params, shape(ROWS, 3, 32, 32))
    assert "seq" in every and "queries" in every
    assert dims["batch"][:2] == ["batch", "params/patches dim 0"]


def test_weights_without_a_common_width_have_no_embed():
    def net(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    sizes = (256, 512, 1024, 768, 128)
    params = [shape(*pair) for pair in itertools.pairwise(sizes)]
    _, every = names_of(net, params, shape(4096, 256))
    assert "embed" not in every and "all weights" in every


def test_groups_of_our_models_are_called_by_their_parts():
    llama = mw.models.model("llama3-8b", layers=2)
    found = mw.plan(
        llama.train_step, llama.shapes(), llama.batch(16, 512), on="v5e:4x4", mesh="tp:16"
    )
    assert {"batch", "seq", "embed", "queries"} <= set(found.groups)
    moe = mw.models.model("moe-tiny")
    found = mw.plan(moe.train_step, moe.shapes(), moe.batch(16), on="v5e:2x4", mesh="tp:8")
    assert {"experts", "embed"} <= set(found.groups)


def test_what_a_step_returns_anew_is_no_data_though_it_is_not_donated():
    def step(params, moments, x):
        grads = jax.grad(lambda params: (jax.nn.relu(x @ params["w"]) @ params["v"]).mean())(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments

    params = {"w": shape(WIDTH, HEADS * WIDTH), "v": shape(HEADS * WIDTH, WIDTH)}
    x = shape(ROWS * SEQ, WIDTH)
    options = {"on": "v5e:2x4", "mesh": "dp:8", "keep": {"batch": "dp"}}
    p = mw.plan(step, params, params, x, **options)
    donated = mw.plan(step, params, params, x, donate_argnums=(0, 1), **options)
    assert p.in_specs[2][0] == "dp"
    assert [axis.shards for axis in p.axes] == [axis.shards for axis in donated.axes]
    assert p.groups == donated.groups


@pytest.mark.parametrize("inside", [True, False], ids=["cut in the step", "cut before"])
def test_rows_of_microbatches_are_the_batch(inside):
    def loss(params, batch):
        rows = batch["x"]
        rows = rows.reshape(4, -1, SEQ, WIDTH) if inside else rows

        def body(total, rows):
            return total + (jnp.tanh(rows @ params["w"]) @ params["v"]).mean(), None

        return jax.lax.scan(body, 0.0, rows)[0]

    params = {"w": shape(WIDTH, HEADS * WIDTH), "v": shape(HEADS * WIDTH, WIDTH)}
    x = shape(32, SEQ, WIDTH) if inside else shape(4, ROWS, SEQ, WIDTH)
    dims, names = names_of(loss, params, {"x": x})
    assert {"batch", "seq"} <= set(names)
    assert dims["batch/x"][-2] == "seq"
    if not inside:
        assert dims["batch/x"][:2] == [None, "batch"]
