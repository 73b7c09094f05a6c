"""Pipelines rehearsed by the vendors' real compilers."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.rehearsal.tpu_slices import slice_for, stand_in_name

pytestmark = pytest.mark.compilers


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def loss(params, x):
    x = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((x @ params["b"]) ** 2)


def rehearsed(on, spec, cache, width=256):
    step = mw.pipeline(loss, mw.MpmdMesh(mw.mesh(spec, on=on), "pp"), microbatches=4)
    weight = jax.ShapeDtypeStruct((width, width), "float32")
    batch = jax.ShapeDtypeStruct((64, width), "float32")
    return mw.rehearse_pipeline(step, {"a": weight, "b": weight}, batch, cache=cache)


WORLDS = [
    ("v5e:2x4", "pp:2, dp:4"),
    ("h100:8", "pp:2, dp:4"),
    # libtpu aborts the process, or fails, for these groups as parts of their slice.
    ("v5e:4x4", "pp:2, fsdp:8"),
    ("v5e:4x2", "pp:2, dp:4"),
    ("v5e:4x4", "pp:2, dp:8"),
]


@pytest.mark.parametrize(("on", "spec"), WORLDS)
def test_a_pipeline_on_groups_that_are_not_here(on, spec, cache):
    found = rehearsed(on, spec, cache)
    assert found.fits
    assert [task.name for group in found.groups for task in group.tasks] == [
        *("0F", "0BW"),
        *("1F", "1BW"),
    ]
    parts = 8 if "fsdp" in spec else 1
    for group in found.groups:
        assert group.memory.limit > 10 * 2**30
        assert group.memory.arguments >= 4 * 256 * 256 // parts
        assert any(task.collectives.moved for task in group.tasks)


def test_what_was_compiled_before_is_kept(cache, monkeypatch):
    first = rehearsed("v5e:2x4", "pp:2, dp:4", cache)
    monkeypatch.setattr("meshwright.rehearsal.compiler.Compiler.run", None)
    again = rehearsed("v5e:2x4", "pp:2, dp:4", cache)
    assert again.to_json() == first.to_json()


def test_a_group_that_does_not_fit_is_told(cache):
    found = rehearsed("v5e:2x4", "pp:2, dp:4", cache, width=2**16)
    assert not found.fits
    assert found.refused.startswith("group 0: ")
    assert "group 0: does NOT fit: " in str(found)
    assert "ran out of memory at group 0" in str(found) and "<p>" in found._repr_html_()
    assert found.to_json()["timeline"] is None


@pytest.mark.parametrize(
    ("on", "spec", "name", "positions", "odd"),
    [
        ("v5e:4x4", "pp:2, fsdp:8", "v5e:2x4", [0, 1, 2, 3, 7, 6, 5, 4], False),
        ("v5e:4x2", "pp:2, dp:4", "v5e:2x2", [0, 1, 3, 2], False),
        ("v5e:4x4", "pp:4, dp:4", "v5e:2x2", [0, 1, 3, 2], True),  # a chip of each host
        ("v5e:4x4", "pp:8, dp:2", "v5e:2x2", [0, 1], True),
        ("v5p:2x2x4", "pp:2, dp:8", "v5p:2x2x2", [0, 1, 3, 2, 6, 7, 5, 4], True),
        ("h100:8x2", "pp:2, dp:8", "h100:4x2", [0, 1, 2, 3, 4, 5, 6, 7], False),
    ],
)
def test_groups_are_compiled_for_hardware_that_can_be_had(on, spec, name, positions, odd):
    groups = mw.MpmdMesh(mw.mesh(spec, on=on), "pp")
    for mesh in groups.meshes:
        hardware, places = slice_for(mesh)
        assert hardware.name == name
        assert places.tolist() == positions
        assert stand_in_name(mesh) == (name if odd else "")


def noisy_loss(params, x):
    jax.debug.print("{}", x.sum())
    x = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((x @ params["b"]) ** 2)


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_callbacks_are_left_out_of_the_tasks_and_listed(on, cache):
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4", on=on), "pp")
    step = mw.pipeline(noisy_loss, groups, microbatches=4)
    weight = jax.ShapeDtypeStruct((256, 256), "float32")
    batch = jax.ShapeDtypeStruct((64, 256), "float32")
    result = mw.rehearse_pipeline(step, {"a": weight, "b": weight}, batch, cache=cache)
    [callback] = result.callbacks
    assert callback.kind == "debug.print"
    assert "1 callback left out of the program" in str(result)
    assert result.to_json()["callbacks"][0]["kind"] == "debug.print"


BATCH, ROWS, HEADS, HEAD = 16, 512, 4, 64


def attention_loss(params, x):
    def layer(w, x):
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], HEADS, 3 * HEAD), 3, axis=-1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return y.reshape(x.shape)

    x = mw.stage_end(layer(params["a"], x))
    return jnp.mean(layer(params["b"], x).astype("float32") ** 2)


def test_attention_of_cudnn_in_a_task_has_its_time_and_its_workspace(cache):
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4", on="h100:8"), "pp")
    step = mw.pipeline(attention_loss, groups, microbatches=2)
    width = HEADS * HEAD
    weight = jax.ShapeDtypeStruct((width, 3 * width), "bfloat16")
    batch = jax.ShapeDtypeStruct((BATCH, ROWS, width), "bfloat16")
    result = mw.rehearse_pipeline(step, {"a": weight, "b": weight}, batch, cache=cache)
    workspace = 256 + 4 * (BATCH // 2 // 4) * ROWS * HEADS * (HEAD + 1)
    for group in result.groups:
        kinds = {kernel.kind for task in group.tasks for kernel in task.time.custom}
        assert kinds == {"cuDNN attention"}
        backward = next(task for task in group.tasks if task.kind == "BW")
        assert backward.temporaries >= workspace
        assert group.memory.temporaries >= workspace


def offloading_loss(params, x):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x, "input") @ w), None

    def layers(x, w):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0]

    x = mw.stage_end(layers(x, params["a"]))
    return jnp.mean(layers(x, params["b"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_what_a_forward_leaves_on_the_host_its_backward_takes_from_there(on, cache):
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4", on=on), "pp")
    step = mw.pipeline(offloading_loss, groups, microbatches=2)
    weight = jax.ShapeDtypeStruct((4, 1024, 1024), "float32")
    batch = jax.ShapeDtypeStruct((2048, 1024), "float32")
    result = mw.rehearse_pipeline(step, {"a": weight, "b": weight}, batch, cache=cache)
    size = 4 * 2048 // 2 // 4 * 1024 * 4  # layers x rows of a microbatch on a device
    for group in result.groups:
        tasks = {str(task.kind): task for task in group.tasks}
        assert tasks["F"].host_transfers.to_host == size
        if on.startswith("v5e"):
            assert tasks["BW"].host_transfers.to_device == size
            assert tasks["BW"].time.host_exposed + tasks["BW"].time.host_hidden > 0
            # 1F1B with two stages: the first group holds two microbatches, the last one.
            assert group.host_memory.peak == (2 - group.group) * size
            assert (group.host_memory.devices, group.host_memory.fits) == (4, True)
    assert not result.offload_lost
    assert ("is taken to come back in no time" in str(result)) == on.startswith("h100")
    assert "Offloaded: 4 MiB to the host" in str(result)
    if on.startswith("v5e"):
        assert "group 0: fits the host: 32 MiB of the host's memory for 4 devices" in str(result)
