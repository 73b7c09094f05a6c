"""What models train with: `Config`, the optimizer, a train step, stages, and synthetic data."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright._checks import check_integer
from meshwright._show import short_repr
from meshwright.errors import ModelError, short
from meshwright.models.remat import Block, check_remat, rematerialize
from meshwright.pipelines.microbatching import value_and_grad
from meshwright.pipelines.trace_marks import stage_end


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Config:
    """Settings of every model.

    `stages` are those of a pipeline. `params` and `compute` are dtypes: of what is stored, and of
    products. `remat` is one of `remat.POLICIES`: what the backward pass computes again. With
    "custom" it keeps the values called `saved` on the device and those called `offloaded` in the
    host's memory. `moments` is the dtype that AdamW's moments are stored in; "" is that of the
    parameters. A batch is computed in `accumulation` equal parts, one after the other, whose
    gradients are added up: the same step with fewer activations in memory. AdamW's learning rate
    rises over `warmup` steps and falls in a cosine until `steps`; gradients are clipped to the norm
    `clip`.
    """

    stages: int = 1
    params: str = "float32"
    compute: str = "float32"
    remat: str = "none"
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    moments: str = ""
    accumulation: int = 1
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
        check_remat(self.remat, self.saved, self.offloaded)
        for name in ("params", "compute", "moments"):
            if name != "moments" or self.moments:
                _check_dtype(name, getattr(self, name))
        if self.accumulation > 1 and self.stages > 1:
            raise ModelError(
                f"accumulation={self.accumulation} with stages={self.stages}: a pipeline cuts the "
                "batch itself. Use accumulation=1, and pipeline(..., microbatches=).",
                option="accumulation",
            )
        if self.warmup >= self.steps:
            raise ModelError(
                f"warmup: {self.warmup} steps of {self.steps} in all. Use fewer.", option="warmup"
            )

    def __repr__(self) -> str:
        """Show the settings that have no default or differ from it, as many as fit."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = [
            f"{field.name}={values[field.name]!r}"
            for field in dataclasses.fields(self)
            if values[field.name] != field.default
        ]
        return short_repr(self, ", ".join(changed))

    def rematerialized(self, block: Block) -> Block:
        """Return a block of layers that keeps what `remat` says for the backward pass."""
        return rematerialize(block, self.remat, self.saved, self.offloaded)

    def check_divides(self, size: str, divisor: str, why: str) -> None:
        """Refuse a setting that does not divide another, both by name."""
        whole, parts = getattr(self, size), getattr(self, divisor)
        if whole % parts:
            divisors = [n for n in range(1, whole + 1) if whole % n == 0]
            raise ModelError(
                f"{size}={whole} is not divisible by {divisor}={parts}: {why}. "
                f"Use {divisor} of {', '.join(map(str, divisors[:12]))}, or another {size}.",
                option=divisor,
            )


def _check_type(name: str, annotation: str, value: object, least: int) -> None:
    """Check a setting by the annotation of its field, which is text in these files."""
    if annotation == "int":
        check_integer(name, value, least=least, error=ModelError)
    if annotation == "tuple[int, ...]":
        if not isinstance(value, tuple) or not value:
            raise ModelError(f"{name}: {short(value)} is not a tuple of integers.", option=name)
        for at, entry in enumerate(value):
            check_integer(f"{name}[{at}]", entry, least=least, error=ModelError)
    if annotation == "tuple[str, ...]" and not (
        isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
    ):
        raise ModelError(f"{name}: {short(value)} is not a tuple of names.", option=name)
    if annotation == "bool" and not isinstance(value, bool):
        raise ModelError(f"{name}: {short(value)} is not True or False.", option=name)
    if annotation == "float" and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30
    ):
        raise ModelError(f"{name}: {short(value)} is not a finite number >= 0.", option=name)
    if annotation == "str" and not isinstance(value, str):
        raise ModelError(f"{name}: {short(value)} is not a string.", option=name)


def _check_dtype(name: str, value: str) -> None:
    try:
        is_float = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise ModelError(
            f"{name}: {short(value)} is no dtype such as 'float32' or 'bfloat16'.", option=name
        )


def make_optimizer(config: Config, decays: Any) -> Any:
    """Make AdamW on clipped gradients; `decays` is a tree of booleans, which weights decay."""
    optax: Any = importlib.import_module("optax")  # only training needs it; it takes a while

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
    chain = optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    return _store_moments(optax, chain, config.moments) if config.moments else chain


def _store_moments(optax: Any, inner: Any, dtype: str) -> Any:
    """Return an optimizer that keeps its state in another dtype, and computes in float32."""

    def convert(state: Any, to: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(to) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            state,
        )

    def init(params: Any) -> Any:
        return convert(inner.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(grads, convert(state, jnp.float32), params)
        return updates, convert(state, dtype)

    return optax.GradientTransformation(init, update)


def make_state(params: Any, optimizer: Any) -> dict[str, Any]:
    """Return everything that a step changes."""
    return {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}


def train_step(
    loss: Callable[..., Any], optimizer: Any, state: Any, batch: Any, accumulation: int = 1
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Take one step of training, of a batch in so many parts; return the next state and metrics."""
    optax: Any = importlib.import_module("optax")  # only training needs it; it takes a while

    params = state["params"]
    # Ours, not `jax.value_and_grad`: it marks what `pipeline` runs once per microbatch, and is the
    # same as JAX's where the step is not a pipeline.
    loss_and_grads = value_and_grad(loss, has_aux=True, aux="mean")
    if accumulation > 1:
        loss_and_grads = functools.partial(_in_parts, loss_and_grads, accumulation)
    (value, metrics), grads = loss_and_grads(params, batch)
    updates, opt = optimizer.update(grads, state["opt"], params)
    next_state = {
        "params": optax.apply_updates(params, updates),
        "opt": opt,
        "step": state["step"] + 1,
    }
    return next_state, {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}


# In: a function of parameters and a batch whose results are means over its rows, and parameters
# that its gradients have the shapes of. Out: the same means, with only the activations of a part in
# memory at once. Every device has rows of every part: a part is not the first rows, which few
# devices hold, but every so-manieth. Example: 8 rows in 2 parts are rows 0, 2, 4, 6 and 1, 3, 5, 7.
def _in_parts(function: Callable[..., Any], parts: int, params: Any, batch: Any) -> Any:
    """Compute means over the rows of a batch in equal parts, one after the other."""
    for rows in {leaf.shape[0] for leaf in jax.tree.leaves(batch)}:
        if rows % parts:
            raise ModelError(
                f"accumulation={parts} does not divide the {rows} rows of the batch. "
                "Use a multiple of it.",
                option="accumulation",
            )

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(params, part)), None

    pieces = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(function, params, jax.tree.map(lambda x: x[0], pieces))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, pieces)
    return jax.tree.map(lambda x: x / parts, total)


def run_stages(
    block: Block, stages: Sequence[Any], x: jax.Array, config: Config
) -> tuple[jax.Array, Any]:
    """Run `block(x, layer) -> (x, metrics)` through all layers; the metrics come stacked.

    `stages` holds the stacked parameters of each stage: a scan over each, a stage end between.
    """
    metrics = []
    block = config.rematerialized(block)
    for number, layers in enumerate(stages):
        if number:
            x = stage_end(x)
        x, stage_metrics = jax.lax.scan(block, x, layers)
        metrics.append(stage_metrics)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *metrics)


def cast(layer: Any, dtype: str) -> Any:
    """Convert a layer's parameters to the dtype it computes in."""
    return jax.tree.map(lambda weight: weight.astype(dtype), layer)


# Synthetic data has a rule in it that can be learned, so that a falling loss means something.


_FEW_WORDS = 512  # up to here a model is tiny, and shall learn the rule in some steps


def synthetic_tokens(rows: int, length: int, vocab: int, seed: int) -> np.ndarray:
    """Make rows in which a token tells the next one, by a rule that is the same for every seed.

    Of large vocabularies every other token does, and the tokens are spread like words of a text:
    the second most common one is half as common, and so on (Zipf). A gradient of an embedding adds
    up what the same token gets, so how often they meet is a part of how long it takes.
    """
    random, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    if vocab <= _FEW_WORDS:
        successor = fixed.permutation(min(vocab, 32))
        tokens = np.empty((rows, length), np.int32)
        tokens[:, 0] = random.integers(0, len(successor), rows)
        for position in range(1, length):
            tokens[:, position] = successor[tokens[:, position - 1]]
        return tokens
    words, successor = fixed.permutation(vocab), fixed.permutation(vocab)
    often = np.cumsum(1 / np.arange(1, vocab + 1))
    drawn = np.searchsorted(often, random.random((rows, (length + 1) // 2)) * often[-1])
    first = words[np.minimum(drawn, vocab - 1)]
    told = words[successor[np.minimum(drawn, vocab - 1)]]
    return np.stack([first, told], axis=-1).reshape(rows, -1)[:, :length].astype(np.int32)


def synthetic_images(
    count: int, side: int, classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Make noisy images and their classes; a class is a colour and a coarse pattern in it.

    The pattern of a class is the same for every seed.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count).astype(np.int32)
    fixed = np.random.default_rng(0)
    patterns = fixed.normal(size=(classes, 1, 1, 3)) + fixed.normal(size=(classes, 4, 4, 3))
    cells = np.arange(side) * 4 // side  # the cell of the pattern that each pixel lies in
    clean = patterns[labels][:, cells][:, :, cells]
    return (clean + 0.3 * random.normal(size=clean.shape)).astype(np.float32), labels
