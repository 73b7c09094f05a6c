"""Rehearsals against the vendors' real compilers."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.meshes.build import placement_of
from meshwright.models import layers
from meshwright.rehearsal.tpu_slices import as_slice

pytestmark = pytest.mark.compilers

WORLDS = [
    ("v5e:4x4", "fsdp:4, tp:4", 1),
    ("v5p:2x2x4", "tp:2, fsdp:8", 1),
    ("v5e:2x4", "dp:2, fsdp:4, tp:2", 2),
    ("h100:8", "fsdp:4, tp:2", 1),
    ("h100:8x2", "dp:2, fsdp:8", 1),
]
SHAPES = {
    "up": jax.ShapeDtypeStruct((512, 2048), "float32"),
    "down": jax.ShapeDtypeStruct((2048, 512), "float32"),
}
BATCH = jax.ShapeDtypeStruct((128, 512), "float32")


def step(params, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def compiled_here(on, spec, slices):
    """The same step by jit alone, on the compiler's own devices."""
    mesh = mw.mesh(spec, on=on, slices=slices)
    data = tuple(name for name in mesh.axis_names if name in ("dp", "fsdp"))

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(placed, SHAPES, mw.partition(SHAPES, mesh))
    batch = placed(BATCH, PartitionSpec(data if len(data) > 1 else data[0]))
    return jax.jit(step, donate_argnums=0).lower(params, batch).compile()


@pytest.mark.parametrize(("on", "spec", "slices"), WORLDS)
def test_memory_and_program_are_those_of_jit(on, spec, slices, cache):
    found = mw.rehearse(
        step, SHAPES, BATCH, mesh=spec, on=on, slices=slices, donate_argnums=0, cache=cache
    )
    here = compiled_here(on, spec, slices)
    report = here.memory_analysis()
    assert found.memory.arguments == report.argument_size_in_bytes
    assert found.memory.outputs == report.output_size_in_bytes
    assert found.memory.aliased == report.alias_size_in_bytes
    if on.startswith("v5"):  # what is assigned, which `jit` does not say
        options = {"slices": slices, "donate_argnums": 0, "cache": cache, "codegen": False}
        scheduled = mw.rehearse(step, SHAPES, BATCH, mesh=spec, on=on, **options)
        assert scheduled.compiler == f"{found.compiler}, without code"
        without_code = found.memory.peak - found.memory.code
        assert without_code == pytest.approx(scheduled.memory.peak, rel=0.01)
        buffers = sum(buffer.bytes for buffer in found.memory.buffers)
        assert 0.7 * without_code < buffers <= without_code  # there are gaps between them
    else:
        assert found.memory.temporaries == report.temp_size_in_bytes
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
        assert found.text.count(f" {kind}") == here.as_text().count(f" {kind}")
    assert found.flops * found.placement.topology.num_devices == 5 * 2 * 128 * 512 * 2048
    assert found.compiler.startswith("libtpu" if on.startswith("v5") else "jax-cuda13-plugin")
    assert not found.stand_in
    assert found.fits


@pytest.mark.slow
def test_a_tpu_compiler_that_runs_out_of_memory_is_heard(cache):
    wide = jax.ShapeDtypeStruct((131072, 65536), "float32")
    found = mw.rehearse(
        lambda w, x: (w + 1, jnp.sort(x, axis=1)),
        wide,
        wide,
        mesh="dp:2, fsdp:2",
        on="v5e:2x2",
        cache=cache,
    )
    assert not found.fits
    assert found.memory.refused
    assert found.memory.limit == int(15.75 * 2**30)
    assert found.memory.peak > found.memory.limit
    assert found.time is None
    assert len(found.collectives) == 0
    assert "does NOT fit" in str(found)
    ways = {way.what: way for way in found.remedies(check=True)}
    assert ways["shard parameters further"].tried.memory.peak < found.memory.peak
    assert mw.rehearse(
        lambda w, x: (w + 1, jnp.sort(x, axis=1)),
        wide,
        wide,
        mesh="dp:2, fsdp:2",
        on="v5e:2x2",
        cache=cache,
    ).memory.refused


def test_a_gpu_program_that_is_too_large_is_told_apart(cache):
    wide = jax.ShapeDtypeStruct((262144, 65536), "float32")
    found = mw.rehearse(lambda w: w @ w.T, wide, mesh="dp:8", on="h100:8", cache=cache)
    assert not found.fits
    assert not found.memory.refused
    assert found.margin < 0


def test_the_tpu_compilers_own_estimate_is_kept(cache):
    found = mw.rehearse(step, SHAPES, BATCH, mesh="fsdp:4, tp:4", on="v5e:4x4", cache=cache)
    assert 0 < found.time.compiler < 1e-3


@pytest.mark.slow
def test_a_model_by_its_own_rules(cache):
    model = mw.models.model("llama3-8b", layers=2, embed=512, heads=8, mlp=1024, vocab=2048)
    found = mw.rehearse_model(
        model, batch=32, seq=512, mesh="fsdp:4, tp:4", on="v5e:4x4", cache=cache
    )
    useful = model.flops(32, 512) / 16
    assert useful < found.flops < 1.6 * useful  # rematerialised once
    causes = {entry.cause for entry in found.collectives}
    assert {"gradient sums", "parameter gathers", "activation exchanges"} <= causes
    lines = {
        entry.source.line
        for entry in found.collectives
        if entry.source and entry.source.file.endswith("models/layers.py")
    }
    for function in (layers._project, layers.feed_forward):  # of attention, of the feed-forward
        code, start = inspect.getsourcelines(function)
        assert lines & set(range(start, start + len(code))), function


@pytest.mark.filterwarnings("ignore::meshwright.errors.IdleDevicesWarning")
@pytest.mark.parametrize(
    ("on", "spec", "name"),
    [("v5e:4x2", "fsdp:4", "v5e:2x2"), ("v5e:4x4", "fsdp:4, tp:2", "v5e:2x4")],
)
def test_a_part_of_a_slice_is_compiled_for_one_of_its_shape(on, spec, name, cache):
    placed = placement_of(mw.MeshSpec.parse(spec), mw.topology(on))
    hardware, places = as_slice(placed)
    assert hardware.name == name
    # Who is next to whom on the part is so on the slice.
    whole = mw.topology(on)
    for first, second in itertools.pairwise(zip(placed.positions.flat, places.flat, strict=True)):
        there, here = (
            np.abs(point(machine, one) - point(machine, other)).sum()
            for machine, one, other in zip((whole, hardware), first, second, strict=True)
        )
        assert there == here
    weight = jax.ShapeDtypeStruct((1024, 1024), "float32")
    found = mw.rehearse(lambda w: (w @ w.T).sum(), weight, mesh=spec, on=on, cache=cache)
    assert found.fits and len(found.collectives) > 0


def point(machine, number):
    return np.argwhere(machine.index == number)[0]


def test_a_product_that_xla_finds_no_tiles_for_goes_to_cublas():
    model = mw.models.model("vit-l16", layers=1)
    batch = jax.eval_shape(lambda: model.example(128, None))
    r = mw.rehearse(model.train_step, model.shapes(), batch, mesh="dp:1", on="h200:1", cache=False)
    # jax 0.10.2 refuses "Couldn't find output tile sizes"; later compilers find some.
    refused = jax.__version_info__ < (0, 11)
    assert r.compiler.endswith("products by cuBLAS") == refused
    assert ("__cublas$" in r.text) == refused
    assert r.fits
