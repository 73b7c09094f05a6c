"""A tour: a mesh on a pod nobody here has, and one on eight simulated devices that computes.

python examples/demo.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.cli import screen


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    print("1. A mesh on 256 TPU v5e chips: fully sharded data parallel, tensor parallel by 4\n")
    placed = mw.place("fsdp:-1, tp:4", "v5e:16x16")
    screen.show_placement(placed)
    print(
        "\n   Each group of 4 is a 2x2 ring of neighbours: twice the bandwidth of 4 in a row,\n"
        "   which is what is left of the torus axis if the mesh is simply reshaped.\n"
    )

    print("2. Two slices: the search keeps tensor parallelism off the slow network\n")
    print(mw.place("dp:2, fsdp:-1, tp:8", mw.topology("v5p:4x4x8", slices=2)))

    print("\n3. A mesh on eight simulated devices, and a sharded step on it\n")
    mesh = mw.mesh("dp:2, fsdp:2, tp:-1")
    print(mesh)
    loss, expected = train_step(mesh)
    print(f"   loss on 8 devices {loss:.6f}, on one device {expected:.6f}")
    if abs(loss - expected) > 1e-5 * abs(expected):
        raise SystemExit("the sharded step disagrees with the single-device one")

    print("\n4. What is asked for wrongly is said clearly\n")
    for request, hardware in (("fsdp:-1, tp:3", "v5e:16x16"), ("tp:8", "v5q:4x4")):
        try:
            mw.mesh(request, on=hardware)
        except mw.MeshwrightError as error:
            print(f"   {error}")


def train_step(mesh: jax.sharding.Mesh) -> tuple[float, float]:
    """One gradient step of a two-layer model, sharded over the mesh and on a single device."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (64, 256)) / 8,
        "down": jax.random.normal(keys[1], (256, 64)) / 16,
    }
    batch = jax.random.normal(keys[2], (32, 64))

    @jax.jit
    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    expected, _ = step(params, batch)
    specs = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}
    sharded = {
        name: jax.device_put(params[name], NamedSharding(mesh, specs[name])) for name in specs
    }
    value, after = step(sharded, jax.device_put(batch, NamedSharding(mesh, P(("dp", "fsdp")))))
    print(f"   up is {after['up'].sharding.spec} on {len(after['up'].sharding.device_set)} devices")
    return float(value), float(expected)


if __name__ == "__main__":
    main()
