"""Tasks compiled in other processes: the same as those compiled here; errors name the task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright import _compat
from meshwright.errors import RehearsalError
from meshwright.pipelines.step_graph import Operation, TaskFunction
from meshwright.rehearsal.compiler import Compiler, Outcome
from meshwright.rehearsal.task_compiler import TaskCompiler
from meshwright.rehearsal.tpu_slices import slice_for
from meshwright.trees.split import split_arrays

WEIGHT = jax.ShapeDtypeStruct((64, 64), "float32")
PARAMS = {"a": WEIGHT, "b": WEIGHT}
X = jax.ShapeDtypeStruct((32, 64), "float32")


def loss(params, x):
    h = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def step_over_groups():
    groups = mw.MpmdMesh(mw.mesh("pp:2, fsdp:2, tp:2"), "pp")
    return mw.pipeline(loss, groups, microbatches=4)


def task():
    """A program and the operation that it is for, as a pipeline lowers it."""
    step = step_over_groups()
    mesh = step.groups.meshes[1]
    lies = NamedSharding(mesh, PartitionSpec("fsdp"))
    shape = jax.ShapeDtypeStruct((8, 8), "float32", sharding=lies)
    code = TaskFunction("group 1: update 0", lambda x: [x + 1], [None])
    operation = Operation(1, "update", (0,), (1,), code)
    program = TaskCompiler(step.groups, 1.0, None).lower(code, operation, jax.jit(code.fn), [shape])
    return step.groups, (code, operation, program)


@pytest.mark.slow
def test_a_task_is_the_same_compiled_elsewhere(tmp_path):
    step = step_over_groups()
    here = step.plan_of(PARAMS, X)
    compiler = TaskCompiler(step.groups, 300.0, tmp_path)
    parts = split_arrays((PARAMS, X), 1)
    there = step.planner.plan(parts, step.local_groups, step.link, compiler, compiler.lower)
    assert there.assembled.builder.slot_shardings == here.assembled.builder.slot_shardings
    for one, other in zip(here.operations, there.operations, strict=True):
        if one.function is None:
            continue
        local_groups, others = one.function.compiled, other.function.compiled
        assert list(local_groups.output_shardings) == list(others.output_shardings)
        for part in ("argument", "output", "alias", "temp"):
            name = f"{part}_size_in_bytes"
            sizes = (
                getattr(local_groups.memory_analysis(), name),
                getattr(others.memory_analysis(), name),
            )
            assert sizes[0] == sizes[1]
        assert local_groups.cost_analysis().get("flops") == others.cost_analysis().get("flops")
    assert list(tmp_path.glob("*.rehearsal"))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 1)])
def test_shardings_of_results_survive_being_written(sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, ("a", "b", "c"), (AxisType.Auto,) * 3, devices=devices)
    specs = (PartitionSpec(("b", "a"), "c"), PartitionSpec("c"))
    shapes = [
        jax.ShapeDtypeStruct((16, 16), "float32", sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    with jax.set_mesh(mesh):
        made = jax.jit(lambda x, y: (x @ y, x.T, x.sum(), 2 * x)).lower(*shapes).compile()
    written = _compat.written_shardings(made.runtime_executable(), 4)
    for found, known in zip(
        _compat.named_shardings(written, mesh), made.output_shardings, strict=True
    ):
        assert found.is_equivalent_to(known, 2)


def test_the_same_program_is_compiled_once(monkeypatch):
    asked = []

    def run(_, job, timeout, tick):
        asked.append(job.name)
        return Outcome("compiled", shardings=[""])

    monkeypatch.setattr(Compiler, "run", run)
    groups, lowered = task()
    compiler = TaskCompiler(groups, 1.0, None)
    compiler(*lowered)
    compiler(*lowered)
    assert asked == ["group 1: update 0"]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome("failed", reason="INTERNAL: no"), "group 1: update 0: the compiler refused it"),
        (
            Outcome("exhausted", reason="Used 20.00G of 15.75G hbm"),
            "group 1: update 0: the compiler ran out of memory. The group does NOT fit: 20 GiB",
        ),
    ],
)
def test_what_a_compiler_refuses_names_the_group_and_the_task(outcome, message, monkeypatch):
    monkeypatch.setattr(Compiler, "run", lambda *_: outcome)
    groups, lowered = task()
    with pytest.raises(RehearsalError, match=message):
        TaskCompiler(groups, 1.0, None)(*lowered)


def test_the_timeout_and_the_end_are_heeded():
    groups, lowered = task()
    with pytest.raises(RehearsalError, match="group 1: update 0: the compiler was not done after"):
        TaskCompiler(groups, 0.01, None)(*lowered)
    compiler = TaskCompiler(groups, 300.0, None)
    compiler.stop()
    with pytest.raises(RehearsalError, match="has ended"):
        compiler(*lowered)


def test_callbacks_of_a_task_are_left_out_and_noted():
    step = step_over_groups()
    lies = NamedSharding(step.groups.meshes[1], PartitionSpec("fsdp"))
    shape = jax.ShapeDtypeStruct((8, 8), "float32", sharding=lies)

    def noisy(x):
        jax.debug.print("{}", x.sum())
        seen = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), "float32"), x.sum())
        return [x + seen]

    code = TaskFunction("group 1: update 0", noisy, [None])
    compiler = TaskCompiler(step.groups, 1.0, None)
    operation = Operation(1, "update", (0,), (1,), code)
    for _ in range(2):  # a line is noted once
        lowered = compiler.lower(code, operation, jax.jit(noisy), [shape])
    assert [callback.kind for callback in compiler.callbacks] == ["debug.print", "pure_callback"]
    assert all("test_pipeline_compiling.py" in str(one.source) for one in compiler.callbacks)
    assert b"custom_call" not in lowered.code


def test_what_cannot_be_lowered_names_the_group_and_the_task():
    step = step_over_groups()
    lies = NamedSharding(step.groups.meshes[1], PartitionSpec("fsdp"))
    shape = jax.ShapeDtypeStruct((8, 8), "float32", sharding=lies)

    def ordered(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return [x]

    code = TaskFunction("group 1: update 0", ordered, [None])
    with pytest.raises(RehearsalError, match=r"group 1: update 0: .*ordered=True on 4 devices"):
        TaskCompiler(step.groups, 1.0, None).lower(
            code, Operation(1, "update", (0,), (1,), code), jax.jit(ordered), [shape]
        )


def test_a_group_of_live_devices_is_hardware_of_its_size():
    step = step_over_groups()
    hardware, positions = slice_for(step.groups.meshes[1])
    assert hardware.name == "cpu:4"
    assert positions.tolist() == [0, 1, 2, 3]
