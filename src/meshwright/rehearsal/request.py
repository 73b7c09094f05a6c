"""`Request`: everything a rehearsal was asked for, so that it can be asked again, changed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright import _compat
from meshwright._checks import argument_numbers
from meshwright.errors import RehearsalError, near, short
from meshwright.hardware.topology import Topology
from meshwright.hardware.topology import topology as read_topology
from meshwright.meshes.build import abstract_mesh, explain_mesh, placement_of, warn_idle
from meshwright.meshes.devices import target_topology
from meshwright.partitioning.decide import Options
from meshwright.placement.placement import Placement
from meshwright.rehearsal.compiler import PLATFORMS, Platform, default_folder
from meshwright.rehearsal.step_arguments import decide_specs, has_rows
from meshwright.spec.mesh_spec import MeshSpec

Compiler = Literal["vendor", "cpu"]

_MOST_CPU_DEVICES = 2048  # of one process, in XLA
EXTRAS = {"tpu": "tpu", "gpu": "cuda13"}


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `rehearse`.

    `lighter` is the same function with rematerialisation; `layout` gives `specs` and `out` for any
    mesh, in place of those two.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Any
    on: Any
    slices: int
    dcn: Any
    specs: Sequence[Any] | None
    out: Any
    data: tuple[int, ...]
    donate: tuple[int, ...]
    compiler: Compiler
    deadline: float
    cache: Path | None
    options: Mapping[str, Any]
    name: str
    lighter: Callable[..., Any] | None = None
    layout: Callable[[AbstractMesh], tuple[Sequence[Any], Any]] | None = None

    def placed(self) -> tuple[Placement, Topology]:
        """Where the mesh lies, and the whole machine that its positions count in."""
        if isinstance(self.mesh, (Mesh, AbstractMesh)):
            found = explain_mesh(self.mesh, on=self.on, slices=self.slices)
            return found, found.topology
        hardware = self._hardware()
        found = placement_of(MeshSpec.parse(self.mesh), hardware, self.dcn)
        warn_idle(found.spec, found.topology, hardware)
        return found, hardware

    def _hardware(self) -> Topology:
        """The machine as data: no compiler is asked here."""
        if isinstance(self.on, Topology):
            return self.on
        if isinstance(self.on, str):
            return read_topology(self.on, slices=self.slices)
        return target_topology(self.on, None, self.slices)

    def abstract(self, placed: Placement) -> AbstractMesh:
        """The mesh without its devices."""
        if isinstance(self.mesh, AbstractMesh):
            return self.mesh
        return (
            self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else abstract_mesh(placed.spec)
        )

    def decided(self, mesh: AbstractMesh) -> tuple[list[Any], Any]:
        """The specs of all arguments, and those of the results."""
        specs, out = (self.specs, self.out) if self.layout is None else self.layout(mesh)
        return decide_specs(self.args, mesh, specs, self.data, self.options), out


def make_request(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: Any,
    data: int | Sequence[int] | None,
    donate: int | Sequence[int],
    compiler: str,
    deadline: float,
    cache: bool | str | Path,
    name: str | None,
    **rest: Any,
) -> Request:
    """The same, with every option checked."""
    if not callable(function):
        raise RehearsalError(f"rehearse: {short(function)} cannot be called; pass a step function.")
    if mesh is None:
        raise RehearsalError("rehearse: say which mesh, e.g. mesh='fsdp:-1, tp:4'.")
    if not args:
        raise RehearsalError("rehearse: pass the step's arguments, or their shapes.")
    known = [field.name for field in dataclasses.fields(Options)]
    for option in rest["options"]:
        if option not in known:
            raise RehearsalError(
                f"rehearse has no option {option!r}.{near(option, known)} Arguments of the step go "
                "by position; bind others with functools.partial."
            )
    donated = argument_numbers("donate", donate, len(args))
    if data is None:
        data = [i for i in range(1, len(args)) if i not in donated]
    if compiler not in ("vendor", "cpu"):
        raise RehearsalError(
            f"compiler: {short(compiler)} is not known.{near(str(compiler), ('vendor', 'cpu'))} "
            "'vendor' is that of the hardware, 'cpu' partitions for simulated devices."
        )
    return Request(
        function,
        args,
        mesh=mesh,
        data=argument_numbers("data", data, len(args)),
        donate=donated,
        compiler=compiler,  # type: ignore[arg-type]
        deadline=check_deadline(deadline),
        cache=choose_folder(cache),
        name=str(name or getattr(function, "__name__", "step")),
        **rest,
    )


def platform_of(request: Request, hardware: Topology, devices: int) -> Platform:
    """Whose compiler takes it; refused where that is not installed."""
    family = hardware.chip.family
    if request.compiler == "cpu" or family == "cpu":
        if devices > _MOST_CPU_DEVICES:
            raise RehearsalError(
                f"{devices} simulated devices: the CPU compiler takes at most {_MOST_CPU_DEVICES}. "
                "Rehearse a part of the machine, or use the vendor's compiler."
            )
        return "cpu"
    if not _compat.compiler_installed(family):
        raise RehearsalError(
            f"{hardware.name}: the {family.upper()} compiler is not installed. It needs no "
            f"{family.upper()} and comes with one command: pip install "
            f"'meshwright[{EXTRAS[family]}]'. Or go without it, rehearse(..., compiler='cpu'): "
            "simulated devices, the same partitioning, memory only roughly."
        )
    return PLATFORMS[family]


def shrunk(args: Sequence[Any], data: Sequence[int], parts: int) -> tuple[Any, ...] | None:
    """The arguments with a smaller batch, or `None` where it does not divide."""
    found = list(args)
    for i in data:
        if any(leaf.shape[0] % parts for leaf in filter(has_rows, jax.tree.leaves(args[i]))):
            return None
        found[i] = jax.tree.map(functools.partial(_fewer_rows, parts), args[i])
    return tuple(found)


def _fewer_rows(parts: int, leaf: Any) -> Any:
    if not has_rows(leaf):
        return leaf
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        (leaf.shape[0] // parts, *leaf.shape[1:]), leaf.dtype
    )


# Options that every rehearsal takes, checked.


def check_deadline(deadline: float) -> float:
    if not isinstance(deadline, (int, float)) or isinstance(deadline, bool) or not deadline > 0:
        raise RehearsalError(f"deadline: {short(deadline)} is not a number of seconds above 0.")
    return float(deadline)


def choose_folder(cache: bool | str | Path) -> Path | None:
    """The folder that answers are kept in, or `None` for none."""
    if not isinstance(cache, (bool, str, Path)):
        raise RehearsalError(f"cache: {short(cache)} is not a folder, True or False.")
    if isinstance(cache, bool):
        return default_folder() if cache else None
    return Path(cache).expanduser()
