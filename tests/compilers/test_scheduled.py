"""Rehearsals that end a TPU's compiler before it generates code, against whole compiles."""

import pytest

import meshwright as mw

pytestmark = pytest.mark.compilers

SIZES = {"layers": 2, "embed": 512, "heads": 4, "kv_heads": 4, "mlp": 1024, "vocab": 8192}
OPTIONS = {"batch": 8, "seq": 1024, "mesh": "fsdp:4, tp:2", "on": "v5e:2x4"}


@pytest.fixture(scope="module")
def both():
    model = mw.models.model("llama3-8b", **SIZES)
    return [mw.rehearse_model(model, **OPTIONS, codegen=codegen) for codegen in (True, False)]


@pytest.mark.slow
def test_the_scheduled_program_is_the_one_that_code_is_generated_for(both):
    whole, scheduled = both
    assert scheduled.compiler == f"{whole.compiler}, without code"
    assert scheduled.flops == whole.flops
    assert ledger(scheduled) == ledger(whole)
    ours, theirs = scheduled.memory.parts(), whole.memory.parts()
    assert theirs.pop("code") > ours.pop("code") == 0
    # What it counts as alive has some of the memory on chip in it, which matters in a small step.
    assert ours == pytest.approx(theirs, rel=0.2)


def ledger(rehearsal):
    return [
        (entry.kind, entry.bytes, entry.over, entry.times.count) for entry in rehearsal.collectives
    ]


def test_kernels_have_their_work_without_code(both):
    whole, scheduled = ({k.name: k.flops for k in r.time.custom} for r in both)
    assert scheduled == whole and all(scheduled.values())
    assert both[1].time.total == pytest.approx(both[0].time.total, rel=0.25)


def test_a_step_that_is_too_large_is_told_so_without_code():
    model = mw.models.model("llama3-8b", **SIZES, remat="none", attention="dot")
    options = {**OPTIONS, "batch": 512, "seq": 4096}
    found = mw.rehearse_model(model, **options, codegen=False)
    assert not found.fits
    assert "attention by a flash kernel" in {remedy.what for remedy in found.remedies()}
