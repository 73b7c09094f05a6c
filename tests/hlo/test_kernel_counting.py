"""The work of Pallas kernels, counted in their own programs, against sums by hand."""

import base64
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshwright import _compat_lowering
from meshwright.hlo.kernel_counting import count_kernel
from meshwright.hlo.kernel_work import _unescape
from meshwright.hlo.literals import decode_constants, integer_constants

BLOCK, SIZE = 128, 512
BLOCKS = SIZE // BLOCK
PRODUCT = 2 * BLOCK**3  # operations of a product of two blocks
MATRIX = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)


def lowered(call, *shapes, platform="tpu"):
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def mosaic(call, *shapes):
    """The program of the one kernel in a function, as the compiler is given it."""
    [config] = re.findall(r'backend_config = "([^"]*body[^"]*)"', lowered(call, *shapes))
    body = json.loads(_unescape(config))["custom_call_config"]["body"]
    module = _compat_lowering.read_kernel(base64.b64decode(body), "mosaic")
    assert module is not None
    return module


def rows(i, j, *_):
    return i, 0


def columns(i, j, *_):
    return 0, j


def tile(i, j, *_):
    return i, j


def product(body, tables=0):
    """A call of a kernel on a grid of blocks of a product, with tables of scalars before it."""
    specs = {
        "grid": (BLOCKS, BLOCKS),
        "in_specs": [pl.BlockSpec((BLOCK, SIZE), rows), pl.BlockSpec((SIZE, BLOCK), columns)],
        "out_specs": pl.BlockSpec((BLOCK, BLOCK), tile),
    }
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=tables, **specs)
    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32), grid_spec=spec
    )


def dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def test_a_product_counts_what_its_grid_multiplies_and_moves():
    def body(x, y, out):
        out[...] = dot(x[...], y[...])

    count = count_kernel(mosaic(product(body), MATRIX, MATRIX))
    assert count.flops == 2 * SIZE**3
    assert count.dtypes == {"bf16": 2 * SIZE**3}
    assert not count.at_most
    # A row of blocks is read once, all columns for each row, and each block is written once.
    assert count.blocks == (2 * SIZE**2, BLOCKS * 2 * SIZE**2, 4 * SIZE**2)


def test_a_condition_on_program_ids_counts_the_blocks_where_it_holds():
    def body(x, y, out):
        @pl.when(pl.program_id(1) <= pl.program_id(0))
        def _():
            out[...] = jnp.exp(dot(x[...], y[...]))

    count = count_kernel(mosaic(product(body), MATRIX, MATRIX))
    causal = BLOCKS * (BLOCKS + 1) // 2
    assert count.flops == causal * 2 * BLOCK**2 * SIZE
    assert count.transcendentals == {"exponential": causal * BLOCK**2}
    assert not count.at_most


def test_a_loop_with_a_computed_bound_counts_its_trips():
    def body(x, y, out):
        def step(k, total):
            left = x[:, pl.ds(k * BLOCK, BLOCK)]
            return total + dot(left, y[pl.ds(k * BLOCK, BLOCK), :])

        zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        out[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, step, zeros)

    count = count_kernel(mosaic(product(body), MATRIX, MATRIX))
    assert count.flops == sum(range(1, BLOCKS + 1)) * BLOCKS * PRODUCT


def masked(mask, x, y, out):
    @pl.when(mask[pl.program_id(0), pl.program_id(1)] > 0)
    def _():
        out[...] = dot(x[...], y[...])


def test_a_mask_that_is_known_is_exact_and_one_that_is_not_bounds():
    table = jax.ShapeDtypeStruct((BLOCKS, BLOCKS), jnp.int32)
    module = mosaic(product(masked, tables=1), table, MATRIX, MATRIX)
    known = count_kernel(module, tables={0: np.eye(BLOCKS, dtype=np.int32)})
    assert (known.flops, known.at_most) == (BLOCKS * 2 * BLOCK**2 * SIZE, False)
    unknown = count_kernel(module)
    assert (unknown.flops, unknown.at_most) == (2 * SIZE**3, True)


def test_a_loop_whose_trips_only_a_run_knows_is_not_counted():
    def body(trips, x, y, out):
        def step(_, total):
            return total + dot(x[...], y[...])

        zeros = jnp.zeros((BLOCK, BLOCK), jnp.float32)
        out[...] = jax.lax.fori_loop(0, trips[0], step, zeros)

    table = jax.ShapeDtypeStruct((1,), jnp.int32)
    module = mosaic(product(body, tables=1), table, MATRIX, MATRIX)
    assert count_kernel(module) is None
    assert count_kernel(module, tables={0: np.array([3])}).flops == 3 * 2 * SIZE**3


def test_bytes_that_are_no_kernel_are_not_read():
    assert _compat_lowering.read_kernel(b"module {}", "triton") is not None
    assert _compat_lowering.read_kernel(b"no kernel", "mosaic") is None


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "int64"])
def test_constants_are_read_from_the_compiled_program(dtype):
    table = np.arange(-12, 12).reshape(2, 3, 4).astype(dtype)
    with jax.enable_x64(True):
        compiled = jax.jit(lambda i: jnp.asarray(table)[i]).lower(0).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    values = decode_constants(json.loads(json.dumps(integer_constants(module))))
    assert any(
        each.dtype == table.dtype and np.array_equal(each.ravel(), table.ravel())
        for each in values.values()
    )
