"""What steps bring with them: placed arrays, their own jit, constraints, settings."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.errors import RehearsalError
from meshwright.rehearsal.request import shrunk

MESH = "fsdp:4, tp:2"
W = jax.ShapeDtypeStruct((128, 128), "float32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def placed(*spec):
    mesh = mw.mesh(MESH)
    return jax.device_put(
        np.ones((128, 128), np.float32), NamedSharding(mesh, PartitionSpec(*spec))
    )


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
    assert found.memory.aliased == 128 * 128 * 4 // 8
    assert "donate what the step replaces" not in {way.what for way in found.remedies()}


def test_ways_out_know_the_mesh_too(cache):
    def step(w, x):
        return jax.lax.with_sharding_constraint(w + x.sum(), PartitionSpec("fsdp"))

    found = mw.rehearse(step, W, W, mesh=MESH, on="cpu:8", cache=cache)
    assert found.remedies()[0].how == "donate_argnums=0"


@pytest.mark.slow
def test_ways_out_stay_on_the_machine_of_a_mesh(cache):
    devices = jax.devices()[:4]
    mesh = mw.mesh("dp:2, fsdp:2", devices=devices)
    found = mw.rehearse(lambda w, x: x @ w, W, W, mesh=mesh, cache=cache)
    ways = {way.what: way for way in found.remedies(check=True)}
    tried = ways["shard parameters further"].tried
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
    found = mw.rehearse(step, W, W, mesh=explicit, in_shardings=specs, cache=cache)
    assert found.memory.outputs == 128 * 128 * 4 // 8
    assert len(found.collectives) == 0


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
    assert found.memory.arguments == 2 * 128 * 128 * 4 // 8
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
        (
            {"donate_argnums": None},
            "donate_argnums: expected an int or a sequence of ints, got None",
        ),
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


def test_compiler_options_of_a_jit_reach_the_compiler(cache):
    def step(w, x):
        return x @ w

    options = {"xla_no_such_option": "1"}
    with pytest.raises(RehearsalError, match="No such compile option: 'xla_no_such_option'"):
        mw.rehearse(jax.jit(step, compiler_options=options), W, W, mesh=MESH, cache=cache)
    plain = mw.rehearse(jax.jit(step), W, W, mesh=MESH, cache=cache)
    options = {"xla_cpu_enable_fast_math": True}
    other = mw.rehearse(jax.jit(step, compiler_options=options), W, W, mesh=MESH, cache=cache)
    assert not plain.from_cache and not other.from_cache


def test_keys_of_the_old_kind_are_whole_and_rows_that_do_not_divide_are_named(cache):
    key = jax.random.PRNGKey(0)
    found = mw.rehearse(
        lambda w, b: b["x"] @ w + jax.random.normal(b["key"]),
        W,
        {"x": W, "key": key},
        mesh=MESH,
        cache=cache,
    )
    assert specs_of(found)["b/key"] == PartitionSpec()
    odd = jax.ShapeDtypeStruct((63, 64), "float32")
    with pytest.raises(RehearsalError, match=r"argument 1 \(b\), x: 63 rows .* over 4 devices"):
        mw.rehearse(lambda w, b: b["x"] @ w, W, {"x": odd}, mesh=MESH, cache=cache)


def test_the_table_has_the_types_that_are_compiled(cache):
    wide = np.ones((128, 128))  # float64, which JAX makes float32
    found = mw.rehearse(lambda w, x: x @ w, wide, wide, mesh=MESH, cache=cache)
    assert [row.text[:3] for row in found.arguments.rows] == ["f32", "f32"]
    assert found.arguments.device_bytes == found.memory.arguments


def test_what_is_no_array_is_told_what_to_do(cache):
    step = jax.jit(lambda m, x, how: m["f"](x))
    with pytest.raises(RehearsalError, match=r"jit takes arrays and numbers alone") as caught:
        mw.rehearse(step, {"f": jnp.tanh, "w": W}, W, "fast", mesh=MESH, cache=cache)
    assert "m/f: <" in str(caught.value) and "how: 'fast' is no array" in str(caught.value)
    assert "without jax.jit" in str(caught.value)
    static = jax.jit(lambda w, n: w * n, static_argnums=1)
    with pytest.raises(RehearsalError, match=r"jitted with static arguments.*its own jit instead"):
        mw.rehearse(static, W, 3, mesh=MESH, cache=cache, donate_argnums=0)
    with pytest.raises(RehearsalError, match=r"no option 'scale'.*go by position"):
        mw.rehearse(lambda w, scale: w * scale, W, mesh=MESH, cache=cache, scale=2.0)
    with pytest.raises(RehearsalError, match=r"Change the model: models\.model\(name, layers="):
        mw.rehearse_model("tiny", batch=8, mesh=MESH, layers=2)


def test_a_part_of_the_machine_is_said_to_be_one(cache):
    with pytest.warns(mw.errors.IdleDevicesWarning, match="uses 4 of 8 devices"):
        assert mw.rehearse(lambda w: w @ w, W, mesh="fsdp:4", on="cpu:8", cache=cache).fits


@pytest.mark.slow
def test_where_a_step_does_not_fit_numbers_and_failing_trials_are_no_trouble(cache):
    rows, width = 32768, 32768

    def step(w, x, rate):
        return w * rate, (x @ w).reshape(rows, width).sum()

    large = jax.ShapeDtypeStruct((rows, width), "float32")
    found = mw.rehearse(step, large, large, 0.1, mesh="dp:8", on="cpu:8", cache=cache)
    assert "does NOT fit" in str(found) and "is what a simulated device is taken to have" in str(
        found
    )
    ways = {way.what: str(way) for way in found.remedies(check=True)}
    assert "tried, the step failed: cannot reshape" in ways["halve the batch"]
    assert "tried, does NOT fit" in ways["donate what the step replaces"]
    whole = PartitionSpec()
    given = mw.rehearse(
        step,
        large,
        large,
        0.1,
        mesh="dp:8",
        on="cpu:8",
        cache=cache,
        in_shardings=[whole, whole, None],
    )
    ways = {way.what: str(way) for way in given.remedies(check=True)}
    assert ways["shard parameters further"].endswith("; yours to try")
    assert "give it a spec" not in str(given)


def test_the_table_has_the_shardings_that_the_step_s_own_jit_gives(cache):
    mesh = mw.mesh(MESH)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    step = jax.jit(lambda w, b: b["x"] @ w * b["rate"], in_shardings=(rows, None))
    found = mw.rehearse(step, W, {"x": W, "rate": 0.5}, mesh=mesh, cache=cache)
    assert specs_of(found)["w"] == PartitionSpec("fsdp")
    assert found.arguments.device_bytes + 4 == found.memory.arguments


def test_a_jit_on_axes_of_other_names_keeps_its_own(cache):
    other = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    step = jax.jit(lambda w, x: x @ w, in_shardings=(other, other))
    assert mw.rehearse(step, W, W, mesh="fsdp:8", on="cpu:8", cache=cache).fits


def test_a_smaller_batch_has_whole_keys():
    key, rows = jax.ShapeDtypeStruct((2,), "uint32"), jax.ShapeDtypeStruct((8, 3), "float32")
    smaller = shrunk((W, {"key": key, "x": rows}, 0.5), (1, 2), 2)
    assert (smaller[1]["key"], smaller[1]["x"].shape, smaller[2]) == (key, (4, 3), 0.5)
    assert shrunk((W, jax.ShapeDtypeStruct((7,), "float32")), (1,), 2) is None


def test_no_device_is_started_so_jax_platforms_may_name_any():
    script = """
import jax, meshwright as mw
from meshwright import _compat
w = jax.ShapeDtypeStruct((64, 64), "float32")
print(mw.rehearse(lambda w: w @ w, w, mesh="fsdp:8", on="cpu:8").fits, _compat.backends_started())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "banana"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True False\n", "")
