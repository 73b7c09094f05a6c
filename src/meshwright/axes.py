"""The vocabulary. In: an axis name. Out: its `Role`: what the axis moves, and how much."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Literal

from meshwright.errors import SpecError, near, short

# What each axis is for, and how hard it works the wires.


@dataclasses.dataclass(frozen=True)
class Role:
    """What an axis does, and how much it communicates compared with the others.

    `intensity` is relative: how often a payload of a given size crosses the axis in a step.
    `moves` says what the payload is: weights shrink as more axes cut them, activations do
    not, because the batch grows with the machine. `cuts_weights`: the axis cuts parameters.
    `neighbours`: the traffic goes from each device to the next (pipelines, ring attention).
    """

    name: str
    intensity: float
    moves: Literal["weights", "activations"]
    cuts_weights: bool
    neighbours: bool
    says: str


# Relative intensities, by passes over the payload in a training step: data parallelism
# reduces gradients once (2 half passes); FSDP gathers parameters twice and scatters gradients
# once; tensor, expert and sequence axes exchange activations in every layer with the
# computation waiting for them; a pipeline hands over one activation per stage.
DATA = Role("data", 1.0, "weights", False, False, "model replicated, data split")
FSDP = Role("fsdp", 3.0, "weights", True, False, "model and data both split")
EXPERT = Role("expert", 6.0, "activations", True, False, "experts split")
SEQUENCE = Role("sequence", 6.0, "activations", False, False, "sequence split")
CONTEXT = Role("context", 6.0, "activations", False, True, "context split, ring attention")
TENSOR = Role("tensor", 12.0, "activations", True, False, "tensors split")
PIPELINE = Role("pipeline", 0.25, "activations", True, True, "layers split into stages")
CUSTOM = Role("custom", 1.0, "activations", False, False, "a name of your own")

_NAMES: dict[Role, tuple[str, ...]] = {
    DATA: ("dp", "data", "batch", "replica", "ddp"),
    FSDP: ("fsdp", "zero", "shard"),
    EXPERT: ("ep", "expert", "experts"),
    SEQUENCE: ("sp", "seq", "sequence"),
    CONTEXT: ("cp", "context"),
    TENSOR: ("tp", "tensor", "model", "mp"),
    PIPELINE: ("pp", "pipe", "pipeline", "stage", "mpmd"),
}

ROLES: Mapping[str, Role] = {name: role for role, names in _NAMES.items() for name in names}


def role(name: str) -> Role:
    """The role of an axis name; names of your own are `custom`.

    >>> role("tp").says, role("tp").intensity
    ('tensors split', 12.0)
    >>> role("banana").name
    'custom'
    """
    return ROLES.get(name, CUSTOM) if isinstance(name, str) else CUSTOM


def intensities(
    names: Sequence[str], overrides: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """How intense each axis is. Unknown names double from left to right, as JAX assumes.

    >>> intensities(["dp", "tp"], {"dp": 5})
    (5.0, 12.0)
    >>> intensities(["a", "b", "c"])
    (1.0, 2.0, 4.0)
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise SpecError(f"intensity: {short(overrides)} is not a dict such as {{'tp': 12}}.")
    overrides = overrides or {}
    for name, value in overrides.items():
        if name not in names:
            raise SpecError(
                f"intensity: no axis {short(name)} in {', '.join(names)}.{near(str(name), names)}"
            )
        _check_intensity(name, value)
    result, custom = [], 0
    for name in names:
        value = role(name).intensity
        if role(name) is CUSTOM:
            value *= 2.0 ** min(custom, 8)
            custom += 1
        result.append(float(overrides.get(name, value)))
    return tuple(result)


def weights(
    names: Sequence[str], sizes: Sequence[int], overrides: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """The weight of each axis in a placement's cost: intensity times relative payload.

    An axis that moves weights (`dp`, `fsdp`) moves only what the other axes have left of
    them: gradients of a model cut 8 ways are an eighth as large.

    >>> weights(["dp", "fsdp", "tp"], [2, 8, 4])
    (0.03125, 0.75, 12.0)
    """
    result = []
    for i, (name, intensity) in enumerate(zip(names, intensities(names, overrides), strict=True)):
        cut = 1
        if role(name).moves == "weights":
            cut = math.prod(
                size
                for j, (other, size) in enumerate(zip(names, sizes, strict=True))
                if j != i and role(other).cuts_weights
            )
        result.append(intensity / cut)
    return tuple(result)


def _check_intensity(name: str, value: object) -> None:
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not ok or not 0 <= value < 1e30:  # type: ignore[operator]
        raise SpecError(
            f"intensity of axis {name!r}: {short(value)} is not a finite number >= 0. "
            "Use e.g. 12 for tensor parallelism, 1 for data parallelism."
        )
