"""Every process must run the same step: its plan in words, compared before it first runs."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.errors import PipelineError, listing
from meshwright.mpmd.watching import Watch

if TYPE_CHECKING:
    from meshwright.mpmd.pipelines.planning import Plan

_NAMED = 16  # arrays of an argument


class Agreement:
    """The plans that all processes have agreed on, each with a name that tells them apart."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._names: dict[Plan, str] = {}
        self._first: Mapping[str, str] = {}

    def enter(self, step: int, plan: Plan) -> None:
        """Begin a step; the first with this plan waits for the others."""
        if plan not in self._names:
            words = in_words(plan)
            self._first = self._first or words
            name = f"plan {len(self._names)}{_beside(words, self._first)}"
            self.watch.enter(step, name)
            wrong = self.watch.confer("the plan", json.dumps(words), _compared)
            if wrong:
                raise PipelineError(f"the processes do not run the same step: {wrong}.")
            self._names[plan] = name
        self.watch.enter(step, self._names[plan])


def in_words(plan: Plan) -> dict[str, str]:
    """What must be the same everywhere, part by part; of long parts a checksum."""
    board, schedule = plan.assembled.board, plan.proof.schedule
    found = {
        "schedule": f"{schedule.name} of {schedule.groups} groups, {schedule.stages} stages and "
        f"{schedule.microbatches} microbatches"
    }
    arguments: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for path, var in zip(plan.paths, plan.traced.invars, strict=True):
        arguments[path.partition("/")[0]][f"argument {path}"] = var.aval.str_short()
    for number, arrays in arguments.items():
        many = f"{len(arrays)} arrays, checksum {_checksum(arrays.items())}"
        found |= arrays if len(arrays) <= _NAMED else {f"argument {number}": many}
    for program in sorted(plan.programs.values(), key=lambda p: (p.stage, p.kind != "F")):
        names = [eqn.primitive.name for eqn in program.eqns]
        counts = [f"{count} {name}" for name, count in collections.Counter(names).items()]
        found[f"task {program.name}"] = ", ".join([*counts, f"checksum {_checksum(names)}"])
    sent = [
        (o.name, *((board.avals[cell].str_short(), str(board.lies[cell])) for cell in o.outs))
        for o in board.operations
        if o.source is not None
    ]
    found["transfers"] = f"{len(sent)}, checksum {_checksum(sent)}"
    return found


def difference(told: Sequence[Mapping[str, str]]) -> str:
    """The first part in which the processes differ; nothing if all say the same.

    >>> difference([{"schedule": "1f1b"}, {"schedule": "1f1b"}, {"schedule": "gpipe"}])
    'schedule: 1f1b in process 0, 1; gpipe in process 2'
    """
    for part in _differing(told):
        said: dict[str, list[int]] = {}
        for process, words in enumerate(told):
            said.setdefault(words.get(part, "nothing"), []).append(process)
        texts = _own(list(said)) if part.startswith("task ") else list(said)
        parts = [
            f"{text} in process {listing(who)}"
            for text, who in zip(texts, said.values(), strict=True)
        ]
        return f"{part}: {'; '.join(parts[:_NAMED])}"
    return ""


def _own(tasks: Sequence[str]) -> list[str]:
    """Of what tasks consist of, that which not all have; the checksums where the order differs.

    >>> _own(["2 mul, 1 tanh, checksum 5f", "2 mul, 1 sin, checksum 07", "2 mul, checksum 3c"])
    ['1 tanh', '1 sin', 'nothing more']
    """
    items = [task.split(", ") for task in tasks]
    own = [[item for item in task if any(item not in other for other in items)] for task in items]
    counts = [[item for item in task if not item.startswith("checksum ")] for task in own]
    return [listing(task) or "nothing more" for task in (counts if any(counts) else own)]


def _beside(words: Mapping[str, str], first: Mapping[str, str]) -> str:
    """What tells a plan from the first one."""
    for part in _differing([words, first]):
        texts = [words.get(part, "nothing"), first.get(part, "nothing")]
        return f" ({part}: {(_own(texts) if part.startswith('task ') else texts)[0]})"
    return ""


def _differing(told: Sequence[Mapping[str, str]]) -> list[str]:
    parts = dict.fromkeys(part for words in told for part in words)
    return [part for part in parts if len({words.get(part) for words in told}) > 1]


def _compared(texts: Sequence[str]) -> str:
    return difference([json.loads(text) for text in texts])


def _checksum(parts: Iterable[Any]) -> str:
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=4).hexdigest()
