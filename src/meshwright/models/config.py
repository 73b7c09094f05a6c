"""What all models are told: precision, memory, stages, and how they learn."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from meshwright.errors import ModelError, near, short
from meshwright.models.stages import REMAT


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
