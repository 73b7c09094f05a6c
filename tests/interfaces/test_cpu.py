"""Working on the CPU, and leaving everything as it was."""

import inspect
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import thread_resources
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw

MINE = mw.create_cpu_mesh((4, 2), ("dp", "tp"))


def current() -> tuple[Any, ...]:
    """What the two contexts change."""
    return (
        jax.config.jax_default_device,
        thread_resources.env.physical_mesh,
        jax.sharding.get_mesh(),
        jax.sharding.get_abstract_mesh(),
    )


def test_the_signatures_are_the_contract() -> None:
    said = {n: p.default for n, p in inspect.signature(mw.create_cpu_mesh).parameters.items()}
    assert list(said.items()) == [
        ("axis_dims", (1, -1, 1, 1, 1)),
        ("axis_names", ("dp", "fsdp", "ep", "tp", "sp")),
    ]
    assert not inspect.signature(mw.force_cpu).parameters
    assert not inspect.signature(mw.cpu_context).parameters


def test_the_cpu_mesh_spans_all_cpu_devices_of_the_host() -> None:
    mesh = mw.create_cpu_mesh()
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    assert set(mesh.devices.flat) == set(jax.local_devices(backend="cpu"))


def test_the_cpu_mesh_takes_dims_and_names() -> None:
    assert dict(mw.create_cpu_mesh((2, -1), ("a", "b")).shape) == {"a": 2, "b": 4}
    assert dict(mw.create_cpu_mesh([4, 2], ["a", "b"]).shape) == {"a": 4, "b": 2}


def test_the_same_cpu_mesh_is_the_same_object() -> None:
    assert mw.create_cpu_mesh((2, 4), ("a", "b")) is mw.create_cpu_mesh([2, 4], ["a", "b"])


def test_fewer_cpu_devices_warn() -> None:
    with pytest.warns(
        mw.errors.IdleDevicesWarning, match="'a:2' uses 2 of 8 devices; 6 stay idle"
    ) as c:
        mesh = mw.create_cpu_mesh((2,), ("a",))
    assert c[0].filename == __file__
    assert list(mesh.devices.flat) == jax.devices("cpu")[:2]


@pytest.mark.parametrize(
    ("dims", "names", "message"),
    [
        (8, ("dp",), "axis_dims: 8 is not a list or tuple"),
        ("24", ("a", "b"), "axis_dims: '24' is not a list or tuple"),
        ((2, 4), "dp", "axis_names: 'dp' is not a list or tuple"),
        ((2, 4), 5, "axis_names: 5 is not a list or tuple"),
        ((2, 4), {"a", "b"}, "axis_names: {.*} is not a list or tuple"),
        ((2, 4), ("a",), "2 sizes for 1 names"),
        ((2, 4), ("a", "a"), "axis 'a' appears twice"),
        ((-2, 4), ("a", "b"), "axis 'a': size -2 is not allowed"),
        ((16,), ("a",), "Not enough devices: 'a:16' needs 16, there are 8"),
    ],
)
def test_bad_dims_and_names_are_refused(dims: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mw.create_cpu_mesh(dims, names)


def test_force_cpu_makes_the_cpu_the_default_device() -> None:
    before = current()
    with mw.force_cpu() as device:
        assert device is jax.local_devices(backend="cpu")[0]
        assert jax.config.jax_default_device is device
        assert jnp.zeros(2).devices() == {device}
    assert current() == before


def test_force_cpu_puts_back_a_default_device_of_yours() -> None:
    mine = jax.devices("cpu")[3]
    with jax.default_device(mine):
        with mw.force_cpu() as device:
            assert jnp.zeros(2).devices() == {device}
        assert jnp.zeros(2).devices() == {mine}


def test_force_cpu_is_restored_after_an_exception() -> None:
    before = current()
    with pytest.raises(KeyError, match="mine"), mw.force_cpu():
        raise KeyError("mine")
    assert current() == before


def test_force_cpu_works_inside_jit() -> None:
    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        with mw.force_cpu():
            return x * 2

    assert float(double(jnp.float32(4))) == 8.0


def test_cpu_context_makes_its_mesh_the_current_one() -> None:
    before = current()
    with mw.cpu_context() as mesh:
        assert mesh is mw.create_cpu_mesh()
        assert thread_resources.env.physical_mesh == mesh
        spread = jax.lax.with_sharding_constraint(jnp.ones(16), PartitionSpec("fsdp"))
        assert spread.sharding == NamedSharding(mesh, PartitionSpec("fsdp"))
        assert jax.config.jax_default_device is jax.devices("cpu")[0]
    assert current() == before


def test_cpu_context_is_restored_after_an_exception() -> None:
    before = current()
    with pytest.raises(KeyError, match="mine"), mw.cpu_context():
        raise KeyError("mine")
    assert current() == before


def test_cpu_contexts_nest() -> None:
    before = current()
    with mw.cpu_context() as outer:
        inside = current()
        with mw.cpu_context() as inner:
            assert inner is outer
        assert current() == inside
    assert current() == before


def test_cpu_context_puts_back_a_mesh_of_yours() -> None:
    with jax.set_mesh(MINE):
        with mw.cpu_context() as mesh:
            assert jax.sharding.get_mesh().empty
            spread = jax.lax.with_sharding_constraint(jnp.ones(16), PartitionSpec("fsdp"))
            assert spread.sharding.mesh == mesh
        assert jax.sharding.get_mesh() == MINE


def test_arrays_made_in_cpu_context_go_anywhere_later() -> None:
    with mw.cpu_context():
        inside = jnp.arange(4.0)
    assert not inside.committed
    elsewhere = jax.device_put(jnp.ones(4), jax.devices()[3])
    assert (inside + elsewhere).devices() == {jax.devices()[3]}
    on_two = jax.device_put(jnp.ones(4), NamedSharding(MINE, PartitionSpec("tp")))
    assert (inside + on_two).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_cpu_context_works_inside_jit() -> None:
    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        with mw.cpu_context():
            return jax.lax.with_sharding_constraint(x * 2, PartitionSpec("fsdp"))

    before = current()
    result = inside(jnp.arange(16.0))
    assert result.sharding == NamedSharding(mw.create_cpu_mesh(), PartitionSpec("fsdp"))
    assert result.tolist() == [2.0 * i for i in range(16)]
    assert current() == before


def test_jitted_code_sees_the_mesh_of_cpu_context() -> None:
    @jax.jit
    def spread(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, PartitionSpec("fsdp"))

    with mw.cpu_context() as mesh:
        result = spread(jnp.arange(16.0))
    assert result.sharding.spec == PartitionSpec("fsdp")
    assert result.sharding.device_set == set(mesh.devices.flat)
    assert result.tolist() == [2.0 * i for i in range(16)]


def test_jitted_code_is_restored_after_it_raises_in_cpu_context() -> None:
    @jax.jit
    def fails(x: jax.Array) -> jax.Array:
        raise KeyError("while tracing")

    before = current()
    with pytest.raises(KeyError, match="while tracing"), mw.cpu_context():
        fails(jnp.zeros(2))
    assert current() == before


def test_cpu_context_inside_jit_under_a_mesh_of_yours_says_where_to_put_it() -> None:
    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        with mw.cpu_context():
            return x

    with jax.set_mesh(MINE):
        before = current()
        with pytest.raises(
            mw.errors.MeshError, match=r"outside of `jax.jit`.*Enter it around the jitted call"
        ):
            inside(jnp.zeros(2))
        assert current() == before


def test_a_missing_cpu_backend_is_an_error_of_ours() -> None:
    code = """
import meshwright as mw
for call in (mw.create_cpu_mesh, mw.force_cpu().__enter__, mw.cpu_context().__enter__):
    try:
        call()
    except RuntimeError as error:
        assert isinstance(error, mw.errors.BackendError)
        print(str(error)[:43])
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "banana"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "JAX runs without its CPU backend here. Add \n" * 3, result.stderr
