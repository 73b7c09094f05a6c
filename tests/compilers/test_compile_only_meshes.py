"""Meshes on hardware that is not there, from the vendors' real compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

pytestmark = pytest.mark.compilers


def _compile_matmul(mesh, data, model):
    def f(x, w):
        return jnp.sum(x @ w)

    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P(data, model)))
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P(model, None)))
    return jax.jit(f).lower(x, w).compile()


@pytest.mark.parametrize("name", ["v5e:4x4", "v5p:2x2x4", "h100:8x2"])
def test_a_named_mesh_compiles_a_sharded_computation(name):
    mesh = mw.mesh("fsdp:-1, tp:4", on=name)
    assert isinstance(mesh, jax.sharding.Mesh)
    text = _compile_matmul(mesh, "fsdp", "tp").as_text()
    assert "all-reduce" in text
    assert f"num_partitions={mesh.size}" in text


def test_slices_are_crossed_by_the_data_axis_alone():
    mesh = mw.mesh("dp:2, fsdp:-1, tp:4", on="v5e:4x8", slices=2)
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert (slices == np.arange(2).reshape(2, 1, 1)).all()


def test_an_axis_can_span_slices_and_the_torus():
    mesh = mw.mesh("fsdp:-1, tp:4", on="v5p:2x2x4", slices=2, dcn={"fsdp": 2})
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert dict(mesh.shape) == {"fsdp": 8, "tp": 4}
    assert (slices == slices[:, :1]).all()
    assert sorted(np.unique(slices[:, 0], return_counts=True)[1]) == [4, 4]


def test_hosts_of_one_slice_are_not_slow_network_parts():
    mesh = mw.mesh("dp:4, tp:4", on="v5e:4x4")
    found = mw.explain(mesh)
    assert found.topology.num_hosts == 4
    assert found.topology.num_slices == 1
    assert all(axis.slow == 1 for axis in found.axes)


def test_nvlink_domains_are_read_from_compile_only_gpus():
    mesh = mw.mesh("dp:2, tp:-1", on="gb200:72x2")
    found = mw.topology(list(mesh.devices.flat))
    assert (found.num_slices, found.num_hosts, found.shape) == (2, 36, (2, 72))
    domains = np.vectorize(lambda d: d.coords[0])(mesh.devices)
    assert (domains == np.arange(2).reshape(2, 1)).all()


@pytest.mark.parametrize("name", ["a100:8", "h100:8", "h200:8", "b200:8", "gb200:4"])
def test_every_gpu_compiles(name):
    mesh = mw.mesh("tp:-1", on=name)
    assert _compile_matmul(mesh, None, "tp").memory_analysis().argument_size_in_bytes > 0


def test_a_device_list_gives_a_mesh_of_exactly_those_devices():
    whole = mw.mesh("fsdp:-1", on="v5e:4x4")
    half = [d for d in whole.devices.flat if d.coords[1] < 2]
    mesh = mw.mesh("dp:2, tp:4", on=half)
    assert set(mesh.devices.flat) == set(half)
    assert mesh.shape["tp"] == 4


def test_mesh_and_abstract_mesh_agree():
    mesh = mw.mesh("fsdp:-1, tp:8", on="v5p:4x4x4")
    abstract = mw.abstract_mesh("fsdp:-1, tp:8", on="v5p:4x4x4")
    assert mesh.abstract_mesh.shape_tuple == abstract.shape_tuple
    assert mesh.axis_types == abstract.axis_types


def test_explain_knows_a_foreign_layout_and_a_better_one():
    from jax.experimental import mesh_utils

    devices = list(mw.mesh("fsdp:-1", on="v5e:16x16").devices.flat)
    theirs = jax.sharding.Mesh(
        mesh_utils.create_device_mesh((64, 4), devices, allow_split_physical_axes=True),
        ("fsdp", "tp"),
    )
    found, ours = mw.explain(theirs), mw.place("fsdp:64, tp:4", "v5e:16x16")
    assert found.cost > 1.3 * ours.cost
    assert "a better layout" in str(found)
    assert found.runner_up_cost == pytest.approx(ours.cost)


@pytest.mark.parametrize("name", ["v5p:4x4x8", "v5e:8x16", "tpu7x:4x4x4"])
def test_two_builds_give_one_mesh(name):
    assert mw.mesh("fsdp:-1, tp:4", on=name) is mw.mesh("fsdp:-1, tp:4", on=name)


def test_the_environment_is_left_as_it_was():
    import os

    before = dict(os.environ)
    mw.mesh("fsdp:-1", on="v6e:4x4")
    assert dict(os.environ) == before
