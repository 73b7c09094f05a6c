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

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs: no accelerator is looked for

import jax
import optax
from _planning_cases import CASES, Case

import meshwright as mw
from meshwright._text import duration, table
from meshwright.errors import MeshwrightError
from meshwright.planning.made_plans import unasked_part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this text in it")
    parser.add_argument("--check", type=int, default=3, help="plans to compile for each case")
    parser.add_argument("--held-out", action="store_true", help="only those never looked at")
    parser.add_argument("--seen", action="store_true", help="only the others")
    parser.add_argument("--compiler", help="of all cases, in place of each one's own")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
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
    alone = None if first else top.rehearse(**codegen(case)).time
    # None where the compiler refuses the plan for its memory.
    first_seconds = first.compiled if first else alone and alone.total
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
        "top1": first_seconds and first_seconds / best,
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
    ratios = ("refused" if row["top1"] is None else f"{row['top1']:.3f}", f"{row['best_of']:.3f}")
    seconds = "" if row["top1"] is None else f"{duration(row['top1_seconds'])} "
    return (
        f"{row['case']:22} top-1 {ratios[0]} best {ratios[1]}  "
        f"{seconds}{row['top1_mesh']} | {row['mesh']} against "
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
        top = [row["top1"] for row in chosen if row["top1"] is not None]
        best = [row["best_of"] for row in chosen]
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
