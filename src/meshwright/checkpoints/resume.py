"""`resume`: go on from the newest whole checkpoint, on the devices that are here now."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

from jax.sharding import Mesh

from meshwright._processes import combine_texts, fail_together
from meshwright.axes import role
from meshwright.checkpoints.async_saves import saved_steps, steps_folder
from meshwright.checkpoints.checkpoint import current_folder, is_checkpoint, restore_checkpoint
from meshwright.checkpoints.manifest import MANIFEST_NAME
from meshwright.errors import (
    CheckpointError,
    CheckpointWarning,
    PartitionError,
    PlacementError,
    SpecError,
    listing,
    warn,
)
from meshwright.meshes.build import mesh as build_mesh
from meshwright.meshes.devices import live_devices
from meshwright.partitioning.decide import PartitionOptions
from meshwright.spec.mesh_spec import AxisSpec, MeshSpec, SpecLike
from meshwright.transfers.device_put import Narrow
from meshwright.transfers.sharded_init import init, init_shapes
from meshwright.trees.walk import problem_lines


class Resumed(NamedTuple):
    """Where a run goes on: after so many steps, with this state, on this mesh."""

    step: int
    state: Any
    mesh: Mesh


def resume(
    path: str | os.PathLike[str],
    build: Callable[..., Any],
    *args: Any,
    mesh: SpecLike | Mesh,
    specs: Any = None,
    narrow: Narrow = "error",
    **options: Unpack[PartitionOptions],
) -> Resumed:
    """Restore the newest whole checkpoint under `path`, or compute a fresh state at step 0.

    The mesh is built for the devices that are here, which may be others than those that saved. Only
    the shapes of `build(*args)` are asked for where there is a checkpoint: nothing is computed, and
    no second state takes memory. A checkpoint that is damaged, or that not all processes see, is
    passed over for the one before, with a `CheckpointWarning`. All processes call this, and go on
    from the same step.

    Args:
      path: the directory that `Checkpoints` saves to.
      build: what makes the fresh state, as for `init`.
      *args: its arguments, as for `init`.
      mesh: the spec of the mesh, where `-1` takes the devices that are left, or a `Mesh`.
      specs, narrow, options: those of `init`.

    Returns:
      `step`, `state` and `mesh`. The state is that after `step` steps.

    Raises:
      SpecError: if the spec does not fit the devices; the text names the nearest that does.
      CheckpointError: if there are checkpoints and none is whole.
      PartitionError: if the newest whole one holds another tree than `build` makes.

    >>> import jax, tempfile
    >>> import meshwright as mw
    >>> path = tempfile.mkdtemp()
    >>> build = lambda: {"w": jax.numpy.ones((256, 256))}
    >>> step, state, mesh = mw.resume(path, build, mesh="fsdp:-1")
    >>> with mw.Checkpoints(path) as checkpoints:
    ...     begun = checkpoints.save(step + 1, state)
    >>> again = mw.resume(path, build, mesh="dp:2, tp:-1")
    >>> again.step, dict(again.mesh.shape)
    (1, {'dp': 2, 'tp': 4})
    """
    with fail_together("resume", PartitionError):
        folder = steps_folder(path)
        on = mesh if isinstance(mesh, Mesh) else _mesh_of_what_is_left(mesh)
        if not callable(build):
            raise PartitionError(
                "resume: build is not a function. Pass what makes the fresh state.", option="build"
            )
    steps, passed = _agree(folder)
    if not steps and not passed:
        _warn_of_other_names(folder)
        return Resumed(0, init(build, *args, mesh=on, specs=specs, narrow=narrow, **options), on)
    with fail_together("resume", PartitionError):
        target = init_shapes(build, *args, mesh=on, specs=specs, narrow=narrow, **options)
    for step in steps:
        state, problem = _restored(folder / f"step_{step}", target)
        if not problem:
            for text in passed:
                warn(f"Going on from step {step}. Passed over: {text}", CheckpointWarning)
            return Resumed(step, state, on)
        passed.append(problem)
    raise CheckpointError(
        f"{folder}: no checkpoint here is whole. Delete them to begin anew.{problem_lines(passed)}"
    )


def _warn_of_other_names(folder: Path) -> None:
    """Warn before a run begins where checkpoints are that `Checkpoints` has not named."""
    items = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [item.name for item in items if item.is_dir() and is_checkpoint(item)]
    if names:
        warn(
            f"{folder}: beginning at step 0, for no checkpoint is named step_N. There is "
            f"{listing(names, 4)}; rename the one to go on from.",
            CheckpointWarning,
        )


def _restored(folder: Path, target: Any) -> tuple[Any, str]:
    """Return the state, or why this checkpoint is damaged; raise if the target does not fit it."""
    state, problem, is_damaged = None, None, False
    try:
        state = restore_checkpoint(folder, target)
    except PartitionError as error:
        # Without its traceback, whose frames hold the arrays that were read.
        problem, is_damaged = error.with_traceback(None), isinstance(error, CheckpointError)
    # One process may see the damage and the others hear of an error only; damage is damage for all.
    damage = combine_texts(
        "resume damage",
        str(problem) if is_damaged else "",
        lambda texts: next((text for text in texts if text), ""),
    )
    if damage:
        return None, damage
    if problem is not None:
        raise problem
    return state, ""


def _agree(folder: Path) -> tuple[list[int], list[str]]:
    """Return the steps that all processes see alike, newest first, and what is wrong with others.

    A directory may be listed late by a network file system, so each process looks for what any of
    them has listed.
    """
    listed = json.dumps(sorted(saved_steps(folder)))
    union = combine_texts("resume list", listed, _union) or listed
    steps = sorted(json.loads(union), reverse=True)
    seen = json.dumps([_fingerprint(folder / f"step_{step}") for step in steps])
    answer = combine_texts("resume look", seen, lambda texts: json.dumps(_compare(texts)))
    same = dict(zip(steps, json.loads(answer or "[]"), strict=True))
    problems = [f"{folder / f'step_{step}'}: {text}" for step, text in same.items() if text]
    return [step for step, text in same.items() if not text], problems


def _union(texts: Sequence[str]) -> str:
    return json.dumps(sorted({step for text in texts for step in json.loads(text)}))


def _fingerprint(path: Path) -> str:
    """Return a digest of the manifest; empty if this process does not see it."""
    place = current_folder(path)
    try:
        return hashlib.sha256(((place or path) / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError:
        return ""


def _compare(texts: Sequence[str]) -> list[str]:
    """Say of every step what is wrong with it, if anything: who does not see it, or another."""
    by_step = zip(*map(json.loads, texts), strict=True)
    return [_difference(prints) for prints in by_step]


def _difference(prints: Sequence[str]) -> str:
    blind = [process for process, text in enumerate(prints) if not text]
    if len(blind) == len(prints):
        return f"holds no {MANIFEST_NAME}, so it is incomplete."
    if blind:
        return f"processes {listing(blind)} of {len(prints)} do not see its {MANIFEST_NAME}."
    return "" if len(set(prints)) == 1 else f"the processes see different {MANIFEST_NAME}."


# The mesh for the devices that are left.

_MODEL_AXES = 4.0  # a change of an axis that cuts the model counts so much more than of a data axis
_NO_DIVISOR = 8.0  # and so much more if what was cut by the old size may not be cut by the new


def _mesh_of_what_is_left(spec: SpecLike) -> Mesh:
    parsed = MeshSpec.parse(spec)
    try:
        built = build_mesh(parsed)
    except (SpecError, PlacementError) as error:
        devices, reason = len(live_devices()), str(error).partition(". ")[0]
        raise SpecError(
            f"mesh='{parsed}' does not fit the {devices} devices that are here. The nearest that "
            f"does: mesh='{nearest_spec(parsed, devices)}'. ({reason}.)",
            option="mesh",
        ) from error
    return cast(Mesh, built)  # without a name of hardware it has devices


def nearest_spec(spec: MeshSpec, devices: int) -> MeshSpec:
    """Return the spec for so many devices whose sizes are nearest; an open size stays open.

    >>> print(nearest_spec(MeshSpec.parse("dp:4, fsdp:2, tp:2"), 8))
    dp:2, fsdp:2, tp:2
    >>> print(nearest_spec(MeshSpec.parse("fsdp:-1, tp:8"), 12))
    fsdp:-1, tp:4
    """
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]

    @functools.cache
    def best(axis: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the least cost of the axes from this one on, for so many devices, and sizes."""
        if axis == len(spec.axes):
            return (0.0 if left == 1 else math.inf), ()
        choices = []
        for size in divisors:
            if left % size == 0:
                cost, sizes = best(axis + 1, left // size)
                choices.append((cost + _cost(spec.axes[axis], size), (size, *sizes)))
        # Rounded, so that equal costs are ordered by the sizes.
        return min(choices, key=lambda choice: (round(choice[0], 9), choice[1]))

    _, sizes = best(0, devices)
    return MeshSpec(
        tuple(
            axis if axis.size == -1 else AxisSpec(axis.name, size, type=axis.type)
            for axis, size in zip(spec.axes, sizes, strict=True)
        )
    )


def _cost(axis: AxisSpec, size: int) -> float:
    if axis.size == -1:
        return 0.0
    weight = 1.0 if role(axis.name).name in ("data", "fsdp") else _MODEL_AXES
    uneven = axis.size % size != 0 and size % axis.size != 0
    return weight * (abs(math.log(size / axis.size)) + _NO_DIVISOR * uneven)
