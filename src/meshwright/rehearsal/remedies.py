"""Ways to need less memory, cheapest first, each with what it should save.

- Donation that was missed: results that could overwrite an argument of the same shape.
- More fsdp: parameters cut over devices that hold copies of them now.
- A smaller batch: half the temporaries, in two steps instead of one.
- Rematerialisation: fewer activations kept, at the price of computing them again. Only the
  function itself can do that, so it is advice here.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright._text import amount
from meshwright.axes import role
from meshwright.errors import MeshwrightError
from meshwright.rehearsal.lowering import is_jitted
from meshwright.rehearsal.request import Request, shrunk
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_arguments import has_rows, names_of
from meshwright.spec.mesh_spec import MeshSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Remedy:
    """One way out: what to change, the peak to expect, and what a compile said, if it was tried.

    `peak` is `None` where it cannot be told: a compiler that gave up says nothing of results.
    """

    what: str
    how: str
    peak: int | None
    request: Request | None = None
    tried: Rehearsal | None = None
    failed: str = ""

    def __str__(self) -> str:
        if self.tried is not None:
            said = self.tried.memory.verdict()
            return f"{self.what} ({self.how}): tried, {said}"
        if self.failed:
            return f"{self.what} ({self.how}): tried, {self.failed}"
        if self.peak is None:
            saves = "what that saves is not known before it is tried"
        else:
            saves = f"about {amount(self.peak)} a device"
        yours = "; yours to try" if self.request is None else ""
        return f"{self.what} ({self.how}): {saves}{yours}"


def find_remedies(result: Rehearsal, *, check: bool) -> tuple[Remedy, ...]:
    """All that apply; with `check`, compiled."""
    found = list(_all(result))
    return tuple(_tried(remedy) for remedy in found) if check else tuple(found)


def _all(result: Rehearsal) -> Iterator[Remedy]:
    yield from _donation(result)
    yield from _more_fsdp(result)
    yield from _smaller_batch(result)
    yield from _rematerialisation(result)


def _tried(remedy: Remedy) -> Remedy:
    from meshwright.rehearsal.api import run

    if remedy.request is None:
        return remedy
    try:
        return dataclasses.replace(remedy, tried=run(remedy.request))
    except Exception as error:  # the user's function may not take it, and the verdict stands
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        ours = isinstance(error, MeshwrightError)
        return dataclasses.replace(remedy, failed=said if ours else f"the step failed: {said}")


def _donation(result: Rehearsal) -> Iterator[Remedy]:
    request = result.request
    if result.memory.aliased or is_jitted(request.function):
        return
    free = [i for i in range(len(request.args)) if i not in {*request.donate, *request.data}]
    wanted = collections.Counter(map(_kind, result.results))
    chosen = []
    for i in free:
        mine = collections.Counter(map(_kind, jax.tree.leaves(request.args[i])))
        if mine and not mine - wanted:
            wanted -= mine
            chosen.append(i)
    if chosen:
        donate = (*request.donate, *chosen)
        yield Remedy(
            "donate what the step replaces",
            f"donate={donate if len(donate) > 1 else donate[0]}",
            result.memory.peak - _argument_bytes(result, chosen),
            dataclasses.replace(request, donate=donate),
        )


def _argument_bytes(result: Rehearsal, numbers: Iterable[int]) -> int:
    """What a device holds of these arguments."""
    names = names_of(result.request.function, len(result.request.args))
    wanted = {names[number] for number in numbers}
    rows = result.arguments.rows
    return sum(row.device_bytes for row in rows if row.path.partition("/")[0] in wanted)


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf)))


def _more_fsdp(result: Rehearsal) -> Iterator[Remedy]:
    """Twice the fsdp, taken from an axis that only copies parameters."""
    placed, request = result.placement, result.request
    sizes = dict(zip(placed.spec.names, placed.spec.sizes, strict=True))
    fsdp = next((name for name in sizes if role(name).name == "fsdp"), None)
    data = next((n for n in sizes if role(n).name == "data" and sizes[n] % 2 == 0), None)
    if fsdp is None and data is not None:
        wish = {("fsdp" if name == data else name): size for name, size in sizes.items()}
    elif fsdp is not None and data is not None:
        wish = {**sizes, fsdp: sizes[fsdp] * 2, data: sizes[data] // 2}
    else:
        return
    spec = MeshSpec.parse(wish)
    factor = sizes[data] if fsdp is None else 2
    state = _argument_bytes(result, set(range(len(request.args))) - set(request.data))
    peak = result.memory.peak - state * (factor - 1) // factor
    yield Remedy(
        "cut parameters further",
        f"mesh='{spec}'",
        peak,
        None if request.specs is not None else _on_mesh(result, spec),
    )


def _on_mesh(result: Rehearsal, spec: MeshSpec) -> Request:
    """The same request with another mesh on the same machine."""
    request = result.request
    if not isinstance(request.mesh, (Mesh, AbstractMesh)):
        return dataclasses.replace(request, mesh=str(spec))
    machine = dataclasses.replace(result.placement.topology, devices=None)
    return dataclasses.replace(request, mesh=str(spec), on=machine, slices=1)


def _smaller_batch(result: Rehearsal) -> Iterator[Remedy]:
    request, memory = result.request, result.memory
    smaller = shrunk(request.args, request.data, 2) if request.data else None
    if smaller is None:
        return
    placed = result.placement
    cuts = math.prod(
        size
        for name, size in zip(placed.spec.names, placed.spec.sizes, strict=True)
        if role(name).name in ("data", "fsdp")
    )
    rows = min(
        (
            leaf.shape[0]
            for i in request.data
            for leaf in filter(has_rows, jax.tree.leaves(smaller[i]))
        ),
        default=0,
    )
    if rows and rows % cuts == 0:
        yield Remedy(
            "halve the batch",
            f"{rows} rows instead of {2 * rows}",
            None if memory.refused else memory.peak - memory.temporaries // 2,
            dataclasses.replace(request, args=smaller),
        )


def _rematerialisation(result: Rehearsal) -> Iterator[Remedy]:
    memory, request = result.memory, result.request
    already = request.layout is not None and request.lighter is None
    if memory.temporaries > memory.peak // 4 and not already:
        yield Remedy(
            "rematerialise",
            "jax.checkpoint around each layer",
            None if memory.refused else memory.peak - memory.temporaries // 2,
            None
            if request.lighter is None
            else dataclasses.replace(request, function=request.lighter, lighter=None),
        )
