"""All models of this folder in one form, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from models_brax import ppo_parts
from models_equinox import bert_parts, unet_parts, vit_parts
from models_linen import lm1b_parts, resnet_parts
from models_nnx import gemma_parts
from models_penzai import neox_parts
from models_transformers import gpt2_parts, llama_parts


class Model(NamedTuple):
    """A loss of (params, batch), both of arrays alone, and the rules an expert would write."""

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    hand_rules: list[tuple[str, Any]]


PARTS = {
    "lm1b": lm1b_parts,
    "resnet": resnet_parts,
    "gemma": gemma_parts,
    "vit": vit_parts,
    "unet": unet_parts,
    "bert": bert_parts,
    "gpt2": gpt2_parts,
    "llama": llama_parts,
    "neox": neox_parts,
    "ppo": ppo_parts,
}


def model(name: str, abstract: bool = False, **sizes: Any) -> Model:
    """Return a model by its name; `sizes` are those of its function in `PARTS`.

    `abstract` makes shapes in place of parameters.
    """
    get = jax.eval_shape if abstract else lambda make: jax.jit(make)()
    init, loss, batch, rules = PARTS[name](**sizes)
    if name in ("vit", "unet", "bert"):
        return Model(*_of_arrays(init, loss, get), batch, rules)
    params = get(init)
    if name == "resnet":
        params, loss = params["params"], _first(loss)
    return Model(loss, params, batch, rules)


def models() -> dict[str, Model]:
    """Return every model, small, by its name."""
    return {name: model(name) for name in PARTS}


def _first(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, batch: loss(params, batch)[0]


def _of_arrays(make: Callable[[], Any], loss: Callable[..., Any], get: Any) -> tuple[Any, Any]:
    """Split an Equinox module into its arrays, which are the parameters, and the rest."""
    _, static = eqx.partition(eqx.filter_eval_shape(make), _is_array)
    params = get(lambda: eqx.filter(make(), eqx.is_array))
    return (lambda params, batch: loss(eqx.combine(params, static), batch)), params


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)
