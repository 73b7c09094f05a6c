"""Models as pipelines: the same loss and gradients as one program."""

import jax
import numpy as np
import pytest
from model_helpers import close, fresh

import meshwright as mw

pytestmark = pytest.mark.slow


def test_a_decoder_in_two_stages_has_the_loss_and_gradients_of_one_program():
    model = mw.models.model("tiny", stages=2)
    params, batch = fresh(model.weights()), model.example(8, 16)
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:2, tp:2"), "pp")
    step = mw.pipeline(model.loss, groups, microbatches=2, has_aux=True, aux="mean")
    (value, _), grads = step(params, batch)
    (wanted, _), slopes = jax.jit(jax.value_and_grad(model.loss, has_aux=True))(params, batch)
    close(value, wanted, rtol=1e-5)
    close(grads, slopes, atol=1e-5)


@pytest.mark.parametrize("name", ["moe-tiny", "vit-tiny", "conv-tiny"])
def test_the_other_models_go_through_two_stages(name):
    model = mw.models.model(name, stages=2)
    params, batch = fresh(model.weights()), model.example(8)
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    step = mw.pipeline(model.loss, groups, schedule="forward", microbatches=2)
    values, metrics = step(params, batch)
    wanted, notes = jax.jit(model.loss)(params, batch)
    close(np.mean(np.asarray(values)), wanted, rtol=1e-4)
    close({key: np.mean(np.asarray(value)) for key, value in metrics.items()}, notes, rtol=1e-4)
