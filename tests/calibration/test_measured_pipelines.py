"""`step.measure`: tasks joined with their kernels, who waits for whom, what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import CalibrationError, PipelineError, RehearsalError

MICROBATCHES = 4


def loss(params, x):
    h = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def train(params, x):
    value, grads = mw.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    return {"a": 0.5 * jnp.eye(64), "b": 0.5 * jnp.eye(64)}, jnp.ones((32, 64))


def pipelined(fn=train, **options):
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")
    return mw.pipeline(fn, groups, microbatches=MICROBATCHES, **options)


@functools.cache
def measured():
    step = pipelined(donate_argnums=0)
    params, x = arguments()
    r = mw.rehearse_pipeline(step, params, x)
    return r, mw.measure(step, params, x, rehearsal=r, steps=3), params


def test_every_task_has_its_kernels_as_often_as_it_runs():
    _, m, _ = measured()
    named = [(task.name, task.group, task.runs) for task in m.tasks]
    assert named == [("0F", 0, 4), ("0BW", 0, 4), ("1F", 1, 4), ("1BW", 1, 4)]
    others = {(each.name, each.runs) for each in m.others}
    assert others >= {("group 0: zeros", 1), ("group 0: update 0", 1), ("group 1: update 0", 1)}
    products = {
        task.name: sum(part.runs for part in task.parts if part.name == "matrix products")
        for task in m.tasks
    }
    # Of the first stage's input nobody wants the gradient.
    assert products == {"0F": 1, "0BW": 1, "1F": 1, "1BW": 2}
    for task in (*m.tasks, *m.others):
        assert task.kernels > 0 and task.modelled > 0
        assert sum(part.measured for part in task.parts) <= task.kernels * 1.001
        assert task.collectives <= task.kernels


def test_a_groups_time_in_tasks_and_its_gaps_add_up():
    _, m, _ = measured()
    for group in m.groups:
        assert group.busy + group.idle == pytest.approx(m.makespan)
        own = [task for task in m.tasks if task.group == group.group]
        assert group.busy == pytest.approx(sum(task.runs * task.measured for task in own))
        waited = sum(task.runs * task.waited for task in own)
        assert sum(group.waiting.values()) == pytest.approx(waited)
        assert (group.processes, group.devices) == ((0,), 4)
    assert {(task.name, task.awaited) for task in m.tasks} >= {("0BW", "1BW"), ("1F", "0F")}
    assert m.makespan <= m.traced


def test_it_runs_as_a_training_loop_and_shows_itself_beside_the_rehearsal(tmp_path):
    r, m, given = measured()
    params, x = arguments()
    plain = jax.jit(train)
    for _ in range(14):  # two to warm up, three rounds of three, three under the profiler
        params, value = plain(params, x)
    after, last = m.results
    assert jnp.allclose(last, value, rtol=1e-4) and jnp.allclose(after["b"], params["b"], rtol=1e-4)
    assert given["a"].is_deleted() and not x.is_deleted()
    promised = {task.name: task.time.total for group in r.groups for task in group.tasks}
    assert {task.name: task.rehearsed for task in m.tasks} == promised
    assert {task.name: task.modelled for task in m.tasks} == pytest.approx(promised)
    assert m.model.makespan == pytest.approx(r.timeline.makespan)
    text = str(m)
    for words in ("rehearsed", "matrix products", "0BW", "group 1: update 0", "waits longest"):
        assert words in text
    data = json.loads(json.dumps(m.to_json()))
    assert data["rehearsed"]["makespan"] == r.timeline.makespan / 1e3
    assert len(data["timeline"]["measured"]["tasks"]) == 16 and len(data["groups"]) == 2
    assert "<svg" in m.save(tmp_path / "m.html").read_text()
    assert json.loads(m.save(tmp_path / "m.json").read_text()) == data
    assert "<svg" in m._repr_html_() and "PipelineMeasurement of train, 1f1b" in repr(m)


@pytest.mark.slow
def test_the_group_that_the_others_wait_for_is_named():
    def heavy(params, x):
        h = mw.stage_end(x @ params["a"])
        h, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ params["b"]), None), h, length=300)
        return jnp.mean(h)

    params, x = arguments()
    m = pipelined(heavy, schedule="gpipe").measure(params, x, steps=2, name="heavy")
    first, second = m.groups
    assert first.waiting[1] > second.waiting[0]
    assert "for group 1, mostly for 1BW before 0BW." in str(m)
    assert str(m).startswith("heavy, gpipe, 2 groups, 4 microbatches on 2 x cpu:4: a step takes ")


def test_the_command_line_measures_a_pipeline(monkeypatch, tmp_path, capsys):
    (tmp_path / "piped.py").write_text(
        "import meshwright as mw\n"
        "from test_measured_pipelines import arguments, pipelined\n"
        "def job():\n"
        "    return (pipelined(), *arguments())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "piped:job", "--steps", "1", "--rehearse"]) == 0
    shown = capsys.readouterr().out
    assert "piped:job, 1f1b, 2 groups" in shown and "rehearsed" in shown


def test_traces_are_removed_unless_they_are_asked_for(tmp_path, monkeypatch):
    params, x = arguments()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    step = pipelined()
    step.measure(params, x, steps=1)
    assert list(temporary.iterdir()) == []
    step.measure(params, x, steps=1, trace=tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.xplane.pb"))


def not_here():
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4", on="v5e:2x4"), "pp")
    return mw.pipeline(train, groups, microbatches=MICROBATCHES)


BAD = [
    (lambda: pipelined().measure(*arguments(), rehearsal=3), "not what rehearse_pipeline returns"),
    (lambda: mw.measure(pipelined(), *arguments(), mesh=mw.mesh("dp:8")), "has its groups"),
    (lambda: pipelined().measure(*arguments(), steps=0), "from 1 on"),
    pytest.param(
        lambda: not_here().measure(*arguments()),
        "hardware that is not here",
        marks=pytest.mark.compilers,
    ),
    (
        lambda: pipelined(loss, schedule="forward", donate_argnums=0).measure(*arguments()),
        "argument 0 is donated",
    ),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_what_cannot_be_measured_is_told(call, words):
    with pytest.raises(CalibrationError) as caught:
        call()
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_what_the_step_itself_raises_comes_through(tmp_path):
    params, x = arguments()
    with pytest.raises(PipelineError, match="a shape without data"):
        pipelined().measure(params, jax.ShapeDtypeStruct((32, 64), "float32"))
    with jax.profiler.trace(tmp_path), pytest.raises(CalibrationError, match="running already"):
        pipelined().measure(params, x, steps=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trace": "/dev/null/here"}, r"^trace: no file can be written to /dev/null/here: Not a"),
        ({"speeds": "/no/such/file.json"}, r"/no/such/file\.json"),
        ({"microbatches": 2}, r"^rehearsal: of train in 2 microbatches, and the step has 4\. Rehe"),
        ({"groups": "pp:2, dp:2"}, r"of train on 2 groups of 2 devices, and the step runs on"),
        (
            {"rows": 64},
            r"train with other arguments: float32\[64,64\] there, float32\[32,64\] here",
        ),
    ],
)
def test_what_is_wrong_is_told_before_the_first_call(options, words):
    params, x = arguments()
    step = pipelined(donate_argnums=0)
    if not {"trace", "speeds"} & set(options):
        options = {"rehearsal": rehearsed(**options)}
    with pytest.raises(CalibrationError, match=words):
        step.measure(params, x, **options)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises(PipelineError):  # no call has made a plan
        step.explain()


def rehearsed(fn=train, microbatches=MICROBATCHES, groups="pp:2, dp:4", rows=32, **options):
    params, _ = arguments()
    mesh = mw.mesh(groups, devices=jax.devices()[: 8 if "dp:4" in groups else 4])
    step = mw.pipeline(fn, mw.MpmdMesh(mesh, "pp"), microbatches=microbatches, **options)
    return mw.rehearse_pipeline(step, params, jax.ShapeDtypeStruct((rows, 64), "float32"))


def test_a_rehearsal_is_shown_beside_afterwards():
    _, m, _ = measured()
    r = rehearsed()
    beside = r.compare(m)
    promised = {task.name: task.time.total for group in r.groups for task in group.tasks}
    assert {task.name: task.rehearsed for task in beside.tasks} == promised
    assert [group.rehearsed_peak for group in beside.groups] == [
        group.memory.peak for group in r.groups
    ]
    other = rehearsed(schedule="gpipe").compare(m)
    words = f"Rehearsed was train as gpipe on 2 x cpu:4; {m.name} ran as 1f1b on 2 x cpu:4."
    assert other.notes[-1] == words and words in str(other)
    assert other.to_json()["rehearsed"]["name"] == "train"
    with pytest.raises(RehearsalError, match=r"is not what step\.measure returns\."):
        r.compare(r)
    with pytest.raises(CalibrationError, match="compare: 3 is not what rehearse_pipeline returns"):
        m.compare(3)
