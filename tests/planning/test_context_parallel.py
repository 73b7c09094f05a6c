"""Plans that cut attention by its queries: searched like others, taken only where compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from forced_plans import assert_equal_to_one_device, with_lists

import meshwright as mw
from meshwright.planning.made_plans import (
    Checked,
    PlanMaker,
    best_plan,
    context_notes,
    unasked_part,
    worth_checking,
)
from meshwright.planning.plan_search import Candidate
from meshwright.planning.plan_text import axis_role, reason_it_loses
from meshwright.planning.step_plan import UNASKED

WEIGHTS = dict.fromkeys(("query", "key", "value"), (64, 4, 16)) | {"out": (4, 16, 64)}


def step(params, x):
    def cost(params):
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, params[n]) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        past = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        y = x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, v, params["out"])
        return jnp.mean(jnp.tanh(y) ** 2)

    value, gradients = jax.value_and_grad(cost)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def long_row(**options):
    """A plan for one row on eight devices: nothing but its length can be cut eight ways."""
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in WEIGHTS.items()}
    x = jax.ShapeDtypeStruct((1, 4096, 64), "float32")
    where = {"on": "v5e:2x4", "compiler": "cpu", "donate_argnums": 0}
    return mw.plan(step, params, x, **{**where, **options})


@pytest.fixture(scope="module")
def unchecked():
    return long_row()


@pytest.fixture(scope="module")
def checked():
    return long_row(check=2, max_axes=1)


def maker_of(plan):
    costs = plan.costs
    return PlanMaker(
        plan.name, plan.topology, None, plan.step, costs, costs.groups, plan.groups, False, None,
        plan.limit,
    )  # fmt: skip


def candidates_of(plan):
    return [
        Candidate(each.sizes, each.lists, each.predicted.seconds, each.predicted)
        for each in plan.alternatives
    ]


def test_without_a_check_another_plan_is_returned_and_a_note_says_so(unchecked):
    assert all("queries" not in axis.shards for axis in unchecked.axes)
    (note,) = [note for note in unchecked.notes if "context parallel" in note]
    assert "plan on cp:4, tp:2 is predicted to take" in note and "check=3 tries it" in note
    (best, *_) = unchecked.alternatives
    assert best.mesh == "cp:4, tp:2" and best.predicted.seconds < 0.8 * unchecked.predicted.seconds
    assert reason_it_loses(unchecked, best) == "context parallel, not compiled"


def test_a_context_parallel_plan_is_taken_once_the_compiler_keeps_to_it(checked):
    (axis,) = checked.axes
    assert axis.name == "cp" and axis_role(axis.shards) == "context parallel"
    (chosen,) = [each for each in checked.alternatives if each.chosen]
    assert chosen.compiled is not None and chosen.unasked <= UNASKED
    others = [each.compiled for each in checked.alternatives if each.compiled and not each.chosen]
    assert others and chosen.compiled < min(others)
    assert not any("context parallel" in note for note in checked.notes)
    assert "context parallel" in str(checked)


def test_keys_and_values_are_gathered_and_their_gradients_scattered(checked):
    size = 4096 * 4 * 16 * 4  # positions, heads, their columns; float32
    kinds = sorted(
        (entry.kind, size / entry.bytes) for entry, *_ in checked.exchanges() if entry.bytes > 2**18
    )
    # Forward and backward use the same keys and values, so that each counts for half.
    assert kinds == [("all-gather", 2.0)] * 4 + [("reduce-scatter", 1.0)] * 2


def test_one_that_the_compiler_reshards_is_not_taken(checked):
    maker, found = maker_of(checked), candidates_of(checked)
    plain = next(n for n, each in enumerate(found) if not maker.cuts_queries(each))
    fast = Checked(checked.rehearsal)
    slow = Checked(maker.make(found[plain]).rehearse(compiler="cpu", progress=False))
    assert slow.rehearsal.time.total > fast.rehearsal.time.total
    assert best_plan(maker, found, {0: fast, plain: slow}) == 0
    resharded = dataclasses.replace(fast, unasked=0.02)
    assert best_plan(maker, found, {0: resharded, plain: slow}) == plain
    (first, *_) = maker.alternatives(found, {0: resharded, plain: slow}, plain)
    assert reason_it_loses(checked, first) == "2% exchanged unasked"


def test_of_the_plans_to_compile_one_is_as_ever(unchecked):
    maker, found = maker_of(unchecked), candidates_of(unchecked)
    assert maker.cuts_queries(found[0])
    for check in (1, 2, 3):
        chosen = worth_checking(maker, found, check)
        assert len(chosen) == check
        assert not all(map(maker.cuts_queries, chosen))
    assert found[0] in worth_checking(maker, found, 2)
    assert worth_checking(maker, found, 0) == []
    # With one of them compiled the note would be wrong.
    assert context_notes(maker, found, {0: Checked(None)}, 1) == []


def test_what_the_compiler_exchanges_unasked_is_found(checked):
    assert unasked_part(checked, checked.rehearsal) <= UNASKED

    def meets_its_transpose(x):
        return jnp.tanh(x) + jnp.tanh(x.T)

    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    where = {"on": "v5e:2x4", "mesh": "cp:8", "compiler": "cpu", "progress": False}
    spec = jax.P("cp")
    other = mw.rehearse(
        meets_its_transpose, x, in_shardings=(spec,), out_shardings=spec, **where
    )  # fmt: skip
    assert unasked_part(checked, other) > UNASKED


def test_queries_can_be_kept_on_an_axis_and_saved(tmp_path):
    kept = long_row(mesh="cp:8", keep={"queries": "cp"})
    assert "queries" in kept.axes[0].shards
    assert any("check=1" in note for note in kept.notes)
    again = long_row(saved=kept.save(tmp_path / "plan.json"))
    assert again.lists == kept.lists


@pytest.mark.parametrize(
    ("mesh", "lists"),
    [
        ("fsdp:2, cp:4", [["batch", "width"], ["queries", "seq"]]),
        ("fsdp:2, tp:2, cp:2", [["batch", "width"], ["heads"], ["seq", "width", "queries"]]),
    ],
)
def test_a_context_parallel_step_gives_what_one_device_gives(mesh, lists):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    params = {name: jax.random.normal(next(keys), s) / 8 for name, s in WEIGHTS.items()}
    args = params, jax.random.normal(next(keys), (4, 64, 64))
    plan = mw.plan(step, *args, mesh=mesh)
    key = plan.costs.groups.layout[plan.costs.program.arguments[0]]
    names = {
        name: plan.groups[kind] for name, (kind, _) in zip(("width", "heads"), key[:2], strict=True)
    }
    plan = with_lists(plan, [[names.get(name, name) for name in order] for order in lists])
    assert cuts_scores(plan)
    verified = plan.verify(*args)
    assert verified.ok, str(verified)


def cuts_scores(plan):
    """Whether an array with queries is cut by the axis cp."""
    queries = plan.groups.index("queries")
    scores = [
        value
        for value, layout in enumerate(plan.costs.groups.layout)
        if queries in (kind for kind, _ in layout)
    ]
    return any("cp" in plan.layouts.of_value(value) for value in scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "lists"),
    [
        ("fsdp:2, cp:4", [["batch", "embed"], ["queries", "seq"]]),
        ("fsdp:2, cp:4", [["batch", "embed"], ["mlp/down dim 1", "queries"]]),
        ("fsdp:2, tp:2, cp:2", [["batch", "embed"], ["attention/key dim 2"], ["seq", "queries"]]),
    ],
)
def test_a_context_parallel_decoder_gives_the_state_of_one_device(mesh, lists):
    model = mw.models.model("tiny", layers=2, seq=64, attention="dot")  # its mask is causal
    args = model.state(jax.random.key(0)), model.example(4)
    plan = with_lists(mw.plan(model.train_step, *args, mesh=mesh, donate_argnums=0), lists)
    assert cuts_scores(plan)
    assert_equal_to_one_device(plan, *args)


def test_of_plans_that_cut_nothing_one_is_compiled(unchecked):
    maker, found = maker_of(unchecked), candidates_of(unchecked)
    none = [
        dataclasses.replace(found[0], sizes=sizes, lists=tuple(() for _ in sizes))
        for sizes in ((8,), (4, 2), (2, 2, 2))
    ]
    assert worth_checking(maker, [*none, *found], 3)[:2] == [none[0], found[0]]
