"""`rehearse(...)`: compile a step for hardware that need not be here, and read what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from meshwright import _compat
from meshwright._progress import Bar
from meshwright.errors import RehearsalError, near
from meshwright.hardware.chips import Chip
from meshwright.hardware.topology import Topology
from meshwright.hlo.program import read_program
from meshwright.models.base import Model
from meshwright.models.presets import model
from meshwright.partitioning.decide import partition
from meshwright.partitioning.report import LeafRow
from meshwright.placement.placement import Placement
from meshwright.rehearsal.collectives.analyze import ledger
from meshwright.rehearsal.collectives.types import Collectives, read_clashes
from meshwright.rehearsal.compiler import Compiler, Job, Outcome, Platform, Site, answer
from meshwright.rehearsal.lowering import lower
from meshwright.rehearsal.memory import Memory, as_compiled, as_refused, live_buffers
from meshwright.rehearsal.request import Request, make_request, platform_of
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_arguments import as_jitted, as_shapes, names_of, sharding_table
from meshwright.rehearsal.step_time import StepTime, step_time
from meshwright.rehearsal.tpu_slices import as_slice
from meshwright.spec.mesh_spec import SpecLike
from meshwright.trees.specs import make_spec


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
) -> tuple[Memory, Collectives, StepTime | None]:
    """Memory, collectives and time, from what the compiler left."""
    chip: Chip = placed.topology.chip
    if outcome.verdict == "exhausted":
        return as_refused(outcome.reason, arguments, chip), Collectives(()), None
    program = read_program(outcome.text)
    collectives = ledger(program, placed, read_clashes(outcome.notes))
    memory = as_compiled(outcome.memory, chip, live_buffers(program))
    return memory, collectives, step_time(program, collectives, chip)


# Rehearsing one of the models that come with the library.


_DEFAULTS: dict[str, Any] = {
    "on": None,
    "slices": 1,
    "dcn": None,
    "compiler": "vendor",
    "deadline": 900.0,
    "cache": True,
}


def rehearse_model(
    name: str | Model, *, batch: int, mesh: Any, seq: int | None = None, **options: Any
) -> Rehearsal:
    """`rehearse` for a train step of one of `meshwright.models`, sharded by its own rules.

    `batch` is that of the whole machine. The other options are those of `rehearse`.

    >>> import meshwright as mw
    >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
    >>> r.fits, r.name
    (True, 'tiny')
    """
    found = name if isinstance(name, Model) else model(name)
    for option in options:
        if option not in _DEFAULTS:
            of_model = option in {field.name for field in dataclasses.fields(found.config)}
            how = f" Change the model: models.model(name, {option}=...)." if of_model else ""
            raise RehearsalError(
                f"rehearse_model has no option {option!r}.{how or near(option, _DEFAULTS)}"
            )
    request = make_request(
        found.train_step,
        (found.shapes(), found.batch(batch, seq)),
        mesh=mesh,
        data=1,
        donate=0,
        name=found.name,
        specs=None,
        out=None,
        options={},
        **{**_DEFAULTS, **options},
    )
    lighter = None
    if found.config.remat != "full":
        lighter = model_with(found, remat="full").train_step

    def layout(on_mesh: AbstractMesh) -> tuple[Any, Any]:
        state = partition(request.args[0], on_mesh, rules=found.rules(on_mesh), unused="allow")
        return (state, found.batch_spec(on_mesh)), (state, make_spec())

    return run(dataclasses.replace(request, layout=layout, lighter=lighter))


def model_with(found: Model, **changes: Any) -> Model:
    """The same model with some settings changed."""
    return dataclasses.replace(found, config=dataclasses.replace(found.config, **changes))
