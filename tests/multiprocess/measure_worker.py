"""A step that is measured by several processes, one device of which is slow.

python measure_worker.py PORT ME PROCESSES DEVICES [INTERRUPTED [REFUSED]]
INTERRUPTED is the number of a process that gets Ctrl-C while `measure` traces the step, REFUSED of
one that cannot write its trace; -1 for none.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from joining import start, tell

import meshwright as mw
from meshwright import _progress

SLOW = 3  # of all devices


def report():
    mesh = mw.mesh("dp:-1")

    def body(x):
        if me == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

        def work(x):
            return jax.lax.fori_loop(0, 1500, lambda _, y: jnp.tanh(y @ y), x)

        x = jax.lax.cond(jax.lax.axis_index("dp") == SLOW, work, lambda x: x, x)
        return jax.lax.psum(x, "dp")

    spec = PartitionSpec("dp")
    step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    x = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))(
        (128 * mesh.size, 128)
    )
    try:
        trace = "/dev/null/here" if me == refused else None
        m = mw.measure(jax.jit(step), x, steps=4, trace=trace)
    except (mw.errors.CalibrationError, KeyboardInterrupt) as error:
        return {"ended": [type(error).__name__, str(error)]}
    return {
        "devices": [device.process for device in m.devices],
        "runs": [entry.runs for entry in m.collectives],
        "late": None if m.late is None else [m.late.position, m.late.process],
    }


if __name__ == "__main__":
    port, me, processes, devices, *more = map(int, sys.argv[1:])
    interrupted, refused = [*more, -1, -1][:2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    _progress._LINES = 0.05  # so that tests see what is going on
    start(port, me, processes, devices)
    tell(report)
