"""Published training runs, rebuilt and rehearsed: modelled against measured step times.

python benchmarks/published.py [rows.json|rows.csv] [--only TEXT] [--timeout SECONDS] [--json FILE]
    [--parts FILE] [--codegen]

Every row becomes a program (model, mesh, batch, remat, kernels, flags), which the chip's own
compiler compiles; nothing runs. A row that has no program, or that the compiler refuses, is listed
with the reason. Without a file the rows are data/tpu_recipes.json: dense decoders on TPUs with all
their settings. The compiler is ended when the program is scheduled, after one to three minutes;
`--codegen` lets it generate code, which takes 3 to more than 20. Answers are kept in the cache of
`rehearse`.
For rows on TPUs it also refits the speeds without each row (leave-one-out, `_fit_speeds.py`);
`--parts` writes what the fit works on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs: no accelerator is looked for

from _fit_speeds import ROW, parts_of, report
from _published_rows import CannotBuild, Run, build, read_rows

import meshwright as mw
from meshwright.errors import MeshwrightError, RehearsalError
from meshwright.hlo.program import read_program

DEFAULT = Path(__file__).parent / "data" / "tpu_recipes.json"
_UNKNOWN_FLAG = re.compile(r"[Uu]nknown (?:command line )?flag '?-{0,2}([\w]+)'?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--only", default="", help="rows whose name has this text in it")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one compile")
    parser.add_argument("--codegen", action="store_true", help="compile to the end")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--parts", type=Path, help="also write what `_fit_speeds.py` works on")
    options = parser.parse_args()
    results = []
    print(f"{'run':30} {'published':>10} {'modelled':>10} {'error':>7}  peak of limit")
    for name, row in read_rows(options.rows):
        if options.only.lower() in name.lower():
            results.append(rehearse_row(name, row, options.timeout, options.codegen))
            print(line(results[-1]), flush=True)
    print(summary(results))
    parts = [row for row in results if "chip" in row]
    if len(parts) > 1:
        print(f"\n{report(parts)}")
    if options.parts is not None:
        kept = [{name: row[name] for name in ROW} for row in parts]
        options.parts.write_text(json.dumps({"rows": kept}, indent=1), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def rehearse_row(name: str, row: dict[str, Any], timeout: float, codegen: bool) -> dict[str, Any]:
    """Rehearse a row; the result has `modelled` seconds, or the `reason` why there are none."""
    began = time.perf_counter()
    result: dict[str, Any] = {"name": name}
    try:
        run = build(name, row)
        result["published"] = run.seconds
        rehearsed, dropped = rehearse_run(run, timeout, codegen)
    except (CannotBuild, MeshwrightError) as error:
        result["reason"] = str(error).strip().splitlines()[0]
        return result
    result |= {
        "took": time.perf_counter() - began,
        "compiled": rehearsed.compile_seconds,
        "from_cache": rehearsed.from_cache,
        "peak": rehearsed.memory.peak,
        "limit": rehearsed.memory.limit,
        "dropped_flags": dropped,
    }
    if rehearsed.time is None:
        result["reason"] = "the compiler ran out of the chip's memory"
    else:
        result |= {
            "modelled": rehearsed.time.total,
            "time": rehearsed.time.to_json(),
        }
        chip = rehearsed.placement.topology.chip
        if chip.family == "tpu":
            program = read_program(rehearsed.text)
            result |= {"chip": chip.name, "parts": parts_of(program, rehearsed.time, chip)}
    return result


def rehearse_run(run: Run, timeout: float, codegen: bool) -> tuple[mw.Rehearsal, list[str]]:
    """Rehearse a program with its flags; also return the flags this compiler does not know."""
    flags, dropped = run.flags.split(), list[str]()
    while True:
        try:
            with environment(LIBTPU_INIT_ARGS=" ".join(flags)):
                return (
                    mw.rehearse_model(
                        run.model,
                        batch=run.batch,
                        seq=run.seq,
                        mesh=run.mesh,
                        on=run.hardware,
                        slices=run.slices,
                        timeout=timeout,
                        codegen=codegen or not is_tpu(run),
                    ),
                    dropped,
                )
        except RehearsalError as error:
            unknown = _UNKNOWN_FLAG.findall(str(error))
            left = [flag for flag in flags if flag.lstrip("-").partition("=")[0] not in unknown]
            if len(left) == len(flags):
                raise
            dropped += unknown
            flags = left


def is_tpu(run: Run) -> bool:
    return mw.topology(run.hardware).chip.family == "tpu"


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables for the compiling process, which starts inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def line(result: dict[str, Any]) -> str:
    """Write a row of the table."""
    name = f"{result['name'][:30]:30}"
    published = f"{result['published']:8.3f} s" if "published" in result else " " * 10
    if "reason" in result:
        return f"{name} {published} {'-':>10} {'':7}  {result['reason']}"
    error = result["modelled"] / result["published"] - 1
    gib = 2**30
    memory = f"{result['peak'] / gib:.1f} of {result['limit'] / gib:.1f} GiB"
    return f"{name} {published} {result['modelled']:8.3f} s {error:+7.1%}  {memory}"


def summary(results: list[dict[str, Any]]) -> str:
    """Say how far off the modelled times are."""
    errors = [row["modelled"] / row["published"] - 1 for row in results if "modelled" in row]
    left = len(results) - len(errors)
    words = f"{len(errors)} rows modelled, {left} without a time."
    if not errors:
        return words
    mean = statistics.mean(map(abs, errors))
    return f"{words} Mean error {mean:.1%}, signed {statistics.mean(errors):+.1%}."


if __name__ == "__main__":
    main()
