"""Specs by logical axes: names given by hand, or read where Flax writes them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshwright as mw

MESH = mw.mesh("fsdp:4, tp:2")
TABLE = {"embed": "fsdp", "mlp": "tp"}


def sds(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_names_become_axes():
    tree = {"up": sds(8, 16), "down": sds(16, 8), "norm": sds(8), "step": sds()}
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "norm": (None,)}
    assert mw.partition(tree, MESH, logical=TABLE, names=names) == {
        "up": P("fsdp", "tp"),
        "down": P("tp", "fsdp"),
        "norm": P(),
        "step": P(),
    }


@pytest.mark.parametrize(
    "logical",
    [
        {"a": ("fsdp", "tp"), "b": None},
        [("a", ["fsdp", "tp"]), ("b", [])],
        (("a", ("fsdp", "tp")), ["b", None]),
    ],
)
def test_a_name_may_stand_for_several_axes_or_none(logical):
    for names in (("b", "a"), ["b", "a"], P("b", "a")):
        found = mw.partition({"w": sds(8, 8)}, MESH, logical=logical, names={"w": names})
        assert found["w"] == P(None, ("fsdp", "tp"))


def test_names_follow_lists_and_tuples():
    tree = [sds(8, 8), (sds(8),)]
    names = [("embed", "mlp"), (("mlp",),)]
    found = mw.partition(tree, MESH, logical=TABLE, names=names)
    assert found == [P("fsdp", "tp"), (P("tp"),)]


def test_a_missing_rule_names_the_leaf_the_dim_and_the_near_name():
    with pytest.raises(
        mw.errors.PartitionError,
        match=r"layers/0/up: dim 1: no rule for logical axis 'mpl'\. Did you mean 'mlp'\? Add it",
    ):
        mw.partition(
            {"layers": [{"up": sds(8, 8)}]},
            MESH,
            logical=TABLE,
            names={"layers": [{"up": ("embed", "mpl")}]},
        )


def test_one_mesh_axis_for_two_dims_names_the_leaf():
    with pytest.raises(mw.errors.PartitionError, match=r"up: P\('tp', 'tp'\) uses axis 'tp' twice"):
        mw.partition({"up": sds(8, 8)}, MESH, logical={"mlp": "tp"}, names={"up": ("mlp", "mlp")})


def test_a_wrong_number_of_names_names_the_leaf():
    with pytest.raises(
        mw.errors.PartitionError, match=r"up: 1 name \('mlp',\) for 2 dims \(8, 8\)\. Give one name"
    ):
        mw.partition({"up": sds(8, 8)}, MESH, logical=TABLE, names={"up": ("mlp",)})


def test_all_leaves_that_are_wrong_come_at_once():
    tree = {"a": sds(8, 8), "b": sds(6, 8), "c": sds(8, 8)}
    names = {"a": ("embed", "x"), "b": ("embed", "mlp"), "c": ("embed", "embed")}
    with pytest.raises(mw.errors.PartitionError, match="3 problems") as caught:
        mw.partition(tree, MESH, logical=TABLE, names=names)
    assert "a: dim 1: no rule for logical axis 'x'" in str(caught.value)
    assert "b: dim 0 has size 6, not divisible by 4 (axes fsdp)" in str(caught.value)
    assert "c: P('fsdp', 'fsdp') uses axis 'fsdp' twice" in str(caught.value)


def test_uneven_dims_stay_whole_when_asked():
    found = mw.partition(
        {"b": sds(6, 8)}, MESH, logical=TABLE, names={"b": ("embed", "mlp")}, uneven="replicate"
    )
    assert found == {"b": P(None, "tp")}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, r"up: \(8, 8\) has no logical names\. Give them with names=.*unmatched='replicate'"),
        (
            {"up": ("embed", "mlp"), "gone": ("mlp",)},
            r"names: gone is not in the tree of arrays\. Fix",
        ),
        (
            {"up": "embed"},
            r"names: up: 'embed' is not one name or None per dim, such as \('embed', None",
        ),
        ({"up": 3}, r"names: up: 3 is not one name"),
    ],
)
def test_bad_names_are_refused(names, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition({"up": sds(8, 8)}, MESH, logical=TABLE, names=names)


def test_all_that_is_wrong_with_names_comes_at_once():
    tree = {"a": sds(8, 8), "b": sds(8, 8), "c": sds(8)}
    names = {"a": "embed", "c": ("embed", "mlp", "x"), "gone": ("mlp",)}
    with pytest.raises(mw.errors.PartitionError, match="4 problems") as caught:
        mw.partition(tree, MESH, logical=TABLE, names=names)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "names: a: 'embed' is not one name or None per dim, such as ('embed', None, 'mlp'). "
        "Let the table map one name to several mesh axes.",
        "names: gone is not in the tree of arrays. Fix its path or remove it.",
        "b: (8, 8) has no logical names. Give them with names=..., create it with metadata "
        "(nnx.with_partitioning, nn.with_logical_partitioning), or pass unmatched='replicate' or "
        "'shape'.",
        "c: 3 names ('embed', 'mlp', 'x') for 1 dim (8,). Give one name, or None, per dim.",
    ]


def test_leaves_without_names_stay_whole_or_go_by_shape_when_asked():
    tree = {"w": sds(1024, 4096), "v": sds(1024, 4096)}
    for names in ({"w": ("embed", None)}, {"w": ("embed", None), "v": None}):
        whole = mw.partition(tree, MESH, logical=TABLE, names=names, unmatched="replicate")
        assert whole == {"w": P("fsdp"), "v": P()}
        shaped = mw.partition(tree, MESH, logical=TABLE, names=names, unmatched="shape")
        assert shaped == {"w": P("fsdp"), "v": P("fsdp", "tp")}
    assert mw.partition(tree, MESH, logical=TABLE, unmatched="shape")["w"] == P("fsdp", "tp")


def test_nnx_leaves_without_names_go_by_shape_when_asked():
    state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))))
    specs = mw.partition(state, MESH, logical=TABLE, unmatched="shape")
    assert specs["kernel"].get_value() == P("fsdp", "tp")
    specs = mw.partition(state, MESH, logical=TABLE, unmatched="replicate")
    assert specs["kernel"].get_value() == P()


@pytest.mark.parametrize(
    ("logical", "message"),
    [
        ("embed", r"^logical: 'embed' is not a table such as"),
        (3, r"^logical: 3 is not a table"),
        ([("embed",)], r"^logical: \('embed',\) is not a \(name, mesh axes\) pair"),
        ({3: "tp"}, r"^logical: \(3, 'tp'\) is not a \(name, mesh axes\) pair"),
        ([("a", "tp"), ("a", "fsdp")], r"^logical: 'a' appears twice\. Give it one entry"),
        (
            {"a": P("tp")},
            r"^logical: 'a': P\('tp',\) is not .* Write e.g. 'fsdp', \('fsdp', 'sp'\)",
        ),
        ({"a": 3}, r"^logical: 'a': 3 is not a mesh axis or several"),
        ({"a": ("tp", 3)}, r"^logical: 'a': \('tp', 3\) is not a mesh axis or several"),
    ],
)
def test_bad_tables_are_refused(logical, message):
    with pytest.raises(mw.errors.PartitionError, match=message):
        mw.partition({"up": sds(8, 8)}, MESH, logical=logical, names={"up": ("a", None)})


def test_a_table_may_name_an_axis_the_mesh_does_not_have_only_if_it_is_not_used():
    logical = {**TABLE, "expert": "ep"}
    tree = {"w": sds(8, 8)}
    found = mw.partition(tree, MESH, logical=logical, names={"w": ("embed", None)})
    assert found == {"w": P("fsdp")}
    with pytest.raises(mw.errors.PartitionError, match=r"w: dim 0: no mesh axis 'ep' in fsdp, tp"):
        mw.partition(tree, MESH, logical=logical, names={"w": ("expert", None)})


def test_names_without_a_table_are_refused():
    with pytest.raises(mw.errors.PartitionError, match=r"^names go with logical="):
        mw.partition({"w": sds(8, 8)}, MESH, names={"w": ("embed", None)})


def test_a_tree_without_any_names_says_how_to_give_them():
    with pytest.raises(
        mw.errors.PartitionError, match=r"w: \(8, 8\) has no logical names\. Give them with names="
    ):
        mw.partition({"w": sds(8, 8)}, MESH, logical=TABLE)


class Nnx(nnx.Module):
    """A layer annotated in every way NNX knows."""

    def __init__(self, rngs):
        normal = nnx.initializers.lecun_normal()
        zeros = nnx.initializers.zeros_init()
        self.up = nnx.Linear(
            8,
            16,
            kernel_init=nnx.with_partitioning(normal, ("embed", "mlp")),
            bias_init=nnx.with_partitioning(zeros, ("mlp",)),
            rngs=rngs,
        )
        self.down = nnx.Param(jnp.ones((16, 8)), out_sharding=("mlp", "embed"))
        self.spec = nnx.Param(jnp.ones((8, 16)), out_sharding=P(None, "mlp"))
        self.count = nnx.Param(jnp.zeros(()))


@pytest.fixture
def logical_nnx():
    """NNX takes names for mesh axes and places at once unless told otherwise."""
    with nnx.use_eager_sharding(False):
        yield


def of_nnx(tree):
    return {
        "up/kernel": tree["up"]["kernel"][...],
        "up/bias": tree["up"]["bias"][...],
        "down": tree["down"][...],
        "spec": tree["spec"][...],
        "count": tree["count"][...],
    }


NNX_SPECS = {
    "up/kernel": P("fsdp", "tp"),
    "up/bias": P("tp"),
    "down": P("tp", "fsdp"),
    "spec": P(None, "tp"),
    "count": P(),
}


def test_nnx_metadata_is_read(logical_nnx):
    state = nnx.state(Nnx(nnx.Rngs(0)), nnx.Param)
    specs = jax.tree.leaves(
        mw.partition(state, MESH, logical=TABLE), is_leaf=lambda leaf: isinstance(leaf, P)
    )
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    words = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    paths = [word.removesuffix("/value") for word in words]
    assert dict(zip(paths, specs, strict=True)) == NNX_SPECS


def test_nnx_arrays_are_placed_by_their_metadata(logical_nnx):
    state = nnx.state(Nnx(nnx.Rngs(0)), nnx.Param)
    placed = mw.shard(state, MESH, logical=TABLE)
    for path, array in of_nnx(placed).items():
        assert array.sharding == jax.NamedSharding(MESH, NNX_SPECS[path]), path
        assert jnp.array_equal(array, of_nnx(state)[path])
    assert placed["down"].get_metadata()["out_sharding"] == ("mlp", "embed")


def test_nnx_metadata_is_read_from_abstract_models(logical_nnx):
    state = nnx.state(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), nnx.Param)
    placed = mw.shard(state, MESH, logical=TABLE)
    found = [leaf.sharding.spec for leaf in jax.tree.leaves(placed)]
    assert sorted(map(str, found)) == sorted(map(str, NNX_SPECS.values()))


def test_nnx_parameters_may_say_sharding_as_they_used_to(logical_nnx):
    with pytest.warns(DeprecationWarning, match="use 'out_sharding' instead"):
        param = nnx.Param(jnp.ones((8, 8)), sharding=("embed", "mlp"))
    placed = mw.shard({"w": param}, MESH, logical=TABLE)
    assert placed["w"][...].sharding.spec == P("fsdp", "tp")


def test_nnx_leaves_without_a_rule_are_named(logical_nnx):
    state = nnx.state(Nnx(nnx.Rngs(0)), nnx.Param)
    with pytest.raises(
        mw.errors.PartitionError, match="up/kernel/value: dim 0: no rule for logical axis"
    ):
        mw.partition(state, MESH, logical={"mlp": "tp"})
    with pytest.raises(
        mw.errors.PartitionError, match=r"down/value: P\('tp', 'tp'\) uses axis 'tp' twice"
    ):
        mw.partition(state, MESH, logical={"mlp": "tp", "embed": "tp"})


def test_an_attribute_called_names_does_not_make_a_module_a_box(logical_nnx):
    class Named(nnx.Module):
        def __init__(self):
            self.names = ("embed", "mlp")
            self.w = nnx.Param(jnp.ones((8, 8)))

    with pytest.raises(mw.errors.PartitionError, match=r"w/value: \(8, 8\) has no logical names"):
        mw.partition(Named(), MESH, logical=TABLE)


def linen(annotate):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(
                16,
                kernel_init=annotate(nn.initializers.lecun_normal(), ("embed", "mlp")),
                bias_init=annotate(nn.initializers.zeros_init(), ("mlp",)),
            )(x)

    return Linen()


both = pytest.mark.parametrize("annotate", [nn.with_partitioning, nn.with_logical_partitioning])


@both
def test_linen_boxes_are_read(annotate):
    shapes = jax.eval_shape(linen(annotate).init, jax.random.key(0), jnp.ones((2, 8)))
    dense = mw.partition(shapes, MESH, logical=TABLE)["params"]["Dense_0"]
    assert dense["kernel"].value == P("fsdp", "tp")
    assert dense["bias"].value == P("tp")
    assert dense["kernel"].names == ("embed", "mlp")  # the boxes stay


@both
def test_linen_arrays_are_made_in_place_by_their_metadata(annotate):
    args = jax.random.key(0), jnp.ones((2, 8))
    model = linen(annotate)
    made = nn.meta.unbox(mw.init(model.init, *args, mesh=MESH, logical=TABLE))
    plain = nn.meta.unbox(jax.jit(model.init)(*args))
    dense = made["params"]["Dense_0"]
    assert dense["kernel"].sharding == jax.NamedSharding(MESH, P("fsdp", "tp"))
    assert jnp.array_equal(dense["kernel"], plain["params"]["Dense_0"]["kernel"])


@both
def test_linen_leaves_without_a_rule_are_named(annotate):
    shapes = jax.eval_shape(linen(annotate).init, jax.random.key(0), jnp.ones((2, 8)))
    with pytest.raises(
        mw.errors.PartitionError, match="Dense_0/bias/value: dim 0: no rule for logical"
    ):
        mw.partition(shapes, MESH, logical={"embed": "tp"})
    with pytest.raises(
        mw.errors.PartitionError, match=r"Dense_0/kernel/value: .* uses axis 'tp' twice"
    ):
        mw.partition(shapes, MESH, logical={"embed": "tp", "mlp": "tp"})
