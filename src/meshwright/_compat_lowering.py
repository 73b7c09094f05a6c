"""The second door to private JAX: lowering a step for hardware that is not there.

What JAX asks the devices of is answered for the target: callbacks are left out, custom partitioning
is written down for the compiling process, cuDNN is taken to be there. All of it holds for one
lowering or trace and is put back after. The programs of kernels that were lowered are read here,
too. Each entry says why, and for which versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshwright import _compat
from meshwright._compat import Eqn, Jaxpr

_CALLBACKS = {
    "debug_print": "debug.print",
    "debug_callback": "debug.callback",
    "inspect_sharding": "debug.inspect_array_sharding",
    "pure_callback": "pure_callback",
    "io_callback": "io_callback",
}


def callback_kind(eqn: Eqn) -> str:
    """Return what an equation calls on the host, as users write it, or an empty string."""
    return _CALLBACKS.get(eqn.primitive.name, "")


def is_refused_on_many_devices(eqn: Eqn) -> bool:
    """Whether JAX refuses an equation's order of effects on more than one device.

    It reads the same two sets of effects, which are private (jax 0.10 to 0.12).
    """
    from jax._src import effects

    ordered = effects.ordered_effects.filter_in(eqn.effects)
    return bool(effects.shardable_ordered_effects.filter_not_in(ordered))


def equations(jaxpr: Jaxpr, *callers: Eqn) -> Iterator[tuple[Eqn, ...]]:
    """Yield every equation of a program, followed by those that call it, innermost first.

    Those of functions that it calls too, but not of Pallas kernels.
    """
    opened: Any = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one
    for eqn in opened.eqns:
        yield eqn, *callers
        if eqn.primitive.name != "pallas_call":
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple) else (value,):
                    if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                        yield from equations(inner, eqn, *callers)


def source_frames(eqn: Eqn) -> list[tuple[str, int]]:
    """Return file and line of every frame above an equation but JAX's own, innermost first.

    `jax.extend.source_info_util` names one frame alone; all of them are private (jax 0.10 to 0.12).
    """
    from jax._src import source_info_util

    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return [(frame.file_name, frame.start_line) for frame in frames]


def moves_to_host(eqn: Eqn) -> bool:
    """Whether an equation moves an array to the host's memory: `device_put`, or a remat policy.

    The memory space of an array's type is not public yet (jax 0.10 to 0.12).
    """
    if eqn.primitive.name != "device_put":
        return False
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return any(is_on_host(new.aval) and not is_on_host(old.aval) for old, new in pairs)


def is_on_host(aval: Any) -> bool:
    """Whether values of a type are in the host's memory, by its space: not public yet, as above."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


_KERNEL_PLATFORMS = {"mosaic": "tpu", "triton": "cuda", "mosaic_gpu": "cuda"}


def kernel_platform(eqn: Eqn) -> str | None:
    """Return the platform that a kernel is written for; `None` if the equation is no kernel.

    Empty if it is a Pallas kernel that does not say. The module of a kernel's parameters, such as
    `jax._src.pallas.mosaic`, and the names of cuDNN's primitives are private (jax 0.10 to 0.12).
    """
    if eqn.primitive.name.startswith("dot_product_attention"):
        return "cuda"
    if eqn.primitive.name != "pallas_call":
        return None
    words = type(eqn.params.get("compiler_params")).__module__.split(".")
    return next((_KERNEL_PLATFORMS[word] for word in words if word in _KERNEL_PLATFORMS), "")


def kernel_name(eqn: Eqn) -> str:
    """Return the name of a `pallas_call`: its own, or that of the function that is its body.

    The latter is in the jaxpr's `debug_info`, which is private (jax 0.10 to 0.12).
    """
    return str(eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name)


@dataclasses.dataclass(frozen=True)
class KernelBlocks:
    """How a kernel goes over one array: `index` gives the block's number for a place in the grid.

    `sizes`: entries of a block along each dim, 0 where `index` does not count in blocks.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    index: Jaxpr


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A Pallas kernel as its equation has it: its grid, its arrays in blocks, its body.

    `grid`: 0 where a run decides. `mapped`: dims of the grid that `vmap` added, which the body does
    not count. `parallel`: those whose places the author says are independent. Operands are
    `bounds` of the grid, `prefetched` tables of scalars, then those with blocks. `aliases`: result
    by operand with blocks. `declared`: FLOP by its author's estimate, or `None`.
    """

    grid: tuple[int, ...]
    mapped: tuple[int, ...]
    parallel: frozenset[int]
    bounds: int
    prefetched: int
    operands: tuple[KernelBlocks, ...]
    results: tuple[KernelBlocks, ...]
    aliases: dict[int, int]
    body: Jaxpr
    declared: float | None


def read_kernel_call(params: Mapping[str, Any]) -> KernelCall | None:
    """Read the parameters of a `pallas_call`; `None` for one that has more than a grid and blocks.

    Those of a mesh of cores, with names for dims of the grid, that write to references from outside
    or talk to other devices: no part of them runs alone. The types of parameters are private, and
    blocks have no public form (jax 0.10 to 0.12).
    """
    mapping = params["grid_mapping"]
    body = params["jaxpr"]
    if (
        params.get("mesh") is not None
        or mapping.grid_names is not None
        or mapping.get_grid_indices is not None
        or mapping.local_grid_env is not None
        or body.constvars
        or getattr(params.get("compiler_params"), "collective_id", None) is not None
        or len(params["out_avals"]) != mapping.num_outputs
    ):
        return None
    grid = tuple(size if isinstance(size, int) else 0 for size in mapping.grid)
    blocks = [
        KernelBlocks(
            tuple(each.array_aval.shape),
            tuple(map(_block_size, each.block_shape)),
            each.index_map_jaxpr,
        )
        for each in mapping.block_mappings
    ]
    semantics = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
    own = [dim for dim in range(len(grid)) if dim not in mapping.vmapped_dims]
    words = [str(getattr(each, "value", each)).lower() for each in semantics]
    estimate = params.get("cost_estimate")
    return KernelCall(
        grid,
        tuple(mapping.vmapped_dims),
        frozenset(dim for dim, word in zip(own, words, strict=False) if word == "parallel"),
        mapping.num_dynamic_grid_bounds,
        mapping.num_index_operands,
        tuple(blocks[: mapping.num_inputs]),
        tuple(blocks[mapping.num_inputs :]),
        {
            operand - mapping.num_index_operands: result
            for operand, result in params["input_output_aliases"]
        },
        body,
        None if estimate is None else float(estimate.flops),
    )


def _block_size(dim: Any) -> int:
    """Entries of a block along a dim: those of `Blocked` and `Squeezed`, which count in blocks."""
    if type(dim).__name__ == "Squeezed":
        return 1
    return int(dim.block_size) if type(dim).__name__ == "Blocked" else 0


def is_whole_store(eqn: Eqn) -> bool:
    """Whether an equation of a kernel's body writes all of a reference, whatever was in it.

    Indices of references are private (jax 0.10 to 0.12).
    """
    if eqn.primitive.name != "swap":
        return False
    shape = eqn.invars[0].aval.shape
    transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[2:])
    if len(transforms) > 1 or any(not hasattr(each, "indices") for each in transforms):
        return False
    return all(
        getattr(index, "start", None) == 0 and index.size == size and index.stride == 1
        for each in transforms
        for index, size in zip(each.indices, shape, strict=True)
    )


def bind_kernel(
    params: Mapping[str, Any],
    ways: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[Any],
) -> list[Any]:
    """Run a `pallas_call` on parts of its arrays: each dim of its grid cut so many ways.

    `shapes` are those of all arrays with blocks, operands and results, as they are then. Kernels
    are built by `pallas_call` alone; to build one from an equation, its primitive is bound with
    the parameters that depend on shapes rewritten (jax 0.10 to 0.12).
    """
    from jax._src.pallas import pallas_call as pallas

    mapping = params["grid_mapping"]
    blocks = tuple(
        each.replace(array_aval=each.array_aval.update(shape=shape))
        for each, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    grid = [size // n if n > 1 else size for size, n in zip(mapping.grid, ways, strict=True)]
    parts = math.prod(ways)
    estimate = params.get("cost_estimate")
    if estimate is not None:
        estimate = dataclasses.replace(
            estimate,
            flops=estimate.flops // parts,
            bytes_accessed=estimate.bytes_accessed // parts,
            transcendentals=estimate.transcendentals // parts,
        )
    results = pallas.pallas_call_p.bind(  # type: ignore[no-untyped-call]
        *operands,
        **{
            **params,
            "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
            "out_avals": tuple(
                aval.update(shape=shape)
                for aval, shape in zip(
                    params["out_avals"], shapes[mapping.num_inputs :], strict=True
                )
            ),
            "cost_estimate": estimate,
        },
    )
    return list(results)


@contextlib.contextmanager
def cudnn_of(capability: tuple[int, int], version: int) -> Iterator[None]:
    """Trace inside of the block as on a GPU of this compute capability, with this cuDNN.

    `jax.nn.dot_product_attention(implementation="cudnn")` asks the live backend for both while it
    is traced; the compiler needs neither. The functions that ask are private (jax 0.10 to 0.12).
    """
    attention = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= parsed(least),
        "is_cuda_compute_capability_equal": lambda other: capability == parsed(other),
    }
    with _PATCHING:
        before = {name: getattr(attention, name) for name in answers}
        vars(attention).update(answers)
        try:
            yield
        finally:
            vars(attention).update(before)


def read_kernel(code: bytes, language: str) -> Any:
    """Parse the program of a kernel; `None` if unread.

    `language` is `"mosaic"` (Pallas on TPU), `"mosaic_gpu"` or `"triton"`.

    The bytes are in the custom call that runs it; the parser and its dialects are jaxlib's own and
    private (jax 0.10 to 0.12). Kernels that libtpu makes are texts, which jaxlib cannot read.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    # From jax 0.11 on the programs of Mosaic GPU have another form, in which counts were wrong.
    if language == "mosaic_gpu" and jax.__version_info__ >= (0, 11):
        return None
    passes = {"mosaic": "mosaic-serde", "mosaic_gpu": "mosaic_gpu-serde"}.get(language)
    try:
        # JAX's own context knows the dialects of GPUs.
        context = mlir.make_ir_context() if language == "mosaic_gpu" else ir.Context()
        context.allow_unregistered_dialects = True
        if language == "mosaic":
            from jax._src.lib import tpu  # type: ignore[attr-defined]

            tpu.register_dialect(context)
        elif language == "mosaic_gpu":
            from jax._src.lib import mosaic_gpu_dialect  # type: ignore[attr-defined]

            mosaic_gpu_dialect.register_dialect(context)
        else:
            from jaxlib.triton import dialect

            dialect.register_dialect(context)
        context.load_all_available_dialects()
        with context, ir.Location.unknown():
            module = ir.Module.parse(code)
            if passes:  # from its form for storing to that of the compiler
                manager = PassManager.parse(f"builtin.module({passes}{{serialize=false}})")
                manager.run(module.operation)
    except Exception:  # of another version, or of a form that jaxlib does not know
        return None
    return module


@dataclasses.dataclass(frozen=True)
class TargetDevice:
    """A device as kernels ask for it: by JAX's names, of hardware that need not be here.

    `num_cores` are the TensorCores of a TPU that are one device, `core_count` the
    multiprocessors of a GPU.
    """

    platform: str
    device_kind: str
    num_cores: int = 1
    core_count: int = 0
    compute_capability: str = ""


_DESCRIBED = frozenset({"device_kind", "num_cores", "core_count", "compute_capability"})


@contextlib.contextmanager
def kernels_on(device: TargetDevice, count: int) -> Iterator[None]:
    """Tell kernels inside of the block that they are for `count` devices of this kind.

    Some choose their blocks by the live device while they are traced (ragged paged attention), or
    one block for each multiprocessor (Mosaic GPU), and Pallas itself asks for the TPU's
    generation while it lowers. The answer is for functions that read a device's kind or cores;
    whoever else asks for devices gets those that are there. Where the mesh has an
    `abstract_device`, JAX asks that; a mesh with one is another mesh than the user's own.
    What is asked, and the caches of generations, are private (jax 0.10 to 0.12).
    """
    from jax._src.interpreters import pxla
    from jax.extend import backend

    thread = threading.get_ident()
    was_asked = False

    def answering(ask: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        def asked(*args: Any, **options: Any) -> Any:
            nonlocal was_asked
            names = sys._getframe(1).f_code.co_names
            if args or options or _DESCRIBED.isdisjoint(names) or threading.get_ident() != thread:
                return ask(*args, **options)
            was_asked = True
            return answer

        return asked

    answers = {
        (jax, "devices"): [device] * count,
        (jax, "local_devices"): [device] * count,
        (jax, "device_count"): count,
        (jax, "local_device_count"): count,
        (pxla, "get_default_device"): device,
        (backend, "get_default_device"): device,
    }
    with _PATCHING:
        _forget_kernels(generations_only=True)
        before = {(module, name): getattr(module, name) for module, name in answers}
        for (module, name), answer in answers.items():
            setattr(module, name, answering(before[module, name], answer))
        try:
            yield
        finally:
            for (module, name), ask in before.items():
                setattr(module, name, ask)
            _forget_kernels(generations_only=not was_asked)


def _forget_kernels(generations_only: bool) -> None:
    """Drop what JAX keeps of the device, and of its own kernels that were traced for it."""
    for name, asked in (
        ("jax._src.tpu_info", "get_tpu_info"),
        ("jax._src.pallas.mosaic.tpu_info", "get_tpu_info"),
        ("jax._src.pallas.triton.gpu_info", "get_gpu_info"),
    ):
        if hasattr(sys.modules.get(name), asked):
            getattr(sys.modules[name], asked).cache_clear()
    if generations_only:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("jax.experimental.pallas.ops."):
            for value in list(vars(module).values()):
                if hasattr(value, "clear_cache"):
                    value.clear_cache()


_PATCHING = threading.RLock()  # what is patched belongs to all threads


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """A function with `custom_partitioning`, for the process that compiles: who cuts it, and how.

    `sizes` and `names` are the mesh's.
    """

    partition: Any
    propagate_user_sharding: Any
    infer_sharding_from_operands: Any
    in_tree: Any
    out_tree: Any
    static_args: Any
    sizes: tuple[int, ...]
    names: tuple[str, ...]


def lower(traced: Any, platform: str, mesh: Any, device: Any) -> tuple[Any, dict[str, Partitioner]]:
    """Lower a trace on an abstract mesh, callbacks left out; also return its partitioners by key.

    `device`, if given, is taken for the default device.

    JAX refuses programs with callbacks or custom partitioning on abstract meshes. Their rules are
    replaced for this lowering by its own parameter for that, which is private; so is the set of
    primitives that it refuses (jax 0.10 to 0.12).
    """
    from jax._src import callback, custom_partitioning, debugging, dispatch
    from jax._src.interpreters import mlir

    partitioners: dict[str, Partitioner] = {}
    rules = (
        (debugging.debug_print_p, _nothing),
        (debugging.debug_callback_p, _nothing),
        (debugging.inspect_sharding_p, _nothing),
        (callback.pure_callback_p, _zeros),
        (callback.io_callback_p, _zeros),
        (custom_partitioning.custom_partitioning_p, _partitioned_call(mesh, partitioners)),
    )
    parameters = mlir.LoweringParameters(override_lowering_rules=rules)  # type: ignore[arg-type]
    refused = dispatch.prim_requires_devices_during_lowering
    with _PATCHING, _compat.lowering_without_devices(device):
        before = set(refused)
        refused.clear()
        dispatch.jaxpr_has_prim_requiring_devices.cache_clear()
        try:
            lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
        finally:
            refused |= before
            dispatch.jaxpr_has_prim_requiring_devices.cache_clear()
    return lowered, partitioners


def _nothing(ctx: Any, *_: Any, **__: Any) -> tuple[()]:
    """Lower a callback without results to nothing; tokens, the order of effects, pass through."""
    if ctx.tokens_in is not None and len(ctx.tokens_in):
        ctx.set_tokens_out(ctx.tokens_in)
    return ()


def _zeros(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower a callback to zeros, behind a barrier: what depends on them is not folded away."""
    from jax._src.interpreters import mlir
    from jax.extend.mlir.dialects import stablehlo

    _nothing(ctx, *operands, **params)
    zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]
    return list(stablehlo.OptimizationBarrierOp(zeros).results) if zeros else []


def _partitioned_call(mesh: Any, partitioners: dict[str, Partitioner]) -> Any:
    """Make the rule of `custom_partitioning`: a call by a key that the compiling process knows.

    JAX's own rule has the address of an object for a key, and needs devices.
    """
    from jax._src import core
    from jax._src.interpreters import mlir

    def rule(
        ctx: Any,
        *values: Any,
        call: Any,
        in_tree: Any,
        out_tree: Any,
        propagate_user_sharding: Any,
        partition: Any,
        infer_sharding_from_operands: Any,
        sharding_rule: Any,
        static_args: Any,
        **rest: Any,
    ) -> Any:
        manual = getattr(ctx.module_context.axis_context, "manual_axes", ())
        if mesh.size == 1 or set(manual) == set(mesh.axis_names):  # nothing is left to cut
            inner = mlir.lower_fun(core.jaxpr_as_fun(call), multiple_results=True)
            return inner(ctx, *values)
        here = ctx.module_context.platforms[0]
        for eqn, *_ in equations(call):  # which is lowered later, piece by piece
            if kernel_platform(eqn) not in (None, "", here):
                raise NotImplementedError(f"{eqn.primitive.name} is not there for {here}")
        key = f"meshwright {len(partitioners)}"
        partitioners[key] = Partitioner(
            partition,
            propagate_user_sharding,
            infer_sharding_from_operands,
            in_tree,
            out_tree,
            static_args,
            mesh.axis_sizes,
            mesh.axis_names,
        )
        operands, results = (
            jax.tree.leaves([mlir.aval_to_ir_types(ctx.module_context, aval) for aval in avals])
            for avals in (call.in_avals, call.out_avals)
        )
        made = mlir.custom_call(
            "CustomSPMDPartitioning",
            result_types=results,
            operands=list(values),
            backend_config=key,
        )
        if callable(sharding_rule):
            sharding_rule = sharding_rule(*static_args, mesh, operands, results)
        if sharding_rule is not None:
            made.attributes["sdy.sharding_rule"] = _shardy_rule(sharding_rule, operands, results)
        return made.results

    return rule


def _shardy_rule(given: Any, operands: list[Any], results: list[Any]) -> Any:
    """Write a sharding rule as an attribute: a text, a text with options, or JAX's own value."""
    from jax._src import custom_partitioning_sharding_rule as sharding_rules

    given, options = given if isinstance(given, (list, tuple)) else (given, {})
    if isinstance(given, str):
        given = sharding_rules.str_to_sdy_sharding_rule(given, **options)
    return sharding_rules.sdy_sharding_rule_to_mlir(given, operands, results)


def restore_partitioners(written: bytes, devices: Sequence[Any], platform: str) -> list[Any]:
    """Make the pickled partitioners of a program known here; they are, as long as the result lives.

    The table of those that are known, and what it holds, are private (jax 0.10 to 0.12). Importing
    its module hands it to compilers that are loaded already.
    """
    from jax._src import custom_partitioning, sharding_impls
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    alive = []
    context = types.SimpleNamespace(platforms=(platform,), backend=None)
    partitioners: dict[str, Partitioner] = pickle.loads(written)  # noqa: S301 - our parent's
    for key, known in partitioners.items():
        mesh = Mesh(np.array(devices).reshape(known.sizes), known.names)

        def named(sharding: Any, ndim: int, mesh: jax.sharding.Mesh = mesh) -> Any:
            if sharding is None:
                return None
            spec = sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0]
            padded = (*spec, *[None] * (ndim - len(spec)))
            return NamedSharding(mesh, PartitionSpec(*padded))  # type: ignore[no-untyped-call]

        info = custom_partitioning._ShardingCallbackInfo(  # type: ignore[no-untyped-call]
            known.propagate_user_sharding,
            known.partition,
            named,
            known.in_tree,
            known.out_tree,
            known.infer_sharding_from_operands,
            context,
            mesh,
            known.static_args,
        )
        custom_partitioning._sharding_callbacks[key.encode()] = info
        alive.append(info)
    return alive
