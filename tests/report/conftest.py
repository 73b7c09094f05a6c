"""A small rehearsal that every test here looks at."""

import dataclasses

import jax
import pytest
from markup import altered

import meshwright as mw
from meshwright.rehearsal.collectives.types import Collectives


@pytest.fixture(scope="session")
def result():
    return mw.rehearse_model("tiny", batch=16, mesh="fsdp:4, tp:2", on="cpu:8")


@pytest.fixture(scope="session")
def larger(result):
    """A 70B model on 4,096 chips, with many collectives: as large as a report gets."""
    placed = mw.place("dp:4, fsdp:-1, tp:8", "v5p:16x16x16")
    mesh = mw.abstract_mesh(placed.spec)
    model = mw.models.model("llama3-70b")
    state, rows = model.shapes(), model.batch(1024)
    specs = mw.partition(state, mesh, rules=model.rules(mesh), unused="allow")
    spec = jax.tree.map(lambda _: model.batch_spec(mesh), rows)
    entries = [
        dataclasses.replace(entry, shape=f"bf16[{number},8192]")
        for entry in result.collectives
        for number in range(50)
    ]
    return altered(
        result,
        placement=placed,
        arguments=mw.explain(
            {"state": state, "batch": rows}, mesh, {"state": specs, "batch": spec}
        ),
        collectives=Collectives(tuple(entries)),
    )


@pytest.fixture(scope="session")
def everything(larger, result):
    """All that a page can hold."""
    return {
        "remedies": result.remedies(),
        "pipeline": mw.schedules.simulate(
            mw.schedules.schedule("zb-h1", groups=8, microbatches=64)
        ),
        "training": {"sharded": [3.0, 2.0, 1.5], "pipeline": [3.0, 2.0, 1.5]},
        "comparison": larger.compare(result),
    }
