"""`Request`: the checked arguments of a rehearsal, kept so that it can be run again, changed."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from meshwright import _compat
from meshwright._checks import argument_numbers, check_flag, check_seconds
from meshwright._show import short_repr
from meshwright.errors import (
    PartitionError,
    RehearsalError,
    near,
    on_command_line,
    option_text,
    short,
)
from meshwright.hardware.calibration_file import Calibration
from meshwright.hardware.chips import Chip
from meshwright.hardware.topology import Topology, measured_by
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.build import abstract_mesh, explain_mesh
from meshwright.meshes.devices import target_topology
from meshwright.models.base import Model
from meshwright.partitioning.decide import Options, partition
from meshwright.pipelines.step import PipelineStep
from meshwright.placement.placement import Placement
from meshwright.placement.placer import placement_of, warn_idle
from meshwright.rehearsal.collectives.causes import Batch
from meshwright.rehearsal.compiler import PLATFORMS, Platform, default_folder
from meshwright.rehearsal.step_arguments import argument_names, decide_specs, has_rows, is_state
from meshwright.spec.mesh_spec import MeshSpec
from meshwright.trees.specs import make_spec

CompilerChoice = Literal["vendor", "cpu"]

TIMEOUT = 900.0  # seconds; a train step of llama3-8b for 64 TPU chips takes 40
_MOST_CPU_DEVICES = 2048  # that XLA's CPU client makes in one process
# How to get the compiler of a family of chips: by the packages themselves, which works wherever
# meshwright came from.
INSTALL = {
    "tpu": "pip install 'jax[tpu]'",
    "gpu": "pip install 'jax[cuda13-local]' nvidia-nvvm nvidia-cuda-nvcc",
}


class CompileOptions(TypedDict, total=False):
    """The options that every rehearsal of a step takes: for what hardware, by which compiler."""

    on: str | Topology | Sequence[Any] | None
    slices: int
    dcn: Mapping[str, int] | Sequence[int] | str | None
    compiler: str
    timeout: float
    codegen: bool
    cache: bool | str | Path
    progress: bool
    speeds: str | os.PathLike[str] | Calibration | None


@dataclasses.dataclass(frozen=True, repr=False)
class Request:
    """The arguments of `rehearse`, checked.

    `layout`, if given, makes `in_shardings` and `out_shardings` for any mesh and replaces those
    two; `model_request` gives one, and `model` is the model whose step it is. `tells_device`
    says that the step asks the ambient mesh for its kind of device, as our models do; a mesh with
    a device equals none without, which users may have in a `shard_map`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Any
    on: Any
    slices: int
    dcn: Any
    in_shardings: Sequence[Any] | None
    out_shardings: Any
    data: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    compiler: CompilerChoice
    timeout: float
    cache: Path | None
    options: Mapping[str, Any]
    name: str
    codegen: bool = True
    progress: bool = True
    layout: Callable[[AbstractMesh], tuple[Sequence[Any], Any]] | None = None
    tells_device: bool = False
    speeds: str | os.PathLike[str] | Calibration | None = None
    intensity: Mapping[str, float] | None = None

    def __repr__(self) -> str:
        return short_repr(self, f"{self.name}, mesh {short(self.mesh)}, on {short(self.on)}")

    def place(self) -> tuple[Placement, Topology]:
        """Place the mesh; also return the whole machine that its positions count in."""
        if isinstance(self.mesh, (Mesh, AbstractMesh)):
            placement = explain_mesh(self.mesh, on=self.on, slices=self.slices, speeds=self.speeds)
            return placement, placement.topology
        hardware = self._hardware()
        placement = placement_of(MeshSpec.parse(self.mesh), hardware, self.dcn, self.intensity)
        warn_idle(placement.spec, placement.topology, hardware)
        return placement, hardware

    def _hardware(self) -> Topology:
        # A name is read as data: `target_topology` would get devices from the vendor's compiler,
        # which takes seconds and is left to the compiling process.
        if isinstance(self.on, (str, Topology)):
            return read_topology(self.on, slices=self.slices, speeds=self.speeds)
        hardware = target_topology(self.on, None, self.slices)
        return hardware if self.speeds is None else measured_by(hardware, self.speeds)

    def abstract(self, placed: Placement, platform: Platform) -> AbstractMesh:
        """Return the mesh without its devices; for a model, with what they will be."""
        if isinstance(self.mesh, AbstractMesh):
            return self.mesh
        if isinstance(self.mesh, Mesh):
            own: AbstractMesh = self.mesh.abstract_mesh
            return own
        mesh = abstract_mesh(placed.spec)
        if self.tells_device:
            mesh = _with_device(mesh, platform, placed.topology.chip)
        return mesh

    def specs(self, mesh: AbstractMesh) -> tuple[list[Any], Any]:
        """Decide the specs of all arguments; also return those asked for the results."""
        given = self.in_shardings, self.out_shardings
        in_specs, out_specs = given if self.layout is None else self.layout(mesh)
        decided = decide_specs(
            self.args, self.argument_names, mesh, in_specs, self.data, self.options
        )
        return decided, out_specs

    @property
    def model(self) -> Model | None:
        """The model, if this is its own step by its own rules."""
        owner = getattr(self.function, "__self__", None)
        return owner if self.layout is not None and isinstance(owner, Model) else None

    @property
    def batch(self) -> Batch:
        """Which arguments are data, and their rows."""
        names = self.argument_names
        shapes = [
            [tuple(np.shape(leaf)) for leaf in filter(has_rows, jax.tree.leaves(arg))]
            for arg in self.args
        ]
        data = [shape for i in self.data for shape in shapes[i] if shape[0] > 1]
        others = (shapes[i] for i in range(len(shapes)) if i not in self.data)
        return Batch(
            frozenset(names[i] for i in self.data),
            frozenset(shape[0] for shape in data),
            frozenset(shape[0] * shape[1] for shape in data if len(shape) > 1),
            frozenset(shape for one in others for shape in one),
        )

    @property
    def argument_names(self) -> list[str]:
        """The names of the step's parameters, for tables and messages."""
        return argument_names(self.function, len(self.args))


_TWO_CORES = ("v4", "v5p")  # two cores work as one JAX device


def _with_device(mesh: AbstractMesh, platform: Platform, chip: Chip) -> AbstractMesh:
    """Return the mesh with the kind of its devices, which programs and Pallas may look at."""
    if platform == "cpu":
        device = AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu")
    else:
        cores = 2 if chip.name in _TWO_CORES else 1
        device = AbstractDevice(
            device_kind=chip.kinds[0],
            num_cores=cores if platform == "tpu" else None,
            platform=chip.family,
        )
    told: AbstractMesh = mesh.update(abstract_device=device)  # type: ignore[no-untyped-call]
    return told


def make_request(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: Any,
    data: int | Sequence[int] | None,
    donate_argnums: int | Sequence[int],
    name: str | None,
    on: Any = None,
    slices: int = 1,
    dcn: Any = None,
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Any = None,
    compiler: str = "vendor",
    timeout: float = TIMEOUT,
    codegen: bool = True,
    cache: bool | str | Path = True,
    progress: bool = True,
    speeds: str | os.PathLike[str] | Calibration | None = None,
    intensity: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
    caller: str = "rehearse",
) -> Request:
    """Check every option of `rehearse`, or of `verify`, as messages then call it."""
    if not callable(function):
        raise RehearsalError(f"{caller}: {short(function)} cannot be called; pass a step function.")
    if isinstance(function, PipelineStep):
        raise RehearsalError(
            f"{caller}: {short(function)} is a pipeline, which has its own mesh and a program for "
            "each group. Use rehearse_pipeline(step, *args)."
        )
    if mesh is None:
        raise RehearsalError(f"{caller}: say which mesh, e.g. mesh='fsdp:-1, tp:4'.", option="mesh")
    if not args:
        raise RehearsalError(f"{caller}: pass the step's arguments, or their shapes.")
    _check_option_names(caller, options or {})
    donated = argument_numbers("donate_argnums", donate_argnums, len(args))
    if data is None:
        others = (i for i in range(1, len(args)) if i not in donated)
        data = [i for i in others if not is_state(args[i], args[0])]
    _check_compiler(compiler, codegen)
    return Request(
        function,
        args,
        mesh=mesh,
        on=on,
        slices=slices,
        dcn=dcn,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        data=argument_numbers("data", data, len(args)),
        donate_argnums=donated,
        compiler=compiler,  # type: ignore[arg-type]
        timeout=check_seconds("timeout", timeout, error=RehearsalError),
        cache=choose_folder(cache),
        options=options or {},
        name=str(name or getattr(function, "__name__", "step")),
        codegen=codegen,
        progress=check_flag("progress", progress, error=RehearsalError),
        tells_device=isinstance(getattr(function, "__self__", None), Model),
        speeds=speeds,
        intensity=intensity,
    )


def _check_compiler(compiler: object, codegen: object) -> None:
    if compiler not in ("vendor", "cpu"):
        meant = compiler in ("tpu", "gpu", "cuda", "libtpu")
        hint = " 'vendor' is meant: on= says whose." if meant else ""
        raise RehearsalError(
            f"compiler: {short(compiler)} is not known.{hint} "
            "'vendor' is that of the hardware, 'cpu' partitions for simulated devices.",
            option="compiler",
        )
    if not isinstance(codegen, bool):
        raise RehearsalError(
            f"codegen: {short(codegen)} is neither True nor False.", option="codegen"
        )


def model_request(
    chosen: Model, batch: int, seq: int | None, mesh: Any, **options: Unpack[CompileOptions]
) -> Request:
    """Make the request for a train step of a model, sharded by the model's own rules."""
    request = make_request(
        chosen.train_step,
        (chosen.shapes(), chosen.batch(batch, seq)),
        mesh=mesh,
        data=1,
        donate_argnums=0,
        name=chosen.name,
        **options,
    )

    def layout(on_mesh: AbstractMesh) -> tuple[Any, Any]:
        rows = chosen.batch_spec(on_mesh)
        _check_rows(batch, rows, on_mesh)
        rules = chosen.rules(on_mesh)
        try:
            state = partition(request.args[0], on_mesh, rules=rules, unused="allow")
        except PartitionError as error:
            raise _cut_unevenly(chosen, error) from error
        return (state, rows), (state, make_spec())

    return dataclasses.replace(request, layout=layout)


def _cut_unevenly(model: Model, error: PartitionError) -> RehearsalError:
    """Say what of a model a mesh does not divide: how many arrays, and the first of them."""
    count, _, problems = str(error).removeprefix("partition: ").partition(".\n")
    first = problems.strip().splitlines()[0].partition(". ")[0] if problems else str(error)
    return RehearsalError(
        f"{option_text('mesh')}: {model.name} cannot be sharded over it, {count}, the first: "
        f"{first}. Choose sizes that divide the dims of its weights.",
        option="mesh",
    )


def _check_rows(batch: int, spec: PartitionSpec, mesh: AbstractMesh) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entry = spec[0] if len(spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    shards = math.prod(sizes[axis] for axis in axes)
    if batch % shards:
        raise RehearsalError(
            f"{option_text('batch')}: {batch} rows cannot be sharded over {shards} devices "
            f"({', '.join(axes)}). Take a multiple of {shards}.",
            option="batch",
        )


def changed_model(
    request: Request, *, batch: int | None = None, seq: int | None = None, **settings: Any
) -> Request:
    """Return a model's request with another batch or sequence, or other settings of the model."""
    model = request.model
    if model is None:
        raise RehearsalError(f"{request.name} is no model of this package.")
    rows, length = batch_shape(request)
    kept = ("on", "slices", "dcn", "compiler", "timeout", "codegen", "progress", "speeds")
    own = {name: getattr(request, name) for name in kept}
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, **settings))
    return model_request(
        changed,
        rows if batch is None else batch,
        length if seq is None else seq,
        request.mesh,
        cache=False if request.cache is None else request.cache,
        **own,
    )


def batch_shape(request: Request) -> tuple[int, int | None]:
    """Return the rows of a model's batch and, of tokens, their length."""
    tokens = request.args[1].get("inputs")
    if tokens is not None and hasattr(getattr(request.model, "config", None), "seq"):
        return tokens.shape[0], tokens.shape[1]
    return jax.tree.leaves(request.args[1])[0].shape[0], None


def without_kernels(request: Request) -> Request:
    """Return a model's request with attention as CPU devices have it, if it asks for a kernel."""
    attention = getattr(getattr(request.model, "config", None), "attention", "auto")
    return request if attention in ("auto", "dot") else changed_model(request, attention="auto")


def _check_option_names(caller: str, options: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Options)]
    for option in options:
        if option not in known:
            shardings = ("in_shardings", "out_shardings", "donate_argnums")
            hint = near(option, (*known, *CompileOptions.__annotations__, *shardings))
            raise RehearsalError(
                f"{caller} has no option {option!r}.{hint} Arguments of the step go by position; "
                "bind others with functools.partial.",
                option=option,
            )


def choose_folder(cache: bool | str | Path) -> Path | None:
    """Return the folder that `cache` means, made if need be, or `None` to cache nothing."""
    if not isinstance(cache, (bool, str, Path)):
        raise RehearsalError(
            f"cache: {short(cache)} is not a folder, True or False.", option="cache"
        )
    if isinstance(cache, bool):
        return default_folder() if cache else None
    folder = Path(cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RehearsalError(
            f"cache: {folder} cannot be made: {error.strerror}. Name a folder that can, or "
            "cache=False to cache nothing.",
            option="cache",
        ) from error
    return folder


def platform_of(request: Request, hardware: Topology, devices: int) -> Platform:
    """Choose the compiler's platform; refuse one that is not installed or takes fewer devices."""
    family = hardware.chip.family
    if not request.codegen and (request.compiler == "cpu" or family != "tpu"):
        whose = request.compiler if request.compiler == "cpu" else family
        raise RehearsalError(
            f"{_without_codegen()} is for the TPU's compiler, which takes minutes to generate "
            f"code; {hardware.name} is compiled by the {whose.upper()}'s. Leave it out.",
            option="codegen",
        )
    if request.compiler == "cpu" or family == "cpu":
        if devices > _MOST_CPU_DEVICES:
            raise RehearsalError(
                f"{devices} simulated devices: the CPU compiler takes at most {_MOST_CPU_DEVICES}. "
                "Rehearse a part of the machine, or use the vendor's compiler."
            )
        return "cpu"
    check_installed(hardware)
    return PLATFORMS[family]


def check_installed(hardware: Topology) -> None:
    """Refuse hardware whose compiler is not installed; say how to get it, or go without."""
    family = hardware.chip.family
    if not _compat.compiler_installed(family):
        raise RehearsalError(
            f"{hardware.name}: the {family.upper()} compiler is not installed. It needs no "
            f"{family.upper()} and comes with one command: {INSTALL[family]}. Or go without it, "
            f"{option_text('compiler', 'cpu')}: simulated devices, the same partitioning, memory "
            "only roughly.",
            option="compiler",
        )


def _without_codegen() -> str:
    return "--no-codegen" if on_command_line() else "codegen=False"


def shrunk(args: Sequence[Any], data: Sequence[int], factor: int) -> tuple[Any, ...] | None:
    """Divide the rows of data by `factor`; `None` where that leaves a rest."""
    smaller = list(args)
    for i in data:
        if any(leaf.shape[0] % factor for leaf in filter(has_rows, jax.tree.leaves(args[i]))):
            return None
        smaller[i] = jax.tree.map(functools.partial(_fewer_rows, factor), args[i])
    return tuple(smaller)


def _fewer_rows(factor: int, leaf: Any) -> Any:
    if not has_rows(leaf):
        return leaf
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (leaf.shape[0] // factor, *leaf.shape[1:]), leaf.dtype
    )
