"""`verify`: does a sharded step compute what one device computes?

Compilers have faults, too: some programs come out wrong when they are partitioned, without a word.
`verify` runs a step twice, on one device and sharded, and compares all that it returns.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright._progress import Pulse, showing
from meshwright._text import plural
from meshwright.errors import RehearsalError, short
from meshwright.meshes.build import abstract_mesh
from meshwright.meshes.devices import live_devices
from meshwright.partitioning.decide import PartitionOptions, resolve_specs
from meshwright.rehearsal.compiler import environment
from meshwright.rehearsal.request import TIMEOUT, make_request
from meshwright.rehearsal.step_arguments import argument_names, decide_specs
from meshwright.rehearsal.verification import Verification, compare, judge_rounding
from meshwright.spec.mesh_spec import MeshSpec, SpecLike
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import Leaf, is_key, retie, walk

# What JAX says where a step names the mesh or the devices itself, or cannot do without devices.
_OWN_MESH = ("incompatible devices", "context mesh", "number of devices", "require devices")


def verify(
    function: Callable[..., Any],
    *args: Any,
    mesh: SpecLike | Mesh | AbstractMesh,
    in_shardings: Sequence[Any] | None = None,
    data: int | Sequence[int] | None = None,
    gradients: bool | None = None,
    tolerance: float | None = None,
    timeout: float = TIMEOUT,
    progress: bool = True,
    **options: Unpack[PartitionOptions],
) -> Verification:
    """Run a step on one device and sharded over a mesh, and compare what comes out.

    Take small shapes: the step runs. Where there are fewer devices than the mesh has, it runs on
    simulated CPU devices in a process of its own. The arguments are not donated or changed.

    Args:
      function: the step, jitted or not: a train step, or a loss.
      *args: its arguments, with values.
      mesh: a spec such as `"fsdp:4, tp:2"`, a `Mesh` or an `AbstractMesh`.
      in_shardings, data, **options: how the arguments are sharded, as for `rehearse`.
      gradients: compare the gradient with respect to the first argument too; by default if the
        step returns one floating-point number.
      tolerance: how far apart results may be, as part of the largest value of an array; by default
        1e-3 for float32, 5e-2 for bfloat16 and float16.
      timeout: seconds after which simulated devices are given up.
      progress: False to show none, as for `rehearse`.

    Raises:
      RehearsalError: for a bad option, arguments without values, or devices of other processes.

    >>> import jax.numpy as jnp, meshwright as mw
    >>> def loss(params, x):
    ...     return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
    >>> v = mw.verify(loss, {"w": jnp.eye(128)}, jnp.ones((8, 128)), mesh="fsdp:4, tp:2")
    >>> v.ok, [row.path for row in v.rows]
    (True, ['value', 'gradient/w'])
    """
    request = make_request(
        function,
        args,
        mesh=mesh,
        data=data,
        donate_argnums=(),
        name=None,
        in_shardings=in_shardings,
        timeout=timeout,
        progress=progress,
        options=options,
        caller="verify",
    )
    _check_tolerance(tolerance)
    on = _without_devices(mesh)
    step = _FlatStep(function, args, on, gradients)
    specs = decide_specs(args, step.names, on, in_shardings, request.data, options)
    flat_specs = [
        spec
        for walked, arg, tree in zip(step.walks, args, specs, strict=True)
        for spec in resolve_specs("verify", walked, arg, on, tree, {})
    ]
    devices = _enough_devices(mesh, on)
    with showing(progress), Pulse(f"verifying {request.name}") as pulse:
        if devices is None:
            where = f"{on.size} simulated CPU devices"
            pulse.now(where)
            one, many = _run_simulated(step, flat_specs, on, request.timeout)
        else:
            where = plural(on.size, f"{devices[0].platform.upper()} device")
            pulse.now(where)
            whole, single = [make_spec()] * len(flat_specs), _like(on, devices[:1])
            one = _run_here(step, whole, single)
            many = _run_here(step, flat_specs, _like(on, devices))
        rows = compare(step.paths, one, many, tolerance)
        if not all(row.ok for row in rows):
            step.nudge()
            if devices is None:
                nudged, _ = _run_simulated(step, flat_specs, on, request.timeout)
            else:
                nudged = _run_here(step, whole, single)
            rows = judge_rounding(rows, step.paths, one, nudged)
    sizes = ", ".join(f"{axis}:{n}" for axis, n in zip(on.axis_names, on.axis_sizes, strict=True))
    return Verification(sizes, where, rows)


def _check_tolerance(tolerance: object) -> None:
    if tolerance is None:
        return
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance > 0:
        raise RehearsalError(
            f"tolerance: {short(tolerance)} is not a number above 0, e.g. 1e-3.", option="tolerance"
        )


def _without_devices(mesh: Any) -> AbstractMesh:
    if isinstance(mesh, AbstractMesh):
        return mesh
    if isinstance(mesh, Mesh):
        on: AbstractMesh = mesh.abstract_mesh
        return on
    spec = MeshSpec.parse(mesh)
    return abstract_mesh(spec if spec.size is not None else spec.resolve(len(live_devices())))


def _enough_devices(mesh: Any, on: AbstractMesh) -> list[Any] | None:
    """Return the devices to run on, `None` where there are too few."""
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else list(live_devices())
    if len(devices) < on.size:
        return None
    if any(device.process_index != jax.process_index() for device in devices[: on.size]):
        raise RehearsalError(
            "verify: the mesh has devices of other processes. Verify in one process, on a smaller "
            "mesh of the same axes.",
            option="mesh",
        )
    return devices[: on.size]


def _like(on: AbstractMesh, devices: Sequence[Any]) -> Mesh:
    """Return a mesh with the axes of another one: of its size, or of one device."""
    shape = on.axis_sizes if len(devices) == on.size else (1,) * len(on.axis_sizes)
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return Mesh(grid.reshape(shape), on.axis_names, axis_types=on.axis_types)


class _FlatStep:
    """A step as a function of a flat list of arrays, which returns a flat list of arrays.

    What is no array (functions and settings of modules) is put back before the step is called. What
    a step returns, the gradient if it is a loss, and arrays that it replaced within its arguments
    (Flax NNX updates modules in place) are its results; `paths` names them once it was traced.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        mesh: AbstractMesh,
        gradients: bool | None,
    ):
        self.function = function
        self.args = tuple(args)
        self.walks = [walk(arg) for arg in args]
        self.names = argument_names(function, len(args))
        self.paths: list[str] = []
        leaves = [
            (name, leaf)
            for name, walked in zip(self.names, self.walks, strict=True)
            for leaf in walked.arrays
        ]
        for name, leaf in leaves:
            _check_value(name, leaf)
        # Typed keys go as their numbers, which NumPy knows.
        self.key_impls = [
            jax.random.key_impl(leaf.value) if is_key(leaf.dtype) else None for _, leaf in leaves
        ]
        self.values = [_plain(leaf.value) for _, leaf in leaves]
        self.with_gradient = False
        with _explaining(), jax.sharding.use_abstract_mesh(mesh):  # for constraints in the step
            outputs = jax.eval_shape(self, self.values)
        if not self.paths:
            raise RehearsalError(
                "verify: the step returns no arrays, so there is nothing to compare. Return the "
                "loss, or the new state."
            )
        is_loss = self.paths == ["value"] and _is_float(outputs[0].dtype) and not outputs[0].shape
        if gradients and not is_loss:
            raise RehearsalError(
                "gradients: the step does not return one floating-point number, so it has no "
                "gradient. Pass a loss, or leave the option out to compare what it returns.",
                option="gradients",
            )
        self.with_gradient = is_loss and gradients is not False

    def __call__(self, flat: Sequence[Any]) -> list[Any]:
        if not self.with_gradient:
            return self._results(flat)
        first = self.walks[0].arrays
        floats = [i for i, leaf in enumerate(first) if _is_float(leaf.dtype)]

        def loss(changed: Sequence[Any]) -> Any:
            values = list(flat)
            for i, value in zip(floats, changed, strict=True):
                values[i] = value
            return self._results(values)[0]

        value, gradient = jax.value_and_grad(loss)([flat[i] for i in floats])
        self.paths = ["value"]
        self.paths += [f"gradient/{first[i].path}".rstrip("/") for i in floats]
        return [value, *gradient]

    def nudge(self) -> None:
        """Change the last bits of the floating-point arguments."""
        rng = np.random.default_rng(0)
        for n, value in enumerate(self.values):
            if _is_float(value.dtype):
                wide = np.asarray(value).astype(np.float64)
                by = rng.integers(-1, 2, wide.shape) * float(jnp.finfo(value.dtype).eps)  # type: ignore[no-untyped-call]
                self.values[n] = (wide * (1 + by)).astype(value.dtype)

    def _results(self, flat: Sequence[Any]) -> list[Any]:
        arrays = [
            value if impl is None else jax.random.wrap_key_data(value, impl=impl)
            for value, impl in zip(flat, self.key_impls, strict=True)
        ]
        parts, start = [], 0
        for walked in self.walks:
            end = start + len(walked.arrays)
            parts.append(walked.rebuild(arrays[start:end]))
            start = end
        args = retie(tuple(parts), self.args)
        returned = walk(self.function(*args)).arrays
        results = [(leaf.path or "value", leaf.value) for leaf in returned]
        after = [
            (name, leaf)
            for name, arg in zip(self.names, args, strict=True)
            for leaf in walk(arg).arrays
        ]
        if len(after) == len(arrays):  # else the step gave an argument another structure
            results += [
                (f"{name}/{leaf.path}", leaf.value)
                for (name, leaf), before in zip(after, arrays, strict=True)
                if leaf.value is not before
            ]
        self.paths = [path for path, _ in results]
        return [jnp.asarray(_plain(value)) for _, value in results]


def _check_value(name: str, leaf: Leaf) -> None:
    if isinstance(leaf.value, (jax.ShapeDtypeStruct, jax.core.Tracer)):
        raise RehearsalError(
            f"{name}, {leaf.where}: a shape without values. The step is run, so pass arrays, e.g. "
            "of a smaller model: jax.jit(init)(jax.random.key(0))."
        )
    if not getattr(leaf.value, "is_fully_addressable", True):
        raise RehearsalError(
            f"{name}, {leaf.where}: lies on devices of other processes. Verify in one process."
        )


def _plain(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value.dtype) else value


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _jitted(step: _FlatStep, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> Any:
    return jax.jit(step, in_shardings=([NamedSharding(mesh, spec) for spec in specs],))


def _run_here(step: _FlatStep, specs: Sequence[PartitionSpec], mesh: Mesh) -> list[Any]:
    # On the host first: what is committed to other devices would clash with the mesh.
    values = [np.asarray(value) for value in step.values]
    # Products of float32 in bfloat16 or TF32, as accelerators do by default, would hide much.
    with _explaining(), jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return [np.asarray(result) for result in _jitted(step, specs, mesh)(values)]


# The child process gets both programs (StableHLO, as `jax.export` writes it) and the arguments in
# one file, and answers with both lists of results in another. No function is pickled.
def _run_simulated(
    step: _FlatStep, specs: Sequence[PartitionSpec], on: AbstractMesh, timeout: float
) -> tuple[list[Any], list[Any]]:
    shapes = [
        jax.ShapeDtypeStruct(value.shape, jnp.asarray(value).dtype)  # type: ignore[no-untyped-call]
        for value in step.values
    ]
    single = AbstractMesh((1,) * len(on.axis_sizes), on.axis_names, axis_types=on.axis_types)
    programs = []
    for mesh, per_leaf in ((single, [make_spec()] * len(specs)), (on, specs)):
        precise = jax.default_matmul_precision("highest")
        with _explaining(), jax.sharding.use_abstract_mesh(mesh), precise:
            exported = jax.export.export(_jitted(step, per_leaf, mesh), platforms=["cpu"])(shapes)
        programs.append((mesh.axis_sizes, bytes(exported.serialize())))
    kinds = [kind.name for kind in on.axis_types]
    values = [np.asarray(value) for value in step.values]
    wide = bool(jax.config.read("jax_enable_x64"))  # type: ignore[no-untyped-call]
    task = (on.size, on.axis_names, kinds, wide, programs, values)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        Path(folder, "task").write_bytes(pickle.dumps(task))
        try:
            ended = subprocess.run(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", f"{__package__}.verify_worker", folder],
                env=environment(),
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RehearsalError(
                f"verify: the simulated devices were not done after {timeout:g} s and were ended. "
                "Pass timeout=... seconds to wait longer, or take smaller shapes.",
                option="timeout",
            ) from error
        answer = Path(folder, "answer")
        if not answer.exists():
            last = ended.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise RehearsalError("\n  ".join(["verify: the simulated devices failed.", *last]))
        one, many = pickle.loads(answer.read_bytes())  # noqa: S301 - our child's
    return one, many


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Say what to do where a step can run on its own devices alone; other errors come through."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if not any(words in text for words in _OWN_MESH):
            raise
        raise RehearsalError(
            "verify: the step names a mesh or devices itself, or calls back to Python, so it "
            "cannot run on one device or on simulated ones. Write constraints as PartitionSpec, "
            "take the mesh of shard_map from jax.sharding.get_abstract_mesh(), and leave "
            f"in_shardings to verify. ({text.splitlines()[0][:160]})"
        ) from error
