"""Microseconds that a watchdog adds to a step of the train loop.

    python benchmarks/watchdog.py

The step does nothing, so what is measured is the wrapper; the best of several runs. The watchdog's
own threads run meanwhile.
"""

from __future__ import annotations

import os
import timeit

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import meshwright as mw

CALLS, RUNS = 2_000, 20
PARAMS = {f"layer {i}": jnp.zeros((4, 4)) for i in range(100)}


def step(params: object) -> object:
    return params


def microseconds(call) -> float:
    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS


def main() -> None:
    bare = microseconds(lambda: step(PARAMS))
    print(f"{'added to a step':44}{'us':>8}")
    with mw.Watchdog() as watch:
        wrapped = watch.wrap(step)
        print(f"{'step = watch.wrap(step)':44}{microseconds(lambda: wrapped(PARAMS)) - bare:8.2f}")

        def number() -> None:
            watch.step = 1

        print(f"{'watch.step = i':44}{microseconds(number):8.2f}")
    with mw.Watchdog(check_steps=True) as watch:
        checked = watch.wrap(step)
        us = microseconds(lambda: checked(PARAMS)) - bare
        print(f"{'wrap, check_steps=True, 100 arrays':44}{us:8.2f}")


if __name__ == "__main__":
    main()
