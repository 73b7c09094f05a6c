"""Advice that finds the cost: the largest first, what to write, and what a second compile says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from collectives_helpers import collectives_of
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright._text import duration
from meshwright.hlo.program import read_program
from meshwright.rehearsal.collectives.analyze import analyze
from meshwright.rehearsal.collectives.causes import Batch
from meshwright.report import page

W = jax.ShapeDtypeStruct((512, 512), "float32")
X = jax.ShapeDtypeStruct((64, 512), "float32")
rehearse = functools.partial(mw.rehearse, on="cpu:8", cache=False)


def gathered(w, x):
    """A step that gathers its batch in the middle, by a constraint that is too strict."""
    h = jax.lax.with_sharding_constraint(jnp.tanh(x), P())
    return jnp.sum(jnp.tanh(h @ w))


@pytest.fixture(scope="module")
def result():
    return rehearse(gathered, W, X, mesh="fsdp:8", in_shardings=[P(None, "fsdp"), P("fsdp")])


def test_a_gathered_batch_is_named_with_the_constraint_to_write(result):
    cost = result.costs()[0]
    assert (cost.kind, cost.what, cost.over) == ("batch gathered", "f32[64,512]", "fsdp")
    assert cost.source.file.endswith("test_avoidable_costs.py")
    assert 'jax.lax.with_sharding_constraint(x, P("fsdp", P.UNCONSTRAINED))' in cost.write
    gathers = [e.total_seconds for e in result.collectives if e.kind == "all-gather"]
    assert cost.seconds == pytest.approx(sum(gathers)) and cost.seconds > 0


def test_costs_are_shown_as_text_html_and_json(result):
    cost = result.costs()[0]
    text = str(result)
    assert "of a step of" in text and f"Avoid {cost.kind} over {cost.over} at {cost.where}" in text
    told = result.advice()[0]
    assert (told.seconds, told.change) == (cost.seconds, cost.write)
    assert f"up to {duration(cost.seconds)} of a step of " in told.brings
    assert "batch gathered" in result._repr_html_()
    assert "What could be saved" in page(result)
    assert result.to_json()["costs"][0]["kind"] == "batch gathered"
    assert str(cost.source) in str(result.costs()) and len(result.costs()) >= 1


def test_a_batch_of_floats_is_no_parameter():
    r = rehearse(
        lambda w, x: jax.lax.with_sharding_constraint(x, P()) @ w,
        W,
        X,
        mesh="fsdp:8",
        in_shardings=[P(), P("fsdp")],
    )
    (entry,) = (e for e in r.collectives if e.kind == "all-gather")
    assert (entry.cause, entry.why) == ("activation exchanges", "gathers x, which is data")
    # The weight's gather is one.
    r = rehearse(lambda w, x: x @ w, W, X, mesh="fsdp:8")
    assert [e.cause for e in r.collectives] == ["parameter gathers"]


def test_a_combined_collective_is_named_by_its_largest_array():
    (entry,) = collectives_of(
        [
            "%one = f32[] constant(1)",
            '%a = f32[] negate(%one), metadata={op_name="jit(f)/small"}',
            '%b = f32[64,64] broadcast(%one), metadata={op_name="jit(f)/jvp()/large"}',
            "ROOT %r = (f32[], f32[64,64]) all-reduce(%a, %b), replica_groups={{0,1,2,3},{4,5,6,7}}"
            ', metadata={op_name="jit(f)/small"}',
        ]
    )
    assert entry.shape == "f32[64,64] + 1 more"
    assert entry.op_name.endswith("large")


def test_a_sum_of_the_whole_batch_is_no_gradient():
    text = """HloModule m, num_partitions=4

ENTRY %main () -> f32[64,16,32] {
  %w = f32[32,32] parameter(0)
  %a = f32[64,16,32] broadcast(%w), dimensions={1,2}
  ROOT %r = f32[64,16,32] all-reduce(%a), replica_groups={}, metadata={op_name="transpose(jvp())/d"}
}
"""
    program, placed = read_program(text), mw.explain("fsdp:4", on="h100:4")
    batch = Batch(frozenset({"x"}), frozenset({64}))
    assert analyze(program, placed)[0].cause == "gradient sums"
    assert analyze(program, placed, batch=batch)[0].cause == "activation exchanges"


def test_repeated_work_is_sharded_by_a_rule_and_tried():
    r = rehearse(lambda w, x: x @ w, W, X, mesh="dp:2, tp:4", in_shardings=[P(), P("dp")])
    (cost,) = r.costs()
    assert (cost.kind, cost.what, cost.over) == ("repeated work", "4 times", "tp")
    assert cost.write == 'shard w over tp, too: P(None, "tp"), by a rule or in_shardings.'
    (tried,) = r.costs(check=True)
    assert tried.tried.time.repeated == ()
    assert tried.tried.time.total < 0.5 * r.time.total
    assert "a step if changed" in str(r.costs(check=True))
    assert tried.to_json()["step_seconds_tried"] == tried.tried.time.total


def test_rows_that_are_whole_over_a_data_axis_are_cut_by_a_constraint_and_tried():
    r = rehearse(lambda w, x: jnp.tanh(x @ w), W, X, mesh="dp:8", in_shardings=[P(), P()])
    (cost,) = r.costs()
    assert (cost.kind, cost.over) == ("repeated work", "dp")
    (tried,) = r.costs(check=True)
    assert tried.tried.time.repeated == ()
    assert tried.tried.time.flops == r.time.flops / 8


@pytest.mark.slow
def test_constraints_are_put_into_loops_and_both_passes():
    # The features of the rows are cut like the weight, so that the rows come together.
    def step(w, x):
        def loss(w, x):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            h, _ = jax.lax.scan(layer, jax.lax.with_sharding_constraint(x, P(None, "fsdp")), w)
            return jnp.sum(h**2)

        return jax.value_and_grad(loss)(w, x)

    w = jax.ShapeDtypeStruct((6, 512, 512), "float32")
    # JAX keeps what it traced of its own functions with the lines of who called them first.
    jax.clear_caches()
    r = rehearse(step, w, X, mesh="fsdp:8", in_shardings=[P(None, "fsdp"), P("fsdp")])
    costs = r.costs(check=True)
    tried = [cost.tried for cost in costs if cost.tried]
    assert tried, [cost.failed for cost in costs]
    # What is computed stays the same.
    assert [s.shape for s in r.results] == [s.shape for s in tried[0].results]


def test_a_step_without_avoidable_costs_says_nothing():
    r = rehearse(lambda w, x: x @ w, W, X, mesh="fsdp:8")
    assert len(r.costs()) == 0 and not r.costs()
    assert str(r.costs()) == "no avoidable costs found"
    assert "avoidable cost" not in str(r)


def test_a_step_too_large_has_no_costs(result):
    outcome = dataclasses.replace(result.outcome, verdict="exhausted", text="")
    refused = dataclasses.replace(result, outcome=outcome)
    assert len(refused.costs()) == 0
