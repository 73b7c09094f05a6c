"""Which dims of a Pallas kernel may be cut, and that its parts make the whole."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshwright.planning.iteration_dims import Loops
from meshwright.planning.kernel_rules import kernel, run_on_parts

ROWS, COLUMNS = 8, 128
SHAPE = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
by_row = pl.BlockSpec((1, COLUMNS), lambda i: (i, 0))
whole = pl.BlockSpec((ROWS, COLUMNS), lambda i: (0, 0))
call = functools.partial(pl.pallas_call, out_shape=SHAPE, interpret=True)


def double(x, out):
    out[...] = x[...] * 2


def numbered(number):
    """A kernel that adds what `number` gives; at every place by itself."""

    def body(x, out):
        out[...] = x[...] + jnp.float32(number())

    return body


def rows(body=double, index=lambda i: (i, 0), shape=SHAPE, **options):
    return call(
        body,
        grid=options.pop("grid", (ROWS,)),
        in_specs=[pl.BlockSpec((1, COLUMNS), index)],
        out_specs=by_row,
        out_shape=shape,
        **options,
    )


def add_up(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += x[...]


def unused(x, out):
    pl.program_id(0)
    double(x, out)


def last(x, out):
    out[...] = x[...] * jnp.where(pl.program_id(0) == pl.num_programs(0) - 1, 2.0, 1.0)


# Two dims: an outer one, and `j`, along which rows go. Scratch is reset where `reset` says.
def running(reset):
    def body(x, out, total):
        @pl.when(reset())
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...]
        out[...] = total[...]

    return body


def carried(reset, index=lambda i, j: (i, j, 0), **options):
    block = pl.BlockSpec((None, 1, COLUMNS), index)
    return call(
        running(reset),
        grid=(4, ROWS),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((4, ROWS, COLUMNS), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, COLUMNS), jnp.float32)],
        **options,
    )


def by_data(**options):
    """Scratch is reset at every place, but that hangs on an array."""

    def body(x, out, total):
        @pl.when(x[0, 0] > -1)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] + jnp.float32(pl.program_id(0))
        out[...] = total[...]

    block = pl.BlockSpec((None, 1, COLUMNS), lambda i, j: (i, j, 0))
    return call(
        body,
        grid=(4, ROWS),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((4, ROWS, COLUMNS), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, COLUMNS), jnp.float32)],
        **options,
    )


def looked_up(index):
    """Rows in the order of a table."""
    return call(
        lambda table, x, out: double(x, out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(ROWS, 2),
            in_specs=[pl.BlockSpec((1, 64), index)],
            out_specs=pl.BlockSpec((1, 64), lambda i, j, table: (i, j)),
        ),
    )


def counting(table, x, out):
    """Counts its places in a table of scalars."""
    table[0] += 1
    out[...] = x[...] + table[0].astype(jnp.float32)


def counting_in_a_loop(table, x, out):
    def body(number):
        table[0] += 1
        return number - 1

    jax.lax.while_loop(lambda number: number > 0, body, table[1])
    out[...] = x[...] + table[0].astype(jnp.float32)


def scoped(table, x, out):
    """Scratch of each place's own."""

    def body(scratch):
        scratch[...] = x[...]
        out[...] = scratch[...] + table[0].astype(jnp.float32)

    pl.run_scoped(body, pltpu.VMEM((1, COLUMNS), jnp.float32))


def with_table(body):
    return call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(ROWS,),
            in_specs=[pl.BlockSpec((1, COLUMNS), lambda i, table: (i, 0))],
            out_specs=pl.BlockSpec((1, COLUMNS), lambda i, table: (i, 0)),
        ),
    )


def half_used(x):
    """A result that nobody reads, at the same place for all rows, is scratch."""

    def body(x, out, left):
        left[...] = x[...] * 3
        out[...] = left[...]

    return call(
        body,
        grid=(ROWS,),
        in_specs=[by_row],
        out_specs=[by_row, pl.BlockSpec((1, COLUMNS), lambda i: (0, 0))],
        out_shape=[SHAPE, jax.ShapeDtypeStruct((1, COLUMNS), jnp.float32)],
    )(x)[0]


x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) % 7
stack = np.stack([x, x + 1, x + 2, x + 3])
table = np.array([3, 0, 1, 2, 7, 6, 5, 4], np.int32)
place = functools.partial(pl.program_id, 0)
parallel = pltpu.CompilerParams(dimension_semantics=("arbitrary", "parallel"))
first_column = call(
    double,
    grid=(ROWS, 1),
    in_specs=[pl.BlockSpec((1, COLUMNS), lambda i, j: (i, j))],
    out_specs=pl.BlockSpec((1, COLUMNS), lambda i, j: (i, j)),
)
shared = call(
    lambda x, y, out: out.__setitem__(..., x[...] * y[...]),
    grid=(ROWS,),
    in_specs=[by_row, pl.BlockSpec((1, COLUMNS), lambda i: (i // 2, 0))],
    out_specs=by_row,
)
both = call(
    lambda x, y, out: out.__setitem__(..., x[...] + y[:1]),
    grid=(ROWS,),
    in_specs=[by_row, whole],
    out_specs=by_row,
)


def aliased(out_index):
    return call(
        double,
        grid=(ROWS,),
        in_specs=[by_row],
        out_specs=pl.BlockSpec((1, COLUMNS), out_index),
        input_output_aliases={0: 0},
    )


# By what it is: a function, its arguments, and into how many parts each of its free loops may go.
KERNELS = {
    "rows": (rows(), (x,), [8]),
    "rows in blocks of two": (
        call(double, grid=(4,), in_specs=[pl.BlockSpec((2, 128), lambda i: (i, 0))],
             out_specs=pl.BlockSpec((2, 128), lambda i: (i, 0))), (x,), [4],
    ),
    "a last block that is not full": (
        call(double, grid=(3,), in_specs=[pl.BlockSpec((3, 128), lambda i: (i, 0))],
             out_specs=pl.BlockSpec((3, 128), lambda i: (i, 0))), (x,), [],
    ),
    "no grid": (call(double), (x,), []),
    "a dim of the grid of one": (first_column, (x,), [8]),
    "one operand whole": (both, (x, x), [8]),
    "vmap": (jax.vmap(rows()), (stack,), [4, 8]),
    "vmap of one operand": (jax.vmap(both, (0, None)), (stack, x), [4, 8]),
    "vmap of vmap": (jax.vmap(jax.vmap(rows())), (stack[None].repeat(2, 0),), [2, 4, 8]),
    "vmap of a dim that is not the first": (jax.vmap(rows(), 1), (stack.swapaxes(0, 1),), [4, 8]),
    "backwards": (rows(index=lambda i: (ROWS - 1 - i, 0)), (x,), []),
    "two rows share one": (shared, (x, x[:4]), [4]),
    "every other row, twice": (rows(index=lambda i: (i % 4, 0)), (x[:4],), []),
    "place read": (rows(numbered(place)), (x,), []),
    "place read by vmap's inner": (jax.vmap(rows(numbered(place))), (stack,), [4]),
    "place read and not used": (rows(unused), (x,), [8]),
    "odd and even places": (rows(numbered(lambda: place() % 2)), (x,), [4]),
    "first half of places": (rows(numbered(lambda: place() // 4)), (x,), []),
    "number of places read": (rows(last), (x,), []),
    "sum over rows": (call(add_up, grid=(8,), in_specs=[by_row], out_shape=SHAPE,
                           out_specs=pl.BlockSpec((1, 128), lambda i: (0, 0))), (x,), []),
    "vmap of a sum over rows": (
        jax.vmap(call(add_up, grid=(8,), in_specs=[by_row],
                      out_specs=pl.BlockSpec((1, 128), lambda i: (0, 0)),
                      out_shape=jax.ShapeDtypeStruct((1, COLUMNS), jnp.float32))), (stack,), [4],
    ),
    "a result nobody reads": (half_used, (x,), [8]),
    "carried along a row, reset at its start": (carried(lambda: pl.program_id(1) == 0), (stack,),
                                                [4]),
    "carried from row to row": (carried(lambda: pl.program_id(0) == 0), (stack,), []),
    "reset everywhere": (carried(lambda: pl.program_id(0) >= 0), (stack,), [4, 8]),
    "reset by what is read": (by_data(), (stack,), []),
    "reset by what is read, and said to be independent": (
        by_data(compiler_params=parallel), (stack,), [8],
    ),
    "vmap of what goes from place to place": (
        jax.vmap(carried(lambda: pl.program_id(0) + pl.program_id(1) == 0)),
        (np.stack([stack, stack + 1]),), [2],
    ),
    "looked up by row": (looked_up(lambda i, j, table: (table[i], j)), (table, x), [2]),
    "looked up by column": (looked_up(lambda i, j, table: (i, table[j] * 0 + j)), (table, x), [8]),
    "a table that is written to": (with_table(counting), (table, x), []),
    "a table that is written to in a loop": (with_table(counting_in_a_loop), (table, x), []),
    "scratch of each place's own": (with_table(scoped), (table, x), [8]),
    "in place": (aliased(lambda i: (i, 0)), (x,), [8]),
    "in place but elsewhere": (aliased(lambda i: (7 - i, 0)), (x,), []),
}  # fmt: skip


def equation(function, args):
    """The kernel's equation, and which of its results nobody reads."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    (eqn,) = [each for each in jaxpr.eqns if each.primitive.name == "pallas_call"]
    used = {str(atom) for each in jaxpr.eqns for atom in each.invars} | set(map(str, jaxpr.outvars))
    return eqn, [n for n, var in enumerate(eqn.outvars) if str(var) not in used]


def rule_of_kernel(eqn, unused=()):
    shapes = ([var.aval.shape for var in vars] for vars in (eqn.invars, eqn.outvars))
    return kernel(Loops(*shapes), eqn.params, unused)


def free_loops(eqn, unused=()):
    return [dim for dim in rule_of_kernel(eqn, unused).dims if dim.kind == "free"]


def in_parts(eqn, loop, operands):
    """What devices make of their parts, put together, for the results that have parts.

    The loop is cut as finely as it may be.
    """
    first, dims = len(operands), dict(loop.at)
    shapes = [list(var.aval.shape) for var in eqn.outvars]
    for n, shape in enumerate(shapes):
        if first + n in dims:
            shape[dims[first + n]] //= loop.blocks
    parts = {
        n: jnp.stack(jnp.split(x, loop.blocks, dims[n]))
        for n, x in enumerate(operands)
        if n in dims
    }
    parts[-1] = jnp.arange(loop.blocks)  # there may be none: an operand that all places read

    def run(parts):
        here = [parts.get(n, operand) for n, operand in enumerate(operands)]
        return run_on_parts(eqn, here, list(map(tuple, shapes)))

    made = jax.lax.map(run, parts)
    return {
        n: jnp.concatenate(list(result), dims[first + n])
        for n, result in enumerate(made)
        if first + n in dims
    }


def whole_and_in_parts(calls):
    """Run kernels whole, and along each of their free loops in parts; all in one program."""

    def run(calls):
        return [
            (
                eqn.primitive.bind(*operands, **eqn.params),
                [in_parts(eqn, loop, operands) for loop in loops],
            )
            for (eqn, loops), operands in zip(given, calls, strict=True)
        ]

    given = [(eqn, loops) for eqn, loops, _ in calls]
    return jax.jit(run)([operands for *_, operands in calls])


@pytest.mark.parametrize("label", KERNELS)
def test_a_dim_of_the_grid_may_be_cut_where_no_place_needs_another(label):
    function, args, blocks = KERNELS[label]
    eqn, unread = equation(function, args)
    assert sorted(loop.blocks for loop in free_loops(eqn, unread)) == sorted(blocks)


def test_parts_of_kernels_make_the_whole():
    calls = []
    for function, args, _ in KERNELS.values():
        eqn, unread = equation(function, args)
        calls.append((eqn, free_loops(eqn, unread), args))
    for (label, (*_, blocks)), (expected, loops) in zip(
        KERNELS.items(), whole_and_in_parts(calls), strict=True
    ):
        assert len(loops) == len(blocks)
        for found in loops:
            assert found, label
            for n, value in found.items():
                np.testing.assert_array_equal(value, expected[n], label)


INDEX_MAPS = [
    lambda i, j: (i, j),
    lambda i, j: (i, 0),
    lambda i, j: (i // 2, j),
    lambda i, j: (i // 2 * 2, j),
    lambda i, j: (i % 2, j),
    lambda i, j: (3 - i, j),
    lambda i, j: ((i + j) % 4, j),
    lambda i, j: (jnp.maximum(i, 1), j),
    lambda i, j: (jnp.where(i < j, i, j), 0),
    lambda i, j: (j, i),
]
NUMBERS = [
    lambda i, j: 0,
    lambda i, j: i,
    lambda i, j: i % 2 + j // 2,
    lambda i, j: jnp.where(i > j, 1, 0),
    lambda i, j: (i * 3 + j % 2 * 4) % 2,
    lambda i, j: i * j,
]


def test_whatever_is_cut_computes_the_same():
    """All pairs of index maps and of what a body makes of its place, on a grid of 4 x 4."""
    square = np.arange(4 * 4 * 8 * 128, dtype=np.float32).reshape(32, 512)
    calls, cut = [], set()
    for index, number in itertools.product(INDEX_MAPS, NUMBERS):

        def body(x, out, number=number):
            out[...] = x[...] + jnp.float32(number(pl.program_id(0), pl.program_id(1)))

        function = call(
            body,
            grid=(4, 4),
            in_specs=[pl.BlockSpec((8, 128), index)],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct(square.shape, square.dtype),
        )
        eqn, _ = equation(function, (square,))
        loops = free_loops(eqn)
        cut.add(tuple(loop.blocks for loop in loops))
        if loops:
            calls.append((eqn, loops, (square,)))
    assert {(), (4,), (2,), (4, 4), (2, 4)} <= cut
    for expected, loops in whole_and_in_parts(calls):
        for found in loops:
            np.testing.assert_array_equal(found[0], expected[0])


def test_work_is_counted_where_it_is_done():
    def causal(q, k, out):
        @pl.when(pl.program_id(1) <= pl.program_id(0))
        def _():
            out[...] = jnp.exp(q[...] @ k[...].T)

    function = call(
        causal,
        grid=(4, 4),
        in_specs=[
            pl.BlockSpec((16, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((16, 32), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        cost_estimate=pl.CostEstimate(flops=1, transcendentals=1, bytes_accessed=1),
    )
    rule = rule_of_kernel(equation(jax.vmap(function), [jnp.zeros((2, 64, 32))] * 2)[0])
    assert rule.flops == 2 * 10 * 2 * 16 * 16 * 32  # ten of sixteen blocks are not above
    assert rule.exponentials == 2 * 10 * 16 * 16
