"""Callbacks are left out of a rehearsed program, and told; kernels for other hardware are named."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.errors import RehearsalError

W = jax.ShapeDtypeStruct((4, 256, 256), "float32")
X = jax.ShapeDtypeStruct((64, 256), "float32")
SCALAR = jax.ShapeDtypeStruct((), "float32")


def forward(w, x, calls):
    def layer(x, w):
        if calls:
            jax.debug.print("{}", x.sum())
        return jnp.tanh(x @ w), None

    y = jax.lax.scan(jax.checkpoint(layer), x, w)[0]
    if calls:
        jax.debug.callback(lambda value: None, y[0, 0])
        jax.debug.inspect_array_sharding(y, callback=print)
    return (y**2).mean()


def step(w, x):
    loss, grads = jax.value_and_grad(forward)(w, x, True)
    return w - grads, loss


def quiet_step(w, x):
    loss, grads = jax.value_and_grad(forward)(w, x, False)
    return w - grads, loss


def asking_step(w, x):
    scale = jax.pure_callback(np.mean, SCALAR, x)
    grads = jax.grad(forward)(w, x, False)
    noise = io_callback(np.mean, SCALAR, scale, ordered=True)  # which JAX can cut over devices
    return w - scale * grads + noise


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def rehearse(function, cache, *args, mesh="fsdp:8", on="cpu:8"):
    return mw.rehearse(function, *(args or (W, X)), mesh=mesh, on=on, cache=cache)


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    (at,) = (start + number for number, line in enumerate(lines) if text in line)
    return f"test_callbacks.py:{at}"


def test_a_step_with_callbacks_is_the_step_without_and_a_list(cache):
    found, quiet = rehearse(step, cache), rehearse(quiet_step, cache)
    kinds = ["debug.print", "debug.callback", "debug.inspect_array_sharding"]
    assert [one.kind for one in found.callbacks] == kinds
    assert [str(one.source) for one in found.callbacks] == [
        line_of(forward, f"jax.{kind}(") for kind in kinds
    ]
    assert quiet.callbacks == ()
    assert found.memory.parts() == quiet.memory.parts()
    assert found.flops == quiet.flops
    assert "custom-call" not in found.text


def test_callbacks_are_told_in_text_html_and_json(cache):
    found = rehearse(step, cache)
    place = line_of(forward, "jax.debug.print(")
    line = f"3 callbacks left out of the program, and of its time: debug.print at {place}, "
    assert line in str(found)
    assert line in found._repr_html_()
    assert found.to_json()["callbacks"][0] == {
        "kind": "debug.print",
        "source": place,
        "returns": False,
    }
    quiet = rehearse(quiet_step, cache)
    assert "left out" not in str(quiet)
    assert quiet.to_json()["callbacks"] == []


def test_what_callbacks_return_is_zeros_that_are_not_folded_away(cache):
    found = rehearse(asking_step, cache)
    assert [(one.kind, one.returns) for one in found.callbacks] == [
        ("pure_callback", True),
        ("io_callback", True),
    ]
    assert "What they return is taken to be zeros." in str(found)
    assert found.flops == rehearse(quiet_step, cache).flops  # the gradients that zero scales


def test_the_step_itself_keeps_its_callbacks(cache, capsys):
    @jax.jit
    def loud(x):
        jax.debug.print("sum {}", x.sum())
        return x

    assert rehearse(loud, cache, X).callbacks
    loud(jnp.ones(2)).block_until_ready()
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 2.0\n"


def ordered_step(w):
    jax.debug.print("{}", w.sum(), ordered=True)
    return w * 2


def test_ordered_callbacks_are_refused_on_several_devices_as_jax_does(cache):
    place = line_of(ordered_step, "ordered=True")
    match = rf"debug\.print at {place}: ordered=True on 8 devices\. JAX refuses.*ordered=False"
    with pytest.raises(RehearsalError, match=match):
        rehearse(ordered_step, cache, W)
    sharded = jax.device_put(np.ones((8, 8)), NamedSharding(mw.mesh("fsdp:8"), PartitionSpec()))
    with pytest.raises(ValueError, match="ordered effects are not supported for more than 1"):
        jax.jit(ordered_step)(sharded)
    assert len(rehearse(ordered_step, cache, W, mesh="fsdp:1", on="cpu:1").callbacks) == 1


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def kernel_step(x):
    return pl.pallas_call(double, out_shape=x)(x)


def test_a_kernel_on_a_cpu_is_told_where_it_belongs(cache):
    place = line_of(kernel_step, "pallas_call")
    match = rf"another platform: {place} is for TPUs or GPUs, and the program is for cpu"
    with pytest.raises(RehearsalError, match=match):
        rehearse(kernel_step, cache, X)


def halves(x):
    return x / 2


def partition_rows(mesh, arguments, result):
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    return mesh, halves, rows, (rows,)


def cut(partition):
    function = custom_partitioning(halves)
    function.def_partition(partition=partition, sharding_rule="i j -> i j")
    return function


def test_a_function_with_custom_partitioning_is_cut_as_it_says(cache):
    function = cut(partition_rows)
    specs = [PartitionSpec(None, "fsdp")]
    found = mw.rehearse(
        lambda x: function(x), X, mesh="fsdp:8", on="cpu:8", in_shardings=specs, cache=cache
    )
    assert [entry.kind for entry in found.collectives] == ["all-to-all"] * 2  # to rows, back
    assert found.memory.outputs == 64 * 256 * 4 // 8


def test_partitioners_that_cannot_be_sent_are_named(cache):
    def partition(mesh, arguments, result):
        return partition_rows(mesh, arguments, result)

    function = cut(partition)
    match = r"custom_partitioning: <function .*partition.* cannot be sent to the compiling process"
    with pytest.raises(RehearsalError, match=match):
        rehearse(lambda x: function(x), cache, X)
