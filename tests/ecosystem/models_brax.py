"""Proximal policy optimisation as brax has it, small: plain functions around two Linen networks.

`ppo_parts` returns the pieces (`init`, `loss`, `batch`, `rules`): a batch holds what a policy saw
and did, rows of environments by steps of time, and the loss scans back through time. `ppo` is the
training step around it, `(step, args)`: it normalises observations by running statistics, shuffles
the rows and scans over minibatches.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct


class Network(nn.Module):
    """A feed-forward network of equal layers."""

    width: int
    outputs: int

    @nn.compact
    def __call__(self, x):
        for number in range(3):
            x = nn.swish(nn.Dense(self.width, name=f"hidden_{number}")(x))
        return nn.Dense(self.outputs, name=f"hidden_{3}")(x)


def advantages(values, rewards, last, discount=0.97, trace=0.95):
    """Generalised advantages of (time, rows), from the last step back to the first."""
    deltas = rewards + discount * jnp.concatenate([values[1:], last[None]]) - values

    def back(sum_so_far, delta):
        sum_so_far = delta + discount * trace * sum_so_far
        return sum_so_far, sum_so_far

    return jax.lax.scan(back, jnp.zeros_like(last), deltas, reverse=True)[1]


def ppo_parts(width=64, rows=8, length=16, observed=32, actions=8):
    policy, value = Network(width, 2 * actions), Network(width, 1)
    keys = jax.random.split(jax.random.key(1), 4)
    batch = {
        "observation": jax.random.normal(keys[0], (rows, length, observed)),
        "action": jax.random.normal(keys[1], (rows, length, actions)),
        "reward": jax.random.normal(keys[2], (rows, length)),
        "log_prob": jax.random.normal(keys[3], (rows, length)),
    }

    def init():
        key, seen = jax.random.key(0), jnp.zeros((1, observed))
        return {"policy": policy.init(key, seen), "value": value.init(key, seen)}

    def loss(params, batch):
        mean, scale = jnp.split(policy.apply(params["policy"], batch["observation"]), 2, -1)
        scale = jax.nn.softplus(scale) + 1e-3
        log_prob = -0.5 * ((batch["action"] - mean) / scale) ** 2 - jnp.log(scale)
        values = value.apply(params["value"], batch["observation"])[..., 0].T
        gains = jax.lax.stop_gradient(advantages(values, batch["reward"].T, values[-1]))
        ratio = jnp.exp(0.1 * (log_prob.sum(-1) - batch["log_prob"])).T
        clipped = jnp.clip(ratio, 0.7, 1.3)
        surrogate = jnp.minimum(ratio * gains, clipped * gains)
        errors = jax.lax.stop_gradient(values + gains) - values
        return -surrogate.mean() + 0.25 * jnp.mean(errors**2) - 1e-2 * jnp.log(scale).mean()

    rules = [
        (r"hidden_(0|2)/kernel", ("fsdp", "tp")),
        ("hidden_1/kernel", ("tp", "fsdp")),
        ("policy/params/hidden_3/kernel", ("tp", "fsdp")),
        ("value/params/hidden_3/kernel", ("tp", None)),
        ("**", None),
    ]
    return init, loss, batch, rules


@struct.dataclass
class TrainingState:
    """What brax keeps between steps; the optimizer's state comes first."""

    optimizer_state: optax.OptState
    params: dict
    normalizer: dict
    env_steps: jax.Array


def ppo(minibatches=4, **sizes):
    """One round of updates, a minibatch after the other."""
    init, loss, batch, _ = ppo_parts(**{"rows": 32, **sizes})
    optimizer, params = optax.adam(3e-4), init()
    zero = jnp.zeros(batch["observation"].shape[-1])
    state = TrainingState(
        optimizer.init(params), params, {"mean": zero, "square": zero}, jnp.zeros((), "int32")
    )

    def minibatch(carry, data):
        optimizer_state, params = carry
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return (optimizer_state, optax.apply_updates(params, updates)), value

    @jax.jit
    def step(state, batch, key):
        seen = batch["observation"]
        normalizer = {
            "mean": 0.9 * state.normalizer["mean"] + 0.1 * seen.mean((0, 1)),
            "square": 0.9 * state.normalizer["square"] + 0.1 * (seen**2).mean((0, 1)),
        }
        scale = jax.lax.rsqrt(normalizer["square"] + 1e-3)
        data = {**batch, "observation": (seen - normalizer["mean"]) * scale}
        order = jax.random.permutation(key, seen.shape[0])
        data = jax.tree.map(lambda x: x[order].reshape(minibatches, -1, *x.shape[1:]), data)
        first = (state.optimizer_state, state.params)
        (optimizer_state, params), values = jax.lax.scan(minibatch, first, data)
        steps = state.env_steps + seen.shape[0] * seen.shape[1]
        return TrainingState(optimizer_state, params, normalizer, steps), values.mean()

    return step, (state, batch, jax.random.PRNGKey(3))
