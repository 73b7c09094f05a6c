"""One reference for every pipeline: the same function under one `jax.jit`, in a loop."""

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw


def groups(count):
    """So many groups of one device each."""
    return mw.MpmdMesh(mw.mesh(f"pp:{count}", devices=jax.devices()[:count]), "pp")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def layers(count, width=4):
    """Parameters of a small chain: {"w0": ..., "w1": ...}."""
    return {f"w{n}": normal(n, width, width) / width**0.5 for n in range(count)}


def batch(rows=8, width=4):
    return normal(100, rows, width), normal(101, rows, width)


def chain_loss(params, x, y):
    """One layer per stage, a stage end after each but the last."""
    *first, last = sorted(params)
    for name in first:
        x = mw.stage_end(jnp.tanh(x @ params[name]))
    return jnp.mean((x @ params[last] - y) ** 2)


def looped(fn, microbatches, *, has_aux=False, aux="stack", reduce="mean", carry=None):
    """`jax.value_and_grad(fn)` in a loop over microbatches: what a pipeline must equal."""
    pair = has_aux or carry is not None

    def run(params, *arguments):
        leaves, treedef = jax.tree.flatten(arguments)
        state = None if carry is None else arguments[carry - 1]
        whole = {n for n, leaf in enumerate(leaves) if not jnp.ndim(leaf)}
        rows = [None if n in whole else _cut(leaf, microbatches) for n, leaf in enumerate(leaves)]

        def one(state, rows):
            own = [leaves[n] if n in whole else row for n, row in enumerate(rows)]
            given = list(jax.tree.unflatten(treedef, own))
            if carry is not None:
                given[carry - 1] = state
            out, grads = jax.value_and_grad(fn, has_aux=pair)(params, *given)
            value, extra = out if pair else (out, None)
            if carry is not None:
                state, extra = extra if has_aux else (extra, None)
            return state, (value, extra, grads)

        state, (values, extra, grads) = jax.lax.scan(one, state, rows)
        value, grads = jax.tree.map(lambda x: _reduced(reduce, x), (values, grads))
        words = jax.tree.map(lambda _: aux, extra) if isinstance(aux, str) else aux
        extra = jax.tree.map(_reduced, words, extra)
        if carry is not None:
            extra = (state, extra) if has_aux else state
        return ((value, extra), grads) if pair else (value, grads)

    return run


def assert_close(actual, expected, rtol=1e-5):
    """Leaf by leaf the same kind, and the same values relative to the leaf's largest.

    What should be zero (the gradient of a bias before a batch norm) may be rounded.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    pairs = zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for path, a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        off, size = np.max(np.abs(a - b), initial=0), np.max(np.abs(b), initial=0)
        assert off <= rtol * size + 1e-6, f"{path}: off by {off} where the largest is {size}"


def assert_same_step(loss, params, *arguments, at, schedule="1f1b", microbatches=4, **options):
    """A pipeline of a loss function gives what the loop gives, and so again at a second call."""
    step = mw.pipeline(loss, at, schedule=schedule, microbatches=microbatches, **options)
    expected = jax.jit(looped(loss, microbatches, **options))(params, *arguments)
    assert_close(step(params, *arguments), expected)
    assert_close(step(params, *arguments), expected)
    return step


def _cut(x, microbatches):
    """In as many pieces as there are microbatches; state is not cut, but goes along unused."""
    if x.shape[0] % microbatches:
        return jnp.zeros(microbatches)
    return x.reshape(microbatches, -1, *x.shape[1:])


def _reduced(word, x):
    return x if word == "stack" else {"max": jnp.max, "mean": jnp.mean, "sum": jnp.sum}[word](x, 0)
