"""Metadata as libraries write it: mesh axes by name, fewer names than dims, trees without boxes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import meshwright as mw
from meshwright.errors import PartitionError

MESH = mw.mesh("fsdp:4, tp:2")
normal = nn.initializers.normal(0.02)


def attention(*names):
    """Flax reshapes the kernels of attention after they were named: two names, three dims."""
    layer = nn.MultiHeadDotProductAttention(
        4, qkv_features=64, use_bias=False, kernel_init=nn.with_logical_partitioning(normal, names)
    )
    return jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 2, 64)))["params"]


def test_fewer_names_than_dims_leave_the_rest_whole():
    shapes = attention("embed", "heads")
    specs = nn.unbox(mw.partition(shapes, MESH, logical={"embed": "fsdp", "heads": "tp"}))
    assert shapes["query"]["kernel"].value.shape == (64, 4, 16)
    assert specs["query"]["kernel"] == P("fsdp", "tp")


def test_more_names_than_dims_are_refused():
    box = nn.LogicallyPartitioned(jnp.ones(8), ("embed", "mlp"))
    with pytest.raises(PartitionError, match=r"w/value: 2 names \('embed', 'mlp'\) for 1 dim"):
        mw.partition({"w": box}, MESH, logical={"embed": "fsdp", "mlp": "tp"})


def test_names_that_are_not_in_the_table_follow_unmatched():
    shapes = attention("embed", "kv")
    choose = functools.partial(mw.partition, shapes, MESH, logical={"embed": "fsdp"})
    with pytest.raises(
        PartitionError, match=r"no rule for logical axis 'kv'.*unmatched='repl"
    ) as e:
        choose()
    assert "4 problems" in str(e.value)
    assert nn.unbox(choose(unmatched="replicate"))["query"]["kernel"] == P("fsdp")
    by_shape = nn.unbox(mw.partition(shapes, MESH, min_shard_bytes=0))
    assert by_shape["query"]["kernel"] == P("fsdp", "tp")
    assert nn.unbox(choose(unmatched="shape", min_shard_bytes=0)) == by_shape


@pytest.mark.parametrize("table", [{}, {"embed": "tp"}])
def test_names_of_mesh_axes_need_no_table(table):
    boxes = {
        "linen": nn.Partitioned(jnp.ones((8, 8)), ("fsdp", "tp")),
        "merged": nn.Partitioned(jnp.ones((8, 8)), (None, ("fsdp", "tp"))),
    }
    assert nn.unbox(mw.partition(boxes, MESH, logical=table)) == {
        "linen": P("fsdp", "tp"),
        "merged": P(None, ("fsdp", "tp")),
    }
    with jax.set_mesh(MESH):
        init = nnx.with_partitioning(nnx.initializers.ones, ("fsdp", "tp"))
        state = nnx.state(nnx.Linear(8, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0)))
    specs = mw.partition(state, MESH, logical=table)
    assert specs["kernel"].get_value() == P("fsdp", "tp")


def test_the_table_goes_before_the_mesh():
    box = {"w": nn.Partitioned(jnp.ones((8, 8)), ("fsdp", "tp"))}
    specs = nn.unbox(mw.partition(box, MESH, logical={"fsdp": "tp", "tp": None}))
    assert specs == {"w": P("tp")}


def test_a_name_one_slip_from_a_mesh_axis_is_suggested():
    box = {"w": nn.Partitioned(jnp.ones((8, 8)), ("fdsp", None))}
    with pytest.raises(PartitionError, match=r"logical axis 'fdsp'\. Did you mean 'fsdp'\?"):
        mw.partition(box, MESH, logical={})


def boxed_state():
    model = nn.Dense(16, kernel_init=nn.with_partitioning(normal, ("fsdp", "tp")))
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return params, optax.adam(1e-3).init(params)


def test_specs_of_the_tree_without_boxes_go_for_the_tree_with_them():
    params, _ = boxed_state()
    unboxed = nn.get_partition_spec(params)
    boxed = mw.partition(params, MESH, logical={}, unmatched="replicate")
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), unboxed)
    for specs in (unboxed, boxed, shardings):
        placed = mw.shard(params, MESH, specs)
        assert placed["kernel"].value.sharding.spec == P("fsdp", "tp")
        assert placed["kernel"].names == ("fsdp", "tp")  # the box stays
        assert mw.explain(params, MESH, specs).rows == mw.explain(params, MESH, boxed).rows
        moved = mw.reshard(placed, MESH, jax.tree.map(lambda _: P(), nn.unbox(params)))
        assert moved["kernel"].value.sharding.spec == P()


def test_a_state_follows_specs_of_the_tree_without_boxes():
    params, state = boxed_state()
    follow = mw.partition_like(state, params, nn.get_partition_spec(params))
    assert follow[0].mu["kernel"].value == P("fsdp", "tp")


def test_a_train_step_of_boxes_takes_specs_without_them():
    params, _ = boxed_state()
    found = mw.rehearse(
        lambda params: jax.tree.map(lambda x: 2 * x, params),
        params,
        mesh=MESH,
        in_shardings=[nn.get_partition_spec(params)],
        out_shardings=nn.get_partition_spec(params),
        cache=False,
    )
    rows = {row.path: row.spec for row in found.arguments.rows}
    assert rows == {"params/kernel/value": P("fsdp", "tp"), "params/bias": P()}
    assert len(found.collectives) == 0


def test_specs_that_are_like_neither_tree_name_the_difference():
    params, _ = boxed_state()
    with pytest.raises(PartitionError, match="'kernel/value' has no spec"):
        mw.shard(params, MESH, {"bias": P()})
    with pytest.raises(
        PartitionError, match=r"kernel/value: dim 0 has size 8, not divisible by 16"
    ):
        wide = mw.abstract_mesh("fsdp:16")
        mw.shard(params, wide, {"kernel": P("fsdp"), "bias": P()})


def test_nnx_states_take_what_nnx_works_out():
    with jax.set_mesh(MESH):
        init = nnx.with_partitioning(nnx.initializers.ones, ("fsdp", "tp"))
        state = nnx.state(nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0)))
    plain = {"kernel": P("tp"), "bias": P()}
    placed = mw.shard(state, MESH, nnx.get_partition_spec(state))
    assert placed["kernel"][...].sharding.spec == P("fsdp", "tp")
    as_dict = dict(state)
    assert mw.shard(as_dict, MESH, plain)["kernel"][...].sharding.spec == P("tp")


def test_the_names_of_penzai_are_read():
    table = {"embed": "fsdp", "mlp": "tp", "layers": None}
    w = pz.nx.wrap(jnp.ones((16, 8, 4))).tag("layers", "embed", "mlp")
    tree = {
        "named": w,
        "view": w.untag("mlp"),  # a name at a dim ahead of one without
        "stacked": w.untag("layers").with_positional_prefix(),
    }
    placed = mw.shard(tree, MESH, logical=table)
    assert {path: value.data_array.sharding.spec for path, value in placed.items()} == {
        "named": P(None, "fsdp", "tp"),
        "view": P(None, "fsdp"),
        "stacked": P(None, "fsdp", "tp"),
    }
    assert placed["named"].named_axes == w.named_axes
    with pytest.raises(PartitionError, match=r"named/data_array: dim 2: no rule .* axis 'mlp'"):
        mw.partition(tree, MESH, logical={"embed": "fsdp", "layers": None})
    by_hand = mw.shard(tree, MESH, {name: P("tp") for name in tree})
    assert by_hand["named"].data_array.sharding.spec == P("tp")


def test_variables_of_penzai_are_refused_with_the_way_out():
    from penzai.models import simple_mlp

    model = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(0), feature_sizes=[8, 16, 8]
    )
    with pytest.raises(PartitionError, match=r"variables of penzai.* pz\.unbind_params"):
        mw.shard(model, mw.mesh("fsdp:4, tp:2"))
    _, values = pz.unbind_params(model, freeze=True)
    assert len(mw.explain(values, mw.mesh("fsdp:4, tp:2")).rows) == 4
