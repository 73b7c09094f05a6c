"""`Job`: a program and the hardware to compile it for; `Outcome`: what the compiler made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import pickle
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from meshwright.hardware import Topology

# What changes the result, besides the job itself: whose versions, which variables.
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FORMAT = 3

Platform = Literal["tpu", "cuda", "cpu"]
PLATFORMS: Mapping[str, Platform] = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}  # by chip family


@dataclasses.dataclass(frozen=True)
class Site:
    """The hardware that a program is compiled for, known before the program is.

    `positions` holds, for each partition of the program, the place of its device in the
    topology, as its `index` counts.
    """

    platform: Platform
    topology: Topology
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """A program in the compiler's bytecode, and where its parts run.

    `free_outputs` says whose sharding the compiler chooses, `shardy` in which of XLA's two
    languages the program's shardings are written, `options` are its `jit`'s compiler options.
    `identity` stands for the program where there is one: its bytecode holds the lines of whoever
    called.
    """

    name: str
    code: bytes
    site: Site
    free_outputs: tuple[bool, ...]
    shardy: bool = True
    identity: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """The same for the same program, hardware, versions and compiler flags."""
        hardware = self.site.topology
        parts = (
            _FORMAT,
            self.identity or self.code,
            self.site.platform,
            (hardware.name, hardware.chip.name, hardware.axes, hardware.host.tobytes()),
            hardware.index.astype(np.int64).tobytes(),
            self.site.positions.astype(np.int64).tobytes(),
            self.free_outputs,
            self.shardy,
            sorted((name, repr(value)) for name, value in self.options),
            versions(),
            tuple(os.environ.get(flag, "") for flag in FLAGS),
        )
        return hashlib.sha256(pickle.dumps(parts, protocol=4)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`verdict`: "compiled"; "exhausted" when the compiler ran out of memory; else "failed".

    `reason` is the compiler's own text where it refused, `notes` what it wrote on the way.
    `shardings` are those of the results, as `_compat.written_shardings` writes them.
    """

    verdict: Literal["compiled", "exhausted", "failed"]
    text: str = ""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    notes: str = ""
    compiler: str = ""
    shardings: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def versions() -> tuple[tuple[str, str], ...]:
    """The versions of what takes part in a compile."""
    return tuple((name, _version(name)) for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
