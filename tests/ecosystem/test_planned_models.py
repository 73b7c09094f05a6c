"""Models of Flax, Equinox, transformers, penzai and brax, planned, compute what one device does."""

import all_models
import jax
import jax.numpy as jnp
import pytest
from forced_plans import assert_equal_to_one_device, forced_mix, two_plans, with_lists
from test_models import STEPS

import meshwright as mw

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", all_models.PARTS)
def test_planned_gradients_are_those_of_one_device(name):
    model = all_models.model(name)
    step = jax.value_and_grad(model.loss)
    for plan in two_plans(step, model.params, model.batch).values():
        verified = plan.verify(model.params, model.batch)
        assert verified.ok, (str(plan), str(verified))


IN_DOUBLE = ("unet", "vit")


@pytest.mark.parametrize("name", sorted(set(STEPS) - set(IN_DOUBLE)))
def test_the_models_own_step_is_planned_with_a_mix_of_everything(name):
    step, args = STEPS[name]()
    plan = forced_mix(step, *args)
    assert any(spec != jax.P() for spec in jax.tree.leaves(plan.in_specs))
    assert_equal_to_one_device(plan, *args)


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_the_models_own_step_is_planned_in_float64(name):
    # In float32 rounding moves some of their gradients across zero, and Adam's first step makes a
    # whole step of each. In float64 every array is the same to 1e-11.
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        step, args = STEPS[name]()
        args = jax.tree.map(_as_double, args)
        plan = forced_mix(step, *args)
        verified = plan.verify(*args)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert verified.ok, str(verified)
    assert max(row.tolerance for row in verified.rows) < 1e-8
    assert any("fsdp" in spec or "tp" in spec for spec in jax.tree.leaves(plan.in_specs))


def _as_double(leaf):
    is_float = hasattr(leaf, "dtype") and leaf.dtype == jnp.float32
    return leaf.astype(jnp.float64) if is_float else leaf


@pytest.mark.parametrize("name", ["bert", "lm1b"])  # of Equinox and Linen
def test_the_models_own_step_is_context_parallel(name):
    step, args = STEPS[name]()
    plan = mw.plan(step, *args, mesh="fsdp:2, cp:4")
    forced = with_lists(plan, [["batch", "embed"], ["seq", "embed", "queries"]])
    queries = forced.groups.index("queries")
    scores = [
        value
        for value, layout in enumerate(forced.costs.groups.layout)
        if queries in (kind for kind, _ in layout)
    ]
    costs = forced.costs
    cuts = [costs.cut(costs.groups.layout[value], forced.lists) for value in scores]
    assert cuts and all(1 in cut for cut in cuts)  # the second axis
    assert_equal_to_one_device(forced, *args)
