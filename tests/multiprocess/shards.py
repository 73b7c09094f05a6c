"""Arrays with known values over meshes of several processes, and what is wrong with them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw


def mesh(places, *sizes: int, names: str = "ab") -> Mesh:
    devices = np.array(jax.devices())[list(places)]
    return Mesh(devices.reshape(sizes or -1), tuple(names[: max(1, len(sizes))]))


def pattern(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Any bits that the dtype knows, the same in every process."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize))
    if dtype == "int4":
        return (raw[..., 0] % 16 - 8).astype(np.int8).astype(jnp.int4)
    if dtype == "bool":
        return raw[..., 0] % 2 == 1
    return raw.astype(np.uint8).view(jnp.dtype(dtype))[..., 0]


def on(values: np.ndarray, at: Mesh, spec: P) -> jax.Array:
    with jax.enable_x64(True):
        return jax.make_array_from_callback(
            values.shape, NamedSharding(at, spec), lambda index: values[index], dtype=values.dtype
        )


def wrong(result: jax.Array, values: np.ndarray, at: Mesh, spec: P) -> list[str]:
    """What is wrong with the shards of this process."""
    faults = []
    if result.dtype != values.dtype or result.sharding != NamedSharding(at, spec):
        faults.append(f"{result.dtype} {result.sharding}")
    here = [device for device in at.devices.flat if device.process_index == jax.process_index()]
    if [shard.device for shard in result.addressable_shards] != here:
        faults.append(f"devices {[shard.device for shard in result.addressable_shards]}")
    return faults + wrong_values(result, values)


def wrong_values(array: jax.Array, values: np.ndarray) -> list[str]:
    return [
        f"values on {shard.device}"
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes() != values[shard.index].tobytes()
    ]


def refused(act) -> str:
    """The message of our own error; anything else ends the process."""
    try:
        act()
    except mw.errors.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
