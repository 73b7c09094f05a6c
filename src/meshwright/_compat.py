"""The only door to private or experimental JAX. Each entry says why, and for which versions."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

# The environment in which libtpu describes hardware that is not there (libtpu 0.0.42 to 0.0.50):
# no metadata server, no worker list, no lock on the chip, and an accelerator type (any will do;
# without one it warns on stderr).
_LIBTPU_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


def compiler_installed(family: str) -> bool:
    """Whether the vendor's compiler can describe hardware of this family here."""
    modules = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
    try:
        return importlib.util.find_spec(modules[family]) is not None
    except (KeyError, ModuleNotFoundError):
        return False


def compile_only_devices(platform: str, name: str, **options: Any) -> list[Any]:
    """Return devices of hardware that is not there; programs can be compiled for them, not run.

    `jax.experimental.topologies` is experimental in jax 0.10 to 0.12 and has no public twin.
    """
    from jax.experimental import topologies

    with _environment(_LIBTPU_WITHOUT_TPU) if platform == "tpu" else _cuda_plugin():
        return list(topologies.get_topology_desc(name, platform, **options).devices)


@contextlib.contextmanager
def _cuda_plugin() -> Iterator[None]:
    """Load JAX's CUDA plugin where there is no GPU and none of CUDA's libraries.

    Unless `JAX_PLATFORMS` leaves CUDA out, the plugin refuses to load without them: JAX prints the
    traceback, and looks for plugins only once in a process. The variable that skips the check is
    the plugin's own; where there is a GPU, what it runs is checked (jax 0.10 to 0.12).
    """
    from jax._src import xla_bridge

    no_gpu = not Path("/dev/nvidiactl").exists()
    with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} if no_gpu else {}):
        xla_bridge._discover_and_register_pjrt_plugins()  # type: ignore[no-untyped-call]
        if no_gpu and "cuda" not in xla_bridge._topology_factories:
            # JAX has looked for plugins before, and this one was refused.
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
            for callback in xla_bridge._plugin_callbacks:
                callback(c_api=xla_bridge._backend_factories["cuda"].c_api)
        yield


@contextlib.contextmanager
def lowering_without_devices(device: Any = None) -> Iterator[None]:
    """Lower programs inside of the block without starting JAX's devices.

    `device` is taken for the default device, where programs do depend on it: kernels for GPUs.

    Lowering on an abstract mesh asks for the default device, though it does not use it. Where
    `JAX_PLATFORMS` names hardware that is not there this fails, and where it names none the
    vendors' plugins print what they miss. The device given instead is a CPU's, of a client that
    JAX does not know; it has no public constructor (jax 0.10 to 0.12).
    """
    if device is None and backends_started():
        yield
        return
    with jax.default_device(device or _unregistered_cpu()):
        yield


@functools.cache
def _unregistered_cpu() -> Any:
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    client: Any = xla_client.make_cpu_client()
    return client.devices()[0]


def is_compile_only(device: Any) -> bool:
    """Whether a device only exists for the compiler.

    The client's class is private (`CompileOnlyPyClient`, jax 0.10 to 0.12); its name is the
    only mark it carries.
    """
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


def client_of(backend: str | None) -> Any:
    """Return the client of a backend: one object for as long as the backend lives; a cheap call.

    `jax.extend.backend` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import backend as extend_backend

    return extend_backend.get_backend(backend)


def tpu_attention(name: str) -> Any:
    """Import JAX's attention kernels for TPUs: `splash_attention` or `flash_attention`.

    They are experimental in 0.10 to 0.12, and there are no others in JAX. Imported when they are
    called: Pallas takes half a second.
    """
    return importlib.import_module(f"jax.experimental.pallas.ops.tpu.{name}")


def make_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], types: tuple[Any, ...], devices: list[Any]
) -> jax.sharding.Mesh:
    """Call `jax.make_mesh` by position: its first argument changed its name in 0.11.1."""
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


@contextlib.contextmanager
def old_ambient_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Enter `with mesh:` without its warning: jax 0.10 to 0.12 call it deprecated.

    It has no successor for two uses: unlike `jax.set_mesh` it may be entered inside `jit`, and
    leaves new arrays uncommitted. Code that reads `thread_resources` sees this mesh alone.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`with mesh:` context", DeprecationWarning)
        mesh.__enter__()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def mesh_around() -> Any:
    """Return the mesh that bare specs are for: of `jax.set_mesh`, or of `with mesh:`; may be empty.

    The second has no public way to be read (jax 0.10 to 0.12).
    """
    from jax._src.mesh import thread_resources

    mesh = jax.sharding.get_abstract_mesh()
    return thread_resources.env.physical_mesh if mesh.empty else mesh


def uses_shardy() -> bool:
    """Whether JAX partitions with Shardy; the alternative, GSPMD, is being removed from JAX."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def use_shardy(yes: bool) -> None:
    if yes != uses_shardy():
        jax.config.update("jax_use_shardy_partitioner", yes)  # type: ignore[no-untyped-call]


def jit_shardings(traced: Any) -> tuple[Any, ...]:
    """Return the flat `in_shardings` that a traced program's `jit` was given; `None` for the rest.

    `lower()` reads them from the same private attribute (jax 0.10 to 0.12).
    """
    found = getattr(traced, "_params", {}).get("in_shardings", ())
    return tuple(one if isinstance(one, jax.sharding.Sharding) else None for one in found)


def compiler_options(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """Return the `compiler_options` that a lowered program's `jit` was given.

    `compile()` reads them from the same private attribute (jax 0.10 to 0.12).
    """
    return tuple(getattr(lowered._lowering, "_compiler_options_kvs", None) or ())


def compile_bytecode(
    code: bytes, devices: list[Any], free_outputs: list[bool], overrides: dict[str, Any]
) -> Any:
    """Compile StableHLO bytecode as `jit(f).lower(...).compile()` would, without `f`.

    `free_outputs` says of which results the compiler chooses the sharding, `overrides` are its
    `compiler_options`. How options are passed, and the parser, are private (jax 0.10 to 0.12).
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax  # type: ignore[attr-defined]
    from jax.extend.mlir import ir

    client = devices[0].client
    options = compiler.get_compile_options(
        1,
        len(devices),
        device_assignment=np.array([devices], object),
        env_options_overrides=overrides or None,
        backend=client,
    )
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = free_outputs
    with mlir.make_ir_context():
        module = ir.Module.parse(code)
        build = client.compile if is_compile_only(devices[0]) else client.compile_and_load
        return build(
            module,
            executable_devices=_jax.DeviceList(tuple(devices)),
            compile_options=options,
        )


def written_shardings(executable: Any, count: int) -> list[str]:
    """Write the shardings of a compiled program's results as text; `named_shardings` reads it.

    A program for one device has none: then there are `count` empty texts. The messages are those
    of jaxlib, which `jax.stages.Compiled` reads too (jax 0.10 to 0.12).
    """
    shardings = executable.get_output_shardings() or []
    texts = [base64.b64encode(each.SerializeToString()).decode() for each in shardings]
    return texts or [""] * count


def named_shardings(texts: Sequence[str], mesh: jax.sharding.Mesh) -> list[Any]:
    """Read what `written_shardings` wrote, onto a mesh of as many devices.

    `Compiled.output_shardings` reads them by the same private function; 0.10 to 0.12.
    """
    from jax._src.lib import xla_client  # type: ignore[attr-defined]
    from jax._src.sharding_impls import parse_flatten_op_sharding

    specs: list[Any] = []
    for text in texts:
        if not text:
            specs.append(jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]
            continue
        sharding = xla_client.OpSharding()
        sharding.ParseFromString(base64.b64decode(text))
        specs.extend(parse_flatten_op_sharding(sharding, mesh))
    return [jax.sharding.NamedSharding(mesh, spec) for spec in specs]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set the environment variables that are unset; unset them again at the end."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def coordination_client() -> Any:
    """Return the client of the service that `jax.distributed.initialize` starts, or None.

    Its key-value store has no public API in jax 0.10 to 0.12. Processes exchange texts through it
    without touching a device.
    """
    from jax._src import distributed

    return distributed.global_state.client


def backends_started() -> bool:
    """Whether JAX has started its devices, after which some options have no effect.

    No public API in jax 0.10 to 0.12.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def cross_host_address() -> str:
    """Return what `jax_cross_host_transfer_socket_address` is set to.

    The option is public to set, but has no attribute to read it by in jax 0.10 to 0.12.
    """
    return str(jax.config.values.get("jax_cross_host_transfer_socket_address") or "")


def puts_by_itself() -> bool:
    """Whether this platform's `jax.device_put` crosses processes without options of its own.

    JAX reads the same attribute of the client (jax 0.10 to 0.12).
    """
    return bool(getattr(client_of(None), "supports_cross_host_transfers", False))


def transfer_server(address: str, transports: list[str]) -> Any:
    """Start a server that offers arrays to other processes and connects to theirs.

    `jax.experimental.transfer` is experimental in jax 0.10 to 0.12 and has no public twin. What
    we rely on, and test: an offered array may be dropped but not deleted or donated; several
    arrays on several devices make one message; a message offered twice under one number at the
    same time is lost; arrays without elements never arrive; sizes are not compared.
    """
    from jax.experimental import transfer

    return transfer.start_transfer_server(client_of(None), address, transports)


@functools.cache
def nan_error() -> type[Exception]:
    """Return the error of a compiled program under `jax_debug_nans`.

    `jit` turns it into a FloatingPointError. It has no public name (jax 0.10 to 0.12).
    """
    from jax._src import api_util

    return getattr(api_util, "InternalFloatingPointError", FloatingPointError)


@functools.cache
def jaxprs() -> Any:
    """Return the module with `Jaxpr`, `Var`, `Literal` and the other parts of a program.

    `jax.extend.core` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import core

    return core


# What a program consists of. JAX ships no types for these, so to a type checker they are `Any`; the
# names say which thing is meant where.
Jaxpr: TypeAlias = Any  # `jax.extend.core.Jaxpr`
Var: TypeAlias = Any  # `jax.extend.core.Var`: a variable of a jaxpr
Atom: TypeAlias = Any  # a `Var` or a `Literal`: an operand of an equation
Eqn: TypeAlias = Any  # `jax.extend.core.JaxprEqn`: one primitive, its operands, its results
Aval: TypeAlias = Any  # `jax.core.ShapedArray`: shape and dtype of a variable


def is_literal(atom: Atom) -> bool:
    """Return whether an operand is a literal, which has a value but no name."""
    return isinstance(atom, jaxprs().Literal)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Count the constants and the carried values among a scan's operands.

    jax 0.12 keeps trees of the operands (constants, carry, stacks) where 0.10 has numbers.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return constants, carry


def constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without constants: its `constvars` become its first `invars`.

    The names of arguments and results in `debug_info` are dropped: with `jax_enable_checks` JAX
    wants one for every input (jax 0.10 to 0.12).
    """
    return jaxprs().Jaxpr(
        (),
        [*jaxpr.constvars, *jaxpr.invars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )


@functools.cache
def known_primitives() -> dict[str, Any]:
    """Return the primitives that the passes of a pipeline recognise, by a short name."""
    from jax.extend.core import primitives

    return {
        "jit": primitives.jit_p,
        "remat": primitives.remat_p,
        "custom_jvp": primitives.custom_jvp_call_p,
        "custom_vjp": primitives.custom_vjp_call_p,
        "closed_call": primitives.closed_call_p,
        "add": primitives.add_jaxvals_p,
        "constraint": primitives.sharding_constraint_p,
    }


def identity_primitive(name: str) -> Any:
    """Make a primitive that returns its operands; its transpose is itself with `backward=True`.

    Rules for differentiation, batching and lowering are registered through `jax.interpreters`,
    which has no public twin in jax 0.10 to 0.12.
    """
    from jax.interpreters import ad, batching, mlir

    primitive = jaxprs().Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *avals, **_: list(avals))
    mlir.register_lowering(primitive, lambda _, *operands, **__: operands)

    def batched(operands: Any, dims: Any, **params: Any) -> Any:
        return primitive.bind(*operands, **params), dims

    def transposed(cotangents: Any, *_: Any, **params: Any) -> Any:
        filled = map(ad.instantiate_zeros, cotangents)
        return primitive.bind(*filled, **{**params, "backward": True})

    batching.primitive_batchers[primitive] = batched
    ad.deflinear2(primitive, transposed)  # type: ignore[no-untyped-call]
    return primitive


def region_primitive(name: str, shapes: Any) -> Any:
    """Make a primitive that stands for a whole program in a trace and is never run itself."""
    primitive = jaxprs().Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, **params: [jax.core.ShapedArray(s, d) for s, d in shapes(**params)]
    )
    return primitive


def coordination_place() -> tuple[int, int]:
    """Return this process's number and how many `jax.distributed.initialize` has joined.

    `jax.process_index` and `jax.process_count` say the same but start the devices. No public
    API in jax 0.10 to 0.12.
    """
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def equation_context(context: Any, mesh: Any) -> Any:
    """Return the context of an equation (what it was traced under) with another abstract mesh.

    Programs are data in `jax.extend.core`, but the contexts of their equations have no public
    API in jax 0.10 to 0.12.
    """
    from jax._src.core import JaxprEqnContext
    from jax.sharding import AbstractMesh, use_abstract_mesh

    if context.cur_abstract_mesh == mesh:
        return context
    nothing = AbstractMesh((), ())  # from which a mesh of any size may follow
    with context.manager, use_abstract_mesh(nothing), use_abstract_mesh(mesh):
        return JaxprEqnContext()  # type: ignore[no-untyped-call]


def source_line(eqn: Any) -> str:
    """Return the file, line and function that an equation comes from.

    `jax.extend.source_info_util` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import source_info_util

    return str(source_info_util.summarize(eqn.source_info))


def custom_call_stacks(code: bytes, targets: Collection[str]) -> list[list[tuple[str, int]]]:
    """Return file and line of the frames above each such custom call of StableHLO, innermost first.

    The parser of bytecode is private (jax 0.10 to 0.12).
    """
    from jax._src.interpreters import mlir
    from jax.extend.mlir import ir

    stacks: list[list[tuple[str, int]]] = []
    with mlir.make_ir_context():
        module = ir.Module.parse(code)  # its operations live as long as it does
        pending = [module.operation]
        while pending:
            operation = pending.pop()
            attributes = operation.attributes
            called = str(attributes["call_target_name"]) if "call_target_name" in attributes else ""
            if called.strip('"') in targets:
                frames = re.findall(r'"([^"]+)":(\d+):\d+', str(operation.location))
                stacks.append([(file, int(line)) for file, line in frames])
            for region in operation.regions:
                pending += [each.operation for block in region.blocks for each in block.operations]
    return stacks


@contextlib.contextmanager
def at_equation(eqn: Any) -> Iterator[None]:
    """Trace inside of the block as if at an equation's own line, under its name scopes.

    `jax.extend.source_info_util` has no way to set these (jax 0.10 to 0.12).
    """
    from jax._src import source_info_util

    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def forget_profiler() -> None:
    """Let another trace begin after one whose files could not be written.

    `jax.profiler.stop_trace` then raises before it forgets the session (jax 0.10), and every later
    `start_trace` of the process is told that a profiler is running.
    """
    from jax._src import profiler

    with profiler._profile_state.lock:
        profiler._profile_state.reset()  # type: ignore[no-untyped-call]


def profiler_runs() -> bool:
    """Whether `jax.profiler.start_trace` or `jax.profiler.trace` is recording in this process.

    JAX says so only by refusing to start a second one (`profile_session` until jax 0.11, `session`
    in 0.12); starting one to see would load CUPTI, which slows the kernels that are timed next.
    Where neither is there, that refusal is what tells, after the first steps.
    """
    from jax._src import profiler

    state = profiler._profile_state
    running = getattr(state, "profile_session", None) or getattr(state, "session", None)
    return running is not None


def is_tracing() -> bool:
    """Whether JAX traces a function now; `jax.core` has it no more (jax 0.10 to 0.12)."""
    from jax._src import core

    return not core.trace_state_clean()
