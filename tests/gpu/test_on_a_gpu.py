"""What must hold where the default backend is a GPU: run by `make test-gpu` on such a machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import thread_resources
from jax.sharding import PartitionSpec as P

import meshwright as mw

pytestmark = pytest.mark.gpu


def _platform(array):
    return {device.platform for device in array.devices()}


def test_the_default_backend_is_a_gpu():
    assert jax.default_backend() == "gpu"


def test_force_cpu_makes_the_cpu_the_default_and_gives_the_gpu_back():
    with mw.force_cpu() as device:
        assert device.platform == "cpu"
        assert _platform(jnp.ones(4)) == {"cpu"}
        assert _platform(jax.jit(lambda: jnp.ones(4))()) == {"cpu"}
    assert _platform(jnp.ones(4)) == {"gpu"}


def test_force_cpu_gives_the_gpu_back_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), mw.force_cpu():
        raise RuntimeError("inside")
    assert _platform(jnp.ones(4)) == {"gpu"}


def test_create_cpu_mesh_uses_all_cpu_devices():
    assert list(mw.create_cpu_mesh().devices.flat) == jax.local_devices(backend="cpu")


def test_cpu_context_computes_on_the_cpu_mesh_under_jit():
    with mw.cpu_context() as mesh:
        assert thread_resources.env.physical_mesh == mesh

        @jax.jit
        def double(x):
            return 2 * jax.lax.with_sharding_constraint(x, P("fsdp"))

        n = mesh.shape["fsdp"]
        result = double(jnp.arange(4.0 * n))
        assert _platform(result) == {"cpu"}
        np.testing.assert_array_equal(result, 2 * np.arange(4.0 * n))
    assert thread_resources.env.physical_mesh.empty
    assert _platform(jnp.ones(4)) == {"gpu"}


def test_create_mesh_takes_the_gpus_by_default_and_cpus_when_told():
    assert {d.platform for d in mw.create_mesh().devices.flat} == {"gpu"}
    assert {d.platform for d in mw.create_mesh(backend="cpu").devices.flat} == {"cpu"}
    assert mw.create_mesh() is not mw.create_mesh(backend="cpu")


def test_the_live_gpu_is_recognised():
    found = mw.topology(jax.devices())
    assert found.chip.family == "gpu"
    assert found.chip.name in jax.devices()[0].device_kind.lower()
    assert found.num_slices == 1


def test_cpus_and_gpus_do_not_mix():
    with pytest.raises(mw.errors.TopologyError, match="devices of 2 kinds"):
        mw.mesh("dp:-1", devices=[jax.devices("cpu")[0], jax.devices("gpu")[0]])


def test_a_mesh_on_the_gpu_computes():
    mesh = mw.mesh("fsdp:-1, tp:1")
    x = jax.device_put(jnp.ones((8, 8)), jax.sharding.NamedSharding(mesh, P("fsdp")))
    assert float(jax.jit(jnp.sum)(x @ x)) == 512.0
