"""`model(name)`: models by name, with the sizes their makers published.

Those called tiny train in seconds on a CPU; the others are as large as published, and made to be
looked at and rehearsed. Names and sizes are known without JAX: `model` imports the families.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from meshwright.errors import ModelError, listing, near, on_command_line, short

if TYPE_CHECKING:
    from meshwright.models.attention import Blocks
    from meshwright.models.base import Model


class ModelSettings(TypedDict, total=False):
    """The settings of all models; which of them a model has, its config says."""

    # Of every model, see `Config`.
    stages: int
    params: str
    compute: str
    remat: str
    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    moments: str
    accumulation: int
    learning_rate: float
    warmup: int
    steps: int
    weight_decay: float
    clip: float
    beta1: float
    beta2: float
    # Of transformers, see `DecoderConfig` and `VisionConfig`.
    layers: int
    embed: int
    heads: int
    mlp: int
    kv_heads: int
    head: int
    vocab: int
    seq: int
    theta: float
    eps: float
    attention: str
    blocks: Blocks | None
    gated: bool
    activation: str
    parallel: bool
    tied: bool
    lookup: str
    tiles: int
    products: str
    split_embed: bool
    # Of mixtures of experts, see `MixtureConfig`.
    experts: int
    chosen: int
    shared: int
    capacity: float
    balance: float
    # Of models of images, see `VisionConfig` and `ConvConfig`.
    image: int
    classes: int
    patch: int
    depths: tuple[int, ...]
    width: int
    groups: int
    stem: int
    pool: int


def names() -> tuple[str, ...]:
    """List the names that `model` knows.

    >>> names()[:2]
    ('tiny', 'llama3-8b')
    """
    return tuple(_PRESETS)


def model(name: str, **settings: Unpack[ModelSettings]) -> Model:
    """Return a model by its name; settings replace those of its config.

    `names()` lists the names. Nothing is computed. Raises `ModelError` for an unknown name, for a
    setting that the model does not have, and for sizes that do not fit together.

    >>> model("llama3-8b").parameters
    8030261248
    >>> model("llama3-8b", layers=4, stages=2).config.stages
    2
    """
    check_model(name)
    (file, kind, kind_of_config), sizes = _PRESETS[name]
    module = importlib.import_module(f"meshwright.models.{file}")
    config = getattr(module, kind_of_config)(**sizes)
    known = [field.name for field in dataclasses.fields(config)]
    changes: dict[str, Any] = {**settings}
    for setting in changes:
        if setting not in known:
            raise ModelError(
                f"{name} has no setting {setting!r}.{near(setting, known)} "
                f"Its settings: {listing(known, limit=40)}.",
                option=setting,
            )
    chosen: Model = getattr(module, kind)(name, dataclasses.replace(config, **changes))
    return chosen


def check_model(name: object) -> None:
    """Refuse a name that no model has."""
    if name not in _PRESETS:
        own = f" For a step of your own write {name}:FUNCTION." if on_command_line() else ""
        raise ModelError(
            f"no model {short(name)}.{near(str(name), _PRESETS)} "
            f"Known: {listing(_PRESETS, limit=20)}.{own}",
            option="name",
        )


_TINY: ModelSettings = {"learning_rate": 1e-2, "warmup": 4, "steps": 1000}
_LARGE: ModelSettings = {"compute": "bfloat16", "remat": "full"}

# 128,000 tokens and 256 special ones; 8 heads of keys and values at every size.
_LLAMA3: ModelSettings = {"kv_heads": 8, "head": 128, "vocab": 128_256, "seq": 8192, **_LARGE}

_PATCHES: ModelSettings = {
    "image": 224,
    "classes": 1000,
    "patch": 16,
    "learning_rate": 1e-3,
    "compute": "bfloat16",
}

# The file of each family, its class and that of its settings.
_Family = tuple[str, str, str]
_DECODER: _Family = ("decoder", "Decoder", "DecoderConfig")
_MIXTURE: _Family = ("mixture", "Mixture", "MixtureConfig")
_VISION: _Family = ("vision", "VisionTransformer", "VisionConfig")
_CONV: _Family = ("vision", "ConvNet", "ConvConfig")

_PRESETS: dict[str, tuple[_Family, ModelSettings]] = {
    "tiny": (
        _DECODER,
        {
            "layers": 4,
            "embed": 64,
            "heads": 4,
            "kv_heads": 2,
            "head": 16,
            "mlp": 192,
            "vocab": 256,
            "seq": 64,
            **_TINY,
        },
    ),
    "llama3-8b": (
        _DECODER,
        {"layers": 32, "embed": 4096, "heads": 32, "mlp": 14_336, **_LLAMA3},
    ),
    "llama3-70b": (
        _DECODER,
        {"layers": 80, "embed": 8192, "heads": 64, "mlp": 28_672, **_LLAMA3},
    ),
    "llama3-405b": (
        _DECODER,
        {"layers": 126, "embed": 16_384, "heads": 128, "mlp": 53_248, **_LLAMA3},
    ),
    "moe-tiny": (
        _MIXTURE,
        {
            "layers": 2,
            "embed": 64,
            "heads": 4,
            "kv_heads": 2,
            "head": 16,
            "mlp": 64,
            "vocab": 256,
            "seq": 64,
            "experts": 8,
            "chosen": 2,
            "shared": 1,
            **_TINY,
        },
    ),
    "mixtral-8x7b": (
        _MIXTURE,
        {
            "layers": 32,
            "embed": 4096,
            "heads": 32,
            "kv_heads": 8,
            "head": 128,
            "mlp": 14_336,
            "vocab": 32_000,
            "seq": 32_768,
            "theta": 1e6,
            "experts": 8,
            "chosen": 2,
            **_LARGE,
        },
    ),
    # Experts as in DeepSeek-V3; its latent attention and its first, dense layers are not.
    "moe-256": (
        _MIXTURE,
        {
            "layers": 60,
            "embed": 7168,
            "heads": 64,
            "kv_heads": 8,
            "head": 128,
            "mlp": 2048,
            "vocab": 129_280,
            "seq": 4096,
            "theta": 1e4,
            "experts": 256,
            "chosen": 8,
            "shared": 1,
            "balance": 1e-4,
            **_LARGE,
        },
    ),
    "vit-tiny": (
        _VISION,
        {
            "image": 16,
            "classes": 8,
            "layers": 4,
            "embed": 64,
            "heads": 4,
            "mlp": 128,
            "patch": 4,
            **_TINY,
        },
    ),
    "vit-b16": (
        _VISION,
        {"layers": 12, "embed": 768, "heads": 12, "mlp": 3072, **_PATCHES},
    ),
    "vit-l16": (
        _VISION,
        {"layers": 24, "embed": 1024, "heads": 16, "mlp": 4096, **_PATCHES},
    ),
    "conv-tiny": (
        _CONV,
        {
            "image": 16,
            "classes": 8,
            "depths": (1, 2),
            "width": 16,
            "groups": 4,
            "stem": 3,
            "pool": 0,
            **_TINY,
        },
    ),
    "resnet50": (
        _CONV,
        {
            "image": 224,
            "classes": 1000,
            "depths": (3, 4, 6, 3),
            "width": 64,
            "groups": 32,
            "stem": 7,
            "learning_rate": 1e-3,
            "compute": "bfloat16",
        },
    ),
}
