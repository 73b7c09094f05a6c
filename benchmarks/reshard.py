"""Moving trees between meshes: time and peak memory against JAX's ways, and random cases.

python benchmarks/reshard.py               # 1 GiB in 32 arrays, each case in its own process
python benchmarks/reshard.py --small 4000  # many small arrays
python benchmarks/reshard.py --cases 10000 --seed 0   # random moves, checked bit for bit
"""

from __future__ import annotations

import argparse
import collections
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

from meshwright._tables import duration, table
from meshwright.partitioning.moving import reshard

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
    eight, first, last = (
        Mesh(part, (name,))
        for part, name in ((devices, "a"), (devices[:4], "b"), (devices[4:], "c"))
    )
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
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    result = moved(way, tree, target)
    wall, peak = time.perf_counter() - start, resident("VmHWM") - before
    assert all(leaf.sharding.is_equivalent_to(target, 2) for leaf in result)
    assert [float(leaf[-1, -1]) for leaf in result[:: max(1, count // 4)]] == expected
    return {"wall": wall, "peak": peak, "after": resident("VmRSS") - before}


def in_fresh_process(*arguments: Any) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def compare(count: int, size: int, times: int) -> None:
    """Every way in every case: the fastest of a few runs, the highest peak."""
    print(f"{count} float32 arrays, {count * size / MIB:,.0f} MiB, jax {jax.__version__}")
    rows = [["case", "way", "wall", "peak MiB", "wall / fastest JAX", "peak / whole tree"]]
    for case in CASES:
        seen = {
            way: [in_fresh_process(case, way, count, size) for _ in range(times)] for way in WAYS
        }
        best = {
            way: (min(run["wall"] for run in runs), max(run["peak"] for run in runs))
            for way, runs in seen.items()
            if None not in runs
        }
        fastest = min(wall for way, (wall, _) in best.items() if not way.startswith("reshard"))
        whole = best[WAYS[0]][1]
        for way in WAYS:
            if way in best:
                wall, peak = best[way]
                numbers = [duration(wall), f"{peak / MIB:,.0f}"]
                rows.append([case, way, *numbers, f"{wall / fastest:.2f}", f"{peak / whole:.3f}"])
            else:
                rows.append([case, way, "fails", "", "", ""])
    print(table(rows, [False, False, True, True, True, True]))


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


def bits(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def random_case(draw: np.random.Generator) -> str:
    """One random move; a description of what went wrong, or nothing."""
    dtype = DTYPES[int(draw.integers(len(DTYPES)))]
    shape = tuple(int(size) for size in draw.choice(DIMS, int(draw.integers(0, 4))))
    mesh, donate = random_mesh(draw), bool(draw.random() < 0.5)
    spec = random_spec(draw, shape, mesh)
    keys = isinstance(dtype, str)
    values = random_bits(
        draw, (*shape, 2) if keys else shape, jnp.dtype("uint32") if keys else dtype
    )
    source = random_source(draw, values, len(shape))
    tree = {"x": jax.random.wrap_key_data(jnp.asarray(source)) if keys else source, "n": 3}
    said = f"{dtype}{list(shape)} {getattr(source, 'sharding', 'host')} to {mesh} {spec}, {donate=}"
    try:
        result = reshard(tree, mesh, {"x": spec, "n": P()}, donate=donate)
    except Exception as error:
        return f"{type(error).__name__}: {error}: {said}"
    array = result["x"]
    plain = jax.random.key_data(array) if keys else array
    if not array.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)):
        return f"other sharding {array.sharding}: {said}"
    if plain.dtype != values.dtype or bits(plain) != bits(values) or not whole(plain, values):
        return f"other values: {said}"
    if not donate and bits(source) != bits(values):
        return f"the source changed: {said}"
    return ""


def whole(array: jax.Array, values: np.ndarray) -> bool:
    """Whether every device's shard is right, not only those that make up the value."""
    return all(bits(shard.data) == bits(values[shard.index]) for shard in array.addressable_shards)


def check_cases(count: int, seed: int) -> int:
    jax.config.update("jax_num_cpu_devices", 8)
    start = time.perf_counter()
    wrong = collections.Counter()
    for number in range(count):
        fault = random_case(np.random.default_rng([seed, number]))
        if fault:
            wrong[fault.split(":")[0]] += 1
            if wrong.total() <= 10:
                print(f"case {number}: {fault}")
    print(
        f"{count:,} random cases, seed {seed}, jax {jax.__version__}: "
        f"{wrong.total()} wrong or failing {dict(wrong) or ''} in "
        f"{duration(time.perf_counter() - start)}"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
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
