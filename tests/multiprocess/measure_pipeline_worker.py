"""A pipeline's step that is measured by several processes, each with groups of its own.

python measure_pipeline_worker.py PORT ME PROCESSES DEVICES GROUPS [REFUSED]
REFUSED is the number of a process that cannot write its trace.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from joining import start, tell

import meshwright as mw


def loss(params, x):
    h = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def train(params, x):
    value, grads = mw.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def report():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(groups, -1), ("pp", "dp"))
    params = {name: 0.5 * np.eye(32, dtype="float32") for name in "ab"}
    step = mw.pipeline(train, mw.MpmdMesh(mesh, "pp"), microbatches=4, donate_argnums=0)
    options = {"trace": "/dev/null/here"} if me == refused else {}
    with step:
        if refused >= 0:
            return {"refused": refusal(step, params, options)}
        m = step.measure(params, np.ones((32, 32), "float32"), steps=2, progress=False)
        data = m.to_json()
    own = ("seconds", "fastest", "slowest", "traced", "overhead", "ratio")
    return {
        "same": {name: value for name, value in data.items() if name not in own},
        "value": float(m.results[1]),
    }


def refusal(step, params, options):
    try:
        step.measure(params, np.ones((32, 32), "float32"), progress=False, **options)
    except mw.errors.CalibrationError as error:
        return str(error)


if __name__ == "__main__":
    port, me, processes, devices, groups, *more = map(int, sys.argv[1:])
    [refused] = more or [-1]
    start(port, me, processes, devices)
    tell(report)
    os._exit(0)
