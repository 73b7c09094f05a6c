"""Plans for a mesh that is there already: JAX's own `Mesh` and `AbstractMesh`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import meshwright as mw
from meshwright.errors import PlanningError
from meshwright.placement.placer import measure
from meshwright.planning.plan_search import speeds_on

W = jax.ShapeDtypeStruct((512, 512), "float32")
X = jax.ShapeDtypeStruct((64, 512), "float32")
ABSTRACT = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


plan = functools.partial(mw.plan, step, W, X)


@pytest.fixture
def shuffled():
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 5, 4]]
    return Mesh(devices.reshape(4, 2), ("data", "model"))


def test_a_mesh_is_planned_for_as_it_is(shuffled):
    found = plan(mesh=shuffled)
    assert found.mesh is shuffled
    assert found.topology.num_devices == 8
    assert found.in_shardings[0].mesh.devices.tolist() == shuffled.devices.tolist()
    w, x = jnp.eye(512), jnp.ones((64, 512))
    assert jnp.allclose(found.jit()(w, x), step(w, x), atol=1e-6)


def test_a_plan_for_a_mesh_is_rehearsed_on_it(shuffled):
    found = plan(mesh=shuffled, check=1, compiler="cpu")
    assert found.rehearsal.fits
    assert found.rehearsal.placement.spec == found.spec == mw.MeshSpec.parse("data:4, model:2")


def test_axes_of_a_mesh_are_as_fast_as_its_order_makes_them():
    hardware = mw.topology("v5e:4x4")
    placed = mw.place("dp:4, tp:4", hardware)
    grid = placed.positions.ravel()
    mixed = placed.positions.ravel()[np.random.default_rng(1).permutation(16)]
    spec = mw.MeshSpec.parse("dp:4, tp:4")
    good, bad = (
        speeds_on((4, 4), measure(spec, hardware, order.reshape(4, 4))) for order in (grid, mixed)
    )
    for one, other in zip(good, bad, strict=True):
        assert one.seconds("all-reduce", 2**24) < other.seconds("all-reduce", 2**24)


def test_an_abstract_mesh_is_planned_for_by_its_axes():
    found = plan(mesh=ABSTRACT, on="v5e:2x4")
    assert found.spec == mw.MeshSpec.parse("data:4, model:2")
    assert found.lists == plan(mesh="data:4, model:2", on="v5e:2x4").lists


def test_an_abstract_mesh_of_named_hardware_knows_it():
    mesh = mw.mesh("data:2, model:4", on=mw.topology("h100:8"))
    assert plan(mesh=mesh).topology.name == "h100:8"


def test_an_abstract_mesh_from_elsewhere_needs_hardware():
    told = r"an AbstractMesh does not say on what hardware: pass on='v5e:4x4'"
    with pytest.raises(PlanningError, match=told) as caught:
        plan(mesh=ABSTRACT.update(axis_names=("one", "two")))
    assert caught.value.option == "on"


def test_a_mesh_on_other_hardware_is_told_how_to_take_its_axes(shuffled):
    told = r"the devices form cpu:8.*Leave on= out.*or pass mesh\.abstract_mesh"
    with pytest.raises(PlanningError, match=told):
        plan(mesh=shuffled, on="v5e:2x4")


@pytest.mark.parametrize(
    "mesh",
    [
        AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)),
        "data:4:explicit, model:2",
    ],
)
def test_explicit_axes_are_refused(mesh):
    told = r"axis 'data' is of type explicit, and a plan's constraints are for axes of type auto"
    with pytest.raises(PlanningError, match=told):
        plan(mesh=mesh, on="v5e:2x4")


def test_a_mesh_with_explicit_axes_is_told_how_to_make_one_without():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    told = r"make_mesh.* axis_types=\(jax\.sharding\.AxisType\.Auto,\) \* 2"
    with pytest.raises(PlanningError, match=told):
        plan(mesh=mesh)
    auto = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert plan(mesh=auto).mesh is auto
