"""Which dims are cut together, found in the jaxpr alone."""

import itertools

import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright.planning.dim_groups import WHOLE, find_groups
from meshwright.planning.traced_program import read_program


def groups_of(fn, *shapes):
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    program = read_program(closed)
    return program, find_groups(program)


def kinds(program, groups, argument):
    return [kind for kind, _ in groups.layout[program.arguments[argument]]]


def test_a_product_has_three_groups():
    program, groups = groups_of(lambda x, w: x @ w, (64, 32), (32, 16))
    (b, k), (also_k, n) = kinds(program, groups, 0), kinds(program, groups, 1)
    assert k == also_k
    assert len({b, k, n}) == 3


def test_rows_go_through_a_chain_of_layers():
    def fn(x, w1, w2):
        return jax.nn.relu(x @ w1) @ w2

    program, groups = groups_of(fn, (64, 32), (32, 128), (128, 8))
    assert kinds(program, groups, 1)[1] == kinds(program, groups, 2)[0]
    result = groups.layout[program.results[0]]
    assert result[0][0] == kinds(program, groups, 0)[0]


def test_equal_layers_are_one_kind_and_others_are_not():
    def fn(x, first, second, head):
        for up, down in (first, second):
            x = x + jax.nn.relu(x @ up) @ down
        return x @ head

    wide = jax.ShapeDtypeStruct((32, 128), "float32"), jax.ShapeDtypeStruct((128, 32), "float32")
    x = jax.ShapeDtypeStruct((64, 32), "float32")
    head = jax.ShapeDtypeStruct((32, 256), "float32")
    program = read_program(jax.make_jaxpr(fn)(x, wide, wide, head))
    groups = find_groups(program)
    assert kinds(program, groups, 1)[1] == kinds(program, groups, 3)[1] != WHOLE
    assert kinds(program, groups, 5)[1] != kinds(program, groups, 1)[1]


def test_the_dim_a_loop_goes_along_stays_whole():
    def fn(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    program, groups = groups_of(fn, (64, 32), (4, 32, 32))
    assert kinds(program, groups, 1)[0] == WHOLE
    assert kinds(program, groups, 0)[0] != WHOLE


def self_attention(x, w):
    scores = jnp.where(jnp.tri(64, dtype=bool), (x @ w) @ x.T, -jnp.inf)
    return jax.nn.softmax(scores) @ x


def test_keys_of_scores_are_whole_and_queries_a_kind_by_themselves():
    program, groups = groups_of(self_attention, (64, 32), (32, 32))
    (rows, _) = kinds(program, groups, 0)
    ((queries, same),) = groups.queries.items()
    assert same == rows != queries
    scores = [value for value, shape in enumerate(program.shapes) if shape == (64, 64)]
    assert {groups.layout[value] for value in scores} == {((queries, 64), (WHOLE, 64))}
    assert groups.layout[program.results[0]][0] == (rows, 64)
    assert groups.sizes[queries] == (64,)


def test_queries_are_followed_backward_through_transposes():
    step = jax.grad(lambda x, w: self_attention(x, w).sum(), argnums=(0, 1))
    program, groups = groups_of(step, (64, 32), (32, 32))
    ((queries, rows),) = groups.queries.items()
    sums = []
    for operation in program.operations:
        if operation.primitive != "dot_general":
            continue
        for dim in operation.dims:
            at = [(operation.values[w], d) for w, d in dim.at]
            if any(program.shapes[value] == (64, 64) for value, _ in at):
                sums.append((dim.kind, groups.of_loop(at)))
    # Scores are made with queries, and used along whole keys; gradients of keys and values are
    # sums over queries.
    assert sorted(sums) == sorted(
        [("free", queries), ("free", WHOLE)] * 2  # scores, and their gradient
        + [("sum", WHOLE), ("free", queries)] * 2  # what is returned, and the queries' gradient
        + [("sum", queries), ("free", WHOLE)] * 2  # gradients of values and of keys
    )
    assert groups.layout[program.results[0]][0][0] == rows


def test_rows_that_meet_themselves_both_ways_are_left_whole():
    def both_ways(x):
        near = x @ x.T
        return jnp.exp(near + near.T) @ x

    program, groups = groups_of(both_ways, (64, 32))
    assert not groups.queries
    scores = [value for value, shape in enumerate(program.shapes) if shape == (64, 64)]
    assert {kind for value in scores for kind, _ in groups.layout[value]} == {WHOLE}


def test_groups_of_a_model_have_names():
    tiny = mw.models.model("tiny")
    p = mw.plan(tiny.train_step, tiny.shapes(), tiny.batch(64), on="v5e:2x4", donate_argnums=0)
    assert {"batch", "seq", "embed"} <= set(p.groups)
    assert len(set(p.groups)) == len(p.groups)


def chain(x, weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def chained(widths):
    shapes = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)]
    x = jax.ShapeDtypeStruct((64, widths[0]), "float32")
    program = read_program(jax.make_jaxpr(chain)(x, shapes))
    return program, find_groups(program, data=program.arguments[:1], most=4)


def test_weights_without_a_dim_in_common_are_listed_as_one():
    widths = [8 * n for n in range(4, 15)]
    program, groups = chained(widths)
    assert groups.every == groups.count - 1 == 4
    assert groups.sizes[groups.every] == tuple(widths[1:])
    # All but the first kinds have no number of their own, and are cut with the others alone.
    assert sum(kind < WHOLE for kind in groups.weights) == len(groups.weights) - 3 > 0
    for value in program.arguments[1:]:
        assert groups.layout[value][1][0] in groups.weights


def test_weights_with_a_dim_in_common_are_not():
    def blocks(x, weights):
        for up, down in weights:
            x = x + jnp.tanh(x @ up) @ down
        return x

    shapes = [
        [jax.ShapeDtypeStruct(pair, "float32") for pair in ((32, n), (n, 32))] for n in (64, 96)
    ]
    x = jax.ShapeDtypeStruct((64, 16, 32), "float32")
    program = read_program(jax.make_jaxpr(blocks)(x, shapes))
    groups = find_groups(program, data=program.arguments[:1])
    assert groups.every == WHOLE and groups.weights == ()


def test_spatial_dims_of_convolutions_are_not_cut():
    # With patches of an image cut along their rows, and channels by another axis, XLA computes
    # other numbers; with the window cut, too.
    def patches(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (4, 4), "VALID")

    program, groups = groups_of(patches, (8, 4, 32, 32), (64, 4, 4, 4))
    assert kinds(program, groups, 0)[2:] == [WHOLE, WHOLE]
    assert kinds(program, groups, 1)[2:] == [WHOLE, WHOLE]
    assert WHOLE not in kinds(program, groups, 0)[:2] + kinds(program, groups, 1)[:2]
