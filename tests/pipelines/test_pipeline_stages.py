"""Which equations end up in which task, and what goes from task to task."""

import jax
import jax.numpy as jnp
import pytest
from pipeline_helpers import batch, chain_loss, layers, normal

import meshwright as mw
from meshwright import _compat
from meshwright.pipelines.arguments import CheckedOptions
from meshwright.pipelines.stages import split_into_stages
from meshwright.pipelines.task_programs import programs
from meshwright.pipelines.tracing import trace_step
from meshwright.trees.split import split_arrays

SPLIT = ("F", "B", "W")


def tasks_of(loss, *arguments, kinds=SPLIT):
    traced = trace_step(loss, split_arrays(arguments), 4, CheckedOptions())
    stages = split_into_stages(traced.region)
    keys = [(kind, stage) for kind in kinds for stage in range(stages.stages)]
    names = dict(zip(stages.invars, traced.region.names, strict=True))
    return programs(stages, keys), names


def products(program):
    return sum(eqn.primitive.name == "dot_general" for eqn in program.eqns)


def takes(program, names):
    return {names[var] for var in program.ins if var in names}


def makers(tasks, key):
    """The tasks whose results a task takes."""
    return {other for other in tasks if set(tasks[other].outs) & set(tasks[key].ins)} - {key}


def test_products_are_split_between_inputs_and_weights():
    tasks, _ = tasks_of(chain_loss, layers(3), *batch())
    assert [products(tasks["F", n]) for n in range(3)] == [1, 1, 1]
    assert [products(tasks["B", n]) for n in range(1, 3)] == [1, 1]
    assert [products(tasks["W", n]) for n in range(1, 3)] == [1, 1]
    assert products(tasks["B", 0]) + products(tasks["W", 0]) == 1


def test_a_whole_backward_has_both_products():
    tasks, _ = tasks_of(chain_loss, layers(3), *batch(), kinds=("F", "BW"))
    assert [products(tasks["BW", n]) for n in range(3)] == [1, 2, 2]


def test_every_stage_takes_its_own_parameters_and_its_share_of_the_batch():
    tasks, names = tasks_of(chain_loss, layers(3), *batch())
    assert takes(tasks["F", 0], names) == {"argument 0, w0", "argument 1"}
    assert takes(tasks["F", 1], names) == {"argument 0, w1"}
    assert takes(tasks["F", 2], names) == {"argument 0, w2", "argument 2"}


def test_casts_at_the_top_are_computed_where_they_are_used():
    def loss(params, x, y):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return chain_loss(low, x.astype(jnp.bfloat16), y)

    tasks, names = tasks_of(loss, layers(3), *batch())
    assert all(len(tasks["F", n].recomputed) == 1 for n in range(3))
    assert takes(tasks["F", 1], names) == {"argument 0, w1"}
    assert all(tasks["W", n].sums for n in range(3) if products(tasks["W", n]))


def test_backwards_take_from_neighbours_only():
    tasks, _ = tasks_of(chain_loss, layers(4), *batch())
    assert makers(tasks, ("B", 1)) <= {("F", 0), ("F", 1), ("B", 2)}
    assert makers(tasks, ("W", 1)) <= {("F", 0), ("F", 1), ("B", 1), ("B", 2)}


@pytest.mark.parametrize("where", ["loss", "blocks"])
def test_what_a_remat_computes_again_starts_from_what_was_handed_over(where):
    def block(w, x):
        return jnp.sin(jnp.sin(x @ w) @ w)

    def loss(params, x, y):
        own = jax.checkpoint(block) if where == "blocks" else block
        x = mw.stage_end(own(params["w0"], x))
        x = mw.stage_end(own(params["w1"], x))
        return jnp.mean((own(params["w2"], x) - y) ** 2)

    whole = jax.checkpoint(loss) if where == "loss" else loss
    tasks, names = tasks_of(whole, layers(3), *batch())
    assert [products(tasks["F", n]) for n in range(3)] == [2, 2, 2]
    for n in range(3):
        assert len(tasks["F", n].outs) <= 1  # the activations that are handed on, nothing else
        back = {name for kind in "BW" for name in takes(tasks[kind, n], names)}
        assert {name for name in back if "argument 0" in name} == {f"argument 0, w{n}"}
    assert makers(tasks, ("B", 1)) == {("F", 0), ("B", 2)}


def test_tied_weights_are_added_up_in_parts():
    def loss(params, x, y):
        x = mw.stage_end(jnp.tanh(x @ params["tied"]))
        x = mw.stage_end(jnp.tanh(x @ params["w"]))
        return jnp.mean((x @ params["tied"].T - y) ** 2)

    tasks, _ = tasks_of(loss, {"tied": normal(0, 4, 4), "w": normal(1, 4, 4)}, *batch())
    adding = {key for key, program in tasks.items() if program.sums}
    assert {stage for kind, stage in adding if kind != "F"} == {0, 1, 2}
    assert not any(kind == "B" and stage > 0 for kind, stage in adding)
    assert products(tasks["W", 2]) == 1


def test_a_backward_scan_stays_whole():
    def loss(params, x, y):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x = mw.stage_end(jnp.tanh(x @ params["w"]))
        x, _ = jax.lax.scan(layer, x, params["stack"])
        return jnp.mean((x - y) ** 2)

    tasks, _ = tasks_of(loss, {"w": normal(0, 4, 4), "stack": normal(1, 2, 4, 4)}, *batch())
    assert any(eqn.primitive.name == "scan" for eqn in tasks["B", 1].eqns)
    assert not any(eqn.primitive.name == "scan" for eqn in tasks["W", 1].eqns)


def test_state_stays_in_the_stage_that_uses_it_however_late_it_is_written():
    def loss(params, x, y, state):
        h = mw.stage_end(jnp.tanh(x @ params["w0"] + state))
        out = mw.stage_end(jnp.tanh(h @ params["w1"])) @ params["w2"]
        return jnp.mean((out - y) ** 2), 0.9 * state + jnp.mean(h, axis=0)

    arguments = (layers(3), *batch(), jnp.zeros(4))
    traced = trace_step(loss, split_arrays(arguments), 4, CheckedOptions(carry=3))
    stages = split_into_stages(traced.region)
    tasks = programs(stages, [(kind, n) for kind in ("F", "BW") for n in range(3)])
    assert stages.outs[1] in tasks["F", 0].outs


def test_constants_become_the_first_inputs_of_a_program():
    table = jnp.arange(4.0)
    closed = jax.make_jaxpr(lambda x: (2.0 * x + table, 1.0))(jnp.ones(4))
    opened = _compat.constants_as_inputs(closed.jaxpr)
    assert not opened.constvars
    assert opened.invars == [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    assert [_compat.is_literal(atom) for atom in opened.outvars] == [False, True]
    jc = _compat.jaxprs()
    result, _ = jc.jaxpr_as_fun(jc.ClosedJaxpr(opened, ()))(*closed.consts, jnp.ones(4))
    assert result.tolist() == [2.0, 3.0, 4.0, 5.0]
