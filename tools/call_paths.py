"""Count the files of the package that one call passes: python tools/call_paths.py [--list | --tree]

A reader who follows a call opens these files. Counted with `sys.setprofile` in every thread, each
call the first of its kind in a fresh process; what merely gets imported does not count. `--list`
prints the files, `--tree` the functions as they are first called, three deep.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("mesh", "shard", "pipeline step", "rehearse")


DEEPEST = 3


def passed(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The package's files in which a function ran during `call`, and those calls as a tree."""
    import meshwright

    root = Path(meshwright.__file__).parent
    seen: set[str] = set()
    tree: dict[str, None] = {}

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":
            return
        seen.add(code.co_filename)
        if code.co_name.startswith("<") or not code.co_filename.startswith(str(root)):
            return
        depth, outer = 0, frame.f_back
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(str(root))
            outer = outer.f_back
        if depth < DEEPEST:
            file = Path(code.co_filename).relative_to(root).as_posix()
            tree.setdefault(f"{'    ' * depth}{file}: {code.co_qualname}")

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    inside = [Path(name) for name in seen if Path(name).is_relative_to(root)]
    return sorted(path.relative_to(root).as_posix() for path in inside), list(tree)


def prepared(name: str) -> Callable[[], Any]:
    """One of the four calls, with everything before it done."""
    import jax
    import jax.numpy as jnp

    import meshwright as mw

    for module in pkgutil.walk_packages(mw.__path__, "meshwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for public in mw.__all__:
        getattr(mw, public)
    jax.config.update("jax_num_cpu_devices", 8)
    if name == "mesh":
        jax.devices()
        return lambda: mw.mesh("dp:2, tp:4")
    if name == "shard":
        mesh, tree = mw.mesh("fsdp:2, tp:4"), {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
        return lambda: mw.shard(tree, mesh)
    params = {"first": jnp.ones((8, 8)), "second": jnp.ones((8, 8))}
    rows = jnp.ones((8, 8))
    if name == "rehearse":

        def train(params: Any, rows: Any) -> Any:
            loss = lambda p: ((rows @ p["first"] @ p["second"]) ** 2).mean()  # noqa: E731
            value, gradient = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

        return lambda: mw.rehearse(
            train, params, rows, mesh="dp:2, tp:4", on="cpu:8", compiler="cpu", cache=False
        )
    end = getattr(mw, "stage_end", None) or mw.stage_end
    groups = mw.MpmdMesh(mw.mesh("pp:2, dp:4"), "pp")

    def step(params: Any, rows: Any) -> Any:
        def loss(params: Any, rows: Any) -> Any:
            return ((end(rows @ params["first"]) @ params["second"]) ** 2).mean()

        value, gradient = mw.value_and_grad(loss)(params, rows)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    run = mw.pipeline(step, groups, schedule="1f1b", microbatches=4)
    return lambda: run(params, rows)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(passed(prepared(sys.argv[2]))))
        return
    for name in CALLS:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True
        )
        files, tree = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:15} {len(files):3} files")
        if "--list" in sys.argv:
            print("".join(f"    {file}\n" for file in files), end="")
        if "--tree" in sys.argv:
            print("".join(f"    {line}\n" for line in tree), end="")


if __name__ == "__main__":
    main()
