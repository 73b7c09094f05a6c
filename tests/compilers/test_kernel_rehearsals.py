"""Programs with kernels of their own, as people run them, through the vendors' compilers."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jax.experimental.pallas.ops.tpu import all_gather
from jax.sharding import PartitionSpec as P
from kernel_programs import ATTENTION, PROGRAMS, causal_splash, gradients

import meshwright as mw
from meshwright.errors import RehearsalError

pytestmark = pytest.mark.compilers


def rehearsed(program, on, **options):
    """Rehearse a program on every device of some hardware, each with its part."""
    devices = mw.topology(on).num_devices
    step = jax.shard_map(program, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)

    def run(*shapes, **more):
        whole = [
            jax.ShapeDtypeStruct((devices * each.shape[0], *each.shape[1:]), each.dtype)
            for each in shapes
        ]
        return mw.rehearse(
            step,
            *whole,
            mesh=f"dp:{devices}",
            on=on,
            in_shardings=[P("dp")] * len(whole),
            cache=False,
            **options,
            **more,
        )

    return run


CASES = [
    pytest.param(program, on, id=f"{program.name}-{on.partition(':')[0]}")
    for program in PROGRAMS
    for on in program.on
]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("program", "on"), CASES)
def test_a_program_has_the_work_that_is_counted_by_hand(program, on):
    r = rehearsed(program.function, on, name=program.name)(*program.shapes)
    devices = r.placement.topology.num_devices
    assert r.flops == program.flops * (devices if program.per_device else 1)
    assert sorted(kernel.trust for kernel in r.time.custom) == sorted(program.kernels)
    assert r.fits
    assert r.time.total > 0
    text = str(r)
    assert all(kernel.name in text for kernel in r.time.custom)
    assert ("FLOPs unknown of" in text) == ("unknown" in program.kernels)


def test_splash_attention_is_read_with_the_metadata_of_its_kernels():
    r = rehearsed(gradients(causal_splash), "v5e:2x4", name="splash")(*ATTENTION)
    assert "kernel_metadata={\n" in r.text  # else this test shows nothing
    assert {kernel.kind for kernel in r.time.custom} == {"Pallas TPU"}
    # The compiler's own estimate leaves kernels out.
    assert r.time.compiler > sum(kernel.seconds for kernel in r.time.custom) > 0


def test_a_mask_that_only_a_run_knows_makes_an_upper_bound():
    def masked(query, key, value, mask):
        def body(mask, query, key, out):
            @pl.when(mask[pl.program_id(0)] > 0)
            def _():
                out[...] = jnp.dot(query[...], key[...].T, preferred_element_type=jnp.float32)

        spec = pl.BlockSpec((256, 128), lambda i, _: (i, 0))
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((1024, 256), jnp.float32),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(4,),
                in_specs=[spec, pl.BlockSpec((256, 128), lambda i, _: (0, 0))],
                out_specs=pl.BlockSpec((256, 256), lambda i, _: (i, 0)),
            ),
        )(mask, query, key)

    query = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((4,), jnp.int32)
    r = rehearsed(masked, "v5e:2x2", name="masked")(query, query, query, mask)
    assert [kernel.trust for kernel in r.time.custom] == ["at most"]
    assert r.flops == 4 * 2 * 256 * 256 * 128
    assert "upper bound" in str(r)
    assert "upper bound" in r._repr_html_()


def test_a_kernel_that_gathers_by_remote_copies_is_rehearsed():
    def gathered(x):  # it has a shard_map of its own
        mesh = jax.sharding.get_abstract_mesh()
        return all_gather.all_gather(x, mesh=mesh, axis_name="dp")

    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    r = mw.rehearse(gathered, x, mesh="dp:4", on="v5e:2x2", in_shardings=[P("dp")], cache=False)
    assert [(kernel.trust, kernel.kind) for kernel in r.time.custom] == [("counted", "Pallas TPU")]


def test_kernels_are_told_the_chip_they_are_for_and_no_one_else_is():
    asked = []

    def step(x):
        asked.append((jax.devices()[0].device_kind, jax.device_count()))
        return x + unasked()

    def unasked():
        asked.append(jax.devices())
        return 1

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    for on, kind in (("v5e:2x2", "TPU v5 lite"), ("h100:4", "NVIDIA H100 80GB HBM3")):
        asked.clear()
        mw.rehearse(step, x, mesh="dp:4", on=on, cache=False)
        assert asked[:2] == [(kind, 4), jax.devices()]
    assert jax.devices.__module__.startswith("jax.")


def plus_one(x, out):
    out[...] = x[...] + 1


@pytest.mark.slow
def test_a_kernel_too_large_for_the_chip_is_no_step_that_does_not_fit():
    def whole(x):
        spec = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(
            plus_one,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    shape = jax.ShapeDtypeStruct((16384, 8192), jnp.float32)
    with pytest.raises(RehearsalError, match=r"^whole: RESOURCE_EXHAUSTED.*vmem") as caught:
        rehearsed(whole, "v5e:2x2", name="whole")(shape)
    message = str(caught.value)
    assert "test_kernel_rehearsals.py:" in message
    assert "vmem_limit_bytes" in message
    assert len(message) < 1000


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_triton_kernel_too_large_for_the_chip_is_none_either():
    def whole(x):
        return pl.pallas_call(
            lambda a, out: out.__setitem__(..., jnp.dot(a[...], a[...]).astype(out.dtype)),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=plt.CompilerParams(num_warps=4),
        )(x)

    shape = jax.ShapeDtypeStruct((512, 512), jnp.float16)
    words = (
        r"^whole: RESOURCE_EXHAUSTED: Shared memory(.|\n)*test_kernel_rehearsals.py:\d+. Make its"
    )
    with pytest.raises(RehearsalError, match=words):
        rehearsed(whole, "h100:1", name="whole")(shape)


def test_a_kernel_that_pallas_rejects_is_told_in_its_words_with_the_line():
    def uneven(x):
        spec = pl.BlockSpec((3, 100), lambda i: (i, 0))
        return pl.pallas_call(
            plus_one,
            grid=(4,),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[spec],
            out_specs=spec,
        )(x)

    line = uneven.__code__.co_firstlineno + 2
    shape = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    words = rf"^The Pallas TPU lowering .*divisible by 8 and 128(.|\n)*rehearsals.py:{line} for tpu"
    with pytest.raises(RehearsalError, match=words) as caught:
        rehearsed(uneven, "v5e:2x2")(shape)
    assert len(str(caught.value)) < 1000
