"""Every schedule of the library gives the same step."""

import functools

import jax
import jax.numpy as jnp
import pytest
from pipeline_helpers import assert_close, batch, groups, looped, normal

import meshwright as mw

STAGES = {
    "gpipe": 2,
    "1f1b": 2,
    "eager-1f1b": 2,
    "zb-h1": 2,
    "zb-h2": 2,
    "interleaved-1f1b": 4,
    "looped-bfs": 6,
    "zb-v": 4,
    "dualpipe-v": 4,
}


def loss(params, x, y):
    """Tied ends, a remat, a skip connection from the first stage to the last."""
    *middle, last = [name for name in sorted(params) if name != "tied"]
    first = x = mw.stage_end(jnp.tanh(x @ params["tied"]))
    for name in middle:
        x = mw.stage_end(jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))(params[name], x))
    out = (x @ params[last] + first) @ params["tied"].T
    return jnp.mean((out - y) ** 2), jnp.max(out)


def params_for(stages):
    return {"tied": normal(9, 4, 4) / 2, **{f"w{n}": normal(n, 4, 4) / 2 for n in range(1, stages)}}


@functools.cache
def expected(stages, microbatches):
    run = jax.jit(looped(loss, microbatches, has_aux=True, aux="max"))
    return run(params_for(stages), *batch())


def assert_runs(schedule, stages, microbatches, count=2):
    step = mw.pipeline(
        loss, groups(count), schedule=schedule, microbatches=microbatches, has_aux=True, aux="max"
    )
    assert_close(step(params_for(stages), *batch()), expected(stages, microbatches))
    return step


@pytest.mark.parametrize("name", STAGES)
def test_named_schedules(name):
    assert_runs(name, STAGES[name], 4)


def test_every_named_schedule_is_in_this_test():
    with pytest.raises(mw.errors.MeshwrightError) as caught:
        mw.schedules.schedule("?", groups=2, microbatches=4)
    known = str(caught.value).split("There are ")[1].rstrip(".").split(", ")
    assert set(known) == {*STAGES, "forward"}


@pytest.mark.parametrize("auto", [mw.schedules.Auto(), mw.schedules.Auto(split=False, memory=2)])
def test_found_schedules(auto):
    assert_runs(auto, 2, 4)


def test_found_schedules_of_several_stages_per_group():
    assert_runs(mw.schedules.Auto(latency=0.1), 4, 4)


def test_a_schedule_read_from_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    mw.schedules.write_schedule(mw.schedules.schedule("zb-v", groups=2, microbatches=4), path)
    assert_runs(mw.schedules.read_schedule(path), 4, 4)


def test_a_schedule_written_by_hand_with_stages_in_any_group():
    tasks = ([("F", 1, 0), ("BW", 1, 0)], [("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("W", 2, 0)])
    tasks[1].extend([("BW", 0, 0)])
    assert_runs(mw.schedules.Schedule("mine", 1, (1, 0, 1), tasks), 3, 1)


def test_whole_and_split_backwards_of_one_stage_in_one_schedule():
    rows = [("F", 0, 0), ("F", 1, 0), ("BW", 1, 0), ("BW", 0, 0)]
    rows += [("F", 0, 1), ("F", 1, 1), ("B", 1, 1), ("B", 0, 1), ("W", 0, 1), ("W", 1, 1)]
    first = [task for task in rows if task[1] == 0]
    second = [task for task in rows if task[1] == 1]
    assert_runs(mw.schedules.Schedule("mixed", 2, (0, 1), (first, second)), 2, 2)


def test_many_stages_and_microbatches_on_four_groups():
    assert_runs("zb-v", 8, 8, count=4)


def test_forward_only_stacks_outputs():
    def model(params, x):
        x = mw.stage_end(jnp.tanh(x @ params["w1"]))
        x = mw.stage_end(jnp.tanh(x @ params["w2"]))
        return {"out": x @ params["w3"], "sum": jnp.sum(x), "tokens": jnp.argmax(x, axis=1)}

    params, (x, _) = params_for(4), batch()
    step = mw.pipeline(model, groups(3), schedule="forward", microbatches=4)
    expected = jax.jit(lambda p, x: jax.lax.map(lambda row: model(p, row), x.reshape(4, 2, 4)))
    assert_close(step(params, x), expected(params, x))
    assert step(params, x)["out"].shape == (4, 2, 4)


def test_forward_only_reduces_outputs_by_words():
    def model(params, x):
        x = mw.stage_end(jnp.tanh(x @ params["w1"]))
        return {"most": jnp.max(x), "mean": jnp.mean(x @ params["w2"])}

    params, (x, _) = params_for(3), batch()
    words = {"most": "max", "mean": "mean"}
    step = mw.pipeline(model, groups(2), schedule="forward", microbatches=4, outputs=words)
    got = step(params, x)
    h = jnp.tanh(x @ params["w1"])
    assert_close(got, {"most": jnp.max(h), "mean": jnp.mean(h @ params["w2"])})


def test_forward_only_from_stage_functions():
    first, second = (lambda w, x: jnp.tanh(x @ w)), (lambda w, x: x @ w)
    params, (x, _) = [normal(0, 4, 4), normal(1, 4, 4)], batch()
    step = mw.pipeline([first, second], groups(2), schedule="forward", microbatches=4)
    expected = jax.jit(lambda p, x: second(p[1], first(p[0], x)).reshape(4, 2, 4))
    assert_close(step(params, x), expected(params, x))
