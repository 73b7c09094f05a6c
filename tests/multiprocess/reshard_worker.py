"""One process of several: moves arrays between meshes, prints what came out as JSON."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joining import start, tell
from shards import mesh, on, pattern, refused, wrong, wrong_values

import meshwright as mw

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "uint8", "complex64")
SHAPE = (8, 16)


def layouts() -> dict[str, tuple[Mesh, P, Mesh, P]]:
    """From and to. Devices 0 to 3 are process 0's, 4 to 7 process 1's."""
    first, last, everything = mesh(range(4)), mesh(range(4, 8)), mesh(range(8))
    order = (6, 1, 4, 3, 2, 5, 0, 7)
    return {
        "1 same split": (first, P("a"), last, P("a")),
        "2 other names": (first, P("a"), mesh(range(4, 8), names="z"), P("z")),
        "3 other order": (everything, P("a"), mesh(order), P("a")),
        "4 all, 4x2 to 2x4": (mesh(range(8), 4, 2), P("a", "b"), mesh(range(8), 2, 4), P("b", "a")),
        "5 transposed split": (first, P("a"), last, P(None, "a")),
        "6 four shards to two": (first, P("a"), mesh((5, 6)), P("a")),
        "7 sharded to replicated": (first, P("a"), last, P()),
        "8 all to process 1": (everything, P("a"), last, P("a")),
        "9 process 0 to all": (first, P("a"), everything, P("a")),
        "10 one of each to another": (mesh((0, 4)), P("a"), mesh((1, 5)), P("a")),
        "11 one of each, swapped": (mesh((0, 4)), P("a"), mesh((5, 1)), P("a")),
        "12 back again": (last, P(None, "a"), first, P("a")),
        "13 one to one": (mesh((2,)), P(), mesh((7,)), P()),
        "14 replicated to split": (everything, P(), mesh((7, 0, 5, 2)), P(None, "a")),
        "15 uneven crowd": (mesh((0, 1, 2, 4, 5, 6, 7, 3), 2, 4), P("b"), mesh((3, 6)), P("a")),
        "16 other grid": (mesh((1, 6, 3, 4), 2, 2), P("a", "b"), mesh((2, 7, 5, 0)), P("a")),
    }


def moved(source: Mesh, source_spec: P, target: Mesh, spec: P, donate: bool) -> list[str]:
    """All dtypes, a key, arrays without elements and a scalar in one tree."""
    values = {name: pattern(seed, SHAPE, name) for seed, name in enumerate(DTYPES)}
    values |= {"empty": np.zeros((0, 16), np.float32), "big": pattern(9, (96, 32, 3), "float16")}
    tree = {name: on(value, source, source_spec) for name, value in values.items()}
    key = pattern(3, (8, 2), "uint32")
    whole = P(*source_spec[:1])
    tree["key"] = jax.random.wrap_key_data(on(key, source, whole))
    tree["scalar"] = on(np.asarray(np.float32(-0.0)), source, P())
    tree["name"] = "not an array"
    specs = dict.fromkeys(values, spec) | {"key": P(*spec[:1]), "scalar": P(), "name": P()}
    result = mw.reshard(tree, target, specs, donate=donate)
    faults = [
        f"{name}: {fault}"
        for name, value in values.items()
        for fault in wrong(result[name], value, target, spec)
    ]
    data = jax.random.key_data(result["key"])
    faults += [f"key: {fault}" for fault in wrong_values(data, key)]
    scalar = wrong_values(result["scalar"], np.asarray(np.float32(-0.0)))
    faults += [f"scalar: {fault}" for fault in scalar]
    faults += [] if result["name"] == "not an array" else ["name"]
    kept = [name for name, value in values.items() if value.size and not tree[name].is_deleted()]
    held = source.devices.flat[0].process_index == jax.process_index() and len(source.devices) == 4
    if not donate:
        faults += [
            f"source {name}: {fault}"
            for name, value in values.items()
            for fault in wrong_values(tree[name], value)
        ]
    elif held and kept:
        faults.append(f"not given up: {kept}")
    return faults


def large() -> list[str]:
    """Messages longer than one load, from several holders to several receivers."""
    values = pattern(5, (1024, 1024, 12), "float32")
    at, spec = mesh((0, 5, 1, 4), 2, 2), P(None, ("b", "a"))
    array = on(values, mesh(range(4), 2, 2), P("a", "b"))
    return wrong(mw.reshard(array, at, spec, donate=True), values, at, spec)


def from_hosts() -> list[str]:
    """Host arrays and uncommitted ones, which every process has whole."""
    values = pattern(1, SHAPE, "float32")
    at, spec = mesh(range(8), 4, 2), P("b", "a")
    result = mw.reshard({"host": values, "loose": jnp.asarray(values)}, at, spec)
    return [fault for array in result.values() for fault in wrong(array, values, at, spec)]


def stand_ins() -> list[str]:
    """A shape with its sharding, in the process that holds nothing of the array."""
    values, source = pattern(2, SHAPE, "float32"), mesh(range(4))
    key = pattern(3, (8, 2), "uint32")
    tree = {"x": on(values, source, P("a")), "key": jax.random.wrap_key_data(on(key, source, P()))}
    if jax.process_index() == 1:
        tree = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in tree.items()
        }
    at = mesh((6, 2, 7))
    result = mw.reshard(tree, at, P())
    return wrong(result["x"], values, at, P()) + wrong_values(
        jax.random.key_data(result["key"]), key
    )


def alone() -> list[str]:
    """A move inside one process needs no other, whichever way it takes."""
    if jax.process_index() == 1:
        return []
    values = pattern(4, (512, 64), "float32")
    array = on(values, mesh(range(4)), P("a"))
    faults = []
    for at, spec in (
        (mesh((1, 2)), P(None, "a")),
        (mesh((3, 2, 1, 0)), P("a")),
        (mesh((2,)), P()),
    ):
        for source in (array, on(values, mesh((0, 3)), P()), values[:8]):
            faults += wrong(mw.reshard(source, at, spec), values[: source.shape[0]], at, spec)
    return faults


def under_a_mesh() -> list[str]:
    """A mesh that the caller has set changes nothing."""
    values = pattern(6, SHAPE, "float32")
    at = mesh(range(4, 8))
    with jax.set_mesh(mesh(range(8), 2, 4)):
        result = mw.reshard(on(values, mesh(range(4)), P("a")), at, P(None, "a"))
    return wrong(result, values, at, P(None, "a"))


def refusals() -> dict[str, str]:
    me = jax.process_index()
    values = pattern(7, SHAPE, "float32")
    first, last, everything = mesh(range(4)), mesh(range(4, 8)), mesh(range(8))
    tree = {"good": on(values, first, P("a")), "gone": on(values, first, P("a"))}
    if me == 0:
        tree["gone"].delete()
    own = jax.device_put(values, jax.local_devices()[0])
    return {
        "spec": refused(lambda: mw.reshard(tree, last, {"good": P("b"), "gone": P("a")})),
        "deleted": refused(lambda: mw.reshard(tree, last, P("a"))),
        "other spec": refused(
            lambda: mw.reshard({"w": tree["good"]}, last, P("a") if me == 0 else P(None, "a"))
        ),
        "other count": refused(lambda: mw.reshard([tree["good"]] * (me + 1), last, P("a"))),
        "other values": refused(lambda: mw.reshard({"w": values + me}, everything, P("a"))),
        "own arrays": refused(lambda: mw.reshard({"w": own}, everything, P("a"))),
    }


def report() -> dict:
    found = {name: moved(*layout, donate=False) for name, layout in layouts().items()}
    found |= {
        f"{name}, donated": moved(*layouts()[name], donate=True)
        for name in ("5 transposed split", "9 process 0 to all", "14 replicated to split")
    }
    found |= {
        "large": large(),
        "from hosts": from_hosts(),
        "stand-ins": stand_ins(),
        "alone": alone(),
        "under a mesh": under_a_mesh(),
        "refusals": refusals(),
    }
    # In step with the other process after all refusals.
    found["after"] = moved(*layouts()["11 one of each, swapped"], donate=False)
    return found


if __name__ == "__main__":
    start(*map(int, sys.argv[1:]))
    tell(report)
