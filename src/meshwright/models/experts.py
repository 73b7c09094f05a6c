"""A mixture of experts: a router sends each token to a few of many feed-forward layers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.feedforward import swiglu, swiglu_weights
from meshwright.models.layouts import constrain
from meshwright.models.weights import matrix


@dataclasses.dataclass(frozen=True)
class Routes:
    """Where the tokens of each row go, all arrays (batch, seq, chosen).

    `slots` are places in the experts' queues, counted through from the first expert's to the
    last's; one behind the end stands for a queue that was full. `shares` weigh the answers.
    """

    slots: jax.Array
    shares: jax.Array


def expert_weights(embed: int, mlp: int, experts: int, shared: int) -> dict[str, Any]:
    """A router, the experts, and `shared` more experts that see every token."""
    up = matrix(embed, experts=experts, expert_embed=embed, mlp=mlp)
    weights: dict[str, Any] = {
        "router": matrix(embed, embed=embed, router=experts),
        "gate": up,
        "up": up,
        "down": matrix(mlp, experts=experts, mlp=mlp, expert_embed=embed),
    }
    if shared:
        weights["shared"] = swiglu_weights(embed, shared * mlp)
    return weights


def mixture(
    params: Any, x: jax.Array, *, chosen: int, capacity: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Each token through its `chosen` experts, and what to watch.

    Every expert has a queue per row of the batch, `capacity` times as long as an even spread
    would need; tokens that find it full go without. Where experts and the batch are split over
    the same axis, the queues change sides in an all-to-all before the experts, and in another
    after them.
    """
    experts = params["router"].shape[-1]
    length = math.ceil(capacity * chosen * x.shape[1] / experts)
    x = constrain(x, "batch", None, None)
    scores = jnp.einsum("bsd,de->bse", x, params["router"], preferred_element_type=jnp.float32)
    routes, notes = route(scores, chosen, length)
    answers = _ask(params, _queue(x, routes.slots, experts * length), experts)
    out = _collect(answers, routes)
    if "shared" in params:
        out += swiglu(params["shared"], x)
    return out, notes


def route(scores: jax.Array, chosen: int, length: int) -> tuple[Routes, dict[str, jax.Array]]:
    """Places for every token in the queues of its best experts, from (batch, seq, experts).

    First choices are served before second ones, earlier tokens before later ones. `balance` is 1
    when every expert gets the same share, and its gradient pulls towards that; it is a mean over
    rows, so a batch may be cut into microbatches.
    """
    batch, seq, experts = scores.shape
    odds = jax.nn.softmax(scores, axis=-1)
    # A sort is split with the batch; for `top_k` the compiler may gather the whole of it.
    picks = jnp.argsort(jax.lax.stop_gradient(-scores), axis=-1)[..., :chosen]
    is_pick = jax.nn.one_hot(picks, experts, dtype=jnp.int32)
    shares = jnp.sum(odds[:, :, None] * is_pick, axis=-1)
    shares /= shares.sum(axis=-1, keepdims=True)

    in_line = is_pick.swapaxes(1, 2).reshape(batch, chosen * seq, experts)
    place = jnp.sum((jnp.cumsum(in_line, axis=1) - 1) * in_line, axis=-1)
    place = place.reshape(batch, chosen, seq).swapaxes(1, 2)
    fits = place < length
    slots = jnp.where(fits, picks * length + place, experts * length)

    taken = in_line.mean(axis=1)
    balance = experts * jnp.mean(jnp.sum(taken * odds.mean(axis=1), axis=-1))
    dropped = 1.0 - jnp.mean(fits, dtype=jnp.float32)
    return Routes(slots, shares), {"balance": balance, "dropped": dropped}


def _queue(x: jax.Array, slots: jax.Array, places: int) -> jax.Array:
    """Tokens in their places, (batch, places, embed); empty places hold zeros."""
    seq, chosen = slots.shape[1:]
    tokens = jnp.repeat(jnp.arange(seq), chosen)

    def one(row: jax.Array, slots: jax.Array) -> jax.Array:
        source = jnp.full(places, seq).at[slots.reshape(-1)].set(tokens, mode="drop")
        return row.at[source].get(mode="fill", fill_value=0)

    return jax.vmap(one)(x, slots)


def _ask(params: Any, queues: jax.Array, experts: int) -> jax.Array:
    """Every expert works on its own queue."""
    batch, places, embed = queues.shape
    queues = constrain(queues, "batch", None, None)
    queues = queues.reshape(batch, experts, places // experts, embed)
    queues = constrain(queues, "rows", "experts", None, None)
    gate = jnp.einsum("becd,edf->becf", queues, params["gate"])
    up = jnp.einsum("becd,edf->becf", queues, params["up"])
    wide = constrain(jax.nn.silu(gate) * up, "rows", "experts", None, "mlp")
    answers = jnp.einsum("becf,efd->becd", wide, params["down"])
    answers = constrain(answers, "rows", "experts", None, None)
    answers = constrain(answers, "batch", None, None, None)
    return answers.reshape(batch, places, embed)


def _collect(answers: jax.Array, routes: Routes) -> jax.Array:
    """The answers to each token, weighed and summed."""

    def one(answers: jax.Array, slots: jax.Array) -> jax.Array:
        return answers.at[slots].get(mode="fill", fill_value=0)

    found = jax.vmap(one)(answers, routes.slots)
    return jnp.einsum("bskd,bsk->bsd", found, routes.shares.astype(found.dtype))
