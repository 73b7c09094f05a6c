"""What processes compare before a step first runs."""

import jax
import jax.numpy as jnp
import pytest
from pipeline_helpers import batch, chain_loss, groups, layers

import meshwright as mw
from meshwright.pipelines.consistency import difference, plan_summary


def summary(loss=chain_loss, rows=8, schedule="1f1b", count=2):
    step = mw.pipeline(loss, groups(2), schedule=schedule, microbatches=4)
    step.explain(layers(count), *batch(rows))
    return plan_summary(step._cache.last())


def other_loss(params, x, y):
    x = mw.stage_end(jnp.sin(x @ params["w0"]))
    return jnp.mean((x @ params["w1"] - y) ** 2)


def test_the_same_step_has_the_same_summary():
    assert difference([summary(), summary()]) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 16}, "argument 1: float32[8,4] in process 0; float32[16,4] in process 1"),
        (
            {"schedule": "gpipe"},
            "schedule: 1f1b of 2 groups, 2 stages and 4 microbatches in process 0; "
            "gpipe of 2 groups, 2 stages and 4 microbatches in process 1",
        ),
        ({"loss": other_loss}, "task F0: 1 tanh"),
    ],
)
def test_a_difference_is_named(change, text):
    assert difference([summary(), summary(**change)]).startswith(text)


def test_of_tasks_only_what_differs_is_named():
    text = difference([summary(), summary(loss=other_loss)])
    assert "1 sin" in text and "dot_general" not in text and "checksum" not in text


def test_tasks_that_differ_in_their_order_alone_show_checksums():
    summaries = [{"task F0": f"1 add, 2 mul, checksum {text}"} for text in ("0a", "0b")]
    expected = "task F0: checksum 0a in process 0; checksum 0b in process 1"
    assert difference(summaries) == expected


def test_many_arrays_are_summarized_by_a_checksum():
    def loss(params, x):
        return jnp.mean(mw.stage_end(x) @ sum(params))

    def with_last(last):
        step = mw.pipeline(loss, groups(2), microbatches=2)
        step.explain([*[jnp.ones((4, 4))] * 20, last], jnp.ones((4, 4)))
        return plan_summary(step._cache.last())

    same, other = with_last(jnp.ones((4, 4))), with_last(jnp.ones((1, 4)))
    assert difference([same, with_last(jnp.ones((4, 4)))]) == ""
    assert difference([same, other]).startswith("argument 0: 21 arrays, checksum ")
    assert len(jax.tree.leaves(same)) < 10
