"""One process of a pipeline in which process 1 goes wrong after its third step, or at once."""

import contextlib
import json
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from joining import start

import meshwright as mw
from meshwright import _compat

STEPS, LAST = 6, 2
LONG = 60
PARAMS = {"a": np.eye(4, dtype="float32"), "b": np.eye(4, dtype="float32")}


def loss(params, x):
    h = mw.stage_end(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def other_loss(params, x):
    h = mw.stage_end(jnp.sin(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def go_wrong(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if "raise" in fault:
        raise ValueError("the data loader broke")
    if fault == "hang":
        time.sleep(LONG)


def until_the_other_waits() -> None:
    """Process 0 is in the next step and waits, this one is outside, and both have said so."""
    room, client = "meshwright/watch/pipeline/0", _compat.coordination_client()
    for _ in range(1000 * LONG):
        states = dict(client.key_value_dir_get(room))
        other, own = (json.loads(states[f"{room}/{key}"]) for key in ("news/0", "states/1"))
        if (other["step"], own["step"], own["doing"]) == (LAST + 1, LAST, "") and other["waiting"]:
            return
        time.sleep(0.001)


def train(step, evaluate, fault: str) -> None:
    params, rows = PARAMS, 4
    for n in range(STEPS):
        value, _ = step(params, np.ones((rows, 4), "float32"))
        jax.block_until_ready(value)
        if n == LAST and fault:
            until_the_other_waits()
            print(time.time(), flush=True)
            go_wrong(fault)
            if "leave" in fault:
                return
            if fault == "shape":
                rows = 8
            if fault == "timeline":
                step.timeline(params, np.ones((rows, 4), "float32"))
            if fault == "order":
                evaluate(params, np.ones((rows, 4), "float32"))


def goes_on(step, evaluate) -> None:
    """What is no fault: results as arguments, another batch, an error that all have caught."""
    rows = np.ones((4, 4), "float32")
    value, grads = step(PARAMS, rows)
    evaluate(grads, rows)
    step(grads, np.ones((8, 4), "float32"))
    with contextlib.suppress(mw.errors.PipelineError):
        step(PARAMS, np.ones((5, 4), "float32"))
    again, _ = step(PARAMS, rows)
    assert float(again) == float(value)


def main() -> None:
    port, me, processes, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    start(port, me, processes, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(processes, 1), ("pp", "dp"))
    own_fault = fault if me == 1 and fault != "goes on" else ""
    fn = other_loss if own_fault == "program" else loss
    if own_fault == "program":
        print(time.time(), flush=True)
    limit = 2.0 if fault == "hang" else LONG
    groups = mw.MpmdMesh(mesh, "pp")
    step = mw.pipeline(fn, groups, microbatches=2, timeout=limit)
    evaluate = mw.pipeline(loss, groups, schedule="forward", microbatches=2)
    if own_fault == "values":
        print(time.time(), flush=True)
    if fault == "values":
        step(PARAMS, np.full((4, 4), me, "float32"))
    if fault == "goes on":
        print(time.time(), flush=True)
        goes_on(step, evaluate)
    with contextlib.nullcontext() if "bare" in fault else evaluate:
        with contextlib.nullcontext() if "bare" in fault else step:
            train(step, evaluate, own_fault)
    if "bare" not in fault:
        os._exit(0)


if __name__ == "__main__":
    main()
