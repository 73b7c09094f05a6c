"""A plan as plain rules: they give back what it says, and its constraints name their lines."""

import json

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from shown_steps import arguments, planned

import meshwright as mw
from meshwright.partitioning.rules import matches
from meshwright.planning.plan_rules import suffix_rules

words = st.sampled_from(["a", "b", "w", "bias", "0", "1", "w.x", "[k]"])
paths = st.lists(words, min_size=1, max_size=4).map("/".join)
specs = st.sampled_from([P(), P("x"), P(None, "x"), P("x", "y")])


@given(st.dictionaries(paths, specs, min_size=1, max_size=12))
def test_rules_give_every_path_its_spec_and_none_is_in_vain(table):
    rules = suffix_rules(list(table), list(table.values()))
    taken = set()
    for path, spec in table.items():
        number = next(n for n, (pattern, _) in enumerate(rules) if matches(pattern, path))
        assert rules[number][1] == spec
        taken.add(number)
    assert taken == set(range(len(rules)))


@pytest.mark.parametrize("mesh", ["dp:8", "dp:2, tp:4"])
def test_partition_by_the_rules_is_the_plan(mesh):
    plan = planned(mesh=mesh)
    state, batch = arguments()
    assert mw.partition(state, plan.mesh, rules=plan.rules().rules) == plan.in_specs[0]
    assert mw.partition(batch, plan.mesh, rules=plan.rules(1).rules) == plan.in_specs[1]


def test_rules_of_a_model_with_optimizer_state_round_trip_and_are_few():
    model = mw.models.model("tiny", attention="dot", embed=256, mlp=1024)
    state = model.shapes()
    plan = mw.plan(
        model.train_step,
        state,
        model.batch(16),
        on="v5e:2x4",
        mesh="fsdp:2, tp:4",
        donate_argnums=0,
    )
    rules = plan.rules()
    assert mw.partition(state, plan.mesh, rules=rules.rules) == plan.in_specs[0]
    assert len(rules.rules) < len(jax.tree.leaves(state)) / 2


def test_constraints_name_line_array_and_spec():
    rules = planned(mesh="dp:2, tp:4").rules()
    assert rules.constraints
    assert all(each.source.startswith("shown_steps.py:") for each in rules.constraints)
    assert any(each.array.startswith("result of dot_general [batch") for each in rules.constraints)
    assert any(any(each.spec) for each in rules.constraints)
    text = str(rules)
    assert text.startswith(f"{len(rules.rules)} rules for params and ")
    assert "with_sharding_constraint" in text
    data = json.loads(json.dumps(rules.to_json()))
    assert len(data["constraints"]) == len(rules.constraints)


def test_rules_as_printed_are_python_that_partitions_alike():
    plan = planned(mesh="dp:2, tp:4")
    code = str(plan.rules()).split("\n", 1)[1].split("\n\njax.lax")[0]
    names = {"P": P}
    exec(code, names)  # noqa: S102
    assert mw.partition(arguments()[0], plan.mesh, rules=names["rules"]) == plan.in_specs[0]


@pytest.mark.parametrize("argument", [2, -1, "params", True])
def test_argument_that_is_not_there_is_refused(argument):
    with pytest.raises(mw.errors.PlanningError, match=r"argument: .*2 arguments, the first is 0"):
        planned(mesh="dp:8").rules(argument)
