"""The same small model as a 1F1B pipeline of SpectraX, for `benchmarks/pipeline.py`.

Run by the Python of an environment where SpectraX is installed, with a jax that it works with
(`pip install spectrax-lib "jax==0.10.2"`). Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["LOGGING_LEVEL_ED"] = "ERROR"

import jax
import jax.numpy as jnp
import numpy as np
import spectrax as spx

LAYERS, GROUPS = 8, 4


def main() -> None:
    hidden, rows, microbatches, steps = map(int, sys.argv[1:5])
    rng = np.random.default_rng(0)
    scale = np.float32(np.sqrt(hidden))
    weights = [rng.normal(size=(hidden, hidden)).astype("float32") / scale for _ in range(LAYERS)]
    x = rng.normal(size=(rows * microbatches, hidden)).astype("float32")
    y = np.roll(x, 1, axis=1)
    mesh = spx.create_mesh(axis_dims=(GROUPS, 1, -1, 1, 1, 1), mpmd_axis="pp")
    where = [mesh.mpmd_mesh.sub_sharding(group) for group in range(GROUPS)]
    params = [
        jax.device_put((w, np.zeros(hidden, "float32")), where[n // 2])
        for n, w in enumerate(weights)
    ]

    @spx.sxjit(mesh=mesh, schedule=spx.Std1F1B(microbatches=microbatches), batch_argnums=(1, 2))
    def loss(params, x, y):  # type: ignore[no-untyped-def]
        for n, (w, b) in enumerate(params):
            x = jnp.tanh(x @ w + b)
            if n % 2 and n + 1 < LAYERS:
                x = spx.sxstage_iter(x)
        return jnp.mean((x - y) ** 2)

    step = spx.sxvalue_and_grad(loss)
    start = time.perf_counter()
    value, _ = jax.block_until_ready(step(params, x, y))
    first = time.perf_counter() - start
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        jax.block_until_ready(step(params, x, y))
        times.append(time.perf_counter() - start)
    found = {"first": first, "step": statistics.median(times[3:]), "value": float(value)}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
