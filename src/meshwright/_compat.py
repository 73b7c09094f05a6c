"""The only door to private or experimental JAX. Each entry says why, and for which versions."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

# What libtpu wants to hear before it describes hardware that is not there (libtpu 0.0.42 to
# 0.0.50): no metadata server, no worker list, no lock on the chip, and some accelerator (which
# one does not matter; without any it complains on stderr).
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
    """Devices of hardware that is not there, good for compiling.

    `jax.experimental.topologies` is experimental in jax 0.10 to 0.12 and has no public twin.
    """
    from jax.experimental import topologies

    with _environment(_LIBTPU_WITHOUT_TPU if platform == "tpu" else {}):
        return list(topologies.get_topology_desc(name, platform, **options).devices)


def is_compile_only(device: Any) -> bool:
    """Whether a device only exists for the compiler.

    The client's class is private (`CompileOnlyPyClient`, jax 0.10 to 0.12); its name is the
    only mark it carries.
    """
    return type(getattr(device, "client", None)).__name__ == "CompileOnlyPyClient"


def client_of(backend: str | None) -> Any:
    """The client behind a backend: one object for the life of a backend, cheap to ask for.

    `jax.extend.backend` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import backend as extend_backend

    return extend_backend.get_backend(backend)


def make_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], types: tuple[Any, ...], devices: list[Any]
) -> jax.sharding.Mesh:
    """`jax.make_mesh`, whose first argument changed its name in 0.11.1: passed by position."""
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def uses_shardy() -> bool:
    """In which language programs carry their shardings; the older one is going away."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def use_shardy(yes: bool) -> None:
    if yes != uses_shardy():
        jax.config.update("jax_use_shardy_partitioner", yes)  # type: ignore[no-untyped-call]


def jit_shardings(traced: Any) -> tuple[Any, ...]:
    """The `in_shardings` that a traced program's `jit` was given, flat; `None` where it was not.

    `lower()` reads them from the same private attribute (jax 0.10 to 0.12).
    """
    found = getattr(traced, "_params", {}).get("in_shardings", ())
    return tuple(one if isinstance(one, jax.sharding.Sharding) else None for one in found)


def compiler_options(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """What a lowered program's `jit` was given as `compiler_options`.

    `compile()` reads them from the same private attribute (jax 0.10 to 0.12).
    """
    return tuple(getattr(lowered._lowering, "_compiler_options_kvs", None) or ())


def compile_bytecode(
    code: bytes, devices: list[Any], free_outputs: list[bool], overrides: dict[str, Any]
) -> Any:
    """What `jit(f).lower(...).compile()` does with a program, for one whose function is elsewhere.

    `free_outputs`: whose sharding the compiler chooses; `overrides`: its `compiler_options`. How
    options are passed, and the parser, are private; 0.10 to 0.12 agree on all of it.
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


def written_shardings(made: Any, count: int) -> list[str]:
    """The shardings of a compiled program's results as text; `named_shardings` reads it.

    A program for one device has none, which is written as such. The messages are those of
    jaxlib, which `jax.stages.Compiled` reads too (jax 0.10 to 0.12).
    """
    found = made.get_output_shardings() or []
    return [base64.b64encode(each.SerializeToString()).decode() for each in found] or [""] * count


def named_shardings(texts: Sequence[str], mesh: jax.sharding.Mesh) -> list[Any]:
    """What `written_shardings` wrote, on a mesh of as many devices.

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
    """Set what is unset, and take it back."""
    added = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` starts, or None without it.

    Its key-value store has no public door in jax 0.10 to 0.12. Used to compare notes between
    processes without touching a device.
    """
    from jax._src import distributed

    return distributed.global_state.client


def backends_started() -> bool:
    """Whether JAX has started its devices, after which some options have no effect.

    No public door in jax 0.10 to 0.12.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def cross_host_address() -> str:
    """What `jax_cross_host_transfer_socket_address` is set to.

    The option is public to set, but has no attribute to read it by in jax 0.10 to 0.12.
    """
    return str(jax.config.values.get("jax_cross_host_transfer_socket_address") or "")


def puts_by_itself() -> bool:
    """Whether this platform's `jax.device_put` crosses processes without options of its own.

    An attribute of the client that JAX asks too (jax 0.10 to 0.12).
    """
    return bool(getattr(client_of(None), "supports_cross_host_transfers", False))


def transfer_server(address: str, transports: list[str]) -> Any:
    """A server that offers arrays to other processes, and connects to theirs.

    `jax.experimental.transfer` is experimental in jax 0.10 to 0.12 and has no public twin. What
    we rely on, and test: an offered array may be dropped but not deleted or donated; several
    arrays on several devices make one message; a message offered twice under one number at the
    same time is lost; arrays without elements never arrive; sizes are not compared.
    """
    from jax.experimental import transfer

    return transfer.start_transfer_server(client_of(None), address, transports)


@functools.cache
def no_number() -> type[Exception]:
    """What a compiled program raises with `jax_debug_nans`; `jit` makes a FloatingPointError of it.

    It has no public name (jax 0.10 to 0.12).
    """
    from jax._src import api_util

    return getattr(api_util, "InternalFloatingPointError", FloatingPointError)


@functools.cache
def jaxprs() -> Any:
    """`Jaxpr`, `Var`, `Literal` and their kin: programs as data.

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
    """The primitives that hold programs or add cotangents, which cutting must know by name."""
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
    """A primitive that gives back its operands, whose transpose says `backward=True`.

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
    """A primitive that stands for a whole program in a trace and never runs by itself."""
    primitive = jaxprs().Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, **params: [jax.core.ShapedArray(s, d) for s, d in shapes(**params)]
    )
    return primitive


def coordination_place() -> tuple[int, int]:
    """This process's number and how many there are, as `jax.distributed.initialize` was told.

    `jax.process_index` and `jax.process_count` say the same but start the devices. No public
    door in jax 0.10 to 0.12.
    """
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


def equation_context(context: Any, mesh: Any) -> Any:
    """The context of an equation (what it was traced under), with another abstract mesh.

    Programs are data in `jax.extend.core`, but the contexts of their equations have no public
    door in jax 0.10 to 0.12.
    """
    from jax._src.core import JaxprEqnContext
    from jax.sharding import AbstractMesh, use_abstract_mesh

    if context.cur_abstract_mesh == mesh:
        return context
    nothing = AbstractMesh((), ())  # from which a mesh of any size may follow
    with context.manager, use_abstract_mesh(nothing), use_abstract_mesh(mesh):
        return JaxprEqnContext()  # type: ignore[no-untyped-call]


def source_line(eqn: Any) -> str:
    """File, line and function that an equation comes from.

    `jax.extend.source_info_util` is public but outside `jax`'s stability promise; 0.10 to 0.12.
    """
    from jax.extend import source_info_util

    return str(source_info_util.summarize(eqn.source_info))
