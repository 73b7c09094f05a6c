"""A fault of XLA to report upstream: a partitioned convolution that computes other numbers.

    python tools/shardy_convolution.py

Plain JAX, no meshwright. Two convolutions, each behind a group norm, with kernels in the order
(out, in, height, width) on a mesh of 2 x 2 x 2 devices. There are two faults:

- Kernels cut by `P('fsdp', 'tp')`, so that `tp` is on the input channels, give other results than
  one device does, with the Shardy partitioner alone. Seen with jax 0.10.2 and 0.11.2, where they
  are 5.3 apart; in this net no more with 0.12.0.1.
- Kernels cut by `P('tp', 'fsdp')` give the right results and wrong gradients, with jax 0.10.2 and
  0.12.0.1, and with either partitioner.

`P(('tp', 'fsdp'))`, both axes on the output channels, is right. The exit status is 1 where a fault
shows. `meshwright` by shape chooses the last where the axes divide the output channels, and
`meshwright.verify` finds both faults in any step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPECS = (P("fsdp", "tp"), P("tp", "fsdp"), P(("tp", "fsdp")))


def group_norm(x: jax.Array, groups: int = 8) -> jax.Array:
    """Normalise (channels, height, width) by groups of channels."""
    parts = x.reshape(groups, -1)
    parts = (parts - parts.mean(1, keepdims=True)) / jnp.sqrt(parts.var(1, keepdims=True) + 1e-5)
    return parts.reshape(x.shape)


def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME")[0]


def net(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = convolution(group_norm(x), kernel)
    return x


def gradients(kernels: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Return those of a sum of squares with respect to the kernels."""
    return jax.grad(lambda kernels: jnp.sum(jax.vmap(net, (None, 0))(kernels, x) ** 2))(kernels)


def results(kernels: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    return [jax.vmap(net, (None, 0))(kernels, x)]


def difference(spec: P, step: Callable[..., list[jax.Array]] = results) -> float:
    """Return how far one device and eight are apart, as part of the largest value."""
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2),
        ("dp", "fsdp", "tp"),
        axis_types=(AxisType.Auto,) * 3,
    )
    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(64, 64, 3, 3)).astype("float32") / 24 for _ in range(2)]
    x = rng.normal(size=(8, 64, 8, 8)).astype("float32")
    expected = jax.device_get(jax.jit(step)(kernels, x))
    cut = [jax.device_put(kernel, NamedSharding(mesh, spec)) for kernel in kernels]
    rows = jax.device_put(x, NamedSharding(mesh, P(("dp", "fsdp"))))
    sharded = jax.device_get(jax.jit(step)(cut, rows))
    pairs = zip(sharded, expected, strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


STEPS = (results, gradients)


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    apart = {(spec, step): difference(spec, step) for spec in SPECS for step in STEPS}
    for (spec, step), largest in apart.items():
        print(f"jax {jax.__version__}: kernels {spec}: {step.__name__} {largest:.1g} apart")
    return int(max(apart.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
