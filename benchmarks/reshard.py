"""Moving trees between meshes: time and peak memory against JAX's ways, and random cases.

    python benchmarks/reshard.py                         # 1 GiB in 32 arrays, a process per run
    python benchmarks/reshard.py --small 4000            # many arrays of 4 KiB
    python benchmarks/reshard.py --cases 10000 --seed 0  # random moves, checked bit for bit

Peaks are resident memory on top of the source. JAX's ways: one `device_put` of the tree; array by
array; the same with the caller dropping each source (what `donate` compares with); and a jitted
identity, where source and target have the same devices.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright._text import duration, table
from meshwright.transfers.resharding import reshard

MIB = 2**20
CASES = ("8 to 4", "4 to 8", "disjoint", "new split")
WAYS = (
    "device_put, whole tree",
    "device_put, leaf by leaf",
    "device_put, leaf by leaf, sources dropped",
    "jit identity, whole tree",
    "reshard",
    "reshard, donate",
)
DEADLINE = 300


def shardings(case: str) -> tuple[NamedSharding, NamedSharding]:
    devices = np.array(jax.devices())
    eight, first, last = Mesh(devices, ("a",)), Mesh(devices[:4], ("b",)), Mesh(devices[4:], ("c",))
    return {
        "8 to 4": (NamedSharding(eight, P("a")), NamedSharding(first, P("b"))),
        "4 to 8": (NamedSharding(first, P("b")), NamedSharding(eight, P("a"))),
        "disjoint": (NamedSharding(first, P("b")), NamedSharding(last, P(None, "c"))),
        "new split": (NamedSharding(eight, P("a")), NamedSharding(eight, P(None, "a"))),
    }[case]


def made(source: NamedSharding, count: int, size: int) -> list[jax.Array]:
    """`count` arrays of `size` bytes, filled on their devices."""
    columns = 1024 if size >= MIB else 64
    shape = (size // 4 // columns, columns)

    @jax.jit(out_shardings=source)
    def fill(number: jax.Array) -> jax.Array:
        return number + jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)

    return jax.block_until_ready([fill(jnp.float32(number)) for number in range(count)])


def moved(way: str, tree: list[jax.Array], target: NamedSharding) -> list[jax.Array]:
    if way == "device_put, whole tree":
        result = jax.device_put(tree, target)
    elif way == "device_put, leaf by leaf":
        result = [jax.block_until_ready(jax.device_put(leaf, target)) for leaf in tree]
    elif way == "device_put, leaf by leaf, sources dropped":
        result = tree
        for place, leaf in enumerate(tree):
            result[place] = jax.block_until_ready(jax.device_put(leaf, target))
            del leaf
    elif way == "jit identity, whole tree":
        result = jax.jit(lambda tree: tree, out_shardings=target)(tree)
    else:
        result = reshard(tree, target.mesh, target.spec, donate=way == "reshard, donate")
    return jax.block_until_ready(result)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure(case: str, way: str, count: int, size: int) -> dict[str, float]:
    """One move in this process."""
    jax.config.update("jax_num_cpu_devices", 8)
    source, target = shardings(case)
    moved(way, made(source, 2, 4096), target)  # whatever is set up once
    tree = made(source, count, size)
    expected = [float(leaf[-1, -1]) for leaf in tree[:: max(1, count // 4)]]
    # A collection of JAX's hundred thousand objects takes 60 ms, and comes when it likes.
    gc.collect()
    gc.disable()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    result = moved(way, tree, target)
    wall, peak = time.perf_counter() - start, resident("VmHWM") - before
    assert all(leaf.sharding.is_equivalent_to(target, 2) for leaf in result)
    assert [float(leaf[-1, -1]) for leaf in result[:: max(1, count // 4)]] == expected
    return {"wall": wall, "peak": peak}


def in_fresh_process(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(count: int, size: int, times: int) -> None:
    """Every way in every case: the fastest of a few runs taken in turns, and the highest peak."""
    print(f"{count} float32 arrays, {count * size / MIB:,.0f} MiB, jax {jax.__version__}")
    rows = [["case", "way", "wall", "peak MiB", "wall / fastest JAX", "peak / whole tree"]]
    for case in CASES:
        ways = [way for way in WAYS if fits(way, case, count)]
        runs = [
            {way: in_fresh_process(case, way, count, size) for way in ways} for _ in range(times)
        ]
        walls = {way: min(run[way]["wall"] for run in runs) for way in ways}
        peaks = {way: max(run[way]["peak"] for run in runs) for way in ways}
        fastest = min(wall for way, wall in walls.items() if not way.startswith("reshard"))
        rows += [
            [
                *(case, way, duration(walls[way]), f"{peaks[way] / MIB:,.0f}"),
                *(f"{walls[way] / fastest:.2f}", f"{peaks[way] / peaks[WAYS[0]]:.3f}"),
            ]
            for way in ways
        ]
    print(table(rows, [False, False, True, True, True, True]))


def fits(way: str, case: str, count: int) -> bool:
    """A jitted identity keeps its devices; thousands of arrays take it minutes to compile."""
    return not way.startswith("jit") or (case == "new split" and count < 1000)


DTYPES = [
    *(jnp.dtype(name) for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")),
    *(jnp.dtype(name) for name in ("int64", "uint64", "float16", "bfloat16", "float32", "float64")),
    *(jnp.dtype(name) for name in ("complex64", "complex128", "int4", "uint4")),
    *(
        np.dtype(getattr(ml_dtypes, name))
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu")
    ),
    "key",
]
DIMS = (0, 1, 1, 2, 3, 4, 4, 6, 8, 8, 12, 16, 24)
LONG = (2048, 3001, 40_000)  # too large to go by way of one host copy


def random_bits(draw: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bit pattern: quiet and signalling NaNs, negative zeros, subnormals."""
    if dtype.name in ("int4", "uint4"):
        low = -8 if dtype.name == "int4" else 0
        return draw.integers(low, low + 16, shape).astype(np.int8).astype(dtype)
    if dtype.name == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    raw = draw.bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)


def random_mesh(draw: np.random.Generator) -> Mesh:
    count = int(draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 4, 6]))
    sizes, left = [], count
    for _ in range(int(draw.integers(0, 3))):
        sizes.append(int(draw.choice([n for n in range(1, left + 1) if left % n == 0])))
        left //= sizes[-1]
    devices = np.array(jax.devices())[draw.permutation(8)[:count]]
    names = draw.permutation(list("abcd"))[: len(sizes) + 1]
    return Mesh(devices.reshape(*sizes, left), tuple(map(str, names)))


def random_spec(draw: np.random.Generator, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Axes dealt out to dims that they divide; some are left over."""
    entries: list[list[str]] = [[] for _ in shape]
    ways = [1] * len(shape)
    for axis in draw.permutation(list(mesh.axis_names)):
        size = mesh.shape[str(axis)]
        fits = [dim for dim, n in enumerate(shape) if n % (ways[dim] * size) == 0]
        if fits and draw.random() < 0.8:
            dim = int(draw.choice(fits))
            entries[dim].append(str(axis))
            ways[dim] *= size
    return P(*(tuple(entry) or None for entry in entries))


def random_source(draw: np.random.Generator, values: np.ndarray, dims: int) -> Any:
    """The values on a mesh, on one device, uncommitted, or on the host."""
    kind = draw.random()
    if kind < 0.05 and values.dtype == jax.dtypes.canonicalize_dtype(values.dtype):
        return values
    with jax.enable_x64(True):
        if kind < 0.1:
            return jnp.asarray(values)
        if kind < 0.15:
            return jax.device_put(values, jax.devices()[int(draw.integers(8))])
        mesh = random_mesh(draw)
        sharding = NamedSharding(mesh, random_spec(draw, values.shape[:dims], mesh))
        return jax.make_array_from_callback(
            values.shape, sharding, lambda index: values[index], dtype=values.dtype
        )


def random_case(draw: np.random.Generator) -> str:
    """One random move; a description of what went wrong, or nothing."""
    dtype = DTYPES[int(draw.integers(len(DTYPES)))]
    shape = tuple(int(size) for size in draw.choice(DIMS, int(draw.integers(0, 4))))
    if draw.random() < 0.4 and math.prod(shape) <= 64:
        shape += (int(draw.choice(LONG)),)
    mesh, donate = random_mesh(draw), bool(draw.random() < 0.5)
    spec = random_spec(draw, shape, mesh)
    keys = isinstance(dtype, str)
    plain = jnp.dtype("uint32") if keys else dtype
    values = random_bits(draw, (*shape, 2) if keys else shape, plain)
    source = random_source(draw, values, len(shape))
    tree = {"x": jax.random.wrap_key_data(jnp.asarray(source)) if keys else source, "n": 3}
    said = f"{dtype}{list(shape)} {getattr(source, 'sharding', 'host')} to {mesh} {spec}, {donate=}"
    try:
        result = reshard(tree, mesh, {"x": spec, "n": P()}, donate=donate)
    except Exception as error:
        return f"{type(error).__name__}: {error}: {said}"
    array = jax.random.key_data(result["x"]) if keys else result["x"]
    if not result["x"].sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)):
        return f"other sharding {array.sharding}: {said}"
    if array.dtype != values.dtype or not has_bits(array, values) or result["n"] != 3:
        return f"other values: {said}"
    if not donate and np.asarray(source).tobytes() != values.tobytes():
        return f"the source changed: {said}"
    return ""


def has_bits(array: jax.Array, values: np.ndarray) -> bool:
    """Whether the shard of every device is right, bit for bit."""
    return all(
        np.asarray(shard.data).tobytes() == values[shard.index].tobytes()
        for shard in array.addressable_shards
    )


def check_cases(count: int, seed: int) -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    start = time.perf_counter()
    wrong: collections.Counter[str] = collections.Counter()
    for number in range(count):
        fault = random_case(np.random.default_rng([seed, number]))
        if fault:
            wrong[fault.split(":")[0]] += 1
            if wrong.total() <= 10:
                print(f"case {number}: {fault}")
    took = duration(time.perf_counter() - start)
    print(
        f"{count:,} random cases, seed {seed}, jax {jax.__version__}: "
        f"{wrong.total()} wrong or failing, {took}. {dict(wrong) or ''}"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        case, way, count, size = options.measure
        print(json.dumps(measure(case, way, int(count), int(size))))
    elif options.cases:
        return check_cases(options.cases, options.seed)
    elif options.small:
        compare(options.small, 4096, options.times)
    else:
        compare(32, 32 * MIB, options.times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
