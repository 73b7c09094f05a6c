"""What steps bring with them: placed arrays, their own jit, constraints, callbacks, settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.errors import RehearsalError

MESH = "fsdp:4, tp:2"
W = jax.ShapeDtypeStruct((64, 64), "float32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def placed(*spec):
    mesh = mw.mesh(MESH)
    return jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec(*spec)))


def specs_of(found):
    return {row.path: row.spec for row in found.arguments.rows}


def test_data_that_lies_on_the_mesh_stays_as_it_lies(cache):
    found = mw.rehearse(lambda w, x: x @ w, W, placed(None, "tp"), mesh=MESH, cache=cache)
    assert specs_of(found)["x"] == PartitionSpec(None, "tp")


def test_what_is_placed_stays_beside_what_is_not(cache):
    state = {"p": placed(None, ("fsdp", "tp")), "step": jnp.zeros((), "int32")}
    found = mw.rehearse(lambda s: s["p"] * s["step"], state, mesh=MESH, cache=cache)
    assert specs_of(found)["s/p"] == PartitionSpec(None, ("fsdp", "tp"))
    assert specs_of(found)["s/step"] == PartitionSpec()


def test_a_jitted_step_keeps_its_donation(cache):
    step = jax.jit(lambda w, x: w + x.sum(), donate_argnums=0)
    found = mw.rehearse(step, W, W, mesh=MESH, on="cpu:8", cache=cache)
    assert found.memory.aliased == 64 * 64 * 4 // 8
    assert "donate what the step replaces" not in {way.what for way in found.remedies()}


def test_ways_out_know_the_mesh_too(cache):
    def step(w, x):
        return jax.lax.with_sharding_constraint(w + x.sum(), PartitionSpec("fsdp"))

    found = mw.rehearse(step, W, W, mesh=MESH, on="cpu:8", cache=cache)
    assert found.remedies()[0].how == "donate=0"


def test_ways_out_stay_on_the_machine_of_a_mesh(cache):
    devices = jax.devices()[:4]
    mesh = mw.mesh("dp:2, fsdp:2", devices=devices)
    found = mw.rehearse(lambda w, x: x @ w, W, W, mesh=mesh, cache=cache)
    ways = {way.what: way for way in found.remedies(check=True)}
    tried = ways["cut parameters further"].tried
    assert tried.placement.topology.num_devices == 4
    assert dict(zip(tried.placement.spec.names, tried.placement.spec.sizes, strict=True)) == {
        "dp": 1,
        "fsdp": 4,
    }


def test_explicit_axes_are_explicit(cache):
    explicit = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def step(w, x):
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=PartitionSpec("fsdp", "tp"))

    specs = (PartitionSpec(None, "tp"), PartitionSpec("fsdp"))
    found = mw.rehearse(step, W, W, mesh=explicit, specs=specs, cache=cache)
    assert found.memory.outputs == 64 * 64 * 4 // 8
    assert len(found.collectives) == 0


def test_callbacks_are_refused_with_a_word(cache):
    def step(w):
        return jax.pure_callback(np.sin, w, w)

    with pytest.raises(RehearsalError, match=r"take jax\.debug\.print, pure_callback"):
        mw.rehearse(step, W, mesh="fsdp:16", on="v5e:4x4", compiler="cpu", cache=cache)


def test_more_simulated_devices_than_the_compiler_takes():
    with pytest.raises(RehearsalError, match=r"3072 simulated devices.*at most 2048"):
        mw.rehearse(lambda w: w, W, mesh="fsdp:-1", on="v5p:12x16x16", compiler="cpu", cache=False)


def test_the_older_language_of_shardings_reaches_the_compiler(cache):
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this jax has one language only")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        found = mw.rehearse(lambda w, x: x @ w, W, W, mesh="fsdp:8", on="cpu:8", cache=cache)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert found.memory.arguments == 2 * 64 * 64 * 4 // 8
    assert [entry.kind for entry in found.collectives] == ["all-gather"]


def test_modules_in_the_working_directory_are_none_of_the_compilers(tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert mw.rehearse(lambda w: w, W, mesh="fsdp:8", on="cpu:8", cache=False).fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": 3}, "cache: 3 is not a folder"),
        ({"cache": None}, "cache: None is not a folder"),
        ({"donate": None}, "donate: None is not an argument's number"),
        ({"rule": []}, "rehearse has no option 'rule'.*'rules'"),
    ],
)
def test_options_that_are_none(changes, message):
    with pytest.raises(RehearsalError, match=message):
        mw.rehearse(lambda w: w, W, **{"mesh": "fsdp:8", "on": "cpu:8", **changes})


def test_a_rehearsal_is_compared_with_another(cache):
    found = mw.rehearse(lambda w: w, W, mesh="fsdp:8", on="cpu:8", cache=cache)
    with pytest.raises(RehearsalError, match="compare: 3 is not a rehearsal"):
        found.compare(3)
    with pytest.raises(RehearsalError, match="rehearse_model has no option 'meshes'"):
        mw.rehearse_model("tiny", batch=8, mesh="fsdp:8", meshes=1)
