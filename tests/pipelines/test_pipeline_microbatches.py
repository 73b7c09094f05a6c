"""Tasks pick their own rows of the batch: no program cuts it, and none of it crosses devices."""

import jax
from pipeline_helpers import assert_same_step, batch, chain_loss, groups, layers

import meshwright as mw


def codes(step):
    """The compiled programs of a step, by name."""
    used = [operation.function for operation in step._cache.last().operations]
    return {code.name: code.compiled for code in used if code is not None}


def test_one_device_cuts_the_batch_without_a_program_of_its_own():
    step = assert_same_step(chain_loss, layers(2), *batch(), at=groups(2))
    assert not any("microbatches" in name for name in codes(step))


def test_several_devices_lay_the_batch_out_once_for_all_microbatches():
    at = mw.MpmdMesh(mw.mesh("pp:2, dp:2", devices=jax.devices()[:4]), "pp")
    step = assert_same_step(chain_loss, layers(2), *batch(16), at=at)
    found = codes(step)
    assert "group 0: microbatches" in found
    assert "all-" not in found["F0"].as_text() and "permute" not in found["F0"].as_text()


def test_the_last_microbatch_is_its_own():
    def loss(params, x):
        return (mw.stage_end(x @ params["w0"]) * x).sum(), x[0]

    step = mw.pipeline(loss, groups(2), microbatches=4, has_aux=True, aux="stack")
    x = batch()[0]
    (_, firsts), _ = step(layers(1), x)
    assert (firsts == x[::2]).all()
