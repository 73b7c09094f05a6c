"""Saved plans load again; what changed since is told, and what is no plan is refused."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from shown_steps import arguments, planned, train

import meshwright as mw
from meshwright.errors import PlanChangedWarning, PlanningError
from meshwright.planning.saved_plans import describe_program


def load(path, *args, function=train, on="v5e:2x4", **options):
    return mw.plan(function, *(args or arguments()), on=on, donate_argnums=0, saved=path, **options)


@pytest.fixture
def saved(tmp_path):
    return planned(mesh="dp:2, tp:4").save(tmp_path / "plan.json")


def test_loaded_plan_is_the_saved_one(saved):
    before, after = planned(mesh="dp:2, tp:4"), load(saved)
    assert after.spec == before.spec
    assert after.lists == before.lists
    assert after.in_specs == before.in_specs
    assert after.predicted.bytes == before.predicted.bytes
    assert after.predicted.seconds == pytest.approx(before.predicted.seconds, rel=1e-6)
    assert after.notes[-1].endswith("plan.json, for the same program and hardware.")
    assert after.tried == 1


def test_fingerprint_is_the_same_in_another_process(saved):
    here = Path(__file__).parent
    code = (
        "from shown_steps import planned; p = planned(mesh='dp:2, tp:4');"
        "from meshwright.planning.saved_plans import describe_program;"
        "print(describe_program(p.step, p.costs.program)['fingerprint'])"
    )
    path = {"PYTHONPATH": f"{Path(mw.__file__).parent.parent}:{here}", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**path, "PYTHONHASHSEED": "7", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plan = planned(mesh="dp:2, tp:4")
    assert out.stdout.strip() == describe_program(plan.step, plan.costs.program)["fingerprint"]


def test_changed_argument_is_named_with_both_shapes(saved):
    changed = r"argument params/up was bfloat16\[1024, 8192\] and is bfloat16\[1024, 4096\]"
    with pytest.warns(PlanChangedWarning, match=changed):
        plan = load(saved, *arguments(hidden=4096))
    assert "argument params/up was" in str(plan).replace("\n  ", " ")


def test_changed_program_names_the_primitives(saved):
    def other(params, batch):
        new, value = train(params, batch)
        return new, jnp.tanh(value)

    with pytest.warns(PlanChangedWarning, match=r"tanh occurs 1 times, not 0"):
        load(saved, function=other)


def test_changed_hardware_names_both(saved):
    with pytest.warns(PlanChangedWarning, match=r"name was v5e:2x4 and is v6e:2x4"):
        load(saved, on="v6e:2x4")


def test_plan_for_more_devices_than_there_are_is_refused(saved):
    with pytest.raises(PlanningError, match=r"a plan for 8 devices, dp:2, tp:4 on v5e:2x4.*has 4"):
        load(saved, on="v5e:2x2")


def test_plan_for_fewer_devices_than_there_are_says_that_others_stay_idle(saved):
    with pytest.warns(PlanChangedWarning, match=r"devices was 8 and is 16"):
        after = load(saved, on="v5e:4x4")
    assert "The mesh has 8 devices of 16: 8 stay idle." in after.notes


@pytest.mark.parametrize("mesh", ["a:2, b:2", "dp:3"])
def test_plan_that_leaves_devices_idle_loads_by_the_same_call(tmp_path, mesh):
    path = planned(mesh=mesh).save(tmp_path / "plan.json")
    after = load(path)
    assert after.in_specs == planned(mesh=mesh).in_specs
    assert after.notes[-1].endswith("plan.json, for the same program and hardware.")


def small(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


SMALL = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((64, 512), "float32")


@pytest.fixture(params=[[3, 1, 0, 2, 7, 6, 5, 4], [6, 1, 3, 2]], ids=["all", "four"])
def own_mesh(request):
    """A mesh of all devices, or of four of them, in an order of its own."""
    devices = np.array(jax.devices())[request.param]
    return Mesh(devices.reshape(-1, 2), ("data", "model"))


def test_devices_of_an_own_mesh_keep_their_order(tmp_path, own_mesh):
    before = mw.plan(small, *SMALL, mesh=own_mesh)
    path = before.save(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = mw.plan(small, *SMALL, saved=path)
    assert after.mesh == own_mesh
    assert after.predicted.seconds == pytest.approx(before.predicted.seconds)
    assert after.lists == before.lists


def test_own_mesh_that_is_not_here_is_told(tmp_path, own_mesh):
    path = mw.plan(small, *SMALL, mesh=own_mesh).save(tmp_path / "plan.json")
    with pytest.warns(PlanChangedWarning, match=r"an order of their own, is not here.*mesh=mesh"):
        mw.plan(small, *SMALL, on="v5e:2x4", saved=path)
    data = json.loads(path.read_text())
    data["devices"][0] = 99
    path.write_text(json.dumps(data))
    with pytest.warns(PlanChangedWarning, match=r"laid out anew.*p\.jit\(mesh\)"):
        after = mw.plan(small, *SMALL, saved=path)
    assert after.spec == mw.MeshSpec.parse(list(own_mesh.shape.items()))


def test_mesh_with_the_axes_of_a_saved_plan_is_taken(tmp_path, own_mesh):
    spec = ", ".join(f"{name}:{size}" for name, size in own_mesh.shape.items())
    path = mw.plan(small, *SMALL, mesh=spec).save(tmp_path / "plan.json")
    hardware = mw.topology(list(own_mesh.devices.flat)).name
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        after = mw.plan(small, *SMALL, mesh=own_mesh, saved=path)
    assert after.mesh is own_mesh
    assert bool(seen) == (hardware != "cpu:8")  # four of them are other hardware
    other = Mesh(own_mesh.devices, ("data", "tensor"))
    with pytest.raises(PlanningError, match=r"is a plan for data:., model:2, not for Mesh"):
        mw.plan(small, *SMALL, mesh=other, saved=path)


def test_group_that_is_gone_is_refused(saved):
    data = json.loads(saved.read_text())
    data["axes"][0]["shards"] = ["batsch"]
    saved.write_text(json.dumps(data))
    with pytest.raises(PlanningError, match=r"shards 'batsch'.*Did you mean 'batch'"):
        load(saved)


def test_same_step_warns_of_nothing(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(saved)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is damaged: not JSON"),
        ("[]", 'is not a plan: it has no "format"'),
        ('{"format": "meshwright-calibration", "version": 1}', "is not a plan"),
        ('{"format": "meshwright-plan", "version": 99}', "is of version 99"),
        ('{"format": "meshwright-plan", "version": "x"}', "is of version 'x'"),
        ('{"format": "meshwright-plan", "version": true}', "is of version True"),
        ('{"format": "meshwright-plan", "version": 1}', "is damaged: the plan: there is no 'mesh'"),
        (
            '{"format": "meshwright-plan", "version": 1, "mesh": "dp:8", "axes": []}',
            "its axes are not those of its mesh",
        ),
    ],
)
def test_file_that_is_no_plan_is_refused(tmp_path, text, match):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanningError, match=match):
        load(path)


def test_every_missing_key_is_damage_that_is_named(saved):
    whole = json.loads(saved.read_text())
    for key in ("mesh", "axes", "program", "hardware", "made_by"):
        saved.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(PlanningError, match=f"is damaged: the plan: there is no '{key}'"):
            load(saved)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("mesh",), 3, "the plan: mesh is 3, not a text"),
        (("mesh",), "dp:-1, tp:4", "its mesh dp:-1, tp:4 is open"),
        (("name",), ["x"], r"the plan: name is \['x'\], not a text"),
        (("axes",), {}, "the plan: axes is {}, not a list"),
        (("axes", 0), "dp", "the plan: axes 0 is 'dp', not an object"),
        (("axes", 0, "shards"), "batch", "axes 0: shards is 'batch', not a list"),
        (("axes", 0, "shards"), [1], "axes 0: shards is 1, not a text"),
        (("axes", 0, "shards"), ["batch"] * 2, "axes 0: shards is .*not a list of groups, each"),
        (("axes", 1, "moved"), None, "axes 1: moved is None, not a number from 0"),
        (("axes", 1, "moved"), float("nan"), "axes 1: moved is nan, not a number from 0"),
        (("devices",), 8, "the plan: devices is 8, not a list"),
        (("devices",), ["a"], "the plan: devices is 'a', not a number from 0"),
        (("devices",), [0, 0], "its devices are not 8 different ones"),
        (("predicted",), [], r"the plan: predicted is \[\], not an object"),
        (("predicted", "bytes"), "many", "predicted: bytes is 'many', not a number"),
        (("program", "fingerprint"), 1, "program: fingerprint is 1, not a text"),
        (("program", "arguments"), [], r"program: arguments is \[\], not an object"),
        (("program", "arguments", "params/up"), 7, "program arguments: params/up is 7, not a text"),
        (("program", "primitives", "mul"), "2", "program primitives: mul is '2', not an integer"),
        (("hardware", "devices"), 8.5, "hardware: devices is 8.5, not an integer"),
        (("hardware", "tflops"), "fast", "hardware: tflops is 'fast', not a number"),
        (("made_by", "jax"), 0.1, "made_by: jax is 0.1, not a text"),
    ],
)
def test_damaged_field_is_named_with_what_was_expected(saved, place, value, told):
    data = json.loads(saved.read_text())
    node = data
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    saved.write_text(json.dumps(data))
    with pytest.raises(PlanningError, match=rf"plan\.json is damaged: {told}"):
        load(saved)


@pytest.mark.parametrize("path", [3, True, ["plan.json"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(
        PlanningError, match=r"saved: .* is no path of a file that Plan\.save wrote"
    ):
        load(path)


def test_missing_file_and_folder_are_told(tmp_path):
    with pytest.raises(PlanningError, match="No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(PlanningError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(PlanningError, match="No such file"):
        planned(mesh="dp:8").save(tmp_path / "none" / "plan.json")
    for path in (tmp_path / "plan.txt", "/", None):
        with pytest.raises(PlanningError, match=r"ends in neither \.json nor \.html"):
            planned(mesh="dp:8").save(path)


def test_saved_goes_with_neither_mesh_nor_keep(saved):
    with pytest.raises(PlanningError, match="mesh: a saved plan has its own"):
        load(saved, mesh="dp:8")
    with pytest.raises(PlanningError, match="keep: a saved plan has its own"):
        load(saved, keep={"batch": "dp"})


def test_argument_that_is_new_and_gone_is_told(saved):
    params, batch = arguments()

    def renamed(params, batch):
        return train(params, {"x": batch["x"], "y": batch["target"]})

    with pytest.warns(PlanChangedWarning, match=r"argument batch/y is gone.*batch/target is new"):
        load(saved, params, {"x": batch["x"], "target": batch["y"]}, function=renamed)
