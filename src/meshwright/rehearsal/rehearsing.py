"""`rehearse(...)`: compile a step for hardware that need not be here, and read what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright import _compat
from meshwright._progress import Bar
from meshwright.hardware import Chip, Topology
from meshwright.partitioning.report import LeafRow
from meshwright.placement import Placement
from meshwright.rehearsal.arguments import as_jitted, as_shapes, names_of, sharding_table
from meshwright.rehearsal.compiler.answers import answer
from meshwright.rehearsal.compiler.jobs import Job, Outcome, Platform, Site
from meshwright.rehearsal.compiler.running import Compiler
from meshwright.rehearsal.ledger import Ledger, ledger, read_clashes
from meshwright.rehearsal.lowering import lower
from meshwright.rehearsal.memory.buffers import live_buffers
from meshwright.rehearsal.memory.use import Memory, as_compiled, as_refused
from meshwright.rehearsal.programs import read_program
from meshwright.rehearsal.request import Request, make_request, platform_of
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.slices import as_slice
from meshwright.rehearsal.timing.steptime import StepTime, step_time
from meshwright.spec import SpecLike


def rehearse(
    function: Callable[..., Any],
    *args: Any,
    mesh: SpecLike | Mesh | AbstractMesh,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    dcn: Mapping[str, int] | Sequence[int] | str | None = None,
    specs: Sequence[Any] | None = None,
    out: Any = None,
    data: int | Sequence[int] | None = None,
    donate: int | Sequence[int] = (),
    compiler: str = "vendor",
    deadline: float = 900.0,
    cache: bool | str | Path = True,
    name: str | None = None,
    **options: Any,
) -> Rehearsal:
    """What the real compiler makes of a step: does it fit, what does it move, how fast is it.

    `args` are arrays or shapes; nothing is computed. `mesh` is a spec such as `"fsdp:-1, tp:4"`
    for the hardware named by `on` (with `slices` and `dcn` as for `mesh`), or a mesh. The first
    argument and those in `donate` are state and are cut as `partition` says (`rules`, `logical`
    and its other options are taken here too); the others are data (or those that `data` counts),
    cut along their first dim. `specs` gives specs instead, one entry per argument; `out` those of
    the results. Arrays that lie on a mesh of these axes stay as they lie.

    The vendor's compiler runs in a process of its own for at most `deadline` seconds; its answer
    is kept in `cache` (a folder, True for the user's own, or False). `compiler="cpu"` partitions
    for simulated devices instead, where the vendor's is not installed.

    >>> import jax, meshwright as mw
    >>> w = jax.ShapeDtypeStruct((512, 512), "float32")
    >>> x = jax.ShapeDtypeStruct((64, 512), "float32")
    >>> r = mw.rehearse(lambda w, x: x @ w, w, x, mesh="fsdp:8", on="cpu:8")
    >>> r.fits, [(entry.kind, entry.bytes) for entry in r.collectives]
    (True, [('all-gather', 1048576)])
    """
    return run(
        make_request(
            function,
            args,
            mesh=mesh,
            on=on,
            slices=slices,
            dcn=dcn,
            specs=specs,
            out=out,
            data=data,
            donate=donate,
            compiler=compiler,
            deadline=deadline,
            cache=cache,
            name=name,
            options=options,
        )
    )


def run(request: Request) -> Rehearsal:
    """From the request to the result."""
    placed, hardware = request.placed()
    platform = platform_of(request, hardware, placed.positions.size)
    mesh = request.abstract(placed)
    site = _site(platform, placed, hardware)
    # The compiler starts while the function is traced.
    with Bar(f"{request.name} on {hardware.name}") as bar, Compiler(site) as compiler:
        bar.now("shardings")
        specs, out = request.decided(mesh)
        names = names_of(request.function, len(request.args))
        shapes = as_shapes(request.args, specs, mesh)
        bar.now("tracing")
        program = lower(request.function, shapes, mesh, platform, request.donate, out)
        arguments = sharding_table(names, as_jitted(shapes, program.inputs, mesh), mesh)
        job = Job(
            request.name,
            program.code,
            site,
            program.free_outputs,
            _compat.uses_shardy(),
            program.identity,
            program.options,
        )
        outcome, kept = answer(
            job,
            request.cache,
            request.deadline,
            lambda passed: bar.now("compiling", passed, request.deadline),
            compiler,
        )
        bar.now("reading")
        memory, collectives, timing = read(outcome, placed, arguments.rows)
    return Rehearsal(
        request=request,
        placement=placed,
        arguments=arguments,
        memory=memory,
        collectives=collectives,
        time=timing,
        compiler=outcome.compiler,
        stand_in=platform == "cpu" and hardware.chip.family != "cpu",
        compile_seconds=outcome.seconds,
        from_cache=kept,
        text=outcome.text,
        results=program.results,
    )


def _site(platform: Platform, placed: Placement, hardware: Topology) -> Site:
    """What to compile for. libtpu aborts for many a part of a slice: it gets one of that shape."""
    part = platform == "tpu" and placed.positions.size < hardware.num_devices
    found = as_slice(placed) if part else None
    machine, positions = found or (hardware, placed.positions)
    return Site(platform, dataclasses.replace(machine, devices=None), positions)


def read(
    outcome: Outcome, placed: Placement, arguments: Sequence[LeafRow]
) -> tuple[Memory, Ledger, StepTime | None]:
    """Memory, collectives and time, from what the compiler left."""
    chip: Chip = placed.topology.chip
    if outcome.verdict == "exhausted":
        return as_refused(outcome.reason, arguments, chip), Ledger(()), None
    program = read_program(outcome.text)
    collectives = ledger(program, placed, read_clashes(outcome.notes))
    memory = as_compiled(outcome.memory, chip, live_buffers(program))
    return memory, collectives, step_time(program, collectives, chip)
