"""The tiny models train for real on 8 simulated devices, split, and as one program."""

import re

import jax
import numpy as np
import pytest
from model_helpers import close, fresh, fresh_state

import meshwright as mw

pytestmark = pytest.mark.slow

MESHES = {
    "tiny": "dp:2, fsdp:2, tp:2",
    "moe-tiny": "fsdp:2, ep:2, tp:2",
    "vit-tiny": "dp:2, fsdp:2, tp:2",
    "conv-tiny": "dp:2, fsdp:2, tp:2",
}
STEPS = 10
QUICK = {"xla_backend_optimization_level": 0}


def quick(model):
    """Less work for the compiler, but for convolutions, which would crawl."""
    return {} if "conv" in model.name else QUICK


@pytest.fixture(scope="module", params=MESHES)
def trained(request):
    """A model, its first state, a batch, and steps on a mesh: losses, states, compiled text."""
    model = mw.models.model(request.param)
    mesh = mw.mesh(MESHES[request.param])
    first, batch = fresh_state(model), model.example(16)
    losses, states = [], []
    with jax.set_mesh(mesh):
        state = mw.shard(first, mesh, rules=model.rules(mesh))
        where = jax.tree.map(lambda leaf: leaf.sharding, state)
        rows = mw.shard(batch, mesh, model.batch_spec(mesh))
        step = jax.jit(model.train_step, out_shardings=(where, None), compiler_options=quick(model))
        step = step.lower(state, rows).compile()
        for _ in range(STEPS):
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
            states.append(state)
    return model, first, batch, losses, states, step.as_text()


def test_it_learns(trained):
    _, _, _, losses, states, _ = trained
    assert losses[-1] < 0.5 * losses[0], losses
    assert int(states[-1]["step"]) == STEPS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1]["params"]))


def test_the_split_step_equals_the_whole_one(trained):
    model, first, batch, losses, states, _ = trained
    whole, metrics = jax.jit(model.train_step, compiler_options=quick(model))(first, batch)
    assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-5)
    ours, theirs = states[0]["opt"][1][0], whole["opt"][1][0]
    close(ours.mu, theirs.mu, rtol=1e-3, atol=2e-6)  # a tenth of the gradients
    close(ours.nu, theirs.nu, rtol=2e-3, atol=1e-8)


def collectives(text, kind):
    """Shapes of the results of one kind of collective."""
    lines = [line for line in text.splitlines() if f" {kind}(" in line]
    return [re.findall(r"\w+\[([\d,]*)\]", line.split(f" {kind}(")[0]) for line in lines]


def test_words_stay_split_and_tokens_change_sides(trained):
    model, *_, text = trained
    gathered = {shape for shapes in collectives(text, "all-gather") for shape in shapes}
    if model.name in ("tiny", "moe-tiny"):
        assert "64,128" in gathered  # the head's words, split by tp
        assert not any("256" in shape.split(",") for shape in gathered)
    if model.name == "moe-tiny":
        assert len(collectives(text, "all-to-all")) == 4  # there and back, and so the gradients


def test_a_rematerialised_step_is_the_same():
    models = [mw.models.model("tiny", remat=how, layers=2) for how in ("none", "full", "dots")]
    params, batch = fresh(models[0].weights()), models[0].example(4, 16)
    grads = [
        jax.jit(jax.grad(model.loss, has_aux=True), compiler_options=QUICK)(params, batch)[0]
        for model in models
    ]
    close(grads[1], grads[0], atol=1e-5)
    close(grads[2], grads[0], atol=1e-5)


def test_a_split_sequence_gives_the_same_loss():
    model = mw.models.model("tiny", layers=2)
    mesh = mw.mesh("fsdp:2, sp:2, tp:2")
    params, batch = fresh(model.weights()), model.example(4, 32)
    whole, _ = jax.jit(model.loss, compiler_options=QUICK)(params, batch)
    with jax.set_mesh(mesh):
        params = mw.shard(params, mesh, rules=model.rules(mesh))
        rows = mw.shard(batch, mesh, model.batch_spec(mesh))
        split, _ = jax.jit(model.loss, compiler_options=QUICK)(params, rows)
    close(split, whole, rtol=1e-5)
