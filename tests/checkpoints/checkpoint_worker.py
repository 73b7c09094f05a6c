"""Saves checkpoints in processes of its own: killed at every step, or several saving as one."""

import itertools
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401  loaded once, here, for all that is forked
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.checkpoints import async_saves
from meshwright.checkpoints.checkpoint import restore_checkpoint, save_checkpoint
from meshwright.errors import PartitionError

STEPS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
WHOLE = np.sin(np.arange(4096, dtype=np.float32)).reshape(64, 64)


def tree(fill: int) -> dict:
    return {"w": np.full((16, 3), fill, np.float32), "step": fill}


def die_at(moment: int) -> None:
    """Kill this process just before the change to the disk that has this number."""
    count = itertools.count()

    def watched(step, original):
        def change(*arguments, **options):
            if next(count) == moment:
                print(step, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return change

    for step in STEPS:
        setattr(os, step, watched(step, getattr(os, step)))


def in_a_child(action) -> int:
    """The exit status of a fork that runs `action`, nothing of which comes back here."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at_every_step(folder: Path) -> None:
    """`folder/0`, `folder/1`, ...: a save over an old checkpoint, killed ever later."""
    assert in_a_child(lambda: save_checkpoint(folder / "before", tree(1))) == 0
    for moment in itertools.count():
        place = folder / str(moment) / "checkpoint"
        shutil.copytree(folder / "before", place)

        def save(moment=moment, place=place):
            die_at(moment)
            save_checkpoint(place, tree(2), overwrite=True)

        if in_a_child(save) == 0:
            return


def start(port: int, me: int, processes: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, processes, me, coordinator_bind_address=address, initialization_timeout=240
    )


def placed(mesh: Mesh, *axes: str | None) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback((64, 64), sharding, lambda index: WHOLE[index])


def refused(action, *arguments, **options) -> str:
    try:
        action(*arguments, **options)
    except PartitionError as error:
        return str(error)
    return "not refused"


def as_one(folder: Path) -> dict:
    """What this process sees of a checkpoint that all of them save and restore."""
    everything = np.array(jax.devices())
    rows = placed(Mesh(everything, ("dp",)), "dp")
    keys = jax.jit(lambda: jax.random.split(jax.random.key(1), 8), out_shardings=rows.sharding)()
    saved = {"w": rows, "key": keys, "n": np.arange(3, dtype=np.int32), "step": 7}
    place = folder / "checkpoint"
    save_checkpoint(place, saved)
    save_checkpoint(place, saved, overwrite=True)
    save_checkpoint(folder / "whole", {"w": rows})
    columns = NamedSharding(Mesh(everything.reshape(2, -1), ("a", "b")), PartitionSpec(None, "b"))
    whole = NamedSharding(columns.mesh, PartitionSpec())
    target = {
        "w": jax.ShapeDtypeStruct((64, 64), "float32", sharding=columns),
        "key": jax.ShapeDtypeStruct((8,), keys.dtype, sharding=whole),
        "n": jax.ShapeDtypeStruct((3,), "int32", sharding=whole),
        "step": 0,
    }
    back = restore_checkpoint(place, target)
    same = [
        bool(np.array_equal(shard.data, WHOLE[shard.index]))
        for shard in back["w"].addressable_shards
    ]
    report = {
        "same": same,
        "key": str(back["key"].dtype),
        "step": back["step"],
        "exists": refused(save_checkpoint, place, saved),
        "local": refused(save_checkpoint, place, {"w": jax.numpy.ones(3)}, overwrite=True),
    }
    local = {**target, "w": jax.numpy.ones((64, 64))}
    report["local target"] = refused(restore_checkpoint, place, local)
    # The second process alone: what it cannot do, all of them must hear of.
    shape = jax.ShapeDtypeStruct((64 + jax.process_index(), 64), "float32", sharding=whole)
    report["other target"] = refused(restore_checkpoint, place, {**target, "w": shape})
    if jax.process_index() == 0:
        damage(place)
    target["w"] = rows  # a piece for each device, so that one process alone meets the damage
    report["damaged"] = refused(restore_checkpoint, place, target)
    return {**report, **by_steps(folder / "steps", rows)}


def by_steps(folder: Path, rows: jax.Array) -> dict:
    """What this process sees of steps that are saved beside the loop, and resumed from."""
    add = jax.jit(lambda w: w + 1, donate_argnums=0)
    checkpoints = mw.Checkpoints(folder, keep=3)
    for step in range(1, 4):
        checkpoints.save(step, {"w": rows})
        rows = add(rows)
    checkpoints.wait()
    # The second half of a save fails in the second process alone.
    original = async_saves.shards_checksum
    if jax.process_index() == 1:
        async_saves.shards_checksum = lambda shards: 1 // 0
    checkpoints.save(4, {"w": rows})
    report = {"half": refused(checkpoints.wait), "steps": checkpoints.steps()}
    async_saves.shards_checksum = original
    # A directory that the second process sees as it was before the last save.
    stale = folder.with_name("stale")
    if jax.process_index() == 0:
        stale.mkdir()
        (stale / "step_2").symlink_to(folder / "step_2")
    checkpoints.save(5, {"w": rows})
    checkpoints.wait()
    seen = stale if jax.process_index() == 1 else folder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step, state, _ = mw.resume(seen, lambda: {"w": jnp.zeros((64, 64))}, mesh="fsdp:-1")
    report["resumed"] = step
    report["warned"] = [str(warning.message) for warning in caught]
    report["equal"] = all(
        bool(np.array_equal(shard.data, WHOLE[shard.index] + np.float32(1)))
        for shard in state["w"].addressable_shards
    )
    return report


def damage(place: Path) -> None:
    """Empty the largest file of the last process. (What a flipped bit shows as depends on where
    it falls.)"""
    file = max(
        place.glob("ocdbt.process_*/d/*"), key=lambda file: (file.parts[-3], file.stat().st_size)
    )
    file.write_bytes(b"")


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "kill":
        killed_at_every_step(folder)
    else:
        start(*map(int, sys.argv[3:]))
        print(json.dumps(as_one(folder)))
