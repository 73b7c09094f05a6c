"""Models of Flax, Equinox, transformers, penzai and brax, planned, compute what one device does."""

import all_models
import jax
import pytest
from forced_plans import assert_equal_to_one_device, forced_mix, three_plans, with_lists
from test_models import STEPS

import meshwright as mw

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", all_models.PARTS)
def test_planned_gradients_are_those_of_one_device(name):
    model = all_models.model(name)
    step = jax.value_and_grad(model.loss)
    for plan in three_plans(step, model.params, model.batch).values():
        verified = plan.verify(model.params, model.batch)
        assert verified.ok, (str(plan), str(verified))


@pytest.mark.parametrize("name", STEPS)
def test_the_models_own_step_is_planned(name):
    step, args = STEPS[name]()
    plan = forced_mix(step, *args)
    assert any(spec != jax.P() for spec in jax.tree.leaves(plan.in_specs))
    # On some machines up2/conv1's weight of the UNet is 2.6e-3 apart after a step of Adam, where
    # 1e-3 is allowed, with jax 0.12; whether that is rounding alone is not known.
    assert_equal_to_one_device(plan, *args, loose=1 if name == "unet" else 0)


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
