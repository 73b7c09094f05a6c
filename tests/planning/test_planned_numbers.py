"""Planned steps of our own models compute what one device computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forced_plans import assert_equal_to_one_device, forced_mix, two_plans, with_lists

import meshwright as mw

PRESETS = [
    pytest.param("tiny", marks=pytest.mark.slow),
    pytest.param("moe-tiny", marks=pytest.mark.slow),
    pytest.param("vit-tiny", marks=pytest.mark.slow),
    pytest.param("conv-tiny", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_planned_step_gives_the_loss_and_the_state_of_one_device(preset):
    model = mw.models.model(preset)
    args = model.state(jax.random.key(0)), model.example(16)
    plans = two_plans(model.train_step, *args, donate_argnums=0)
    plans["mix"] = forced_mix(model.train_step, *args, donate_argnums=0)
    for name, plan in plans.items():
        specs = jax.tree.leaves(plan.in_specs if name == "best" else plan.in_specs[0])
        # The weights of conv-tiny are too small to cut; for channels see the test below.
        assert any(spec != jax.P() for spec in specs) or preset == "conv-tiny", name
        assert_equal_to_one_device(plan, *args)


def group_norm(x):
    parts = x.reshape(8, -1)
    parts = (parts - parts.mean(1, keepdims=True)) / jnp.sqrt(parts.var(1, keepdims=True) + 1e-5)
    return parts.reshape(x.shape)


def net(kernels, x):
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(group_norm(x)[None], kernel, (1, 1), "SAME")[0]
    return x


@pytest.mark.slow
def test_chained_convolutions_with_cut_channels_are_right():
    # With the same cuts as shardings of arguments alone, XLA's partitioner computes other numbers:
    # tools/shardy_convolution.py. The plan's constraints leave it no such choice.
    def step(kernels, x):
        def cost(kernels):
            return jnp.sum(jax.vmap(net, (None, 0))(kernels, x) ** 2)

        return jax.value_and_grad(cost)(kernels)

    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(64, 64, 3, 3)).astype("float32") / 24 for _ in range(2)]
    x = rng.normal(size=(8, 64, 8, 8)).astype("float32")
    expected = jax.tree.leaves(jax.jit(step)(kernels, x))
    plan = mw.plan(step, kernels, x, mesh="dp:2, fsdp:2, tp:2")
    layout = plan.costs.groups.layout
    *weights, data = plan.costs.program.arguments
    rows = plan.groups[layout[data][0][0]]
    channels = sorted({layout[value][dim][0] for value in weights for dim in (0, 1)} - {-1})
    assert len(channels) == 3
    seen = set()
    for fsdp, tp in itertools.permutations([plan.groups[kind] for kind in channels], 2):
        forced = with_lists(plan, [[rows], [rows, fsdp], [tp]])
        seen.add(forced.in_specs[0][0])
        got = jax.tree.leaves(forced.jit()(kernels, x))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.max(np.abs(b))))
    assert {jax.P("fsdp", "tp"), jax.P("tp", "fsdp")} <= seen
