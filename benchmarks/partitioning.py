"""Deciding and placing: ours, one bare `jax.device_put`, and eformer's helper when installed.

    python benchmarks/partitioning.py            # all parts
    python benchmarks/partitioning.py working    # one: placing, deciding, sizes, working or limits
    python benchmarks/partitioning.py working gpt2 neox    # of some models alone

`working` rehearses a forward and a backward pass of real models, sharded by shape and by rules that
were written by hand, for 16 TPU chips: with libtpu where it is installed, else with the CPU as a
stand-in. `limits` does so for several values of `min_shard_bytes`.

For the comparison with eformer run it where both are installed, from one environment of its own:
`pip install eformer`, then `PYTHONPATH=src python benchmarks/partitioning.py`.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright._text import amount, duration, table
from meshwright.trees.specs import spec_problems

Shape = jax.ShapeDtypeStruct


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 256)
    parts = {part.__name__: part for part in (placing, deciding, sizes, working, limits)}
    for name in [word for word in sys.argv[1:] if word in parts] or parts:
        parts[name]()


def placing() -> None:
    """4,000 leaves placed: the helper against one bare transfer of the same tree."""
    mesh = mw.mesh("fsdp:4, tp:2", devices=jax.devices()[:8])
    rng = np.random.default_rng(0)
    small = [(1024, 8), (8, 1024), (2048, 4), (4096,), (1024, 16)]
    for size, shapes in (("8 to 64 KiB", small), ("512 KiB", [(1024, 128)])):
        host = {f"l{i}": rng.random(shapes[i % len(shapes)], np.float32) for i in range(4000)}
        on_one = jax.device_put(host, jax.devices()[0])
        for source, tree in (("a device", on_one), ("the host", host)):
            print(f"4,000 leaves of {size} from {source}, placed on 8 simulated devices")
            _place(mesh, tree)


def _place(mesh: Any, tree: dict[str, Any]) -> None:
    helper = mw.MeshPartitionHelper(mesh)
    shardings = {
        name: NamedSharding(
            mesh, helper.create_partition_spec(x.shape, helper._suggest_methods(x.shape))
        )
        for name, x in tree.items()
    }
    calls: dict[str, Callable[[], Any]] = {
        "jax.device_put, one call": lambda: jax.device_put(tree, shardings),
        "meshwright auto_shard_pytree": lambda: helper.auto_shard_pytree(tree),
    }
    theirs = _eformer_helper(mesh)
    if theirs is not None:
        calls["eformer auto_shard_pytree"] = lambda: theirs.auto_shard_pytree(tree)
    times = {name: _median(call, 3) for name, call in calls.items()}
    ours, bare = times["meshwright auto_shard_pytree"], times["jax.device_put, one call"]
    rows = [["way", "time", "of the bare call", "of ours"]]
    for name, seconds in times.items():
        rows.append([name, duration(seconds), f"{seconds / bare:.2f}", f"{seconds / ours:.2f}"])
    print(table(rows, [False, True, True, True]), "\n")


def deciding() -> None:
    """Specs alone."""
    mesh = mw.mesh("fsdp:4, tp:2", devices=jax.devices()[:8])
    many = {f"l{i}": {"w": Shape((1024 + i % 1000 * 8, 4096), "float32")} for i in range(100_000)}
    few = {name: many[name] for name in list(many)[:1000]}
    large = mw.abstract_mesh("dp:100, fsdp:125, tp:8")
    rows = [["specs for", "time"]]
    for name, call in {
        "100,000 leaves, by shape": lambda: mw.partition(many, mesh),
        "100,000 leaves, by rules": lambda: mw.partition(many, mesh, rules=[("*/w", ("fsdp",))]),
        "1,000 leaves on 100,000 abstract devices": lambda: mw.partition(few, large),
    }.items():
        rows.append([name, duration(_median(call, 3))])
    print(table(rows, [False, True]), "\n")


def sizes() -> None:
    """Bytes per device of the specs chosen by shape."""
    theirs_installed = importlib.util.find_spec("eformer") is not None
    rows = [
        ["model", "mesh", "whole", "ours, a device", "eformer's", "eformer's that cannot be placed"]
    ]
    for name, tree in models().items():
        for spec in ("fsdp:8, tp:4", "fsdp:16, tp:8", "fsdp:4, sp:2, tp:4", "fsdp:8, ep:8, tp:4"):
            size = mw.MeshSpec.parse(spec).size
            mesh = mw.mesh(spec, devices=jax.devices()[:size])
            axes = [axis for axis in ("fsdp", "sp", "ep", "tp") if axis in mesh.axis_names]
            report = mw.explain(tree, mesh, axes=axes)
            bytes_theirs, unplaceable = "-", "-"
            if theirs_installed:
                found, wrong = _eformer_bytes(tree, mesh)
                bytes_theirs, unplaceable = amount(found), f"{wrong} of {len(report.rows)}"
            rows.append(
                [
                    name,
                    spec,
                    amount(report.bytes),
                    amount(report.device_bytes),
                    bytes_theirs,
                    unplaceable,
                ]
            )
    print(table(rows, [False, False, True, True, True, True]))


def working() -> None:
    """FLOPs and modelled time of a forward and a backward pass: by shape against by hand."""
    print(f"value_and_grad on v5e:4x4 as fsdp:4, tp:4 ({_compiler()} compiler)")
    right = [False, *[True] * 7]
    rows = [["model", "FLOPs", "by hand", "time", "by hand", "ratio", "bytes / ideal", "by hand"]]
    for name, model in real_models().items():
        ours, hand = (_rehearsed(model, **how) for how in ({}, {"rules": model[3]}))
        sizes = [_bytes_over_ideal(model[1], **how) for how in ({}, {"rules": model[3]})]
        print(f"  {name}: compiled", file=sys.stderr, flush=True)
        rows.append(
            [
                name,
                *(f"{r.flops:.3g}" for r in (ours, hand)),
                *(duration(r.time.total) for r in (ours, hand)),
                f"{ours.time.total / hand.time.total:.2f}",
                *(f"{size:.2f}" for size in sizes),
            ]
        )
    print(table(rows, right), "\n")


LIMITS = {"0": 0, "16 KiB": 2**14, "64 KiB": 2**16, "256 KiB": 2**18, "1 MiB": 2**20}


def limits() -> None:
    """What `min_shard_bytes` changes: gathers of parameters, modelled time, bytes a device."""
    print(f"gathers of parameters / modelled time / bytes against ideal ({_compiler()} compiler)")
    rows = [["model", *LIMITS]]
    for name, model in real_models().items():
        cells = [name]
        for limit in LIMITS.values():
            r = _rehearsed(model, min_shard_bytes=limit)
            gathers = r.collectives.by_cause().get("parameter gathers", ())
            share = _bytes_over_ideal(model[1], min_shard_bytes=limit)
            count = sum(each.times.count for each in gathers)
            cells.append(f"{count} / {duration(r.time.total)} / {share:.2f}")
        print(f"  {name}: compiled", file=sys.stderr, flush=True)
        rows.append(cells)
    print(table(rows, [False, *[True] * len(LIMITS)]), "\n")


def _compiler() -> str:
    return "vendor" if importlib.util.find_spec("libtpu") else "cpu"


def _rehearsed(model: Any, **options: Any) -> Any:
    loss, params, batch, _ = model
    where = {"mesh": "fsdp:4, tp:4", "on": "v5e:4x4", "compiler": _compiler()}
    # The time goes by the scheduled program, and its code takes libtpu minutes to generate.
    where["codegen"] = _compiler() == "cpu"
    return mw.rehearse(jax.value_and_grad(loss), params, batch, **where, **options)


def _bytes_over_ideal(params: Any, **options: Any) -> float:
    report = mw.explain(params, mw.abstract_mesh("fsdp:4, tp:4"), **options)
    return report.device_bytes / (report.bytes / 16)


def real_models() -> dict[str, tuple[Any, Any, Any, Any]]:
    """Losses, parameters, batches and rules of models in their own library's idiom."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ecosystem"))
    from all_models import model

    text = {"width": 512, "rows": 64, "length": 256, "vocab": 32000}
    image = {"width": 512, "rows": 64, "classes": 1000}
    sizes = {
        **dict.fromkeys(("lm1b", "gemma", "bert", "gpt2", "llama", "neox"), text),
        "ppo": {"width": 1024, "rows": 512, "length": 64, "observed": 256, "actions": 32},
        "resnet": {**image, "side": 32},
        "vit": {**image, "side": 64},
        "unet": {"width": 256, "rows": 64, "side": 32},
    }
    chosen = [name for name in sys.argv[1:] if name in sizes] or sizes
    return {name: tuple(model(name, abstract=True, **sizes[name])) for name in chosen}


def models() -> dict[str, Any]:
    """Parameter trees as shapes."""
    return {
        "dense 8B": _dense(32, 4096, 14336, 128256, 1024),
        "dense 70B": _dense(80, 8192, 28672, 128256, 1024),
        "experts 8x7B": _experts(32, 4096, 14336, 32000, 8),
        "convolutional": _convolutional(),
    }


def _dense(layers: int, width: int, hidden: int, words: int, kv: int) -> Any:
    def b(*s: int) -> Shape:
        return Shape(s, jnp.bfloat16)

    layer = {
        "attn": {"q": b(width, width), "k": b(width, kv), "v": b(width, kv), "o": b(width, width)},
        "mlp": {"gate": b(width, hidden), "up": b(width, hidden), "down": b(hidden, width)},
        "norm1": b(width),
        "norm2": b(width),
    }
    return {
        "embed": b(words, width),
        "layers": [layer] * layers,
        "norm": b(width),
        "head": b(width, words),
    }


def _experts(layers: int, width: int, hidden: int, words: int, experts: int) -> Any:
    tree = _dense(layers, width, hidden, words, 1024)
    shape = (experts, width, hidden)
    moe = {
        "router": Shape((width, experts), jnp.float32),
        "up": Shape(shape, jnp.bfloat16),
        "gate": Shape(shape, jnp.bfloat16),
        "down": Shape((experts, hidden, width), jnp.bfloat16),
    }
    tree["layers"] = [{**layer, "mlp": moe} for layer in tree["layers"]]
    return tree


def _convolutional() -> Any:
    tree, channels = {"stem": Shape((7, 7, 3, 64), jnp.float32)}, 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            tree[f"{name}/in"] = Shape((1, 1, channels, width), jnp.float32)
            tree[f"{name}/mid"] = Shape((3, 3, width, width), jnp.float32)
            tree[f"{name}/out"] = Shape((1, 1, width, 4 * width), jnp.float32)
            tree[f"{name}/scale"] = Shape((4 * width,), jnp.float32)
            channels = 4 * width
    return {**tree, "head": Shape((2048, 1000), jnp.float32)}


def _eformer_helper(mesh: Any) -> Any:
    if importlib.util.find_spec("eformer") is None:
        return None
    from eformer.escale import MeshPartitionHelper

    return MeshPartitionHelper(mesh)


def _eformer_bytes(tree: Any, mesh: Any) -> tuple[int, int]:
    """Bytes per device of eformer's specs; entries that do not divide count as whole there."""
    helper = _eformer_helper(mesh)
    axes, total, wrong = dict(mesh.shape), 0, 0
    for leaf in jax.tree.leaves(tree):
        spec = helper.create_partition_spec(leaf.shape, helper._suggest_methods(leaf.shape))
        bad = any(spec_problems("", leaf.shape, spec, axes))
        wrong += bad
        report = mw.explain(
            {"x": leaf},
            mesh,
            {"x": mw.partition({"x": leaf}, mesh, rules=[("x", spec)], uneven="replicate")["x"]},
        )
        total += report.device_bytes
    return total, wrong


def _median(call: Callable[[], Any], times: int) -> float:
    seen = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready([x for x in jax.tree.leaves(call()) if isinstance(x, jax.Array)])
        seen.append(time.perf_counter() - start)
    return statistics.median(seen)


if __name__ == "__main__":
    main()
