"""`Remedy`: ways to need less memory, cheapest first, each with what it should save.

- Donation that was missed: results that could overwrite an argument of the same shape.
- More fsdp: parameters sharded over devices that hold copies of them now.
- A smaller batch: half the temporaries, in two steps instead of one.
- Rematerialisation: fewer activations kept, at the price of computing them again. Only the
  function itself can do that, so it is advice here.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright._show import short_repr
from meshwright._text import amount
from meshwright.axes import role
from meshwright.errors import MeshwrightError
from meshwright.rehearsal.lowering import is_jitted
from meshwright.rehearsal.request import Request, shrunk
from meshwright.rehearsal.step_arguments import argument_names, has_rows
from meshwright.spec.mesh_spec import MeshSpec

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Remedy:
    """One change that saves memory: what to change and how, and the peak to expect in bytes.

    `peak` is `None` where it is not known: a compiler that gave up says nothing of results.
    `request` is the changed request, where the change can be made here; `tried` is its rehearsal,
    or `failed` why there is none, after `remedies(check=True)`.
    """

    what: str
    how: str
    peak: int | None
    request: Request | None = None
    tried: Rehearsal | None = None
    failed: str = ""

    def __str__(self) -> str:
        change = f"{self.what} ({self.how})"
        if self.tried is not None:
            return f"{change}: tried, {self.tried.memory.verdict()}"
        if self.failed:
            return f"{change}: tried, {self.failed}"
        if self.peak is None:
            saves = "what that saves is not known before it is tried"
        else:
            saves = f"about {amount(self.peak)} a device"
        yours = "; yours to try" if self.request is None else ""
        return f"{change}: {saves}{yours}"

    def __repr__(self) -> str:
        return short_repr(self, str(self))


def find_remedies(result: Rehearsal, *, check: bool) -> tuple[Remedy, ...]:
    """List all remedies that apply, cheapest first; with `check`, compile them."""
    remedies = (
        *_donation(result),
        *_more_fsdp(result),
        *_smaller_batch(result),
        *_rematerialisation(result),
    )
    return tuple(map(_try, remedies)) if check else remedies


def _try(remedy: Remedy) -> Remedy:
    """Compile a remedy, if it can be made here."""
    # In the function because of a cycle: `api` makes rehearsals, and those know their remedies.
    from meshwright.rehearsal.api import run

    if remedy.request is None:
        return remedy
    try:
        return dataclasses.replace(remedy, tried=run(remedy.request))
    except Exception as error:  # the user's function may not take it, and the verdict stands
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        ours = isinstance(error, MeshwrightError)
        return dataclasses.replace(remedy, failed=reason if ours else f"the step failed: {reason}")


# Arguments are matched with results by shape and dtype, each result once, in the order of the
# arguments: (params, opt_state, batch) -> (params, opt_state, loss) donates 0 and 1.
def _donation(result: Rehearsal) -> Iterator[Remedy]:
    request = result.request
    if result.memory.aliased or is_jitted(request.function):
        return
    taken = {*request.donate_argnums, *request.data}
    unmatched = collections.Counter(map(_shape_and_dtype, result.results))
    chosen = []
    for i in (i for i in range(len(request.args)) if i not in taken):
        leaves = collections.Counter(map(_shape_and_dtype, jax.tree.leaves(request.args[i])))
        if leaves and not leaves - unmatched:
            unmatched -= leaves
            chosen.append(i)
    if chosen:
        donated = (*request.donate_argnums, *chosen)
        yield Remedy(
            "donate what the step replaces",
            f"donate_argnums={donated if len(donated) > 1 else donated[0]}",
            result.memory.peak - _argument_bytes(result, chosen),
            dataclasses.replace(request, donate_argnums=donated),
        )


def _argument_bytes(result: Rehearsal, numbers: Iterable[int]) -> int:
    """Return the bytes of these arguments on one device."""
    names = argument_names(result.request.function, len(result.request.args))
    wanted = {names[number] for number in numbers}
    rows = result.arguments.rows
    return sum(row.device_bytes for row in rows if row.path.partition("/")[0] in wanted)


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf)))


def _more_fsdp(result: Rehearsal) -> Iterator[Remedy]:
    """Double fsdp at the cost of an axis over which parameters are replicated."""
    placed, request = result.placement, result.request
    sizes = dict(zip(placed.spec.names, placed.spec.sizes, strict=True))
    fsdp = next((name for name in sizes if role(name).name == "fsdp"), None)
    data = next((n for n in sizes if role(n).name == "data" and sizes[n] % 2 == 0), None)
    if fsdp is None and data is not None:
        axes = {("fsdp" if name == data else name): size for name, size in sizes.items()}
    elif fsdp is not None and data is not None:
        axes = {**sizes, fsdp: sizes[fsdp] * 2, data: sizes[data] // 2}
    else:
        return
    spec = MeshSpec.parse(axes)
    factor = sizes[data] if fsdp is None else 2
    state = _argument_bytes(result, set(range(len(request.args))) - set(request.data))
    peak = result.memory.peak - state * (factor - 1) // factor
    yield Remedy(
        "cut parameters further",
        f"mesh='{spec}'",
        peak,
        # Given shardings name the axes of the old mesh.
        None if request.in_shardings is not None else _on_mesh(result, spec),
    )


def _on_mesh(result: Rehearsal, spec: MeshSpec) -> Request:
    """Return the request with another mesh on the same machine."""
    request = result.request
    if not isinstance(request.mesh, (Mesh, AbstractMesh)):
        return dataclasses.replace(request, mesh=str(spec))
    # A mesh object stood for its devices as well; those are named by `on` now.
    machine = dataclasses.replace(result.placement.topology, devices=None)
    return dataclasses.replace(request, mesh=str(spec), on=machine, slices=1)


def _smaller_batch(result: Rehearsal) -> Iterator[Remedy]:
    request, memory = result.request, result.memory
    smaller = shrunk(request.args, request.data, 2) if request.data else None
    if smaller is None:
        return
    placed = result.placement
    shards = math.prod(
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
    if rows and rows % shards == 0:
        yield Remedy(
            "halve the batch",
            f"{rows} rows instead of {2 * rows}",
            None if memory.refused else memory.peak - memory.temporaries // 2,
            dataclasses.replace(request, args=smaller),
        )


def _rematerialisation(result: Rehearsal) -> Iterator[Remedy]:
    memory, request = result.memory, result.request
    # `rehearse_model` sets a layout, and a lighter step unless the model has full remat already.
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
