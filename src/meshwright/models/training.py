"""What all models are told: precision, memory, stages, and how they learn."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import ModelError, near, short
from meshwright.pipelines.microbatching import value_and_grad
from meshwright.pipelines.stage_mark import stage_end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of every model.

    `params` and `compute` are dtypes: of what is stored, and of products. `remat` says what the
    backward pass computes again: "none", "full" (all but the input of each layer) or "dots" (all
    but the products with weights). `stages` are those of a pipeline. AdamW's learning rate rises
    over `warmup` steps and falls in a cosine until `steps`; gradients are cut to the norm `clip`.
    """

    stages: int = 1
    params: str = "float32"
    compute: str = "float32"
    remat: str = "none"
    learning_rate: float = 3e-4
    warmup: int = 2000
    steps: int = 100_000
    weight_decay: float = 0.1
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = field.metadata.get("least", 1)
            _check_type(field.name, str(field.type), getattr(self, field.name), least)
        if self.remat not in REMAT:
            raise ModelError(
                f"remat: {short(self.remat)} is not one of {', '.join(REMAT)}."
                f"{near(self.remat, REMAT)}"
            )
        for name in ("params", "compute"):
            _check_dtype(name, getattr(self, name))
        if self.warmup >= self.steps:
            raise ModelError(f"warmup: {self.warmup} steps of {self.steps} in all. Use fewer.")

    def check_parts(self, whole: str, part: str, why: str) -> None:
        """Refuse one size that does not divide another."""
        size, pieces = getattr(self, whole), getattr(self, part)
        if size % pieces:
            fits = [n for n in range(1, size + 1) if size % n == 0]
            raise ModelError(
                f"{whole}={size} is not divisible by {part}={pieces}: {why}. "
                f"Use {part} of {', '.join(map(str, fits[:12]))}, or another {whole}."
            )


def _check_type(name: str, kind: str, value: object, least: int) -> None:
    if kind == "int" and not _is_count(value, least):
        raise ModelError(f"{name}: {short(value)} is not a whole number of at least {least}.")
    if kind == "tuple[int, ...]" and not (
        isinstance(value, tuple) and value and all(_is_count(entry, least) for entry in value)
    ):
        raise ModelError(f"{name}: {short(value)} is not a tuple of whole numbers above 0.")
    if kind == "float" and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30
    ):
        raise ModelError(f"{name}: {short(value)} is not a finite number >= 0.")
    if kind == "str" and not isinstance(value, str):
        raise ModelError(f"{name}: {short(value)} is not a word.")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_dtype(name: str, value: str) -> None:
    try:
        good = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        good = False
    if not good:
        raise ModelError(f"{name}: {short(value)} is no dtype such as 'float32' or 'bfloat16'.")


# Learning: the optimizer, the state, a step.


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


# Layers in stages: a scan over the layers of each, a stage end between them.


Block = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

# What the backward pass finds in memory, by name: everything; what each layer began with; the
# results of matrix products with weights as well.
REMAT: dict[str, Callable[[Block], Block]] = {
    "none": lambda block: block,
    "full": lambda block: jax.checkpoint(block, prevent_cse=False),
    "dots": lambda block: jax.checkpoint(
        block,
        prevent_cse=False,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
}


def run_stages(
    block: Block, stages: Sequence[Any], x: jax.Array, *, remat: str
) -> tuple[jax.Array, Any]:
    """`block(x, layer) -> (x, notes)` through all layers; the notes come stacked."""
    notes = []
    for number, layers in enumerate(stages):
        if number:
            x = stage_end(x)
        x, found = jax.lax.scan(REMAT[remat](block), x, layers)
        notes.append(found)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *notes)


def cast(layer: Any, dtype: str) -> Any:
    """A layer's parameters as its computation wants them."""
    return jax.tree.map(lambda weight: weight.astype(dtype), layer)


# Made-up data with something in it to learn.


def synthetic_tokens(rows: int, length: int, vocab: int, seed: int) -> np.ndarray:
    """Rows in which a word tells the next one, by a rule that is the same for every seed."""
    alphabet = min(vocab, 32)
    follows = np.random.default_rng(0).permutation(alphabet)
    found = np.empty((rows, length), np.int32)
    found[:, 0] = np.random.default_rng(seed).integers(0, alphabet, rows)
    for place in range(1, length):
        found[:, place] = follows[found[:, place - 1]]
    return found


def synthetic_images(
    count: int, side: int, classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures and their classes; a class is a colour and a coarse pattern in it.

    What a class looks like is the same for every seed.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count).astype(np.int32)
    looks = np.random.default_rng(0)
    patterns = looks.normal(size=(classes, 1, 1, 3)) + looks.normal(size=(classes, 4, 4, 3))
    places = np.arange(side) * 4 // side
    clean = patterns[labels][:, places][:, :, places]
    return (clean + 0.3 * random.normal(size=clean.shape)).astype(np.float32), labels
