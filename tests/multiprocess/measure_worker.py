"""A step that is measured by several processes, one device of which is slow.

python measure_worker.py PORT ME PROCESSES DEVICES
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from joining import start, tell

import meshwright as mw

SLOW = 3  # of all devices


def report():
    mesh = mw.mesh("dp:-1")

    def body(x):
        def work(x):
            return jax.lax.fori_loop(0, 1500, lambda _, y: jnp.tanh(y @ y), x)

        x = jax.lax.cond(jax.lax.axis_index("dp") == SLOW, work, lambda x: x, x)
        return jax.lax.psum(x, "dp")

    spec = PartitionSpec("dp")
    step = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    x = jax.jit(jnp.ones, static_argnums=0, out_shardings=NamedSharding(mesh, spec))(
        (128 * mesh.size, 128)
    )
    m = mw.measure(jax.jit(step), x, steps=4)
    return {
        "devices": [device.process for device in m.devices],
        "runs": [entry.runs for entry in m.collectives],
        "late": None if m.late is None else [m.late.position, m.late.process],
    }


if __name__ == "__main__":
    port, me, processes, devices = map(int, sys.argv[1:])
    start(port, me, processes, devices)
    tell(report)
