"""What a step keeps in memory, and as what, before it is known how it is cut."""

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright.planning.dim_groups import find_groups
from meshwright.planning.moment_bytes import Gathered, LookedUp, Waiting
from meshwright.planning.plan_memory import live_sets
from meshwright.planning.stored_values import kept_values
from meshwright.planning.traced_program import read_program


def peak(function, *args, family=""):
    """Bytes at the worst moment, uncut; arguments included."""
    program = read_program(jax.make_jaxpr(function)(*args))
    kept = kept_values(program, family)
    layout = find_groups(program).layout
    donated = [False] * len(args)
    moments = live_sets(program, layout, kept, donated, family)
    waiting = [sum(size for _, size, _ in moment.waiting) for moment in moments]
    return max(sum(m.live.values()) + more for m, more in zip(moments, waiting, strict=True))


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_a_constant_mask_that_a_loop_takes_is_made_inside_of_it():
    def step(x, w, mask):
        def body(x, _):
            return jnp.where(mask, x @ w, 0.0), None

        return jax.lax.scan(body, x, length=4)[0]

    def constant(x, w):
        return step(x, w, jnp.ones((512, 1024), bool))

    x, w = shape(512, 1024), shape(1024, 1024)
    given = peak(step, x, w, shape(512, 1024, dtype=bool))
    assert given - peak(constant, x, w) == pytest.approx(512 * 1024, rel=0.01)


def test_what_is_computed_from_what_is_there_anyway_does_not_wait_for_later_uses():
    def twice(x, w):
        scores = x @ w
        chosen = jnp.exp(scores)  # for two products, far apart; `scores` stays for the end
        y = chosen @ w
        for _ in range(4):
            y = y @ w
        return (y + scores) @ w + chosen @ w

    def once(x, w):
        scores = x @ w
        y = jnp.exp(scores) @ w
        for _ in range(4):
            y = y @ w
        return (y + scores) @ w

    x, w = shape(4096, 512), shape(512, 512)
    array = 4 * 4096 * 512
    assert peak(twice, x, w) - peak(once, x, w) <= array


def test_a_tpu_stores_what_is_for_products_alone_as_bf16():
    def step(x, w):
        return jax.nn.relu(x @ w) @ w

    def also(x, w):
        hidden = jax.nn.relu(x @ w)
        return hidden @ w, hidden

    x, w = shape(8192, 256), shape(256, 256)
    array = 4 * 8192 * 256
    assert peak(step, x, w) - peak(step, x, w, family="tpu") == pytest.approx(array / 2, rel=0.2)
    assert peak(also, x, w) == pytest.approx(peak(also, x, w, family="tpu"), rel=0.03)


def test_a_tpu_compares_where_every_row_gets_one_number():
    def loss(w, x, labels):
        logits = x @ w
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    args = shape(64, 8192), shape(2048, 64), shape(2048, dtype=jnp.int32)
    program = read_program(jax.make_jaxpr(jax.grad(loss))(*args))
    (scattered,) = (v for v in range(len(program.bytes)) if program.maker.get(v) == "scatter-add")
    assert scattered in kept_values(program)
    assert scattered not in kept_values(program, family="tpu")
    assert peak(jax.grad(loss), *args, family="tpu") <= 1.05 * peak(jax.grad(loss), *args)


def test_what_is_computed_elementwise_takes_the_place_of_what_it_is_computed_from():
    def biased(x, w, b):
        return (x @ w + b) @ w

    def also(x, w, b):
        hidden = x @ w
        shifted = hidden + b
        return shifted @ w, hidden @ w.T

    def later(x, w, b):
        hidden = x @ w
        shifted = hidden + b  # a use of `hidden`, not the last one
        return shifted @ w + shifted[:, ::-1] @ w, hidden @ w.T

    args = shape(8192, 256), shape(256, 256), shape(8192, 256)
    array = 4 * 8192 * 256
    given = 2 * array + 4 * 256 * 256
    assert peak(biased, *args) == pytest.approx(given + 2 * array, rel=0.01)  # and the result
    assert peak(also, *args) == pytest.approx(given + 4 * array, rel=0.01)
    assert peak(later, *args) >= peak(also, *args)


def test_what_is_smaller_takes_no_others_place():
    def step(x, w):
        hidden = x @ w
        y = hidden @ w
        return y, hidden.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    args = shape(8192, 256), shape(256, 256)
    array = 4 * 8192 * 256
    # What is given, both results, the product, and what is made of it.
    expected = (1 + 1.5 + 1 + 0.5) * array + 4 * 256 * 256
    assert peak(step, *args) == pytest.approx(expected, rel=0.05)


def test_what_a_weights_gradient_is_computed_from_waits_for_the_end_of_the_loop():
    def body(g, given, *, gradient):
        h, up, down = given
        wide = g @ up
        result = wide.T @ h if gradient else None  # no other product waits for this one
        g = wide @ down
        for _ in range(3):
            g = (g @ up) @ down
        return g, g[0] if result is None else result

    def loop(gradient):
        def step(g, *stacks):
            return jax.lax.scan(lambda g, given: body(g, given, gradient=gradient), g, stacks)

        return step

    g, h = shape(4096, 64), shape(8, 4096, 64)
    args = g, h, shape(8, 64, 1024), shape(8, 1024, 64)
    made = 4 * (8 * 1024 * 64 - 8 * 64)  # all layers' gradients, for one row of each result
    waits = peak(loop(True), *args) - peak(loop(False), *args) - made
    assert waits == pytest.approx(4 * 4096 * 1024, rel=0.1)


def test_what_a_weights_gradient_is_computed_from_waits_for_later_loops():
    def step(x, w, head, gradient=True):
        logits = x @ head
        g = logits @ head.T
        g = jax.lax.scan(lambda g, w: (g @ w, None), g, w)[0]
        return g, x.T @ logits if gradient else None

    args = shape(4096, 64), shape(4, 64, 64), shape(64, 2048)
    program = read_program(jax.make_jaxpr(step)(*args))
    layout, kept = find_groups(program).layout, kept_values(program)
    moments = live_sets(program, layout, kept, [False] * 3)
    in_loop = max(sum(moment.live.values()) for moment in moments if moment.during == "loop")
    assert in_loop > 4 * 4096 * 2048


@pytest.mark.parametrize(("rows", "sums"), [(4096, True), (128, False)])
def test_a_tpu_holds_the_sums_of_a_product_that_waits_where_they_are_smaller(rows, sums):
    def step(x, w, head):
        logits = x @ head
        gradient = x.T @ logits
        return jax.lax.scan(lambda g, w: (g @ w, None), logits @ head.T, w)[0], gradient

    args = shape(rows, 64), shape(4, 64, 64), shape(64, 2048)
    p = mw.plan(step, *args, on="v5e:2x4", mesh="dp:8", pipelines=False)
    lists = ((next(n for n, sizes in enumerate(p.costs.groups.sizes) if rows in sizes),),)
    program, layout = p.costs.program, p.costs.groups.layout
    kept = kept_values(program, "tpu")
    moments = live_sets(program, layout, kept, [False] * 3, "tpu")
    ((dims, size, products),) = next(m.waiting for m in moments if m.during == "loop")
    waiting = Waiting(dims, size, tuple(map(p.costs.work, products)))
    expected = 4 * 64 * 2048 if sums else size / 8
    assert waiting.bytes(p.costs, lists) == pytest.approx(expected)


def test_in_a_loop_a_tpu_holds_what_the_product_needs_even_where_its_sums_are_smaller():
    def step(g, w):
        def body(g, w):
            wide = g @ w
            gradient = wide.T @ g  # no other product of the body waits for it
            for _ in range(3):
                g = jnp.tanh(g @ w) @ w.T
            return g, gradient

        return jax.lax.scan(body, g, w)

    rows, thin, wide = 8192, 64, 512
    p = mw.plan(step, shape(rows, thin), shape(4, thin, wide), on="v5e:2x4", mesh="dp:8")
    lists = ((next(n for n, sizes in enumerate(p.costs.groups.sizes) if rows in sizes),),)
    arrays = (each for moment in p.costs.moments.held for held in moment.values() for each in held)
    waiting = [each for each in arrays if isinstance(each, Waiting)]
    assert waiting
    for each in waiting:
        assert each.bytes(p.costs, lists) == each.size / 8
        sums = sum(work.values[-1][1] for work in each.products)
        assert sums < each.size / 8


def test_what_is_gathered_for_the_forward_pass_is_there_for_the_backward_pass():
    def step(w, x):
        def loss(w):
            hidden = x
            for each in w:
                hidden = jax.nn.relu(hidden @ each)
            return (hidden**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    wide, layers = 512, 4
    args = [shape(wide, wide)] * layers, shape(64, wide)
    p = mw.plan(step, *args, on="v5e:2x4", mesh="fsdp:8", pipelines=False)
    rows, *widths = (p.groups.index(name) for name in ("batch", *set(p.groups) - {"batch"}))
    found = [each.bytes(p.costs, ((rows, *widths),)) for each in gathered_by(p)]
    in_bf16 = 2 * wide * wide
    assert set(found) <= {0.0, in_bf16}
    assert in_bf16 in found
    assert not gathered_by(mw.plan(step, *args, on="h100:8", mesh="fsdp:8", pipelines=False))


def gathered_by(plan):
    moments = plan.costs.moments.held
    arrays = (each for moment in moments for arrays in moment.values() for each in arrays)
    return [each for each in arrays if isinstance(each, Gathered)]


def test_a_tpu_computes_in_its_products_what_is_there_otherwise():
    def step(x, w, v):
        scores = x @ w
        chosen = jnp.exp(scores)
        return chosen @ v, scores @ v

    args = shape(8192, 256), shape(256, 256), shape(256, 8)
    array = 4 * 8192 * 256
    assert peak(step, *args) - peak(step, *args, family="tpu") == pytest.approx(array, rel=0.1)


def test_a_tpu_converts_the_stacked_weights_of_a_loop_before_it():
    def step(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w.astype(jnp.bfloat16), None), x, stack)[0]

    args = shape(256, 512, dtype=jnp.bfloat16), shape(16, 512, 512)
    more = peak(step, *args, family="tpu") - peak(step, *args)
    assert more == pytest.approx(2 * 16 * 512 * 512, rel=0.1)


def passing(function, *args):
    """For the worst moments, arrays that a TPU may keep on the chip, and with how many copies."""
    program = read_program(jax.make_jaxpr(function)(*args))
    kept = kept_values(program, "tpu")
    layout = find_groups(program).layout
    moments = live_sets(program, layout, kept, [False] * len(args), "tpu")
    return [(tuple(size for _, size in dims), n) for each in moments for dims, n in each.passing]


def test_a_tpu_keeps_on_the_chip_what_is_used_again_at_once():
    def step(x, w, between):
        hidden = x @ w
        for _ in range(between):
            x = x @ w
        return x + hidden

    x, w = shape(4096, 4096), shape(4096, 4096)
    soon = passing(lambda x, w: step(x, w, 1), x, w)
    late = passing(lambda x, w: step(x, w, 64), x, w)
    assert {copies for _, copies in soon} == {1.0}
    assert max(copies for _, copies in late) > 1.0  # of what waits for all products


def test_what_a_lookup_in_rows_needs_is_not_needed_at_other_moments():
    def loss(w, x, labels):
        logits = x @ w
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    args = shape(64, 8192), shape(16, 128, 64), shape(16, 128, dtype=jnp.int32)
    program = read_program(jax.make_jaxpr(jax.grad(loss))(*args))
    layout, kept = find_groups(program).layout, kept_values(program, "tpu")
    moments = live_sets(program, layout, kept, [False] * 3, "tpu")
    (lookup,) = (each for each in moments if each.during == "lookup")
    assert sum(lookup.live.values()) >= 4 * 16 * 128 * 8192
    assert any(each.during == "step" for each in moments)


def test_a_tpu_writes_images_that_are_seen_in_groups_of_channels():
    def net(w, x, groups):
        for each in w:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, each, (1, 1), "SAME", dimension_numbers=dims)
            image = x.reshape(*x.shape[:-1], groups, -1) if groups else x
            centered = image - image.mean((1, 2), keepdims=True)
            image = centered * jax.lax.rsqrt((centered**2).mean((1, 2), keepdims=True))
            x = jax.nn.relu(image.reshape(x.shape))
        return x.sum()

    def written(groups):
        w, x = [shape(3, 3, 32, 32)] * 4, shape(8, 32, 32, 32)
        program = read_program(jax.make_jaxpr(jax.grad(lambda w, x: net(w, x, groups)))(w, x))
        more = kept_values(program, "tpu") - kept_values(program)
        return [program.shapes[value] for value in more]

    assert set(written(4)) == {(8, 32, 32, 4, 8)}
    assert written(0) == []


def test_images_computed_in_another_dtype_than_that_of_the_convolutions_are_not_written():
    def net(w, x):
        for each in w:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, each, (1, 1), "SAME", dimension_numbers=dims)
            image = x.astype(jnp.float32).reshape(*x.shape[:-1], 4, -1)
            centered = image - image.mean((1, 2), keepdims=True)
            image = centered * jax.lax.rsqrt((centered**2).mean((1, 2), keepdims=True))
            x = jax.nn.relu(image.reshape(x.shape).astype(x.dtype))
        return x.astype(jnp.float32).sum()

    w, x = [shape(3, 3, 32, 32, dtype=jnp.bfloat16)] * 4, shape(8, 32, 32, 32, dtype=jnp.bfloat16)
    program = read_program(jax.make_jaxpr(jax.grad(net))(w, x))
    more = kept_values(program, "tpu") - kept_values(program)
    assert {program.dtypes[value] for value in more} <= {"bfloat16"}


def language_loss(w, x, labels, temperature=None):
    """Logits of all words but the last row's; scaled, if asked for."""
    logits = x @ w
    if temperature:
        logits = logits / temperature
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels)
    return losses.mean()


LANGUAGE = shape(64, 8192), shape(16, 128, 64), shape(16, 127, dtype=jnp.int32)
LOGITS = 4 * 16 * 128 * 8192


def test_nearly_all_of_a_product_is_made_as_that():
    program = read_program(jax.make_jaxpr(jax.grad(language_loss))(*LANGUAGE))
    slices = {value for value, maker in program.maker.items() if maker == "slice"}
    assert slices
    assert slices.isdisjoint(kept_values(program, "tpu"))
    half = read_program(
        jax.make_jaxpr(lambda x, w: jnp.exp((x @ w)[:4]) @ w)(shape(8, 8), shape(8, 8))
    )
    (value,) = (value for value, maker in half.maker.items() if maker == "slice")
    assert value not in kept_values(half, "tpu")  # it is computed where it is used


def test_what_the_loss_alone_looks_up_in_waits_for_the_gradient_of_it():
    gradient = jax.grad(language_loss, argnums=(0, 1))

    def scaled(w, x, labels):
        return jax.grad(lambda *args: language_loss(*args, 8.0), argnums=(0, 1))(w, x, labels)

    plain = peak(gradient, *LANGUAGE, family="tpu")
    late = peak(scaled, *LANGUAGE, family="tpu")
    assert late - plain == pytest.approx(LOGITS, rel=0.1)  # written for the lookup alone


@pytest.mark.parametrize(("mesh", "whole"), [("a:8", True), ("a:4, b:2", False)])
def test_a_tpu_adds_up_everywhere_what_it_looks_up_in_a_table_cut_over_the_whole_mesh(mesh, whole):
    def step(table, w, ids):
        rows = table[ids]
        x = rows
        for _ in range(2):
            x = jax.nn.relu(x @ w)
        return (x * rows).sum()

    args = shape(2**18, 64), shape(64, 64), shape(256, 128, dtype=jnp.int32)
    p = mw.plan(jax.grad(step), *args, on="v5e:2x4", mesh=mesh, pipelines=False)
    costs = p.costs
    sizes = costs.groups.sizes
    table = next(n for n, size in enumerate(sizes) if 2**18 in size)
    rows = next(n for n, size in enumerate(sizes) if 256 in size)
    lists = ((table, rows),) if whole else ((table, rows), (rows,))
    program, layout = costs.program, costs.groups.layout
    moments = live_sets(program, layout, kept_values(program, "tpu"), [False] * 3, "tpu")
    (dims, size, lookup), *_ = next(each.looked_up for each in moments if each.looked_up)
    held = LookedUp(dims, size, costs.work(lookup)).bytes(costs, lists)
    assert held == pytest.approx(size if whole else size / 8)
