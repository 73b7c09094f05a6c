"""`rehearse`: from a function and shapes to what the compiler made of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.errors import MeshwrightError, RehearsalError
from meshwright.hlo.instructions import Source
from meshwright.rehearsal.callbacks import Callback
from meshwright.rehearsal.repeated_work import RepeatedWork
from meshwright.rehearsal.step_time import CustomKernel
from meshwright.rehearsal.verification import Compared

MESH = "fsdp:4, tp:2"


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["x"]) ** 2)


def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"up": shape(256, 1024), "down": shape(1024, 256)}
BATCH = {"x": shape(64, 256)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def result(cache):
    return mw.rehearse(step, PARAMS, BATCH, mesh=MESH, on="cpu:8", donate_argnums=0, cache=cache)


def compiled_here(donate=0):
    """The same step, compiled in this process on its own devices."""
    mesh = mw.mesh(MESH)
    specs = mw.partition(PARAMS, mesh)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        PARAMS,
        specs,
    )
    batch = {"x": jax.ShapeDtypeStruct((64, 256), "float32", sharding=rows)}
    return jax.jit(step, donate_argnums=donate).lower(params, batch).compile()


def test_memory_is_the_compilers_own_report(result):
    report = compiled_here().memory_analysis()
    found = result.memory
    assert found.arguments == report.argument_size_in_bytes
    assert found.outputs == report.output_size_in_bytes
    assert found.aliased == report.alias_size_in_bytes > 0
    assert found.temporaries == report.temp_size_in_bytes
    assert found.peak == (
        report.argument_size_in_bytes
        + report.output_size_in_bytes
        - report.alias_size_in_bytes
        + report.temp_size_in_bytes
        + report.generated_code_size_in_bytes
    )
    assert found.limit == 4_000_000_000
    assert result.fits
    assert result.margin == found.limit - found.peak


def test_the_program_is_the_one_that_jit_makes(result):
    def kinds(text):
        words = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "fusion", "dot")
        return {word: text.count(f" {word}(") for word in words}

    assert kinds(result.text) == kinds(compiled_here().as_text())


def test_flops_are_those_of_the_multiplications(result):
    # Six products of 64 x 256 x 1024 less the gradient of the input, over 8 devices.
    assert result.flops == 5 * 2 * 64 * 256 * 1024 / 8
    assert result.bytes > result.memory.arguments
    assert 0 < result.time.utilisation < 1
    assert result.time.total == pytest.approx(sum(result.time.parts().values()))


def test_sources_are_lines_of_the_users_code(result):
    files = {entry.source.file for entry in result.collectives if entry.source}
    assert files == {__file__}
    assert all(
        str(buffer.source).startswith("test_rehearse.py:") or not buffer.source
        for buffer in result.memory.buffers
    )


def test_arguments_are_cut_as_partition_says(result):
    by_path = {row.path: row.spec for row in result.arguments.rows}
    decided = mw.partition(PARAMS, mw.abstract_mesh(MESH))
    assert by_path["params/up"] == decided["up"]
    assert by_path["batch/x"] == PartitionSpec("fsdp")


def test_rules_specs_and_data_are_obeyed(cache):
    found = mw.rehearse(
        step,
        PARAMS,
        BATCH,
        mesh=MESH,
        on="cpu:8",
        rules=[("up", (None, "tp")), ("down", ("tp", None))],
        cache=cache,
    )
    specs = {row.path: row.spec for row in found.arguments.rows}
    assert specs["params/up"] == PartitionSpec(None, "tp")
    given = ({"up": PartitionSpec("tp"), "down": PartitionSpec()}, PartitionSpec(None, "tp"))
    other = mw.rehearse(step, PARAMS, BATCH, mesh=MESH, on="cpu:8", in_shardings=given, cache=cache)
    assert [row.spec for row in other.arguments.rows] == [
        PartitionSpec(None, "tp"),
        PartitionSpec(),
        PartitionSpec("tp"),
    ]


def test_arrays_stay_as_they_lie(cache):
    mesh = mw.mesh(MESH)
    w = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec("tp")))
    found = mw.rehearse(lambda w: w @ w, w, mesh=mesh, cache=cache)
    assert found.arguments.rows[0].spec == PartitionSpec("tp")


def test_state_beyond_the_first_follows_it(cache):
    def two(params, momentum, batch):
        grads = jax.grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - m, params, momentum), momentum

    found = mw.rehearse(
        two, PARAMS, PARAMS, BATCH, mesh=MESH, on="cpu:8", donate_argnums=(0, 1), cache=cache
    )
    specs = {row.path: row.spec for row in found.arguments.rows}
    assert specs["momentum/up"] == specs["params/up"] != PartitionSpec()
    assert specs["batch/x"] == PartitionSpec("fsdp")


def test_results_lie_as_asked(cache):
    options = {"mesh": MESH, "on": "cpu:8", "cache": cache}
    free = mw.rehearse(
        lambda w: w * 2, shape(64, 64), in_shardings=[PartitionSpec("fsdp")], **options
    )
    whole = mw.rehearse(
        lambda w: w * 2,
        shape(64, 64),
        in_shardings=[PartitionSpec("fsdp")],
        out_shardings=PartitionSpec(),
        **options,
    )
    assert len(free.collectives) == 0
    assert [entry.kind for entry in whole.collectives] == ["all-gather"]
    assert whole.memory.outputs == 4 * free.memory.outputs


def test_constraints_by_name_hold_inside(cache):
    def constrained(w):
        return jax.lax.with_sharding_constraint(w * 2, PartitionSpec(None, "fsdp")) + 1

    found = mw.rehearse(
        constrained,
        shape(64, 64),
        mesh=MESH,
        on="cpu:8",
        in_shardings=[PartitionSpec("fsdp")],
        cache=cache,
    )
    assert {entry.kind for entry in found.collectives} == {"all-to-all"}


def test_what_hangs_on_values_is_told_and_rows_are_those_of_the_largest_data(cache):
    def chosen(w, x, sizes):
        y = jax.lax.switch(sizes[0], [lambda: x @ w, lambda: jnp.tanh(x @ w) @ w])
        return jax.lax.while_loop(lambda y: jnp.sum(y) < sizes[1], lambda y: y @ w, y)

    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((8, 8), "f4"), ((64, 8), "f4"), ((4,), "i4"))
    ]
    found = mw.rehearse(chosen, *shapes, mesh="dp:2", on="cpu:2", cache=cache)
    assert "upper bounds: every branch" in str(found)
    assert "lower bounds: a loop of unknown trip count" in str(found)
    assert found.examples_per_second == pytest.approx(64 / found.time.total)


def test_hardware_that_is_not_here_by_a_cpu_in_its_place(cache):
    found = mw.rehearse(
        step, PARAMS, BATCH, mesh="fsdp:8, tp:2", on="v5e:4x4", compiler="cpu", cache=cache
    )
    assert found.stand_in
    text = str(found)
    assert "in place of v5e" in text
    # Every number of it is marked, wherever it is shown.
    assert "fits (CPU estimate): " in text and "time of a step (CPU estimate)" in text
    assert "What to do next (CPU estimate)" in text
    assert "which is a CPU estimate" in found.advice()[-1].brings
    data = found.to_json()
    assert data["cpu_estimate"] and data["memory"]["cpu_estimate"] and data["time"]["cpu_estimate"]
    for shown in (found.memory, found.time):
        assert "(CPU estimate)" in shown._repr_html_()
    assert found.memory.limit == int(15.75 * 2**30)
    assert {"ICI" in entry.links for entry in found.collectives} == {True}


def test_it_shows_itself(result):
    text = str(result)
    assert "step as fsdp:4, tp:2 on cpu:8" in text
    assert "fits: " in text
    assert "modelled time of a step" in text
    assert max(map(len, text.splitlines())) <= 130
    data = result.to_json()
    assert data["fits"] is True
    assert data["cpu_estimate"] is False and "CPU estimate" not in text
    assert data["memory"]["peak"] == result.memory.peak
    assert len(data["collectives"]["collectives"]) == len(result.collectives)


def test_two_side_by_side(result, cache):
    other = mw.rehearse(step, PARAMS, BATCH, mesh="dp:8", on="cpu:8", cache=cache)
    # The verdict is there; what it does not need is read off the program when first asked for.
    assert other.memory.buffers and not {"program", "collectives", "time"} & vars(other).keys()
    both = result.compare(other)
    assert both.to_json()["peak memory"] == [result.memory.peak, other.memory.peak]
    text = str(both)
    assert "fsdp:4, tp:2" in text
    assert "dp:8" in text
    assert "<table" in both._repr_html_()


def test_what_the_function_raises_comes_through():
    with pytest.raises(TypeError, match="dot_general requires"):
        mw.rehearse(lambda a, b: a @ b, shape(8, 4), shape(8, 4), mesh="fsdp:8", on="cpu:8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": None}, "say which mesh"),
        ({"mesh": "fsdp:3, tp:5"}, "8"),
        ({"on": "v5q:4x4"}, "v5q"),
        ({"donate_argnums": 7}, "donate_argnums: 7 is no argument"),
        ({"data": (0, "x")}, "data: 'x' is no argument"),
        ({"compiler": "gcc"}, "compiler: 'gcc' is not known"),
        ({"timeout": 0}, "timeout: 0 is not a number of seconds above 0"),
        ({"in_shardings": PartitionSpec("fsdp")}, "one entry for each of the 2 arguments"),
        ({"rules": [("nowhere", None)]}, "nowhere"),
        ({"out_shardings": "fsdp"}, "(?s)out_shardings: .*0/down: 'fsdp' is not a PartitionSpec"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_compiled(changes, message):
    asked = {"mesh": MESH, "on": "cpu:8", "cache": False, **changes}
    with pytest.raises(MeshwrightError, match=message):
        mw.rehearse(step, PARAMS, BATCH, **asked)


def test_a_function_and_arguments_are_needed():
    with pytest.raises(RehearsalError, match="cannot be called"):
        mw.rehearse("step", PARAMS, mesh=MESH)
    with pytest.raises(RehearsalError, match="pass the step's arguments"):
        mw.rehearse(step, mesh=MESH)


def test_reprs_are_short_however_large_the_value_is(result):
    many = dataclasses.replace(result.request, name="a long name " * 40)
    large = dataclasses.replace(result, request=many)
    line = Source("/somewhere/" + "deep/" * 40 + "a" * 200 + ".py", 7, "f" * 200)
    values = [
        result,
        result.memory,
        result.collectives,
        *result.collectives,
        result.time,
        *result.remedies(),
        large,
        large.compare(result),
        line,
        Callback("debug.print", line, False),
        RepeatedWork(line, "dot" * 80, 4.0, None, 1e9, 1e-3, ("params/" + "w" * 200,)),
        CustomKernel("kernel" * 50, "Pallas", "unknown", 1, 0.0, 1e6, 1e-3),
        Compared("params/" * 50, (8, 8), "float32", 1.0, 1.0, 0.0, 1e-6),
    ]
    for value in values:
        assert repr(value).startswith(f"<{type(value).__name__} ")
        assert len(repr(value)) <= 200


def test_without_the_vendors_compiler_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("meshwright._compat.compiler_installed", lambda family: False)
    with pytest.raises(RehearsalError, match=r"pip install 'jax\[tpu\]'\..*compiler='cpu'"):
        mw.rehearse(step, PARAMS, BATCH, mesh="fsdp:16", on="v5e:4x4", cache=False)
    with pytest.raises(RehearsalError, match=r"pip install 'jax\[cuda13-local\]' nvidia-"):
        mw.rehearse(step, PARAMS, BATCH, mesh="fsdp:8", on="h100:8", cache=False)
