"""One process of several: groups, arrays in them and trees on the move, printed as JSON."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joining import start, tell
from shards import on, pattern, refused, wrong_values

import meshwright as mw


def whole(groups: int) -> Mesh:
    """All devices in their order; the first axis cuts them into groups of whole processes."""
    return Mesh(np.array(jax.devices()).reshape(groups, 2, -1), ("pp", "a", "b"))


def wrong(name: str, array: jax.Array, values: np.ndarray, at: Mesh) -> list[str]:
    """What is wrong with an array on a mesh, as far as this process sees it."""
    faults = []
    if (array.shape, array.dtype) != (values.shape, values.dtype) or array.sharding.mesh != at:
        faults.append(f"{name}: {array.dtype} {array.shape} {array.sharding}")
    here = {device for device in at.devices.flat if device.process_index == jax.process_index()}
    if {shard.device for shard in array.addressable_shards} != here:
        faults.append(f"{name}: shards on {[s.device for s in array.addressable_shards]}")
    return faults + [f"{name}: {fault}" for fault in wrong_values(array, values)]


def told(groups) -> dict:
    """What groups say in this process, and a program of its own in each."""
    mine = groups.my_mpmd_axis_index
    at = groups.lowering_mesh()
    split = NamedSharding(at, P(("a", "b")))
    x = jax.make_array_from_callback((8,), split, lambda index: np.arange(8.0)[index] + mine)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(at, P()))(x)
    return {
        "mine": mine,
        "same mesh": at is groups.my_mpmd_group_mesh is groups.unstack[mine],
        "processes": [
            sorted({d.process_index for d in part.devices.flat}) for part in groups.unstack
        ],
        "sum": float(total.addressable_data(0)),
        "shown": str(groups).splitlines()[1:],
    }


def arrays(groups) -> list[str]:
    """What this process has of arrays in some groups."""
    values, faults = pattern(1, (8, 4)), []
    mine = groups.my_mpmd_axis_index
    for ids in ([0], [1], [0, 1]):
        split = mw.MpmdSharding(groups, ids, P("a"))
        here = [on(values, groups.unstack[mine], P("a"))] if mine in ids else []
        array = mw.MpmdArray(here, split, shape=(8, 4), dtype="float32")
        held = mine in ids
        if (array.is_partially_addressable, array.local is None) != (held, not held):
            faults.append(f"{ids}: holds {array.is_partially_addressable}")
        if held and (array.local is not here[0] or split.local.mesh != groups.unstack[mine]):
            faults.append(f"{ids}: local {array.local}")
        faults += wrong(f"{ids} first", array.first, values, groups.unstack[ids[0]])
        note = "" if held else ", none of it in this process"
        if repr(array) != f"MpmdArray(f32[8@a,4] in {named(ids)} of 2{note})":
            faults.append(repr(array))
        array.block_until_ready().delete()
        if held and not array.local.is_deleted():
            faults.append(f"{ids}: not deleted")
    return faults


def named(ids: list[int]) -> str:
    return f"groups {ids[0]}, {ids[1]}" if len(ids) > 1 else f"group {ids[0]}"


def round_trip(groups, at: Mesh, spec: P, donate: bool) -> list[str]:
    """From one mesh into groups, on to other groups, and back."""
    where = {"first": 0, "last": 1, "both": {0, 1}, "host": {0, 1}, "key": 1, "n": 0, "wide": 1}
    values = {
        name: pattern(seed, (8, 16), dtype)
        for seed, (name, dtype) in enumerate(
            {"first": "float32", "last": "bfloat16", "both": "int8", "host": "float16"}.items()
        )
    }
    values["wide"] = pattern(9, (64, 1024, 4))
    tree = {name: on(value, at, spec) for name, value in values.items()} | {"host": values["host"]}
    key = pattern(7, (8, 2), "uint32")
    tree["key"] = jax.random.wrap_key_data(on(key, at, P(*spec[:1])))
    tree["n"] = "not an array"
    placed = mw.to_groups(tree, groups, where, donate=donate)
    faults = in_place("to", placed, values, groups, where)
    other = where | {"first": {0, 1}, "both": 1, "host": 0}
    moved = mw.to_groups(placed, groups, other, P(), donate=donate)
    faults += in_place("on", moved, values, groups, other)
    if not donate:
        faults += in_place("kept", placed, values, groups, where)
    specs = dict.fromkeys(values, spec) | {"key": P(*spec[:1]), "n": P()}
    back = mw.from_groups(moved, at, specs, donate=donate)
    for name, value in values.items():
        faults += wrong(f"back {name}", back[name], value, at)
    faults += wrong("back key", jax.random.key_data(back["key"]), key, at)
    live = [name for name in ("first", "both", "wide") if not tree[name].is_deleted()]
    if donate == bool(live):
        faults.append(f"donate={donate}, alive: {live}")
    return faults + ([] if back["n"] == "not an array" else ["n"])


def in_place(step: str, placed: dict, values: dict, groups, where: dict) -> list[str]:
    faults = []
    for name, value in values.items():
        array, ids = placed[name], where[name]
        if isinstance(ids, int):
            faults += wrong(f"{step} {name}", array, value, groups.unstack[ids])
            continue
        if not isinstance(array, mw.MpmdArray) or array.mesh_ids != tuple(sorted(ids)):
            faults.append(f"{step} {name}: {array!r}")
            continue
        for group in ids:
            faults += wrong(
                f"{step} {name} in {group}", array.on(group), value, groups.unstack[group]
            )
    return faults


def key_without_shards(groups) -> list[str]:
    """Keys that live in another process's group alone."""
    split = mw.MpmdSharding(groups, 1, P())
    key = pattern(7, (8, 2), "uint32")
    keys = jax.random.wrap_key_data(on(key, groups.unstack[1], P()))
    here = [keys] if groups.my_mpmd_axis_index == 1 else []
    array = mw.MpmdArray(here, split, shape=(8,), dtype=keys.dtype)
    back = mw.from_groups({"k": array}, groups.jax_mesh, P())
    return wrong("key", jax.random.key_data(back["k"]), key, groups.jax_mesh)


def refusals(groups, at: Mesh) -> dict[str, str]:
    me = jax.process_index()
    values = pattern(3, (8, 4))
    tree = {"good": on(values, at, P()), "gone": on(values, at, P())}
    if me == 0:
        tree["gone"].delete()
    torn = Mesh(np.array(jax.devices()).reshape(-1, 2).T, ("pp", "a"))
    return {
        "torn": refused(lambda: mw.MpmdMesh(torn, "pp")),
        "torn list": refused(
            lambda: mw.MeshGroups([Mesh(part, ("a",)) for part in np.asarray(torn.devices)])
        ),
        "outside": refused(
            lambda: groups.mpmd_submesh([1 - groups.my_mpmd_axis_index]).my_mpmd_axis_index
        ),
        "deleted": refused(lambda: mw.to_groups(tree, groups, {0, 1}, P())),
        "group": refused(lambda: mw.to_groups({"w": tree["good"]}, groups, 5, P())),
        "one bad": refused(lambda: mw.to_groups({"w": tree["good"]}, groups, 5 if me else 0, P())),
        "other group": refused(lambda: mw.to_groups({"w": tree["good"]}, groups, min(me, 1), P())),
        "missing": refused(
            lambda: mw.MpmdArray(
                [], mw.MpmdSharding(groups, [0, 1], P()), shape=(8, 4), dtype="f4"
            ).on(groups.my_mpmd_axis_index)
        ),
        "unsaid": refused(lambda: mw.MpmdArray([], mw.MpmdSharding(groups, not_mine(groups), P()))),
    }


def not_mine(groups) -> int:
    return 1 - groups.my_mpmd_axis_index


def report() -> dict:
    at = whole(2)
    cut = mw.MpmdMesh(at, "pp")
    half = at.devices[1].reshape(-1)
    unlike = mw.MeshGroups([cut.unstack[0], Mesh(half, ("b",))])
    found = {
        "told": told(cut),
        "alone": mw.MpmdMesh(Mesh(np.array(jax.local_devices()), ("pp",)), "pp").mpmd_dim,
        "unlike": [unlike.my_mpmd_axis_index, dict(unlike.lowering_mesh().shape)],
        "faults": {
            "arrays": arrays(cut),
            "there and back": round_trip(cut, at, P("pp"), donate=False),
            "donated": round_trip(cut, at, P(("a", "b")), donate=True),
            "unlike groups": round_trip(unlike, at, P(("pp", "b")), donate=False),
            "key without shards": key_without_shards(cut),
        },
        "refusals": refusals(cut, at),
    }
    # In step with the others after all refusals.
    found["faults"]["after"] = round_trip(cut, cut.unstack[1], P("a"), donate=False)
    return found


if __name__ == "__main__":
    start(*map(int, sys.argv[1:]))
    tell(report)
