"""One process of several: places trees and batches, prints what it holds of them as JSON."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joining import start, tell
from worker import refused

import meshwright as mw

BATCH = 64
GLOBAL = np.arange(BATCH * 4, dtype=np.float32).reshape(BATCH, 4)


@functools.cache
def summing(mesh: Mesh):
    whole = NamedSharding(mesh, P())
    return jax.jit(lambda x: jnp.sum(x.astype(jnp.float32)), out_shardings=whole)


def total(array) -> float:
    """The sum, computed by all processes together."""
    return float(summing(array.sharding.mesh)(array))


def held(array, values) -> dict:
    """This process's shards: how many, how large, and whether they are the right values."""
    shards = array.addressable_shards
    return {
        "spec": str(array.sharding.spec),
        "dtype": str(array.dtype),
        "shards": len(shards),
        "bytes": sum(shard.data.nbytes for shard in shards),
        "right": all(np.array_equal(shard.data, values[shard.index]) for shard in shards),
        "sum": total(array) if shards else None,
    }


def meshes(processes: int, devices: int) -> dict[str, Mesh]:
    """Meshes by hand: which processes share rows does not depend on any search."""
    grid = np.array(jax.devices()).reshape(processes, devices)
    pairs = max(1, processes // 2)
    return {
        "own rows": Mesh(grid, ("dp", "tp")),
        "rows over all": Mesh(grid.reshape(-1), ("fsdp",)),
        "same rows": Mesh(grid.reshape(1, -1), ("dp", "tp")),
        "rows shared by two": Mesh(grid.reshape(pairs, -1), ("dp", "tp")),
        "tp crosses": Mesh(grid, ("tp", "dp")),
        "dp and fsdp": Mesh(grid, ("dp", "fsdp")),
    }


def batches(mesh: Mesh) -> dict:
    """A global batch assembled from what `data_shard` says each process must load."""
    part = mw.data_shard(mesh)
    spec = P(tuple(name for name in mesh.axis_names if name != "tp"))
    mine = GLOBAL[part.rows(BATCH)]
    by_jax = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), mine)
    by_us = mw.shard({"x": mine, "y": mine + 1}, mesh, spec, local=True)
    return {
        "part": [part.index, part.count],
        "asked": [
            [p.index, p.count]
            for p in (
                mw.data_shard(mesh, process=process) for process in range(jax.process_count())
            )
        ],
        "by jax": held(by_jax, GLOBAL),
        "by us": held(by_us["x"], GLOBAL),
        "shape": by_us["y"].shape,
        "second": total(by_us["y"]),
    }


def uneven(processes: int, devices: int) -> list[str]:
    """Meshes whose rows do not fall into equal parts per process."""
    grid = np.array(jax.devices()).reshape(processes, devices)
    turned = Mesh(grid.T.reshape(-1), ("dp",))
    lopsided = Mesh(grid.reshape(-1)[: processes * devices - 1], ("dp",))
    return [refused(mw.data_shard, mesh) for mesh in (turned, lopsided)]


def placed(mesh: Mesh) -> dict:
    """The same host arrays in every process, of every kind."""
    asked = []

    def part(index):
        asked.append(
            [side.indices(size)[:2] for side, size in zip(index, GLOBAL.shape, strict=True)]
        )
        return GLOBAL[index]

    axes = P(mesh.axis_names)
    keys = jax.random.split(jax.random.key(5), BATCH)
    tree = {
        "host": GLOBAL,
        "device": jnp.asarray(GLOBAL),
        "bf16": GLOBAL.astype(jnp.bfloat16),
        "int4": (GLOBAL % 7).astype(jnp.int4),
        "callback": mw.FromCallback(GLOBAL.shape, "float32", part),
        "scalar": np.float32(3),
        "key": keys,
        "note": "x",
    }
    specs = dict.fromkeys(tree, axes) | {"scalar": P(), "note": "x"}
    result = mw.shard(tree, mesh, specs)
    report = {
        key: held(result[key], tree[key]) for key in ("host", "device", "bf16", "int4", "scalar")
    }
    report["callback"] = held(result["callback"], GLOBAL)
    own = {
        str([side.indices(size)[:2] for side, size in zip(index, GLOBAL.shape, strict=True)])
        for device, index in result["host"].sharding.devices_indices_map(GLOBAL.shape).items()
        if device.process_index == jax.process_index()
    }
    report["asked for own pieces"] = {str(piece) for piece in asked} == own
    report["keys"] = all(
        np.array_equal(jax.random.key_data(s.data), jax.random.key_data(keys)[s.index])
        for s in result["key"].addressable_shards
    )
    narrowed = mw.shard({"w": GLOBAL.astype("float64")}, mesh, axes, narrow="convert")["w"]
    report["narrowed"] = held(narrowed, GLOBAL)
    return report


def elsewhere(processes: int, devices: int) -> dict:
    """A mesh of process 0 alone: the others hold nothing of it, and say so."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    array = mw.shard({"w": GLOBAL}, mesh, P("fsdp"))["w"]
    return {
        "shape": array.shape,
        "dtype": str(array.dtype),
        "shards": len(array.addressable_shards),
        "load": "some" if jax.process_index() == 0 else refused(mw.data_shard, mesh),
    }


def wrong(mesh: Mesh) -> list[str]:
    tree = {"a": np.ones((6, 5), np.float32), "b": [GLOBAL], "c": np.ones(8)}
    good = {"a": P(), "b": [P()], "c": P()}
    return [
        refused(mw.shard, {"a": tree["a"], "b": tree["b"]}, mesh, P(mesh.axis_names[0], "nope")),
        refused(mw.shard, tree, mesh, good),
        refused(mw.shard, tree, mesh, {"a": P()}, narrow="convert"),
        refused(mw.shard, {"a": GLOBAL}, mesh, P("nope"), local=True),
        refused(mw.partition, tree, mesh, rules=[("a", "nope")]),
        refused(mw.init, lambda: jnp.ones((7, 7)), mesh=mesh, specs=P(mesh.axis_names)),
    ]


def initialised(mesh: Mesh) -> dict:
    def fn(key):
        return {"w": jax.random.normal(key, (BATCH, 32))}

    made = mw.init(fn, jax.random.key(2), mesh=mesh, specs=P(mesh.axis_names))
    plain = np.asarray(jax.jit(fn)(jax.random.key(2))["w"])
    state = mw.shard_like({"mu": {"w": np.zeros((BATCH, 32), np.float32)}, "n": np.int32(1)}, made)
    return {
        "w": held(made["w"], plain),
        "mu": held(state["mu"]["w"], np.zeros((BATCH, 32))),
        "beside": state["mu"]["w"].sharding == made["w"].sharding,
        "n": held(state["n"], np.array(1)),
    }


def report(processes: int, devices: int) -> dict:
    every = meshes(processes, devices)
    return {
        "batches": {name: batches(mesh) for name, mesh in every.items()},
        "uneven": uneven(processes, devices),
        "placed": {name: placed(every[name]) for name in ("own rows", "rows over all")},
        "wrong": wrong(every["own rows"]),
        # Work in step with the others shows that the refusals left nobody waiting.
        "initialised": initialised(every["own rows"]),
        "elsewhere": elsewhere(processes, devices),
    }


if __name__ == "__main__":
    port, me, processes, devices = map(int, sys.argv[1:])
    start(port, me, processes, devices)
    tell(lambda: report(processes, devices))
