"""`ProgramRuns`: what one run of each computation of a scheduled program spends its time on.

Instructions pass in the compiler's order. Kernels add up; a collective, or a transfer to the host,
adds what is left of it when its end is reached.
"""

from __future__ import annotations

import collections

from meshwright.hlo.dataflow import runs_per_call
from meshwright.hlo.instructions import Computation, Instruction
from meshwright.hlo.program import Program
from meshwright.rehearsal.collectives.types import Collective, Collectives
from meshwright.rehearsal.host_transfers import Direction, HostTransfer, transfers_of
from meshwright.rehearsal.kernel_speeds import Speeds
from meshwright.rehearsal.kernels import Kernel, kernels

WAITED = ("compute", "memory", "start", "exposed", "host_exposed")  # that make up the total
PARTS = (*WAITED, "hidden", "host_hidden", "flops", "bytes")

Pairs = frozenset[tuple[int, int]]  # senders and receivers of a permute


class ProgramRuns:
    """One run of each computation of a program: its parts, and how long it takes as a whole."""

    def __init__(self, program: Program, collectives: Collectives, speed: Speeds):
        self.program, self.speed = program, speed
        self.by_name = {name: entry for entry in collectives for name in entry.instructions}
        self.met: set[int] = set()  # the collectives that are instructions of their own
        self.transfers = transfers_of(program)
        self.bodies = {each.body for entries in self.transfers.values() for each in entries}
        self._parts: dict[str, dict[str, float]] = {}
        self._whole: dict[str, float] = {}

    def kernels(self, computation: Computation) -> list[Kernel]:
        """The kernels of a computation; transfers to and from the host are none."""
        starts = {transfer.start for transfer in self.transfers.get(computation.name, ())}
        return [each for each in kernels(self.program, computation) if each.name not in starts]

    def parts(self, computation: Computation) -> dict[str, float]:
        """The parts of one run, without those of the computations that it calls."""
        if computation.name not in self._parts:
            self._parts[computation.name] = _one_run(self, computation)
        return self._parts[computation.name]

    def called(self, instruction: Instruction) -> float:
        """Seconds of the computations that an instruction runs, e.g. of all rounds of a loop."""
        if not instruction.only_calls:
            return 0.0
        return sum(
            self._seconds(name) * runs_per_call(how, instruction, self.program.dataflow).count
            for how, name in instruction.called
            if name not in self.bodies and (how != "to_apply" or instruction.opcode == "call")
        )

    def rounds(self, instruction: Instruction, seconds: float) -> float:
        """Seconds that starting the rounds of a loop adds, where that was measured."""
        if instruction.opcode != "while" or not self.speed.iteration:
            return 0.0
        count = runs_per_call("body", instruction, self.program.dataflow).count
        return count * self.speed.next_round(seconds / max(1, count))

    def _seconds(self, name: str) -> float:
        """Seconds of one run of a computation and of all that it calls."""
        if name not in self._whole:
            computation = self.program.computations[name]
            own = self.parts(computation)
            nested = sum(map(self.called, computation.instructions))
            self._whole[name] = nested + sum(own[part] for part in WAITED)
        return self._whole[name]


def _back(permute: Collective) -> Pairs:
    """The pairs of the permute that goes back; none where nothing may run beside it."""
    pairs = permute.pairs if permute.beside_back else ()
    return frozenset((receiver, sender) for sender, receiver in pairs)


class _Clock:
    """How far one run is. What passes between a start and an end hides that much of a wait.

    `work` counts kernels and waits for the host, beside which collectives run; `now` counts
    everything, beside which transfers to and from the host run. Transfers one way queue up.
    `waited`: for permutes, by the pairs of chips that they go between; one that goes back runs
    meanwhile. `spent`: how much of that has hidden some that go between these pairs.
    """

    def __init__(self) -> None:
        self.work = self.now = 0.0
        self.waited = collections.defaultdict[Pairs, float](float)
        self.spent = collections.defaultdict[Pairs, float](float)
        self.free: dict[Direction, float] = {"to host": 0.0, "to device": 0.0}
        self.ends: dict[str, float] = {}  # by the instruction that ends the transfer

    def begin(self, transfer: HostTransfer, seconds: float) -> None:
        self.free[transfer.direction] = max(self.now, self.free[transfer.direction]) + seconds
        self.ends[transfer.end] = self.free[transfer.direction]

    def start(self, entry: Collective) -> tuple[float, float]:
        """When a collective starts: by what works, and by what is waited for that goes back."""
        return self.work, self.waited[_back(entry)]

    def end(self, entry: Collective, start: tuple[float, float]) -> float:
        """Wait for the end of a collective; return how much of it ran beside something else."""
        worked, waited = start
        hidden = min(entry.seconds, self.work - worked)
        if entry.beside_back:
            since = max(waited, self.spent[entry.pairs])
            beside = (self.waited[_back(entry)] - since) * entry.beside_back
            taken = max(0.0, min(entry.seconds - hidden, beside))
            self.spent[entry.pairs] = since + taken / entry.beside_back
            hidden += taken
        self.now += entry.seconds - hidden
        self.waited[entry.pairs] += entry.seconds - hidden
        return hidden

    def wait(self, end: str) -> float:
        """Wait for the end of a transfer, and return for how long."""
        waited = max(0.0, self.ends.pop(end) - self.now)
        self.work += waited
        self.now += waited
        return waited


def _one_run(runs: ProgramRuns, computation: Computation) -> dict[str, float]:
    """The parts of one run of a computation; the collectives that are here are added to `met`."""
    parts = dict.fromkeys(PARTS, 0.0)
    work = {kernel.name: kernel for kernel in runs.kernels(computation)}
    transfers = {each.start: each for each in runs.transfers.get(computation.name, ())}
    started: dict[int, tuple[float, float]] = {}
    clock, on_bus = _Clock(), 0.0
    for instruction in computation.instructions:
        if (transfer := transfers.get(instruction.name)) is not None:
            seconds = runs.speed.host(transfer.bytes, transfer.direction)
            clock.begin(transfer, seconds)
            on_bus += seconds
            parts["bytes"] += transfer.bytes
        if instruction.name in clock.ends:
            parts["host_exposed"] += clock.wait(instruction.name)
        elif (entry := runs.by_name.get(instruction.name)) is not None:
            runs.met.add(id(entry))
            start = started.setdefault(id(entry), clock.start(entry))
            if instruction.name == entry.instructions[-1]:
                hidden = clock.end(entry, start)
                parts["hidden"] += hidden
                parts["exposed"] += entry.seconds - hidden
        elif (kernel := work.get(instruction.name)) is not None:
            compute, memory = runs.speed.kernel(kernel)
            seconds = max(compute, memory)
            launch = runs.speed.launch(seconds)
            parts["compute" if compute > memory else "memory"] += seconds
            parts["start"] += launch
            parts["flops"] += kernel.flops
            parts["bytes"] += kernel.bytes
            clock.work += seconds
            clock.now += seconds + launch
        else:
            seconds = runs.called(instruction)
            launch = runs.rounds(instruction, seconds)
            parts["start"] += launch
            clock.work += seconds
            clock.now += seconds + launch
    if computation is runs.program.entry:
        parts["start"] += runs.speed.step
    hidden = on_bus - parts["host_exposed"]
    parts["host_hidden"] = hidden if hidden > 1e-9 * on_bus else 0.0  # not what rounding leaves
    return parts
