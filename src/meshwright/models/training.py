"""Learning: the optimizer, the state, a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ModelError
from meshwright.models.config import Config
from meshwright.mpmd import value_and_grad


def load_optax() -> Any:
    """Optax, which only training needs."""
    try:
        return importlib.import_module("optax")
    except ModuleNotFoundError as error:
        raise ModelError(
            'Training needs Optax, which is not installed: pip install "meshwright[models]".'
        ) from error


def make_optimizer(config: Config, decays: Any) -> Any:
    """AdamW on clipped gradients; `decays` is a tree of truths, which weights decay."""
    optax = load_optax()
    rate = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / config.warmup,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )
    adamw = optax.adamw(
        rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decays
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def make_state(params: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that a step changes."""
    return {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}


def train_step(
    loss: Callable[..., Any], optimizer: Any, state: Any, batch: Any
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Learn from one batch: the next state, and numbers to watch."""
    optax = load_optax()
    params = state["params"]
    differentiate = value_and_grad(loss, has_aux=True, aux="mean")
    (value, metrics), grads = differentiate(params, batch)
    updates, opt = optimizer.update(grads, state["opt"], params)
    after = {
        "params": optax.apply_updates(params, updates),
        "opt": opt,
        "step": state["step"] + 1,
    }
    return after, {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
