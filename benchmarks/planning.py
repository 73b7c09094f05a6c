"""Plans against people: what `mw.plan` finds, compiled, against the best of a grid of hand layouts.

python benchmarks/planning.py [--only TEXT] [--held-out | --seen] [--check 3] [--json FILE]

Every case is a train step on named hardware. The grid is fsdp x tp x ep x sp meshes with the
model's own hand-written layouts (ours), or with the rules an expert would write (users' models of
tests/ecosystem). Both sides are compiled by the hardware's own compiler, or by the CPU's
partitioner standing in where that is said, and compared by their modelled time. `top-1` is the plan
that is predicted best, `best of n` what `check=n` returns. Below 1 the plan is faster.

Those marked held out were not looked at: nothing was tuned with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax

import meshwright as mw
from meshwright._text import duration, table
from meshwright.errors import MeshwrightError
from meshwright.planning.made_plans import unasked_part


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step on hardware, and the meshes that people would try."""

    name: str
    model: str
    on: str
    batch: int
    meshes: tuple[str, ...]
    seq: int | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiler: str = "vendor"
    held_out: bool = False
    users: bool = False


DOT = {"attention": "dot"}
L4 = {"layers": 4, "vocab": 32768, **DOT}
GRID16 = ("fsdp:16", "fsdp:8, tp:2", "fsdp:4, tp:4", "fsdp:2, tp:8", "tp:16")
SP16 = ("fsdp:8, sp:2", "fsdp:4, sp:4", "fsdp:4, sp:2, tp:2")
EXPERTS16 = (*GRID16, "ep:16", "fsdp:2, ep:8", "fsdp:4, ep:4", "fsdp:8, ep:2", "ep:8, tp:2")
GRID256 = ("fsdp:256", "fsdp:128, tp:2", "fsdp:64, tp:4", "fsdp:32, tp:8", "fsdp:16, tp:16")
GRID64 = ("fsdp:64", "fsdp:32, tp:2", "fsdp:16, tp:4", "fsdp:8, tp:8")
GRID32 = ("fsdp:32", "fsdp:16, tp:2", "fsdp:8, tp:4", "fsdp:4, tp:8")
# Rules of users name both axes, so that a mesh has both.
USERS16 = ("fsdp:16, tp:1", "fsdp:8, tp:2", "fsdp:4, tp:4", "fsdp:2, tp:8", "fsdp:1, tp:16")
TEXT = {"width": 512, "rows": 64, "length": 256, "vocab": 32000}
IMAGE = {"width": 512, "rows": 64, "classes": 1000}

CASES = [
    Case("llama 4L 32x2k", "llama3-8b", "v5e:4x4", 32, (*GRID16, *SP16), 2048, L4),
    Case("llama 4L 8x2k", "llama3-8b", "v5e:4x4", 8, (*GRID16, *SP16), 2048, L4),
    Case("llama 4L 4x8k", "llama3-8b", "v5e:4x4", 4, (*GRID16, *SP16), 8192, L4),
    Case("llama 4L 2x16k", "llama3-8b", "v5e:4x4", 2,
         ("tp:16", "fsdp:2, tp:8", "fsdp:2, sp:8", "fsdp:2, sp:4, tp:2", "fsdp:2, sp:2, tp:4"),
         16384, {**L4, "seq": 16384}),
    Case("llama 2L 1x32k", "llama3-8b", "v5e:4x4", 1,
         ("tp:16", "sp:16", "sp:4, tp:4", "sp:2, tp:8"),
         32768, {**L4, "layers": 2, "seq": 32768}),
    Case("mixtral 2L", "mixtral-8x7b", "v5e:4x4", 32, EXPERTS16, 1024, {"layers": 2, **DOT}),
    Case("vit-b16", "vit-b16", "v5e:4x4", 256, GRID16),
    Case("resnet50", "resnet50", "v5e:4x4", 256, ("dp:16", *GRID16)),
    Case("llama3-8b 256x2k", "llama3-8b", "v5e:16x16", 256, GRID256, 2048, DOT),
    Case("llama3-8b 64x8k", "llama3-8b", "v5e:16x16", 64, GRID256, 8192, DOT),
    Case("llama3-8b 64 chips", "llama3-8b", "v5p:4x4x4", 128, GRID64, 4096, DOT),
    Case("llama 4L h100", "llama3-8b", "h100:8x2", 32, GRID16, 2048, L4),
    Case("lm1b", "lm1b", "v5e:4x4", 64, USERS16, None, TEXT, users=True),
    Case("bert", "bert", "v5e:4x4", 64, USERS16, None, TEXT, users=True),
    Case("gpt2", "gpt2", "v5e:4x4", 64, USERS16, None, TEXT, users=True),
    Case("gemma", "gemma", "v5e:4x4", 64, USERS16, None, TEXT, users=True),
    Case("resnet", "resnet", "v5e:4x4", 64, USERS16, None, {**IMAGE, "side": 32}, users=True),
    Case("vit", "vit", "v5e:4x4", 64, USERS16, None, {**IMAGE, "side": 64}, users=True),
    # These were held out once: what they showed when they were first compiled is mended.
    Case("llama3-70b 2L", "llama3-70b", "v5p:2x2x4", 16, (*GRID16, *SP16), 4096,
         {"layers": 2, **DOT}),
    Case("moe-256 2L", "moe-256", "v5p:2x2x4", 32, EXPERTS16, 1024, {"layers": 2, **DOT}),
    Case("vit-l16", "vit-l16", "v6e:4x4", 128, GRID16),
    Case("llama 6L v6e", "llama3-8b", "v6e:8x8", 64, GRID64, 2048, {"layers": 6, **DOT}),
    Case("mixtral 2L h100", "mixtral-8x7b", "h100:8x2", 32, EXPERTS16, 1024,
         {"layers": 2, **DOT}),
    Case("mixtral 64 chips", "mixtral-8x7b", "v5p:4x4x4", 64, (*GRID64, "fsdp:8, ep:8"), 4096,
         DOT),
    Case("llama (transformers)", "llama", "v5e:4x4", 32, USERS16, None,
         {**TEXT, "rows": 32, "width": 1024}, users=True),
    Case("neox", "neox", "v5e:4x4", 64, USERS16, None, TEXT, users=True),
    Case("ppo", "ppo", "v5e:4x4", 512, USERS16, None,
         {"width": 1024, "rows": 512, "length": 64, "observed": 256, "actions": 32},
         users=True),
    Case("unet", "unet", "v5e:4x4", 64, USERS16, None, {"width": 256, "rows": 64, "side": 32},
         users=True),
    Case("unet wide", "unet", "v5e:4x4", 32, USERS16, None,
         {"width": 512, "rows": 32, "side": 64}, users=True),
    # And these, a second time.
    Case("llama 8L 64x4k", "llama3-8b", "v5e:8x8", 64, GRID64, 4096,
         {"layers": 8, "vocab": 32768, **DOT}),
    Case("llama3-70b 4L v6e", "llama3-70b", "v6e:8x8", 64, GRID64, 2048, {"layers": 4, **DOT}),
    Case("mixtral 4L v6e", "mixtral-8x7b", "v6e:4x4", 64, EXPERTS16, 1024,
         {"layers": 4, **DOT}),
    Case("moe-256 2L 64 chips", "moe-256", "v5p:4x4x4", 128,
         (*GRID64, "ep:64", "fsdp:8, ep:8", "fsdp:2, ep:32"), 1024, {"layers": 2, **DOT}),
    Case("vit-b16 512", "vit-b16", "v5p:2x2x4", 512, ("dp:16", *GRID16)),
    Case("resnet50 128", "resnet50", "v6e:4x4", 128, ("dp:16", *GRID16)),
    Case("llama 2L 16x8k h100", "llama3-8b", "h100:8x2", 16, GRID16, 8192,
         {"layers": 2, "vocab": 32768, **DOT}),
    Case("llama 4L h200", "llama3-8b", "h200:8x4", 64, GRID32, 2048, L4),
    Case("gpt2 wide", "gpt2", "v6e:4x4", 32, USERS16, None,
         {**TEXT, "width": 1024, "rows": 32, "length": 512}, users=True),
    Case("bert long", "bert", "v5p:2x2x4", 128, USERS16, None,
         {**TEXT, "width": 768, "rows": 128, "length": 512}, users=True),
    Case("gemma wide", "gemma", "v5e:4x4", 128, USERS16, None,
         {**TEXT, "width": 1024, "rows": 128}, users=True),
    Case("lm1b long", "lm1b", "v6e:4x4", 32, USERS16, None,
         {**TEXT, "width": 1024, "rows": 32, "length": 1024}, users=True),
    # And these, a third time.
    Case("llama 4L 16x4k v6e", "llama3-8b", "v6e:4x4", 16, (*GRID16, *SP16), 4096, L4),
    Case("llama3-70b 2L 32 chips", "llama3-70b", "v5p:2x4x4", 32, GRID32, 2048,
         {"layers": 2, **DOT}),
    Case("mixtral 2L v5p", "mixtral-8x7b", "v5p:2x2x4", 16, EXPERTS16, 2048,
         {"layers": 2, **DOT}),
    Case("moe-256 2L v6e", "moe-256", "v6e:4x4", 64, EXPERTS16, 512, {"layers": 2, **DOT}),
    Case("vit-l16 256", "vit-l16", "v5e:4x4", 256, ("dp:16", *GRID16)),
    Case("llama 2L h200", "llama3-8b", "h200:8x2", 16, GRID16, 4096,
         {"layers": 2, "vocab": 32768, **DOT}),
    Case("gpt2 short", "gpt2", "v5e:4x4", 128, USERS16, None,
         {**TEXT, "width": 768, "rows": 128, "length": 128}, users=True),
    Case("bert wide", "bert", "v6e:4x4", 32, USERS16, None,
         {**TEXT, "width": 1024, "rows": 32}, users=True),
    Case("gemma long", "gemma", "v5p:2x2x4", 32, USERS16, None,
         {**TEXT, "width": 768, "rows": 32, "length": 1024}, users=True),
    Case("lm1b short", "lm1b", "v5e:4x4", 128, USERS16, None,
         {**TEXT, "width": 768, "rows": 128, "length": 128}, users=True),
    Case("unet v6e", "unet", "v6e:4x4", 64, USERS16, None,
         {"width": 384, "rows": 64, "side": 32}, users=True),
    Case("resnet large", "resnet", "v5e:4x4", 128, USERS16, None,
         {**IMAGE, "rows": 128, "side": 64}, users=True),
    Case("vit wide", "vit", "v6e:4x4", 128, USERS16, None,
         {**IMAGE, "width": 768, "rows": 128, "side": 64}, users=True),
    # And these, a fourth time.
    Case("llama 4L 64x1k", "llama3-8b", "v5e:4x4", 64, (*GRID16, *SP16), 1024, L4),
    Case("llama 2L 8x4k v5p", "llama3-8b", "v5p:2x2x4", 8, (*GRID16, *SP16), 4096,
         {"layers": 2, "vocab": 32768, **DOT}),
    Case("llama3-70b 2L 16x2k", "llama3-70b", "v6e:4x4", 16, GRID16, 2048, {"layers": 2, **DOT}),
    Case("mixtral 2L 64x512", "mixtral-8x7b", "v6e:4x4", 64, EXPERTS16, 512, {"layers": 2, **DOT}),
    Case("moe-256 2L 64x512", "moe-256", "v5p:2x2x4", 64, EXPERTS16, 512, {"layers": 2, **DOT}),
    Case("vit-l16 64", "vit-l16", "v5p:2x2x4", 64, ("dp:16", *GRID16)),
    Case("vit-b16 128", "vit-b16", "v6e:4x4", 128, ("dp:16", *GRID16)),
    Case("resnet50 512", "resnet50", "v5p:2x2x4", 512, ("dp:16", "fsdp:16", "fsdp:8, tp:2")),
    Case("llama 3L h200", "llama3-8b", "h200:8x2", 32, GRID16, 2048, {**L4, "layers": 3}),
    Case("mixtral 2L h200", "mixtral-8x7b", "h200:8x2", 16, EXPERTS16, 1024, {"layers": 2, **DOT}),
    Case("gpt2 long", "gpt2", "v5e:4x4", 16, USERS16, None,
         {**TEXT, "width": 768, "rows": 16, "length": 1024}, users=True),
    Case("bert short", "bert", "v5e:4x4", 256, USERS16, None,
         {**TEXT, "rows": 256, "length": 128}, users=True),
    Case("gemma short", "gemma", "v6e:4x4", 256, USERS16, None,
         {**TEXT, "width": 768, "rows": 256, "length": 128}, users=True),
    Case("lm1b wide", "lm1b", "v5p:2x2x4", 64, USERS16, None, {**TEXT, "width": 1024}, users=True),
    Case("llama (transformers) v6e", "llama", "v6e:4x4", 64, USERS16, None,
         {**TEXT, "width": 768}, users=True),
    Case("neox wide", "neox", "v6e:4x4", 32, USERS16, None,
         {**TEXT, "width": 768, "rows": 32}, users=True),
    Case("ppo wide", "ppo", "v6e:4x4", 1024, USERS16, None,
         {"width": 2048, "rows": 1024, "length": 64, "observed": 256, "actions": 32}, users=True),
    Case("unet v5p", "unet", "v5p:2x2x4", 64, USERS16, None,
         {"width": 320, "rows": 64, "side": 32}, users=True),
    # And these, a fifth time.
    Case("llama 3L 128x1k v5p", "llama3-8b", "v5p:2x2x4", 128, (*GRID16, *SP16), 1024,
         {**L4, "layers": 3}),
    Case("llama 5L 32x4k v6e", "llama3-8b", "v6e:8x8", 32, GRID64, 4096, {**L4, "layers": 5}),
    Case("llama3-70b 3L 64x1k", "llama3-70b", "v5p:2x4x4", 64, GRID32, 1024,
         {"layers": 3, **DOT}),
    Case("mixtral 3L 32x1k", "mixtral-8x7b", "v5p:2x2x4", 32, EXPERTS16, 1024,
         {"layers": 3, **DOT}),
    Case("mixtral 2L 64 chips", "mixtral-8x7b", "v6e:8x8", 128, (*GRID64, "fsdp:8, ep:8"), 1024,
         {"layers": 2, **DOT}),
    Case("moe-256 1L v6e", "moe-256", "v6e:4x4", 32, EXPERTS16, 1024, {"layers": 1, **DOT}),
    Case("vit-b16 192 v5p", "vit-b16", "v5p:2x2x4", 192, ("dp:16", *GRID16)),
    Case("resnet50 64", "resnet50", "v6e:4x4", 64, ("dp:16", "fsdp:16", "fsdp:8, tp:2")),
    Case("llama 3L 32x4k h100", "llama3-8b", "h100:8x4", 32, GRID32, 4096, {**L4, "layers": 3}),
    Case("mixtral 3L h100", "mixtral-8x7b", "h100:8x2", 16, EXPERTS16, 2048,
         {"layers": 3, **DOT}),
    Case("gpt2 640", "gpt2", "v5p:2x2x4", 64, USERS16, None,
         {**TEXT, "width": 640, "length": 512}, users=True),
    Case("bert 640", "bert", "v6e:4x4", 128, USERS16, None,
         {**TEXT, "width": 640, "rows": 128}, users=True),
    Case("gemma 1280", "gemma", "v5p:2x2x4", 64, USERS16, None,
         {**TEXT, "width": 1280}, users=True),
    Case("lm1b 640", "lm1b", "v5e:4x4", 32, USERS16, None,
         {**TEXT, "width": 640, "rows": 32, "length": 512}, users=True),
    Case("llama (transformers) v5p", "llama", "v5p:2x2x4", 64, USERS16, None,
         {**TEXT, "width": 1280, "length": 512}, users=True),
    Case("neox 640", "neox", "v5p:2x2x4", 128, USERS16, None,
         {**TEXT, "width": 640, "rows": 128}, users=True),
    Case("ppo v5p", "ppo", "v5p:2x2x4", 2048, USERS16, None,
         {"width": 1536, "rows": 2048, "length": 32, "observed": 512, "actions": 16}, users=True),
    Case("unet 384", "unet", "v5e:4x4", 64, USERS16, None,
         {"width": 384, "rows": 64, "side": 48}, users=True),
    Case("resnet v6e", "resnet", "v6e:4x4", 256, USERS16, None,
         {**IMAGE, "rows": 256, "side": 64}, users=True),
    Case("vit 640", "vit", "v5p:2x2x4", 256, USERS16, None,
         {**IMAGE, "width": 640, "rows": 256, "side": 96}, users=True),
    # Nothing below was looked at while the planner was made.
    Case("llama 2L 64x2k v5p", "llama3-8b", "v5p:2x2x4", 64, (*GRID16, *SP16), 2048,
         {**L4, "layers": 2}, held_out=True),
    Case("llama 6L 128x1k", "llama3-8b", "v5e:8x8", 128, GRID64, 1024, {**L4, "layers": 6},
         held_out=True),
    Case("llama3-70b 1L v5p", "llama3-70b", "v5p:2x2x4", 32, GRID16, 2048, {"layers": 1, **DOT},
         held_out=True),
    Case("mixtral 1L v6e", "mixtral-8x7b", "v6e:4x4", 32, EXPERTS16, 2048, {"layers": 1, **DOT},
         held_out=True),
    Case("vit-l16 192", "vit-l16", "v5e:4x4", 192, ("dp:16", *GRID16), held_out=True),
    Case("gpt2 896", "gpt2", "v6e:4x4", 64, USERS16, None, {**TEXT, "width": 896},
         held_out=True, users=True),
    Case("bert 896", "bert", "v5e:4x4", 64, USERS16, None,
         {**TEXT, "width": 896, "length": 512}, held_out=True, users=True),
    Case("gemma 896", "gemma", "v5e:4x4", 64, USERS16, None,
         {**TEXT, "width": 896, "length": 512}, held_out=True, users=True),
    Case("lm1b 896", "lm1b", "v6e:4x4", 64, USERS16, None,
         {**TEXT, "width": 896, "length": 512}, held_out=True, users=True),
    Case("neox 1024", "neox", "v5e:4x4", 64, USERS16, None,
         {**TEXT, "width": 1024, "length": 512}, held_out=True, users=True),
    Case("unet 448", "unet", "v6e:4x4", 128, USERS16, None,
         {"width": 448, "rows": 128, "side": 32}, held_out=True, users=True),
    Case("resnet 768", "resnet", "v5p:2x2x4", 128, USERS16, None,
         {**IMAGE, "width": 768, "rows": 128, "side": 64}, held_out=True, users=True),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this text in it")
    parser.add_argument("--check", type=int, default=3, help="plans to compile for each case")
    parser.add_argument("--held-out", action="store_true", help="only those never looked at")
    parser.add_argument("--seen", action="store_true", help="only the others")
    parser.add_argument("--compiler", help="of all cases, in place of each one's own")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs: no accelerator is looked for
    rows = []
    for case in CASES:
        if options.only.lower() not in case.name.lower():
            continue
        if (options.held_out and not case.held_out) or (options.seen and case.held_out):
            continue
        if options.compiler:
            case = dataclasses.replace(case, compiler=options.compiler)
        try:
            rows.append(compare(case, options.check))
        except MeshwrightError as error:
            print(f"{case.name}: {str(error)[:300]}", flush=True)
            continue
        print(line(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    if rows:
        print(f"\n{summary(rows)}")


def compare(case: Case, check: int) -> dict[str, Any]:
    """Plan a case, compile the best plans, and compile the grid."""
    step, args, rehearse = users_step(case) if case.users else our_step(case)
    began = time.process_time()
    options = {"on": case.on, "donate_argnums": 0, "compiler": case.compiler, "progress": False}
    top = mw.plan(step, *args, **options)
    cpu = time.process_time() - began
    checked = mw.plan(step, *args, check=check, **options)
    plans = [each for each in checked.alternatives if each.compiled is not None]
    # Without a check no context parallel plan is returned, however good it is predicted to be.
    first = next((each for each in plans if (each.sizes, each.lists) == chosen(top)), None)
    first_seconds = first.compiled if first else top.rehearse(**codegen(case)).time.total
    hand = {}
    for mesh in case.meshes:
        try:
            r = rehearse(mesh)
        except MeshwrightError as error:
            print(f"  {case.name}, {mesh}: {str(error)[:100]}", file=sys.stderr)
            continue
        if r.time is None:  # the compiler refused it for its memory
            continue
        hand[mesh] = {"seconds": r.time.total, "bytes": r.memory.peak, "fits": r.fits}
    fitting = {mesh: each for mesh, each in hand.items() if each["fits"]} or hand
    best_mesh = min(fitting, key=lambda mesh: fitting[mesh]["seconds"])
    best = fitting[best_mesh]["seconds"]
    r = checked.rehearsal
    return {
        "case": case.name,
        "held_out": case.held_out,
        "compiler": case.compiler,
        "cpu_seconds": cpu,
        "mesh": str(checked.spec),
        "top1_mesh": str(top.spec),
        "best_hand_mesh": best_mesh,
        "best_hand": best,
        "hand": hand,
        "top1": first_seconds / best,
        "top1_seconds": first_seconds,
        "best_of": r.time.total / best,
        "fits": checked.fits,
        "said_to_fit": top.fits,
        "unasked": unasked_part(checked, r),
        "predicted_seconds": [each.predicted.seconds for each in plans],
        "compiled_seconds": [each.compiled for each in plans],
        "predicted_bytes": [each.predicted.bytes for each in plans],
        "compiled_bytes": [each.peak for each in plans],
        "arguments": r.memory.arguments,
        "predicted_exchange": sum(e.seconds * n for e, _, n in checked.exchanges()),
        "compiled_exchange": r.collectives.seconds,
        "predicted_moved": sum(e.bytes * n for e, _, n in checked.exchanges()),
        "compiled_moved": r.collectives.bytes,
        "predicted_compute": checked.predicted.compute,
        "compiled_compute": r.time.total - r.time.exposed,
        "hidden": r.time.hidden,
    }


def chosen(plan: Any) -> tuple[Any, Any]:
    """The sizes and lists by which an alternative is known to be this plan."""
    each = next(each for each in plan.alternatives if each.chosen)
    return each.sizes, each.lists


def our_step(case: Case) -> tuple[Any, tuple[Any, ...], Any]:
    model = mw.models.model(case.model, **case.settings)
    seq = {} if case.seq is None else {"seq": case.seq}

    def rehearse(mesh: str) -> Any:
        where = {"mesh": mesh, "on": case.on, "compiler": case.compiler, "progress": False}
        return mw.rehearse_model(model, batch=case.batch, **seq, **where, **codegen(case))

    return model.train_step, (model.shapes(), model.batch(case.batch, **seq)), rehearse


def users_step(case: Case) -> tuple[Any, tuple[Any, ...], Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ecosystem"))
    from all_models import model

    loss, params, batch, rules = model(case.model, abstract=True, **case.settings)
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}

    def rehearse(mesh: str) -> Any:
        where = {"mesh": mesh, "on": case.on, "compiler": case.compiler, "progress": False}
        layout = mw.abstract_mesh(mesh)
        specs = mw.partition(params, layout, rules=rules)
        opt = mw.partition_like(state["opt"], params, specs)
        rows = jax.tree.map(lambda each: jax.sharding.PartitionSpec("fsdp"), batch)
        return mw.rehearse(
            *(step, state, batch),
            in_shardings=({"params": specs, "opt": opt}, rows),
            donate_argnums=0,
            **where,
            **codegen(case),
        )

    return step, (state, batch), rehearse


def codegen(case: Case) -> dict[str, bool]:
    """The time goes by the scheduled program, and its code takes libtpu minutes to generate."""
    is_tpu = case.compiler == "vendor" and case.on.startswith(("v", "tpu"))
    return {"codegen": False} if is_tpu else {}


def line(row: dict[str, Any]) -> str:
    peak = row["predicted_bytes"][0] / row["compiled_bytes"][0]
    return (
        f"{row['case']:22} top-1 {row['top1']:.3f} best {row['best_of']:.3f}  "
        f"{duration(row['top1_seconds'])} {row['top1_mesh']} | {row['mesh']} against "
        f"{duration(row['best_hand'])} {row['best_hand_mesh']}; exchange "
        f"{ratio(row, 'exchange'):.2f} bytes {ratio(row, 'moved'):.2f} computing "
        f"{ratio(row, 'compute'):.2f} peak {peak:.2f}"
        f" unasked {row['unasked']:.1%} hidden {row['hidden'] / row['compiled_exchange']:.0%} "
        f"cpu {row['cpu_seconds']:.1f} s"
    )


def ratio(row: dict[str, Any], what: str) -> float:
    return float(row[f"predicted_{what}"] / (row[f"compiled_{what}"] or math.nan))


def summary(rows: list[dict[str, Any]]) -> str:
    """Worst and mean ratios, and how true the predictions were."""
    cells = [["", "cases", "top-1 mean", "worst", "best of n mean", "worst", "bytes", "peak"]]
    for name, chosen in _parts(rows):
        peaks = [
            p / c
            for row in chosen
            for p, c in zip(row["predicted_bytes"], row["compiled_bytes"], strict=True)
        ]
        near = sum(abs(peak - 1) <= 0.1 for peak in peaks) / len(peaks)
        top, best = [row["top1"] for row in chosen], [row["best_of"] for row in chosen]
        moved = statistics.median(ratio(row, "moved") for row in chosen)
        cells.append(
            [
                name,
                str(len(chosen)),
                *(f"{each:.3f}" for each in (geometric(top), max(top))),
                *(f"{each:.3f}" for each in (geometric(best), max(best))),
                f"{moved:.2f}",
                f"{near:.0%} within 10 %",
            ]
        )
    return table(cells, [False, *[True] * 7])


def _parts(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "all", rows
    for held_out, name in ((False, "seen"), (True, "held out")):
        chosen = [row for row in rows if row["held_out"] == held_out]
        if chosen:
            yield name, chosen


def geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


if __name__ == "__main__":
    main()
