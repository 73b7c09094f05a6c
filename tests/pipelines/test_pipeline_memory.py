"""While a step runs, each group holds what its schedule was proved to hold, and no more."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.pipelines.runtime import bind_arguments
from meshwright.trees.split import split_arrays

GROUPS = 4
PARAMS = [jnp.eye(8)] * 8
ROWS = jnp.ones((32, 8))


def loss(stages):
    def value(params, x):
        for n, w in enumerate(params):
            x = jnp.tanh(x @ w)
            if (n + 1) % (8 // stages) == 0 and n < 7:
                x = mw.stage_end(x)
        return jnp.mean(x**2)

    return value


def held(step, args):
    """The most stage activations that each group has at once."""
    jax.block_until_ready(step(*args))
    (plan,) = step._plans.values()
    slots = bind_arguments(plan.assembled.builder, split_arrays(args).arrays, step.local_groups)
    activations, most = {}, [0] * GROUPS
    for operation in plan.operations:
        results = operation.call(*[slots[slot] for slot in operation.ins])
        for slot, result in zip(operation.outs, results, strict=True):
            slots[slot] = result
        task = operation.task
        if task is not None and task.kind == "F":
            kept = operation.outs[: len(plan.programs["F", task.stage].outs)]
            activations.update(dict.fromkeys(kept, (operation.group, task.stage, task.microbatch)))
        for group in range(GROUPS):
            live = {
                at for slot, at in activations.items() if slots[slot] is not None and at[0] == group
            }
            most[group] = max(most[group], len(live))
        for slot in operation.drop:
            slots[slot] = None
    # Nothing but results and constants is left.
    wanted = {slot for by_group in plan.assembled.results for slot in by_group.values()}
    left = {n for n, value in enumerate(slots) if value is not None}
    assert left <= wanted | set(plan.assembled.builder.constants)
    return tuple(most), plan.proof.live


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_live_activations_are_the_proved_peak(name):
    groups = mw.MpmdMesh(mw.mesh(f"pp:{GROUPS}", devices=jax.devices()[:GROUPS]), "pp")
    step = mw.pipeline(loss(4), groups, schedule=name, microbatches=8)
    counted, proved = held(step, (PARAMS, ROWS))
    assert counted == proved


def test_several_stages_per_group_never_hold_more():
    groups = mw.MpmdMesh(mw.mesh(f"pp:{GROUPS}", devices=jax.devices()[:GROUPS]), "pp")
    step = mw.pipeline(loss(8), groups, schedule="zb-v", microbatches=8)
    counted, proved = held(step, (PARAMS, ROWS))
    assert all(have <= most for have, most in zip(counted, proved, strict=True))
