"""What a plan prints: roles, reasons that are costs of the same model, exchanges, runners-up."""

import dataclasses
import json

import pytest
from shown_steps import planned

from meshwright.planning.plan_costs import Totals
from meshwright.planning.plan_text import (
    axis_reason,
    axis_role,
    exchange_rows,
    lists_lines,
    reason_it_loses,
    runners_up,
    short_name,
)


@pytest.mark.parametrize(
    ("shards", "role"),
    [
        (["batch"], "data parallel"),
        (["batch", "seq"], "data parallel + sequence parallel"),
        (["batch", "mlp/up dim 1"], "FSDP"),
        (["vocab", "batch", "embed"], "FSDP"),
        (["vocab", "batch"], "data parallel"),
        (["vocab", "mlp/up dim 1"], "tensor parallel (Megatron)"),
        (["mlp/up dim 1", "vocab"], "tensor parallel (Megatron)"),
        (["mlp/up dim 1", "seq"], "tensor parallel (Megatron) + sequence parallel"),
        (["embed"], "tensor parallel"),
        (["mlp/experts dim 0", "batch"], "expert parallel"),
        (["seq"], "sequence parallel"),
        ([], "unused"),
    ],
)
def test_role_is_recognised_from_the_list(shards, role):
    assert axis_role(shards) == role


def test_text_names_mesh_roles_exchanges_and_fits_a_terminal():
    text = str(planned(mesh="dp:2, tp:4"))
    assert text.startswith("train on v5e:2x4, planned: dp:2, tp:4\nfits: ")
    assert "parallel" in text
    assert "Largest exchanges of a step" in text
    assert "shown_steps.py:" in text
    assert max(map(len, text.splitlines())) <= 100


def test_reason_is_the_cost_of_the_plan_without_the_axis():
    plan = planned(mesh="dp:8")
    assert plan.axes[0].shards[0] == "batch"
    alone = plan.costs.totals(((),))
    said = axis_reason(plan, 0)
    assert f"{alone.seconds / plan.predicted.seconds:.1f} times as long" in said
    assert "Without it" in said


def test_exchanges_are_of_named_parameters_and_sum_to_the_predicted_time():
    plan = planned(mesh="dp:8")
    rows = exchange_rows(plan)
    assert {row.axis for row in rows} == {"dp"}
    assert any(row.purpose.startswith("gradient of ") for row in rows)
    assert any("up" in row.purpose or "down" in row.purpose for row in rows)
    assert sum(row.seconds for row in rows) == pytest.approx(plan.axes[0].seconds)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)


def test_runners_up_are_one_per_mesh_and_never_the_plan_itself():
    plan = planned()
    others = runners_up(plan)
    sizes = [each.sizes for each in others]
    assert len(sizes) == len(set(sizes)) >= 2
    assert not any(each.chosen for each in others)
    assert sum(each.chosen for each in plan.alternatives) == 1


def test_reason_it_loses_names_the_part_that_is_worse():
    plan = planned()
    own, some = plan.predicted, runners_up(plan)[0]

    def said(compute=own.compute, exchange=own.exchange, size=own.bytes):
        other = dataclasses.replace(
            some, predicted=Totals(compute, exchange, 0.0, size), compiled=None
        )
        return reason_it_loses(plan, other)

    assert said(compute=own.compute + 0.5) == "computing: 500 ms more"
    assert said(exchange=own.exchange + 0.25) == "exchanging: 250 ms more"
    assert said(size=plan.costs.limit + 2**30) == "memory: 1 GiB too much"
    assert said() == "as fast, but not simpler"


def test_checked_plans_show_predicted_beside_compiled():
    plan = planned(mesh="dp:2, tp:4", check=1, compiler="cpu")
    text = str(plan)
    assert "Checked by the compiler" in text
    assert "chosen" in text
    assert "Nothing was compiled" not in text


def test_rows_of_checked_plans_that_differ_never_look_alike():
    plan = planned(mesh="dp:2, tp:4", check=3, compiler="cpu")
    table = str(plan).partition("Checked by the compiler\n")[2].partition("\n\n")[0]
    checked = [each for each in plan.alternatives if each.compiled is not None]
    shown = ["".join(lists_lines(plan.groups, each.lists)) for each in checked]
    assert len(set(shown)) == len(checked) == 3
    for each in checked:
        for line in lists_lines(plan.groups, each.lists):
            assert line in table
    assert max(map(len, table.splitlines())) <= 100


def test_lists_are_written_in_full_and_names_alike_too():
    groups = ["batch", f"one/{'x' * 30} dim 1", f"two/{'x' * 30} dim 1"]
    assert lists_lines(groups, ((0,), ())) == ["batch | -"]
    one, other = (lists_lines(groups, ((0, kind), (3 - kind,))) for kind in (1, 2))
    assert one != other
    assert "".join(one) == f"batch+{groups[1]} |{groups[2]}"


def test_json_has_roles_exchanges_and_every_plan_kept():
    plan = planned()
    data = json.loads(json.dumps(plan.to_json()))
    assert data["axes"][0]["role"] == axis_role(plan.axes[0].shards)
    assert len(data["alternatives"]) == len(plan.alternatives)
    assert [each["chosen"] for each in data["alternatives"]].count(True) == 1
    assert data["exchanges"][0]["kind"]


def test_long_names_lose_their_left():
    assert short_name("mlp/down dim 1") == "mlp/down dim 1"
    assert len(short_name("a" * 80 + "/down dim 1")) <= 24
