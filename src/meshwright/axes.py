"""What every mesh axis name means: its `Role`, and how much the axis communicates in a step.

Placement asks here which axis deserves the fastest links, partitioning which axes shard
parameters. No devices and no JAX: a name comes in, plain data go out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Literal

from meshwright.errors import SpecError, near, short


@dataclasses.dataclass(frozen=True)
class Role:
    """What an axis does, and how much it communicates compared with the others.

    `intensity` is relative: how often a payload of a given size crosses the axis in a step.
    `moves` says what the payload is: weights shrink as more axes shard them, activations do
    not, because the batch grows with the machine. `shards_weights`: the axis shards parameters.
    `neighbours`: the traffic goes from each device to the next (pipelines, ring attention).
    """

    name: str
    intensity: float
    moves: Literal["weights", "activations"]
    shards_weights: bool
    neighbours: bool
    description: str


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
    """Return the role of an axis name; a name that is not in `ROLES` is `custom`.

    >>> role("tp").description, role("tp").intensity
    ('tensors split', 12.0)
    >>> role("banana").name
    'custom'
    """
    # JAX allows any hashable value as an axis name, so this is not only ever given strings.
    return ROLES.get(name, CUSTOM) if isinstance(name, str) else CUSTOM


# Names of people's own that happen to be near a known one.
_OWN_WORDS = ("state", "share", "shared", "mode", "modes", "date")


@functools.lru_cache(maxsize=256)
def meant_name(name: str) -> str | None:
    """Return the known name that an unknown one is most likely a slip of, or `None`.

    A slip is one letter too many, too few, wrong or in the wrong place. Short names, numbered ones
    and plurals are people's own.

    >>> meant_name("fdsp"), meant_name("tensr"), meant_name("batch2"), meant_name("pt")
    ('fsdp', 'tensor', None, None)
    """
    if not isinstance(name, str) or name in ROLES or name in _OWN_WORDS:
        return None
    if len(name) < 4 or not name.isalpha() or name.removesuffix("s") in ROLES:
        return None
    return next((known for known in ROLES if len(known) > 3 and _one_slip(name, known)), None)


def _one_slip(name: str, known: str) -> bool:
    # Slips in the first letter are rare, and words such as patch and batch differ in it alone.
    if name[0] != known[0] or abs(len(name) - len(known)) > 1:
        return False
    shorter, longer = sorted((name, known), key=len)
    # Taking one letter out of the longer one, or of both, leaves the same.
    left = {longer[:at] + longer[at + 1 :] for at in range(len(longer))}
    if len(shorter) < len(longer):
        return shorter in left
    return any(shorter[:at] + shorter[at + 1 :] in left for at in range(len(shorter)))


def intensities(
    names: Sequence[str], overrides: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """Return how intensely each axis communicates; `overrides` replaces values by axis name.

    Unknown names double from left to right, as JAX assumes.

    >>> intensities(["dp", "tp"], {"dp": 5})
    (5.0, 12.0)
    >>> intensities(["a", "b", "c"])
    (1.0, 2.0, 4.0)
    """
    overrides = _check_overrides(names, overrides)
    result = []
    custom_axes = 0
    for name in names:
        value = role(name).intensity
        if role(name) is CUSTOM:
            # Capped, so that the last of very many custom axes does not outweigh everything.
            value *= 2.0 ** min(custom_axes, 8)
            custom_axes += 1
        result.append(float(overrides.get(name, value)))
    return tuple(result)


def axis_weights(
    names: Sequence[str], sizes: Sequence[int], overrides: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """Return the weight of each axis in a placement's cost: intensity times relative payload.

    An axis that moves model weights (`dp`, `fsdp`) moves only what the other axes have left of
    them: gradients of a model sharded 8 ways are an eighth as large.

    >>> axis_weights(["dp", "fsdp", "tp"], [2, 8, 4])
    (0.03125, 0.75, 12.0)
    """
    shards = {
        name: size for name, size in zip(names, sizes, strict=True) if role(name).shards_weights
    }
    result = []
    for name, intensity in zip(names, intensities(names, overrides), strict=True):
        shrinks = role(name).moves == "weights"
        ways = math.prod(size for other, size in shards.items() if shrinks and other != name)
        result.append(intensity / ways)
    return tuple(result)


def _check_overrides(
    names: Sequence[str], overrides: Mapping[str, float] | None
) -> Mapping[str, float]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise SpecError(
            f"intensity: {short(overrides)} is not a dict such as {{'tp': 12}}.", option="intensity"
        )
    for name, value in overrides.items():
        if name not in names:
            raise SpecError(
                f"intensity: no axis {short(name)} in {', '.join(names)}.{near(str(name), names)}",
                option="intensity",
            )
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 1e30:  # a comparison with NaN is false: refused too
            raise SpecError(
                f"intensity of axis {name!r}: {short(value)} is not a finite number >= 0. "
                "Use e.g. 12 for tensor parallelism, 1 for data parallelism.",
                option="intensity",
            )
    return overrides
