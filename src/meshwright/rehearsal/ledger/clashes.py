"""What the partitioner complains of: a sharding it could not turn into another without gathering
the whole array. It says so on standard error alone, in words that have changed over time."""

from __future__ import annotations

import dataclasses
import re

from meshwright.rehearsal.programs.reading import read_instruction
from meshwright.rehearsal.programs.sources import Source, SourceTable

_COMPLAINT = re.compile(
    r"Involuntary full rematerialization\.[^\n]*? from sharding (?P<before>.+?) to (?P<after>.+?) "
    r"(?:efficiently|without doing a full rematerialization of the tensor) "
    r"for HLO operation:? (?P<operation>%.+?)"
    r"(?=\. (?:As the last resort|You probably want)|\.?\n|\.?$)"
)


@dataclasses.dataclass(frozen=True)
class Clash:
    """Two shardings that do not go together, and the operation where they meet."""

    operation: str
    shape: str
    before: str
    after: str
    op_name: str = ""
    source: Source | None = None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.shape} {self.operation}{where}: from {self.before} to {self.after}"


def read_clashes(stderr: str) -> list[Clash]:
    """Every complaint in a compiler's standard error, each once."""
    found: dict[Clash, None] = {}
    for complaint in _COMPLAINT.finditer(stderr):
        instruction = read_instruction(f"  {complaint['operation']}", "")
        if instruction is not None:
            clash = Clash(
                instruction.name,
                str(instruction.shape.leaves[0]),
                complaint["before"],
                complaint["after"],
                instruction.op_name,
                SourceTable({}).source(instruction),
            )
            found.setdefault(clash)
    return list(found)
