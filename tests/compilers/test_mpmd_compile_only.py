"""Groups on hardware that is not there: each group's program compiles for its own devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import GroupError

pytestmark = pytest.mark.compilers


def compiled(mesh, data, model):
    def program(x, w):
        return jnp.sum(x @ w)

    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P(data, model)))
    w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P(model)))
    return jax.jit(program).lower(x, w).compile()


@pytest.mark.parametrize("name", ["v5p:4x4x4", "v5e:4x4", "h100:8x2"])
def test_every_group_compiles_on_its_own(name):
    groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:-1, tp:2", on=name), "pp")
    size = groups.jax_mesh.size // 4
    assert groups.lowering_mesh() is groups.unstack[0]
    for mesh in (groups.lowering_mesh(), groups.unstack[3]):
        text = compiled(mesh, "fsdp", "tp").as_text()
        assert "all-reduce" in text
        assert f"num_partitions={size}" in text


def test_a_host_may_be_cut_between_groups():
    groups = mw.MpmdMesh(mw.mesh("pp:-1", on="v5e:4x4"), "pp")
    hosts = [mesh.devices[0].process_index for mesh in groups.unstack]
    assert len(hosts) == 16
    assert len(set(hosts)) == 4


def test_no_group_is_this_process_s_own():
    groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:-1", on="v5p:4x4x4"), "pp")
    for name in ("my_mpmd_axis_index", "my_mpmd_group_mesh"):
        with pytest.raises(ValueError, match=r"the devices exist only for the compiler\. Name a"):
            getattr(groups, name)
    assert "compile-only" in str(groups)
    assert groups.to_json()["groups"][0]["processes"] == []


def test_groups_of_different_shapes_compile():
    devices = list(mw.mesh("fsdp:-1", on="v5e:4x4").devices.flat)
    low = [device for device in devices if device.coords[1] < 2]
    rest = [device for device in devices if device.coords[1] >= 2]
    groups = mw.MeshGroups([mw.mesh("fsdp:4, tp:2", on=low), mw.mesh("tp:8", on=rest)])
    assert "num_partitions=8" in compiled(groups.unstack[0], "fsdp", "tp").as_text()
    assert "num_partitions=8" in compiled(groups.unstack[1], None, "tp").as_text()


def test_live_and_compile_only_devices_do_not_mix():
    there = mw.mesh("fsdp:-1", on="v5e:4x4")
    with pytest.raises(GroupError, match=r"platforms: 8 of cpu, 16 of tpu, compile-only devices"):
        mw.MeshGroups([mw.mesh("fsdp:8"), there])


def test_arrays_of_such_groups_are_shapes():
    groups = mw.MpmdMesh(mw.mesh("pp:4, fsdp:-1", on="v5e:4x4"), "pp")
    split = mw.MpmdSharding(groups, [0, 3], P(("pp", "fsdp")))
    assert split.local is None
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split.sharding_of(3))
    assert jax.jit(jnp.sum).lower(shape).compile().memory_analysis().argument_size_in_bytes > 0
    with pytest.raises(
        mw.errors.PartitionError, match="groups: their devices exist only for the compiler"
    ):
        mw.to_groups(np.ones((8, 8), np.float32), groups, 0)


def test_a_large_pod_is_cut_and_shown():
    groups = mw.MpmdMesh(mw.mesh("pp:16, fsdp:-1, tp:4", on="v5p:16x16x16"), "pp")
    assert groups.mpmd_dim == 16
    assert len(str(groups).splitlines()) == 18
    assert max(map(len, str(groups).splitlines())) <= 100
