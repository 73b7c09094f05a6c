"""A fault of XLA to report upstream: a partitioned convolution that computes other numbers.

    python tools/shardy_convolution.py

Plain JAX, no meshwright. Two convolutions, each behind a group norm, with kernels in the order
(out, in, height, width) on a mesh of 2 x 2 x 2 devices. Kernels cut by `P('fsdp', 'tp')`, so that
`tp` is on the input channels, give other results than one device does; `P('tp', 'fsdp')` does not,
and neither does anything with the Shardy partitioner switched off. Seen with jax 0.10.2 and
0.11.2, where they are 5.3 apart; no more with 0.12.0.1. The exit status is 1 where it shows.

`meshwright` by shape never chooses the first, and `meshwright.verify` finds it in any step.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SPECS = (P("fsdp", "tp"), P("tp", "fsdp"))


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


def difference(spec: P) -> float:
    """Return how far the results of one device and of eight are apart, at most."""
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2),
        ("dp", "fsdp", "tp"),
        axis_types=(AxisType.Auto,) * 3,
    )
    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(64, 64, 3, 3)).astype("float32") / 24 for _ in range(2)]
    x = rng.normal(size=(8, 64, 8, 8)).astype("float32")
    step = jax.vmap(net, (None, 0))
    expected = np.asarray(jax.jit(step)(kernels, x))
    cut = [jax.device_put(kernel, NamedSharding(mesh, spec)) for kernel in kernels]
    rows = jax.device_put(x, NamedSharding(mesh, P(("dp", "fsdp"))))
    return float(np.max(np.abs(np.asarray(jax.jit(step)(cut, rows)) - expected)))


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    apart = {spec: difference(spec) for spec in SPECS}
    for spec, largest in apart.items():
        print(f"jax {jax.__version__}: kernels {spec}: {largest:.2g} apart")
    return int(max(apart.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
