"""What offloading moves between devices and hosts, by the vendors' compilers."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw

pytestmark = pytest.mark.compilers

LAYERS, WIDTH, ROWS = 4, 1024, 8192
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)


def step(w, x, policy):
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "input") @ w), None

    def loss(w):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].mean()

    value, grads = jax.value_and_grad(loss)(w)
    return w - grads, value


@pytest.mark.parametrize(("on", "bus"), [("v5e:2x4", 15e9), ("h100:8", 0.84 * 63e9)])
def test_every_layers_input_goes_to_the_host_and_back(on, bus):
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")

    def rehearse(policy):
        return mw.rehearse(lambda w, x: step(w, x, policy), w, x, mesh="fsdp:8", on=on)

    result = rehearse(OFFLOAD)
    found, time = result.host_transfers, result.time
    size = LAYERS * ROWS * WIDTH * 4 // 8
    assert (found.to_host, found.to_device, found.transfers) == (size, size, 2 * LAYERS)
    assert found.seconds == pytest.approx(size / bus)
    # Both ways together take twice that; kernels of a layer hide a part of its transfers.
    assert time.host_exposed + time.host_hidden == pytest.approx(2 * size / bus)
    assert time.host_hidden > 0 and time.host_exposed > 0
    assert "Offloaded: 16 MiB to the host and 16 MiB back" in str(result)
    assert result.to_json()["host_transfers"]["to_host"] == size
    host = result.host_memory
    assert (host.temporaries, host.peak) == (size, size)
    assert host.buffers[0].bytes == size
    assert (host.devices, host.limit) == (8, 384 * 10**9 if "v5e" in on else None)
    assert result.fits and not result.offload_lost
    kept = rehearse(None)
    assert kept.host_transfers is None and kept.host_memory is None
    assert kept.time.host_exposed == kept.time.host_hidden == 0.0
    assert "Offloaded" not in str(kept)


def update(w, moments):
    return w - jax.device_put(moments, jax.memory.Space.Device)


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:8"])
def test_an_argument_on_the_host_stays_there_until_the_step_takes_it(on):
    # Not on `mw.mesh(..., on=...)`: JAX forgets the memory of GPUs that are not here.
    lies = NamedSharding(
        mw.abstract_mesh("fsdp:8"), PartitionSpec("fsdp"), memory_kind="pinned_host"
    )
    moments = jax.ShapeDtypeStruct((4096, 1024), "float32", sharding=lies)
    w = jax.ShapeDtypeStruct((4096, 1024), "float32")
    result = mw.rehearse(update, w, moments, mesh="fsdp:8", on=on)
    size = 4096 * 1024 * 4 // 8
    assert result.host_memory.arguments == size
    assert result.memory.arguments == size
    found = result.host_transfers
    assert (found.to_host, found.to_device) == (0, size)
    assert result.time.host_exposed > 0
    assert "taken to be on the device" not in str(result)


def unrolled(w, x, prevent_cse):
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "input") @ w)

    remat = jax.checkpoint(layer, policy=OFFLOAD, prevent_cse=prevent_cse)

    def loss(w):
        y = x
        for number in range(LAYERS):
            y = remat(y, w[number])
        return y.mean()

    value, grads = jax.value_and_grad(loss)(w)
    return w - grads, value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "prevent_cse", "lost"),
    [("h100:8", False, True), ("h100:8", True, False), ("v5e:2x4", False, False)],
)
def test_offloading_that_the_compiler_drops_is_told(on, prevent_cse, lost):
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    result = mw.rehearse(
        lambda w, x: unrolled(w, x, prevent_cse), w, x, mesh="fsdp:8", on=on, name="unrolled"
    )
    assert result.offload_lost is lost
    assert (result.host_transfers is None) is lost
    told = "the compiled program moves nothing there" in str(result)
    assert told is lost
    assert result.to_json()["offload_lost"] is lost
