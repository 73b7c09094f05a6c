"""Models by name, with the sizes their makers published."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.errors import ModelError, listing, near, short
from meshwright.models.base import Model
from meshwright.models.config import Config
from meshwright.models.decoder import Decoder, DecoderConfig

_TINY: dict[str, Any] = {"learning_rate": 1e-2, "warmup": 4, "steps": 1000}
_LARGE: dict[str, Any] = {"compute": "bfloat16", "remat": "full"}

_LLAMA3: dict[str, Any] = {"kv_heads": 8, "head": 128, "vocab": 128_256, "seq": 8192, **_LARGE}

_PRESETS: dict[str, tuple[type[Model], Config]] = {
    "tiny": (
        Decoder,
        DecoderConfig(
            layers=4, embed=64, heads=4, kv_heads=2, head=16, mlp=192, vocab=256, seq=64, **_TINY
        ),
    ),
    "llama3-8b": (
        Decoder,
        DecoderConfig(layers=32, embed=4096, heads=32, mlp=14_336, **_LLAMA3),
    ),
    "llama3-70b": (
        Decoder,
        DecoderConfig(layers=80, embed=8192, heads=64, mlp=28_672, **_LLAMA3),
    ),
    "llama3-405b": (
        Decoder,
        DecoderConfig(layers=126, embed=16_384, heads=128, mlp=53_248, **_LLAMA3),
    ),
}


def names() -> tuple[str, ...]:
    """The models there are.

    >>> names()[:2]
    ('tiny', 'llama3-8b')
    """
    return tuple(_PRESETS)


def model(name: str, **overrides: Any) -> Model:
    """A model by its name; sizes and settings of its config may be given anew.

    >>> model("llama3-8b").parameters
    8030261248
    >>> model("llama3-8b", layers=4, stages=2).config.stages
    2
    """
    if name not in _PRESETS:
        raise ModelError(
            f"no model {short(name)}.{near(str(name), _PRESETS)} "
            f"Known: {listing(_PRESETS, limit=20)}."
        )
    family, config = _PRESETS[name]
    known = [field.name for field in dataclasses.fields(config)]
    for field in overrides:
        if field not in known:
            raise ModelError(
                f"{name} has no setting {field!r}.{near(field, known)} "
                f"Its settings: {listing(known, limit=40)}."
            )
    return family(name, dataclasses.replace(config, **overrides))
