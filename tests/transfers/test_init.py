"""`init`: initialisers computed into their shardings, never whole on one device."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.mesh("fsdp:4, tp:2")


def model(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (64, 256)),
        "down": jax.random.truncated_normal(down, -2, 2, (256, 64)),
        "bias": jnp.zeros(64),
        "step": jnp.zeros((), jnp.int32),
    }


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_values_are_those_of_the_plain_initialiser(kind):
    mesh = mw.mesh("fsdp:4, tp:2", axis_types=kind)
    made = mw.init(model, jax.random.key(3), mesh=mesh)
    plain = jax.jit(model)(jax.random.key(3))
    for path in plain:
        np.testing.assert_array_equal(made[path], plain[path])
        assert made[path].dtype == plain[path].dtype


def test_every_array_is_made_in_its_sharding():
    made = mw.init(model, jax.random.key(3), mesh=MESH)
    specs = mw.partition(jax.eval_shape(model, jax.random.key(3)), MESH)
    for path, array in made.items():
        assert array.sharding == NamedSharding(MESH, specs[path]), path
    for path in ("up", "down"):
        for shard in made[path].addressable_shards:
            assert shard.data.size == made[path].size // 8


def test_the_function_is_only_traced():
    seen = []

    def fn(key):
        made = jax.random.normal(key, (128, 128))
        seen.append(isinstance(made, jax.core.Tracer))
        return {"w": made}

    before = {id(array) for array in jax.live_arrays()}
    made = mw.init(fn, jax.random.key(0), mesh=MESH)["w"]
    assert seen and all(seen)
    assert not made.sharding.is_fully_replicated
    new = [array for array in jax.live_arrays() if id(array) not in before]
    new = [array for array in new if array.size == 128 * 128]
    assert [array is made for array in new] == [True]  # nothing of that size besides the result


def test_specs_and_options_decide():
    by_tree = mw.init(
        model,
        jax.random.key(0),
        mesh=MESH,
        specs={"up": P("tp"), "down": P(None, "tp"), "bias": P("fsdp"), "step": P()},
    )
    assert by_tree["down"].sharding.spec == P(None, "tp")
    assert by_tree["bias"].sharding.spec == P("fsdp")
    by_rules = mw.init(model, jax.random.key(0), mesh=MESH, rules=[("up", "tp"), ("**", None)])
    assert by_rules["up"].sharding.spec == P("tp")
    assert by_rules["down"].sharding.is_fully_replicated
    by_one = mw.init(lambda: jnp.ones((8, 8)), mesh=MESH, specs=P("tp", "fsdp"))
    assert by_one.sharding.spec == P("tp", "fsdp")


def test_arguments_may_be_placed_already():
    batch = mw.shard(np.ones((64, 8), np.float32), MESH, P("fsdp"))
    made = mw.init(lambda x: {"w": x.T @ x}, batch, mesh=MESH, specs=P("tp"))
    np.testing.assert_array_equal(made["w"], np.full((8, 8), 64))


def test_leaves_that_are_no_arrays_come_back():
    class Layer(eqx.Module):
        weight: jax.Array
        act: Callable

    made = mw.init(lambda: Layer(jnp.ones((128, 128)), jnp.tanh), mesh=MESH)
    assert isinstance(made, Layer)
    assert made.act is jnp.tanh
    assert made.weight.addressable_shards[0].data.size == 128 * 128 // 8
    mixed = mw.init(lambda: {"w": jnp.ones((8, 8)), "n": 3, "s": "x", "none": None}, mesh=MESH)
    assert (mixed["n"], mixed["s"], mixed["none"]) == (3, "x", None)


def test_optimizer_states_are_made_beside_their_parameters():
    params = mw.init(model, jax.random.key(0), mesh=MESH)
    specs = mw.partition(params, MESH)
    zeros = mw.init(lambda p: jax.tree.map(jnp.zeros_like, p), params, mesh=MESH, specs=specs)
    assert all(zeros[path].sharding == params[path].sharding for path in params)


def test_bad_specs_name_the_leaf_before_anything_runs():
    ran = []

    def fn():
        jax.debug.callback(lambda: ran.append(1))
        return {"w": jnp.ones((6, 8))}

    with pytest.raises(mw.errors.PartitionError, match=r"init: 1 problem.*\n  w: dim 0 has size 6"):
        mw.init(fn, mesh=MESH, specs=P("fsdp"))
    with pytest.raises(mw.errors.PartitionError, match="First difference: 'w' has no spec"):
        mw.init(fn, mesh=MESH, specs={"v": P()})
    with pytest.raises(mw.errors.PartitionError, match=r"w: \(6, 8\) matches no rule"):
        mw.init(fn, mesh=MESH, rules=[])
    assert ran == []


@pytest.mark.parametrize(
    ("fn", "mesh", "message"),
    [
        (3, MESH, r"^init: 3 is not a function\.$"),
        ({"w": 1}, MESH, r"^init: \{'w': 1\} is not a function"),
        (model, MESH.abstract_mesh, r"^init computes: it needs a Mesh of devices"),
        (model, "fsdp:8", r"^mesh: 'fsdp:8' is not a jax.sharding.Mesh"),
        (model, None, r"^mesh: None is not a jax.sharding.Mesh"),
    ],
)
def test_bad_input_is_refused(fn, mesh, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.init(fn, jax.random.key(0), mesh=mesh)


# Arguments and results that are no arrays of JAX.


@dataclasses.dataclass
class Config:
    width: int
    act: str = "gelu"


def test_what_is_no_array_reaches_the_function_as_it_is():
    def fn(key, n, config, scale, words):
        assert (config.act, words) == ("gelu", {"kind": "zeros"})
        return jax.random.normal(key, (n, config.width)) * scale

    args = (jax.random.key(0), 64, Config(32), 0.5, {"kind": "zeros"})
    made = mw.init(fn, *args, mesh=MESH)
    np.testing.assert_array_equal(made, jax.jit(lambda key: fn(key, *args[1:]))(args[0]))
    assert mw.init(lambda n: jnp.ones((n, n)), np.int32(8), mesh=MESH).shape == (8, 8)


def test_arrays_that_decide_a_shape_say_what_to_do():
    with pytest.raises(
        TypeError, match="Pass sizes as Python numbers, or bind them with functools"
    ):
        mw.init(lambda n: jnp.ones((n, n)), jnp.int32(64), mesh=MESH)


def test_arguments_by_name_are_told_from_options_before_the_function_runs():
    def fn(key, n):
        raise AssertionError("must not run")

    with pytest.raises(
        mw.errors.PartitionError,
        match=r"^init: no option 'n'\. Bind an argument of the function with "
        r"functools\.partial\(fn, n=\.\.\.\)",
    ):
        mw.init(fn, jax.random.key(0), n=64, mesh=MESH)
    with pytest.raises(
        mw.errors.PartitionError, match=r"no option 'rule'\. Did you mean 'rules'\?"
    ):
        mw.init(fn, jax.random.key(0), 64, rule=[], mesh=MESH)
    with pytest.raises(mw.errors.PartitionError, match=r"^uneven: 'no' is not one of"):
        mw.init(fn, jax.random.key(0), 64, uneven="no", mesh=MESH)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: {"step": np.array([2**40])}, "step: int64 would become int32"),
        (lambda: {"w": np.ones((8, 8))}, "w: float64 would become float32"),
        (lambda: {"w": np.float64(3)}, "w: float64 would become float32"),
        (lambda: {"w": np.array(["a"])}, r"w: ndarray of <U1 cannot be placed"),
        (
            lambda: {"w": jax.ShapeDtypeStruct((8,), "float32")},
            r"w: ShapeDtypeStruct holds no values\. Return an array",
        ),
        (
            lambda: {"w": mw.FromCallback((8,), "float32", np.ones)},
            r"w: FromCallback holds no values\. Return an array",
        ),
    ],
)
def test_results_that_would_be_changed_are_refused(made, message):
    with pytest.raises(
        mw.errors.PartitionError, match=rf"^init: 1 problem, nothing was placed\.\n  {message}"
    ):
        mw.init(made, mesh=MESH)


def test_results_are_narrowed_when_asked_and_integers_only_if_they_fit():
    made = mw.init(lambda: {"s": np.array([7]), "w": np.ones(8)}, mesh=MESH, narrow="convert")
    assert (made["s"].dtype, made["w"].dtype, int(made["s"][0])) == (np.int32, np.float32, 7)
    with pytest.raises(mw.errors.PartitionError, match=r"s: holds integers from 1099511627776 to"):
        mw.init(lambda: {"s": np.array([2**40])}, mesh=MESH, narrow="convert")
    with pytest.raises(
        mw.errors.PartitionError, match=r"^narrow: True is not 'error' or 'convert'\.$"
    ):
        mw.init(model, jax.random.key(0), mesh=MESH, narrow=True)


def test_numpy_in_the_other_byte_order_is_read():
    made = mw.init(lambda x: [x, np.arange(8, dtype=">i4")], np.arange(8, dtype=">f4"), mesh=MESH)
    np.testing.assert_array_equal(made[0], np.arange(8))
    np.testing.assert_array_equal(made[1], np.arange(8))


def test_arguments_that_would_be_changed_are_refused():
    gone = jnp.ones(3)
    gone.delete()
    args = ({"a": np.ones(8)}, 3, gone)
    with pytest.raises(
        mw.errors.PartitionError, match=r"^init: 2 problems, nothing was placed"
    ) as caught:
        mw.init(lambda *args: args, *args, mesh=MESH)
    assert "argument 0/a: float64 would become float32" in str(caught.value)
    assert "argument 2: the array was deleted or donated" in str(caught.value)


def test_arguments_on_other_devices_say_how_to_move_them():
    few = mw.mesh("x:2", devices=jax.devices()[:2])
    turned = jax.sharding.Mesh(np.array(jax.devices())[::-1], ("x",))
    there = mw.shard(np.ones((8, 8), np.float32), few, P("x"))
    back = jax.device_put(np.ones(8, np.float32), NamedSharding(turned, P("x")))
    one = jax.device_put(np.ones(8, np.float32), jax.devices()[3])
    for array, devices in ((there, "0, 1"), (one, "3"), (back, "0, 1, 2, 3 and 4 more")):
        with pytest.raises(
            mw.errors.PartitionError,
            match=rf"argument 0: lies on devices {devices}, not on the 8 of the mesh in their "
            r"order\. Move it first: reshard\(x, mesh, PartitionSpec\(\)\)",
        ):
            mw.init(lambda x: x * 2, array, mesh=MESH)
        moved = mw.reshard(array, MESH, P())
        assert (np.asarray(mw.init(lambda x: x * 2, moved, mesh=MESH)) == 2).all()


def test_another_mesh_around_does_not_matter():
    few, key = mw.mesh("x:2", devices=jax.devices()[:2]), jax.random.key(3)
    with jax.set_mesh(few):
        made = mw.init(model, key, mesh=MESH)
        assert jax.sharding.get_mesh() == few
    np.testing.assert_array_equal(made["up"], jax.jit(model)(jax.random.key(3))["up"])


def test_under_jit_the_initialiser_is_part_of_the_program():
    made = jax.jit(lambda key: mw.init(model, key, mesh=MESH))(jax.random.key(3))
    np.testing.assert_array_equal(made["up"], jax.jit(model)(jax.random.key(3))["up"])


def test_a_dim_that_is_left_open_is_refused():
    with pytest.raises(
        mw.errors.PartitionError, match=r"^init: .*\n.*leaves a dim unconstrained, which only"
    ):
        mw.init(lambda: jnp.ones((8, 8)), mesh=MESH, specs=P(P.UNCONSTRAINED))


def test_names_of_nnx_that_are_no_axes_say_what_to_switch_off():
    init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"))

    def make():
        return nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    options = {"mesh": MESH, "logical": {"embed": "fsdp", "mlp": "tp"}}
    match = (
        r"^init: Flax NNX takes the names of a variable for axes of a mesh .*eager_sharding\(False"
    )
    with pytest.raises(mw.errors.PartitionError, match=match):
        mw.init(make, **options)
    with jax.set_mesh(MESH), pytest.raises(mw.errors.PartitionError, match=match):
        mw.init(make, **options)
    with nnx.use_eager_sharding(False):
        assert mw.init(make, **options).kernel.get_value().sharding.spec == P("fsdp", "tp")


def test_errors_of_the_function_itself_stay_as_they_are():
    def fn():
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine") as caught:
        mw.init(fn, mesh=MESH)
    assert not isinstance(caught.value, mw.errors.MeshwrightError)
