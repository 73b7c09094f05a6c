"""`lower`: from a function and shapes to a StableHLO program, without any device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwright import _compat, _compat_lowering
from meshwright._text import plural
from meshwright.errors import PartitionError, RehearsalError, listing, short
from meshwright.hardware.chips import CUDNN, Chip, device_facts, gpu_capability
from meshwright.hardware.topology import Topology
from meshwright.hlo.instructions import Source
from meshwright.meshes.devices import target_topology
from meshwright.rehearsal.callbacks import Callback, find_callbacks, source_of
from meshwright.rehearsal.compiler import Job, Platform, Site
from meshwright.rehearsal.step_arguments import (
    donated_beside_bound,
    is_filter_jit,
    is_jitted,
    traces_itself,
    unbound,
)
from meshwright.trees.specs import mesh_axes, spec_on_axes, spec_problems
from meshwright.trees.split import is_number, split_arrays
from meshwright.trees.walk import (
    is_array,
    path_text,
    problem_lines,
    shown_path,
    tie_problems,
    variables_of,
)

_SOURCE_FILE = re.compile(r'loc\("([^"]+)":\d+')


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A StableHLO program and what is known of it before it is compiled.

    `code` is its bytecode, `identity` its key for the cache (see `identity_of`). `results` are the
    shapes of what it returns, `free_outputs` says which of those the compiler may shard as it
    likes. `options` are its `jit`'s compiler options, `inputs` the shardings that its `jit` gives
    the flat arguments. `callbacks` were left out; `partitioners` are those of functions with
    `custom_partitioning`, pickled, or empty. `offloads` are the lines that move arrays to the
    host's memory, `host_results` says which results are there.
    """

    code: bytes
    identity: str
    results: tuple[Any, ...]
    free_outputs: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]
    inputs: tuple[Any, ...]
    callbacks: tuple[Callback, ...] = ()
    partitioners: bytes = b""
    offloads: tuple[Source | None, ...] = ()
    host_results: tuple[bool, ...] = ()

    def job(self, name: str, site: Site) -> Job:
        """Return what the compiling process is asked for."""
        return Job(
            name,
            self.code,
            site,
            self.free_outputs,
            _compat.uses_shardy(),
            self.identity,
            self.options,
            self.partitioners,
            tuple(sys.path) if self.partitioners else (),
        )


# In: the step and `ShapeDtypeStruct`s with shardings on an abstract mesh. Out: bytecode for a
# platform that need not be here. Invariant: what the function itself raises comes through as it
# is, and only a failure to lower becomes a RehearsalError. Example: `lambda w, x: x @ w` with w
# sharded over fsdp:8 becomes a module of one dot_general whose arguments carry sdy.sharding.
def lower(
    function: Callable[..., Any],
    shapes: tuple[Any, ...],
    names: Sequence[str],
    mesh: AbstractMesh,
    platform: Platform,
    hardware: Topology,
    donate_argnums: tuple[int, ...],
    out_shardings: Any,
) -> Lowered:
    """Trace and lower a step.

    `out_shardings` is a tree of specs for the results, or a prefix of one; the compiler chooses
    where it has `None`. A function that is jitted already keeps the options of its own `jit`,
    unless some are given here. `names` are those of the arguments, for messages.
    """
    # `with_sharding_constraint(x, PartitionSpec(...))` in the user's code needs the mesh set.
    kernels = _compat_lowering.kernels_on(_target_device(platform, hardware), mesh.size)
    with jax.sharding.use_abstract_mesh(mesh), cudnn_of_chip(hardware.chip), kernels:
        own: tuple[int, ...] | None = donate_argnums
        if traces_itself(unbound(function)) and not donate_argnums and out_shardings is None:
            traced = _trace(function, shapes, names, wrapped=False)
            # Flax's `nnx.jit` wraps what its own `jax.jit` made.
            traced, free = getattr(traced, "traced", traced), None
            own = donated_beside_bound(function, traced, len(shapes))
        if own is not None:
            traced, free = _trace_arrays(function, shapes, names, mesh, own, out_shardings)
        free_outputs = _free_outputs(free, traced.out_info)
        return lower_trace(traced, free_outputs, mesh, platform, hardware)


def cudnn_of_chip(chip: Chip) -> contextlib.AbstractContextManager[None]:
    """Trace inside of the block as where this chip and a cuDNN are."""
    return _compat_lowering.cudnn_of(gpu_capability(chip), CUDNN[0] * 10000 + CUDNN[1] * 100)


def lower_trace(
    traced: Any,
    free_outputs: tuple[bool, ...],
    mesh: Mesh | AbstractMesh,
    platform: Platform,
    hardware: Topology,
) -> Lowered:
    """Lower what was traced, a step or a task of a pipeline, for hardware that need not be here."""
    callbacks = find_callbacks(traced.jaxpr, mesh.size)
    try:
        device = _kernel_device(traced.jaxpr, platform, hardware)
        lowered, partitioners = _compat_lowering.lower(traced, platform, mesh, device)
    except Exception as error:
        refusal = _foreign_kernel(traced.jaxpr, platform, error)
        refusal = refusal or _rejected_kernel(platform, error)
        raise RehearsalError(refusal or _refusal(platform, error)) from error
    module = lowered.compiler_ir("stablehlo").operation
    code = io.BytesIO()
    module.write_bytecode(code)
    return Lowered(
        code.getvalue(),
        identity_of(module),
        tuple(jax.tree.leaves(traced.out_info)),
        free_outputs,
        _compat.compiler_options(lowered),
        _compat.jit_shardings(traced),
        callbacks,
        _pickled(partitioners) if partitioners else b"",
        find_offloads(traced.jaxpr),
        tuple(map(_compat_lowering.is_on_host, traced.jaxpr.out_avals)),
    )


# In: a jaxpr and all that it calls. Out: the user's line of every equation that moves an array to
# the host's memory, by `device_put` or by a policy of `jax.checkpoint`; `None` for one without a
# line. Example: `jax.device_put(h, jax.memory.Space.Host)` at model.py:12 gives (model.py:12,).
def find_offloads(jaxpr: Any) -> tuple[Source | None, ...]:
    """List the lines of a program that move arrays to the host's memory, each once."""
    return tuple(
        dict.fromkeys(
            source_of([eqn, *callers])
            for eqn, *callers in _compat_lowering.equations(jaxpr)
            if _compat_lowering.moves_to_host(eqn)
        )
    )


def _target_device(platform: Platform, hardware: Topology) -> _compat_lowering.TargetDevice:
    kind, cores, multiprocessors = device_facts(hardware.chip)
    capability = "{}.{}".format(*gpu_capability(hardware.chip)) if platform == "cuda" else ""
    name = {"cuda": "gpu"}.get(platform, platform)
    return _compat_lowering.TargetDevice(name, kind, cores, multiprocessors, capability)


def _kernel_device(jaxpr: Any, platform: Platform, hardware: Topology) -> Any:
    """Return a GPU of the target if there are kernels: how they are lowered depends on it."""
    eqns = (eqn for eqn, *_ in _compat_lowering.equations(jaxpr))
    if platform != "cuda" or all(_compat_lowering.kernel_platform(eqn) is None for eqn in eqns):
        return None
    devices = target_topology(dataclasses.replace(hardware, devices=None), None, 1).devices
    return devices[0] if devices else None


def _pickled(partitioners: dict[str, _compat_lowering.Partitioner]) -> bytes:
    """Write partitioners for the compiling process, which has the same modules but no script."""
    for one in partitioners.values():
        rules = (one.partition, one.propagate_user_sharding, one.infer_sharding_from_operands)
        for rule in filter(None, rules):
            try:
                pickle.dumps(rule)
                here = rule.__module__ == "__main__"
            except Exception:  # whatever pickle raises for closures and lambdas
                here = True
            if here:
                raise RehearsalError(
                    f"custom_partitioning: {short(rule)} cannot be sent to the compiling process. "
                    "Make it a function of a module that can be imported, not of a script or "
                    "another function."
                )
    return pickle.dumps(partitioners)


def _trace(step: Any, shapes: tuple[Any, ...], names: Sequence[str], wrapped: bool) -> Any:
    """Trace; `wrapped` says that the user's own `jit` is inside of ours."""
    bound: Any = step if isinstance(step, functools.partial) else functools.partial(step)
    try:
        return bound.func.trace(*bound.args, *shapes, **bound.keywords)
    except (TypeError, ValueError) as error:
        # Our `jit` makes tracers of what the inner one holds to be static.
        if wrapped and "static arg" in str(error).lower():
            raise RehearsalError(
                "the step is jitted with static arguments, and donate_argnums or out_shardings was "
                "given here as well. Give both to its own jit instead."
            ) from error
        others = [
            f"{where}: {short(leaf)} is no array."
            for where, leaf in _other_leaves(shapes, names)
            if not (isinstance(leaf, bool) or is_number(leaf))
        ]
        if others and "as an abstract array" in str(error):
            raise RehearsalError(
                f"jax.jit takes arrays and numbers alone.{problem_lines(others)}\nPass the step "
                "without jax.jit: what is no array is then a part of it, as it is with "
                "eqx.filter_jit; or name the argument in its jit's static_argnums."
            ) from error
        raise


def _other_leaves(shapes: tuple[Any, ...], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, arg in zip(names, shapes, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if not is_array(leaf):
                yield "/".join(filter(None, (name, path_text(path)))), leaf


# In: a step and its arguments, trees with any leaves. Out: a trace of a function of the arrays
# among them. What is no array is a part of the program: functions, texts, flags, and numbers inside
# of a tree. Results are what the step returns and, since NNX modules are changed in place, what it
# leaves in their variables. Example: `step(model, x)` with `model.activation = jnp.tanh` is traced
# as a function of `model` with `None` there.
def _trace_arrays(
    function: Callable[..., Any],
    shapes: tuple[Any, ...],
    names: Sequence[str],
    mesh: AbstractMesh,
    donate_argnums: tuple[int, ...],
    out_shardings: Any,
) -> tuple[Any, Any]:
    """Trace a step as a function of its arrays; also return the shardings asked of its results."""
    # Equinox's wrapper holds numbers to be static wherever they stand, and says what it donates.
    flags: Any = unbound(function)
    filtered = is_filter_jit(flags)
    inner: Any = function
    donated = set(donate_argnums)
    if filtered:
        bound = function if isinstance(function, functools.partial) else functools.partial(flags)
        inner = functools.partial(
            getattr(flags, "__wrapped__", flags), *bound.args, **bound.keywords
        )
        rest = 0 if bound.args else 1
        donated |= set(range(rest)) if flags.donate_first else set()
        donated |= set(range(rest, len(shapes))) if flags.donate_rest else set()
    parts = [split_arrays(arg, depth=-1 if filtered else 0) for arg in shapes]
    operands = [part.rebuild(part.arrays, other=None) for part in parts]
    in_place = bool(variables_of(shapes))
    problems = tie_problems(dict(zip(names, shapes, strict=True)))
    if problems:
        raise RehearsalError(
            f"{problem_lines(problems).strip()} Or decorate the step with nnx.jit, which takes "
            "donate_argnums and out_shardings as well."
        )

    @functools.wraps(inner, updated=())
    def step(*trees: Any) -> Any:
        args = tuple(
            part.rebuild(jax.tree.leaves(tree)) for part, tree in zip(parts, trees, strict=True)
        )
        before = jax.tree.leaves(variables_of(args))
        results = jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, inner(*args))
        given = set(map(id, before))
        changed = [leaf for leaf in jax.tree.leaves(variables_of(args)) if id(leaf) not in given]
        return (results, changed) if in_place else results

    wrapped = is_jitted(function)
    jit = functools.partial(jax.jit, step, donate_argnums=tuple(sorted(donated)))
    traced = _trace(jit(), tuple(operands), names, wrapped)
    if out_shardings is None:
        return traced, None
    results = traced.out_info[0] if in_place else traced.out_info
    shardings = result_shardings(out_shardings, results, mesh)
    shardings = (shardings, None) if in_place else shardings
    return _trace(jit(out_shardings=shardings), tuple(operands), names, wrapped), shardings


def identity_of(module: Any) -> str:
    """Hash a program without its source lines, together with the source files that it names.

    The bytecode differs with the line that calls the step; this does not, as long as no file has
    changed. Files count because their lines are named in what the compiler makes.
    """
    digest = hashlib.sha256(module.get_asm(enable_debug_info=False).encode())
    for name in sorted(set(_SOURCE_FILE.findall(module.get_asm(enable_debug_info=True)))):
        digest.update(name.encode())
        with contextlib.suppress(OSError):
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


_MOST_WORDS = 800  # characters of what Pallas says of a kernel


def _rejected_kernel(platform: str, error: Exception) -> str:
    """What Pallas says of a kernel that it cannot lower, with its line; empty for other errors."""
    words = str(error).strip()
    if "Pallas" not in words and "Mosaic" not in words:
        return ""
    # Its dump of an operation and its request to file a bug say nothing of the user's mistake.
    lines = [line for line in words.splitlines() if "see current operation" not in line]
    said = " ".join(lines).replace(
        " Please file a bug at https://github.com/jax-ml/jax/issues/new/choose.", ""
    )
    # JAX hangs the frames of the call, which traced the kernel long ago, on the error's causes.
    users_own: list[Source] = []
    cause = error.__cause__
    while cause is not None and not users_own:
        stack = traceback.extract_tb(cause.__traceback__)
        frames = [Source(each.filename, each.lineno or 0) for each in stack]
        users_own = [frame for frame in frames if not frame.in_library]
        cause = cause.__cause__
    place = f" at {users_own[-1]}" if users_own else ""
    return f"{said[:_MOST_WORDS]}\n  Pallas rejects the kernel{place} for {platform}."


_PLATFORM_WORDS = {"cuda": "GPUs (cuda)", "tpu": "TPUs", "": "TPUs or GPUs"}


def _foreign_kernel(jaxpr: Any, platform: Platform, error: Exception) -> str:
    """Name the kernels that are for another platform; empty if there are none."""
    foreign: dict[str, str] = {}  # lines of kernels for other platforms, with which
    for eqn, *callers in _compat_lowering.equations(jaxpr):
        written_for = _compat_lowering.kernel_platform(eqn)
        # A Pallas kernel that does not say is for either kind of accelerator.
        if written_for not in (None, platform) and (written_for or platform == "cpu"):
            place = str(source_of([eqn, *callers]) or eqn.primitive.name)
            foreign[place] = _PLATFORM_WORDS[written_for]
    if not foreign:
        return ""
    kernels = listing(f"{place} is for {words}" for place, words in foreign.items())
    return (
        f"the step has a kernel for another platform: {kernels}, and the program is for "
        f"{platform} {_said(error)}. Choose the kernel by the platform, e.g. with "
        "jax.lax.platform_dependent, or rehearse on hardware that it is for."
    )


def _refusal(platform: Platform, error: Exception) -> str:
    return (
        f"the step cannot be made into a program for {platform} without its devices {_said(error)}."
    )


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"({type(error).__name__}: {lines[0][:200]})"


# Stands for a `None` of `out_shardings`; `None`s in the results themselves are no leaves.
_FREE: Any = object()


def result_shardings(out_shardings: Any, results: Any, mesh: AbstractMesh) -> Any:
    """Read `out_shardings` for results of these shapes; raise for every leaf that is wrong."""
    try:
        per_result = _per_result(out_shardings, results)
    except ValueError as error:
        raise RehearsalError(
            f"out_shardings: not like the tree of the results, {short(results, 200)} "
            f"({str(error).splitlines()[0][:200]}). Give a tree of specs like it, one that ends "
            "higher up, or one spec for all results.",
            option="out_shardings",
        ) from error
    flat, treedef = jax.tree_util.tree_flatten_with_path(per_result)
    problems: list[str] = []
    named: list[Any] = []
    for (path, given), leaf in zip(flat, jax.tree.leaves(results), strict=True):
        sharding, wrong = (
            (None, []) if given is _FREE else _read_sharding(given, leaf, mesh, path_text(path))
        )
        named.append(sharding)
        problems += wrong
    if problems:
        raise RehearsalError(
            f"out_shardings: {plural(len(problems), 'problem')} in what the step returns."
            f"{problem_lines(problems)}",
            option="out_shardings",
        )
    return jax.tree.unflatten(treedef, named)


def _read_sharding(
    given: Any, leaf: Any, mesh: AbstractMesh, path: str
) -> tuple[NamedSharding | None, list[str]]:
    """Read what is asked for one result; also return what is wrong with it."""
    where = path or "the result"
    try:
        spec = spec_on_axes(given, mesh)
    except PartitionError as error:
        return None, [f"{shown_path(where)}: {error}"]
    wrong = list(spec_problems(where, tuple(leaf.shape), spec, mesh_axes(mesh)))
    return (None if wrong else NamedSharding(mesh, spec)), wrong


def _free_outputs(out_shardings: Any, results: Any) -> tuple[bool, ...]:
    return tuple(one is _FREE for one in jax.tree.leaves(_per_result(out_shardings, results)))


def _per_result(out_shardings: Any, results: Any) -> Any:
    """Broadcast a tree of specs, or a prefix of one, to the tree of the results."""
    marked = jax.tree.map(
        lambda value: _FREE if value is None else value,
        out_shardings,
        is_leaf=lambda value: value is None,
    )
    return jax.tree.broadcast(marked, results)
