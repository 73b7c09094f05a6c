"""Rules, logical names and constraints: they agree, cover everything and divide."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models.weights import constrain

MESHES = {
    "fsdp:16, tp:4": "v5e:8x8",
    "fsdp:64, tp:8": "v5p:8x8x8",
    "dp:2, fsdp:32": "v5e:8x8",
    "ep:8": "v5e:2x4",
    "fsdp:4, ep:8, tp:2": "v5e:8x8",
    "dp:8, sp:8": "v5e:8x8",
}


@pytest.mark.parametrize("spec", MESHES)
@pytest.mark.parametrize("name", mw.models.names())
def test_rules_cover_the_state_and_agree_with_logical_names(name, spec):
    model = mw.models.model(name)
    mesh = mw.abstract_mesh(spec, on=MESHES[spec])
    state = model.shapes()
    by_rules = mw.partition(state, mesh, rules=model.rules(mesh))
    params = state["params"]
    by_names = mw.partition(params, mesh, logical=model.logical_rules(mesh), names=model.logical())
    assert by_rules["params"] == by_names
    assert by_rules["opt"] == mw.partition_like(state["opt"], params, by_names)


@pytest.mark.parametrize("name", mw.models.names())
def test_rules_are_the_same_for_every_stage(name):
    model = mw.models.model(name)
    stages = len(model.config.depths) if hasattr(model.config, "depths") else model.config.layers
    mesh = mw.abstract_mesh("fsdp:16, tp:4", on="v5e:8x8")
    assert mw.models.model(name, stages=stages).rules(mesh) == model.rules(mesh)


@pytest.mark.parametrize(
    ("name", "spec", "least"),
    [("llama3-405b", "fsdp:64, tp:8", 500), ("moe-256", "fsdp:4, ep:8, tp:2", 60)],
)
def test_large_models_are_split_almost_evenly(name, spec, least):
    model = mw.models.model(name)
    mesh = mw.abstract_mesh(spec, on=MESHES[spec])
    report = mw.explain(model.shapes(), mesh, rules=model.rules(mesh))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.shapes()))
    assert whole / report.device_bytes > least


def test_rules_name_only_axes_of_the_mesh():
    model = mw.models.model("moe-tiny")
    mesh = mw.abstract_mesh("data:2, zero:2, model:2", on="cpu:8")
    named = {axis for _, spec in model.rules(mesh) for axis in spec if axis is not None}
    assert named == {"zero", "model"}
    assert model.batch_spec(mesh) == P(("data", "zero"))


def test_more_tensor_parallelism_than_heads_of_keys_copies_them():
    model = mw.models.model("llama3-8b")
    mesh = mw.abstract_mesh("fsdp:-1, tp:16", on="v5e:8x8")
    rules = dict(model.rules(mesh))
    assert rules["stages/*/attention/query"] == P(None, "fsdp", "tp")
    assert rules["stages/*/attention/key"] == P(None, "fsdp")


def test_an_axis_that_must_divide_is_not_dropped():
    model = mw.models.model("mixtral-8x7b")
    mesh = mw.abstract_mesh("ep:16", on="v5e:4x4")
    with pytest.raises(mw.errors.PartitionError, match="size 8, not divisible by 16"):
        mw.partition(model.shapes(), mesh, rules=model.rules(mesh))


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("dp:2, fsdp:2, tp:2", P(("dp", "fsdp"))),
        ("pod:2, fsdp:4", P(("pod", "fsdp"))),
        ("ep:4, fsdp:2", P(("fsdp", "ep"))),
        ("fsdp:4, sp:2", P("fsdp", "sp")),
        ("tp:8", P()),
    ],
)
def test_batches_are_split_over_all_axes_of_data(spec, wanted):
    assert mw.models.model("tiny").batch_spec(mw.mesh(spec)) == wanted


def test_constraints_keep_the_axes_that_divide():
    with jax.set_mesh(mw.mesh("dp:2, fsdp:2, tp:2")):
        x = jax.jit(lambda x: constrain(x, "batch", "seq", "mlp"))(jnp.ones((6, 5, 4)))
        assert x.sharding.spec == P("dp", None, "tp")
        x = jax.jit(lambda x: constrain(x, "batch", None, "heads"))(jnp.ones((8, 5, 3)))
        assert x.sharding.spec == P(("dp", "fsdp"))


def test_constraints_do_nothing_without_a_mesh_or_on_axes_of_other_types():
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", "embed") is x
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((8,), ("dp",), axis_types=explicit)):
        assert constrain(x, "batch", "embed") is x


def test_unknown_names_in_constraints_are_refused():
    with jax.set_mesh(mw.mesh("dp:8")):
        with pytest.raises(
            mw.errors.ModelError, match=r"no logical name 'bach'\. Did you mean 'batch'"
        ):
            constrain(jnp.ones(8), "bach")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("bach", "seq"), r"no logical name 'bach'\. Did you mean 'batch'\?"),
        ((3, "seq"), "no logical name 3"),
        (("batch",), r"1 name for an array with 2 dims \(8, 4\)\. Give one per dim"),
    ],
)
def test_wrong_names_are_refused_without_a_mesh_too(names, message):
    with pytest.raises(mw.errors.ModelError, match=message):
        constrain(jnp.ones((8, 4)), *names)
    with jax.set_mesh(mw.mesh("fsdp:8")), pytest.raises(mw.errors.ModelError, match=message):
        constrain(jnp.ones((8, 4)), *names)
