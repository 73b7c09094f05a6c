"""Arrays that a step closes over: counted whole on every device, and told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.planning.stored_values import constants_of

WIDE = 1024
BASE = np.random.default_rng(0).normal(size=(WIDE, WIDE)).astype("float32")
ADAPTER = {
    "down": jax.ShapeDtypeStruct((WIDE, 16), "float32"),
    "up": jax.ShapeDtypeStruct((16, WIDE), "float32"),
}
X = jax.ShapeDtypeStruct((64, WIDE), "float32")


def adapted(adapter, base, x):
    """A step for an adapter beside a frozen weight."""

    def loss(adapter):
        return jnp.mean(jnp.tanh(x @ base + x @ adapter["down"] @ adapter["up"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, adapter, jax.grad(loss)(adapter))


@pytest.fixture
def closed():
    base = jnp.asarray(BASE)
    return lambda adapter, x: adapted(adapter, base, x)


@pytest.fixture
def closed_plan(closed):
    return mw.plan(closed, ADAPTER, X, on="v5e:2x4", mesh="dp:8")


def test_what_a_step_closes_over_is_whole_on_every_device(closed_plan):
    given = mw.plan(adapted, ADAPTER, jnp.asarray(BASE), X, on="v5e:2x4", mesh="dp:8")
    assert (closed_plan.costs.constants, given.costs.constants) == (BASE.nbytes, 0)
    assert BASE.nbytes < closed_plan.predicted.bytes < 1.2 * BASE.nbytes
    assert closed_plan.alternatives[0].predicted.bytes == closed_plan.predicted.bytes


def test_what_a_step_closes_over_is_named_and_told_to_be_passed(closed_plan):
    told = (
        "The step closes over arrays of 4 MiB, float32[1024, 1024]: constants, which are copied "
        "whole to every device and cannot be sharded. Pass them as arguments."
    )
    assert told in closed_plan.notes


def test_small_constants_are_counted_and_not_told():
    table = jnp.arange(WIDE, dtype="float32")
    plan = mw.plan(lambda w, x: x @ w + table, jax.ShapeDtypeStruct((WIDE,) * 2, "float32"), X)
    assert plan.costs.constants == table.nbytes
    assert not any("closes over" in note for note in plan.notes)


def test_constants_of_inner_functions_count_once():
    base, key = jnp.asarray(BASE), jax.random.key(0)
    inner = jax.jit(lambda x: x @ base)

    def body(x, _):
        return inner(x) + jax.random.normal(key, x.shape), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(body, inner(x), length=3)[0] @ base)(X)
    sizes = constants_of(closed)
    assert sizes["float32[1024, 1024]"] == BASE.nbytes
    assert sum(sizes.values()) <= BASE.nbytes + 8


def test_a_rehearsal_counts_what_the_step_closes_over(closed):
    plan = mw.plan(closed, ADAPTER, X, on="v5e:2x4", mesh="dp:8", check=1, compiler="cpu")
    assert plan.rehearsal.memory.code >= BASE.nbytes
    assert plan.alternatives[0].peak == plan.rehearsal.memory.peak > BASE.nbytes


def test_a_step_that_does_not_fit_for_its_constants_says_so(closed):
    limit = 2.0 * BASE.nbytes / (15.75 * 2**30)
    assert mw.plan(closed, ADAPTER, X, on="v5e:2x4", memory=limit).notes[0].startswith("The step")
    plan = mw.plan(closed, ADAPTER, X, on="v5e:2x4", memory=limit / 4)
    assert plan.notes[0].startswith("Nothing that was tried fits")
    assert "rows in place of" not in plan.notes[1]


@pytest.mark.compilers
@pytest.mark.parametrize(
    ("on", "options"), [("v5e:2x4", {"codegen": False}), ("v5e:2x4", {}), ("h100:8", {})]
)
def test_compilers_count_what_the_step_closes_over_once(on, options):
    base, x = jnp.asarray(BASE, "bfloat16"), jax.ShapeDtypeStruct(X.shape, "bfloat16")
    adapter = {k: jax.ShapeDtypeStruct(w.shape, "bfloat16") for k, w in ADAPTER.items()}
    plan = mw.plan(lambda a, x: adapted(a, base, x), adapter, x, on=on, mesh="dp:8")
    peak = plan.rehearse(progress=False, **options).memory.peak
    assert base.nbytes < peak < 2 * base.nbytes


def test_what_a_step_closes_over_is_a_part_of_what_does_not_fit(closed):
    p = mw.plan(closed, ADAPTER, X, on="v5e:2x4", mesh="dp:8", memory=1e-6)
    assert p.predicted.bytes > p.costs.limit
    assert " are arguments, 4 MiB closed over, " in " ".join(p.notes)
