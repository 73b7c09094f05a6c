"""`rehearse` and `rehearse_model`: compile a step for hardware that need not be here.

A rehearsal runs these parts in order: check the request (`request`), place the mesh, decide how
the arguments are sharded (`step_arguments`), lower to StableHLO (`lowering`), compile in another
process or take the answer from the cache (`compiler`), and judge its memory (`memory`, `peak`).
What else the program tells, its collectives and time, a `Rehearsal` reads when it is asked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from jax.sharding import AbstractMesh, Mesh

from meshwright._progress import Pulse, showing
from meshwright.errors import MeshwrightError, RehearsalError, near
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.topology import Topology
from meshwright.models.base import Model
from meshwright.models.presets import model
from meshwright.partitioning.decide import PartitionOptions
from meshwright.partitioning.report import LeafRow
from meshwright.placement.placement import Placement
from meshwright.rehearsal.compiler import (
    Compiler,
    Outcome,
    Platform,
    Site,
    compile_or_load,
    last_seconds,
)
from meshwright.rehearsal.host_memory import HostMemory, host_memory
from meshwright.rehearsal.lowering import lower
from meshwright.rehearsal.memory import Buffer, Memory, as_compiled, as_refused
from meshwright.rehearsal.peak import (
    constant_bytes,
    live_buffers,
    scheduled_sizes,
    workspace_at_peak,
)
from meshwright.rehearsal.peak_estimates import PeakEstimate
from meshwright.rehearsal.request import (
    TIMEOUT,
    CompileOptions,
    Request,
    make_request,
    model_request,
    platform_of,
    without_kernels,
)
from meshwright.rehearsal.result import Rehearsal
from meshwright.rehearsal.step_arguments import (
    as_shapes,
    name_variables,
    sharding_table,
    with_jit_shardings,
)
from meshwright.rehearsal.tpu_slices import as_slice
from meshwright.spec.mesh_spec import SpecLike


def rehearse(
    function: Callable[..., Any],
    *args: Any,
    mesh: SpecLike | Mesh | AbstractMesh,
    on: str | Topology | Sequence[Any] | None = None,
    slices: int = 1,
    dcn: Mapping[str, int] | Sequence[int] | str | None = None,
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Any = None,
    data: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] = (),
    compiler: str = "vendor",
    timeout: float = TIMEOUT,
    codegen: bool = True,
    cache: bool | str | Path = True,
    progress: bool = True,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    intensity: Mapping[str, float] | None = None,
    name: str | None = None,
    **options: Unpack[PartitionOptions],
) -> Rehearsal:
    """Compile a step for the hardware of a mesh: does it fit, what does it move, how fast is it.

    Nothing is computed, and no device of the mesh needs to be here.

    Args:
      function: the step, bare or with `jax.jit`, `nnx.jit` or `eqx.filter_jit`, whose options hold.
        What it raises while it is traced comes through.
      *args: its arguments, as arrays or as `jax.ShapeDtypeStruct`s. Unless `jax.jit` is around the
        step, other leaves (functions, flags, numbers inside of a tree) are a part of it. Modules of
        NNX may be updated in place: what the step leaves in them is a result.
      mesh: a spec such as `"fsdp:-1, tp:4"` for the hardware named by `on` (`slices` and `dcn` as
        for `mesh`), or a `Mesh` or `AbstractMesh`.
      in_shardings: a list or tuple with one entry per argument: a `PartitionSpec` for all its
        arrays, a tree of specs, or `None` to decide here. By default the first argument and those
        in `donate_argnums` are state and sharded as `partition` says; `options` are those of
        `partition` (`rules`, `logical`, ...). So are NNX modules and optimizer states of the first.
        Other arguments are data, sharded along their first dim. A `NamedSharding`, here or of an
        array that is an argument, is read by its spec if its mesh has these axes in name and size;
        one on other axes is an error.
      out_shardings: a tree of specs for the results, or a prefix of one; the compiler chooses
        where it says `None`.
      data: numbers of the arguments that are data, in place of that default.
      donate_argnums: numbers of the arguments whose memory the results may take.
      compiler: `"vendor"` for the hardware's own, in a process of its own, or `"cpu"` to partition
        for simulated CPU devices where that is not installed.
      timeout: seconds after which the compiler is ended.
      codegen: False ends a TPU's compiler when it has scheduled the program and assigned its
        memory, before it generates code: seconds instead of minutes for large models. Kernels that
        do not fit the memory on chip are not noticed then.
      cache: folder for the compiler's answers; True for the user's own, False for none.
      progress: after two seconds, show what is being done and for how long: a line that updates on
        a terminal (stderr) and in a notebook, elsewhere a line every 15 seconds. False: nothing.
      speeds: a file of `meshwright calibrate`, or what `calibrate` returned: measured speeds in
        place of the table's; `"default"` is the user's own file. The result says whose it used.
      intensity: how much axes communicate, by name, where the mesh is placed here; as for `place`.
      name: what the result is called; by default the function's name.

    Raises:
      RehearsalError: for a bad option, a step that cannot be lowered without devices, a compiler
        that is not installed, refuses the program, crashes or takes longer than `timeout`. A step
        that is too large is no error: the result says so.

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
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            data=data,
            donate_argnums=donate_argnums,
            compiler=compiler,
            timeout=timeout,
            codegen=codegen,
            cache=cache,
            progress=progress,
            speeds=speeds,
            intensity=intensity,
            name=name,
            options=options,
        )
    )


def rehearse_model(
    name: str | Model,
    *,
    batch: int,
    mesh: SpecLike | Mesh | AbstractMesh,
    seq: int | None = None,
    **options: Unpack[CompileOptions],
) -> Rehearsal:
    """Rehearse a train step of one of `meshwright.models`, sharded by the model's own rules.

    Args:
      name: a model, or its name as for `models.model`.
      batch: rows of the global batch, over all devices.
      mesh: as for `rehearse`.
      seq: length of a row; by default the model's own.
      **options: `on`, `slices`, `dcn`, `compiler`, `timeout`, `codegen`, `cache`, `progress` and
        `speeds`, as for `rehearse`.

    Raises `ModelError` for an unknown model or sizes that do not fit it, and `RehearsalError` as
    `rehearse` does.

    >>> import meshwright as mw
    >>> r = mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")
    >>> r.fits, r.name
    (True, 'tiny')
    """
    chosen = name if isinstance(name, Model) else model(name)
    known = CompileOptions.__annotations__
    for option in options:
        if option not in known:
            of_model = option in {field.name for field in dataclasses.fields(chosen.config)}
            hint = f" Change the model: models.model(name, {option}=...)." if of_model else ""
            raise RehearsalError(
                f"rehearse_model has no option {option!r}.{hint or near(option, known)}",
                option=option,
            )
    return run(model_request(chosen, batch, seq, mesh, **options))


def run(request: Request) -> Rehearsal:
    """Do what a checked request asks for; remedies are tried by changing one and running it."""
    placed, hardware = request.place()
    platform = platform_of(request, hardware, placed.positions.size)
    mesh = request.abstract(placed, platform)
    site = _site(platform, placed, hardware)
    stand_in = platform == "cpu" and hardware.chip.family != "cpu"
    # The compiling process takes seconds to load its compiler: it starts before the function is
    # traced, and is ended unused if tracing fails or the cache has the answer.
    with (
        showing(request.progress),
        Pulse(f"{request.name} on {hardware.name}") as pulse,
        Compiler(site, request.codegen) as compiler,
    ):
        pulse.now("shardings")
        in_specs, out_specs = request.specs(mesh)
        names = request.argument_names
        # Simulated CPU devices have one memory alone.
        shapes = as_shapes(request.args, in_specs, mesh, keep_on_host=platform != "cpu")
        pulse.now("tracing")
        lowered = lower(
            request.function,
            shapes,
            names,
            mesh,
            platform,
            hardware,
            request.donate_argnums,
            out_specs,
        )
        arguments = sharding_table(names, with_jit_shardings(shapes, lowered.inputs, mesh), mesh)
        job = dataclasses.replace(lowered.job(request.name, site), codegen=request.codegen)
        pulse.now("compiling", last_seconds(request.cache, job))
        outcome, from_cache = compile_or_load(
            job, request.cache, request.timeout, lambda _: None, compiler
        )
        pulse.now("reading the program")
        text = name_variables(outcome.text, arguments.rows)
        outcome = dataclasses.replace(outcome, text=text)
        memory, host = _judge(outcome, placed, hardware, arguments.rows)
    estimate = _on_cpu_devices(request) if memory.refused else None
    result = Rehearsal(
        request=request,
        placement=placed,
        arguments=arguments,
        memory=dataclasses.replace(memory, cpu_estimate=stand_in),
        outcome=outcome,
        stand_in=stand_in,
        from_cache=from_cache,
        results=lowered.results,
        callbacks=lowered.callbacks,
        host_memory=host,
        offloads=lowered.offloads,
        estimate=estimate,
    )
    return result if estimate is None else _with_buffers(result, PeakEstimate(result).buffers())


class Trial(TypedDict, total=False):
    """What came of a changed request: its rehearsal, or why there is none."""

    tried: Rehearsal
    failed: str


def trial(request: Request) -> Trial:
    """Run a request that was changed here: what it raises is an answer, too."""
    try:
        return {"tried": run(request)}
    except Exception as error:  # the user's function may not take it, and the first verdict stands
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        ours = isinstance(error, MeshwrightError)
        return {"failed": reason if ours else f"the step failed: {reason}"}


def _on_cpu_devices(request: Request) -> Rehearsal | None:
    """Compile a step that its compiler refused for simulated CPU devices, for what is in memory.

    `None` where that cannot be: kernels of the platform alone, or more devices than it takes.
    """
    changed = dataclasses.replace(without_kernels(request), compiler="cpu", codegen=True)
    return trial(changed).get("tried")


def _with_buffers(result: Rehearsal, buffers: tuple[Buffer, ...]) -> Rehearsal:
    memory = dataclasses.replace(result.memory, buffers=buffers, estimated=True)
    return dataclasses.replace(result, memory=memory)


def _site(platform: Platform, placed: Placement, hardware: Topology) -> Site:
    """Return the hardware to compile for, and the device of each partition there."""
    # libtpu (0.0.42 to 0.0.50) aborts for many parts of a slice: it gets a whole slice of the
    # part's shape, where TPUs come in that shape.
    is_part = platform == "tpu" and placed.positions.size < hardware.num_devices
    whole_slice = as_slice(placed) if is_part else None
    machine, positions = whole_slice or (hardware, placed.positions)
    return Site(platform, dataclasses.replace(machine, devices=None), positions)


# In: what the compiling process left. Out: the memory of one device, since every device runs the
# same program, and of a host, `None` where nothing is kept there. A compiler that ran out of memory
# leaves no program: the verdict is then from its error message. Example: sizes of 3 GB and
# libraries that need 1 GB beside them at the peak are a `Memory` of 4 GB.
def _judge(
    outcome: Outcome, placed: Placement, hardware: Topology, arguments: Sequence[LeafRow]
) -> tuple[Memory, HostMemory | None]:
    chip = placed.topology.chip
    program = outcome.program
    if program is None:
        return as_refused(outcome.reason, arguments, chip), None
    sizes = scheduled_sizes(program, outcome.memory) if outcome.scheduled else outcome.memory
    if sizes.get("assigned"):
        sizes = {**sizes, "assigned": sizes["assigned"] - constant_bytes(program)}
    memory = as_compiled(sizes, chip, live_buffers(program, chip))
    workspace = workspace_at_peak(program, chip, memory.peak)
    return (
        dataclasses.replace(memory, temporaries=memory.temporaries + workspace),
        host_memory(sizes, program, placed.topology, hardware),
    )
