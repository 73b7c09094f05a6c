"""`CompiledTask`: what a compiler in another process made of a task, read as one made here is."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from meshwright.rehearsal.compiler.jobs import Outcome


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledTask:
    """Answers what `jax.stages.Compiled` does, and cannot be called."""

    outcome: Outcome
    output_shardings: Sequence[NamedSharding]

    def as_text(self) -> str:
        return self.outcome.text

    def memory_analysis(self) -> Any:
        sizes = {f"{part}_size_in_bytes": size for part, size in self.outcome.memory.items()}
        return types.SimpleNamespace(**sizes)

    def cost_analysis(self) -> dict[str, float]:
        return self.outcome.cost
