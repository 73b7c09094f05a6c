"""How values lie under a plan, and what is said of products that sum over dims cut further."""

import jax
import jax.numpy as jnp
import pytest
from forced_plans import with_lists

import meshwright as mw

ROWS, SEQ, VOCAB, WIDTH = 16, 64, 1024, 128
LOGITS = ROWS * SEQ * VOCAB * 4


@pytest.fixture(scope="module")
def plan():
    model = mw.models.model("tiny", vocab=VOCAB, embed=WIDTH)
    args = model.shapes(), model.batch(ROWS, seq=SEQ)
    options = {"on": "cpu:8", "compiler": "cpu", "progress": False, "pipelines": False}
    return mw.plan(model.train_step, *args, mesh="a:4, b:2", donate_argnums=0, **options)


HEAD = "params/head dim 1"


def moved(plan, lists):
    rehearsal = with_lists(plan, lists).rehearse(cache=False, progress=False)
    return [(each.kind, each.bytes, each.total_bytes) for each in rehearsal.collectives]


def test_sums_over_part_of_a_mesh_gather_no_activations(plan):
    # The gradient of the head: words on b, sums over the rows on a, and its width lies on a.
    found = moved(plan, [["batch", "embed"], [HEAD, "batch", "embed"]])
    assert found
    assert max(size for kind, size, _ in found if kind == "all-gather") < LOGITS / 4


def test_what_a_product_sums_over_in_parts_is_pinned_where_it_lies(plan):
    # Weights lie cut by both axes along the width, of which a product sums over one.
    found = moved(plan, [["batch", "embed"], ["mlp/down dim 1", "embed"]])
    assert sum(total for *_, total in found) < 10 * 2**20  # 11.3 without


def test_how_sums_lie_is_said_before_other_axes_move(plan):
    layouts = with_lists(plan, [["batch", "embed"], [HEAD, "batch", "embed"]]).layouts
    program = plan.costs.program
    head = next(v for v in program.arguments if program.shapes[v] == (WIDTH, VOCAB))
    assert layouts.of_value(head) == jax.P("a", "b")
    # Made with sums over a, beside the words on b: that both lie so is said at once.
    assert layouts.of_made(head, jax.P(None, "b"), False) == (jax.P("a", "b"),)
    # Made with other axes: first the sums are scattered beside these, then those move.
    assert layouts.of_made(head, jax.P("b"), False) == (jax.P(("b", "a")), jax.P("a", "b"))
    # A dim of a product that is cut further: how it is made is said, too.
    made, lies = jax.P(None, "b"), jax.P(None, ("a", "b"))
    products = [op.outputs[0] for op in program.operations if op.primitive == "dot_general"]
    gradient = next(value for value in products if layouts.of_value(value) == lies)
    assert layouts.of_made(gradient, made, False) == (made, lies)


@pytest.mark.parametrize(("depth", "whole"), [(24, True), (4096, False)])
def test_of_a_stack_it_is_a_layers_part_that_is_small_or_large(depth, whole):
    width = 1024

    def step(params, x):
        def layer(x, parts):
            return jnp.tanh(x * parts["scale"] @ parts["kernel"]) + parts["bias"], None

        def loss(params):
            return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {
        "kernel": jax.ShapeDtypeStruct((depth, width, width), "float32"),
        "scale": jax.ShapeDtypeStruct((depth, width), "float32"),  # 4 KiB of a layer
        "bias": jax.ShapeDtypeStruct((depth, width), "float32"),
    }
    x = jax.ShapeDtypeStruct((512, width), "float32")
    p = mw.plan(step, params, x, on="v5e:2x4", mesh="fsdp:8", donate_argnums=0, progress=False)
    fsdp = ["batch", *(name for name in p.groups if name != "batch")]
    plan = with_lists(p, [fsdp], smallest=2**16)
    cut = {name: plan.in_shardings[0][name].spec for name in params}
    assert "fsdp" in cut["kernel"] and cut["scale"] == cut["bias"]
    assert (cut["scale"] == jax.P()) == whole


def test_few_rows_that_meet_large_weights_are_whole_but_for_results():
    def predict(params, x):
        hidden = jnp.tanh(x @ params["first"])
        return jnp.tanh(hidden @ params["second"]) @ params["head"]

    params = {
        name: jax.ShapeDtypeStruct((4096, 4096), "float32") for name in ("first", "second", "head")
    }
    x = jax.ShapeDtypeStruct((32, 4096), "float32")
    options = {"mesh": "fsdp:8", "progress": False, "pipelines": False}
    p = mw.plan(predict, params, x, on="v5e:2x4", **options)
    program = p.costs.program
    made = [op.outputs[0] for op in program.operations if op.primitive == "dot_general"]
    fsdp = with_lists(p, [["batch", *(n for n in p.groups if n != "batch")]], smallest=2**16)
    assert [fsdp.layouts.of_value(value) for value in made] == [jax.P(), jax.P(), jax.P("fsdp")]
    assert fsdp.out_shardings.spec == jax.P("fsdp")
    # By an axis that cuts no weights they are.
    rows = with_lists(p, [["batch"]], smallest=2**16)
    assert [rows.layouts.of_value(value) for value in made] == 3 * [jax.P("fsdp")]
