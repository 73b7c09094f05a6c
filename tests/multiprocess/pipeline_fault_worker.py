"""One process of a pipeline in which another goes wrong at its third step."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from joining import start

import meshwright as mw


def loss(params, x):
    h = mw.stage(jnp.tanh(x @ params["a"]))
    return jnp.mean((h @ params["b"]) ** 2)


def go_wrong(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise ValueError("the data loader broke")
    if fault == "hang":
        time.sleep(60)


def main() -> None:
    port, me, processes, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    start(port, me, processes, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(processes, 1), ("pp", "dp"))
    params = {"a": np.eye(4, dtype="float32"), "b": np.eye(4, dtype="float32")}
    with mw.pipeline(loss, mw.MpmdMesh(mesh, "pp"), microbatches=2, limit=2.0) as step:
        for n in range(100):
            value, _ = step(params, np.ones((4, 4), "float32"))
            print(n, float(value), flush=True)
            if n == 2 and me == 1:
                print("now", time.time(), flush=True)
                go_wrong(fault)
            time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    main()
