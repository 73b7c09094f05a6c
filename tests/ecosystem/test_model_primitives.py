"""Every primitive of these models has a rule for the planner, in gradients and in whole steps."""

import all_models
import equinox as eqx
import jax
import pytest
from test_models import STEPS

from meshwright.planning.traced_program import read_program

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", all_models.PARTS)
def test_gradients_have_no_primitive_without_a_rule(name):
    model = all_models.model(name, abstract=True)
    closed = jax.make_jaxpr(jax.value_and_grad(model.loss))(model.params, model.batch)
    assert read_program(closed).unknown() == {}


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_no_primitive_without_a_rule(name):
    step, args = STEPS[name]()
    closed, *_ = eqx.filter_make_jaxpr(step)(*args)
    assert read_program(closed).unknown() == {}
