"""CPU seconds until the package answers, beside those of `import jax`.

    python benchmarks/start.py

Each line is a process of its own, the best of five: user and system time of it and of what it
started. Ratios are to `import jax` on the same machine, which is what any program with JAX pays.
"""

from __future__ import annotations

import os
import subprocess
import sys

IMPORT_JAX = "import jax"
RUNS = 5
MESHWRIGHT = ("-m", "meshwright")

PROGRAMS: dict[str, tuple[str, ...]] = {
    IMPORT_JAX: ("-c", IMPORT_JAX),
    "python alone": ("-c", "pass"),
    "import meshwright": ("-c", "import meshwright"),
    "import meshwright, mesh()": ("-c", "import meshwright as mw; mw.mesh('dp:-1')"),
    "--help": (*MESHWRIGHT, "--help"),
    "--version": (*MESHWRIGHT, "--version"),
    "rehearse --help": (*MESHWRIGHT, "rehearse", "--help"),
    "a mistake": (*MESHWRIGHT, "rehearse", "lama3-8b", "--mesh", "fsdp:8", "--batch", "8"),
    "schedule": (*MESHWRIGHT, "schedule", "zb-h1", "--groups", "4", "--microbatches", "16"),
    "hardware": (*MESHWRIGHT, "hardware"),
    "mesh, on named hardware": (*MESHWRIGHT, "mesh", "fsdp:-1, tp:4", "--on", "v5e:16x16"),
    "mesh, on live devices": (*MESHWRIGHT, "mesh", "dp:-1"),
}


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    seconds = {
        name: min(cpu_seconds(words) for _ in range(RUNS)) for name, words in PROGRAMS.items()
    }
    print(f"{'':26}{'CPU s':>8}{'of import jax':>16}")
    for name, spent in seconds.items():
        print(f"{name:26}{spent:8.2f}{spent / seconds[IMPORT_JAX]:16.2f}")


def cpu_seconds(words: tuple[str, ...]) -> float:
    """User and system time of one process."""
    started = os.times()
    subprocess.run([sys.executable, *words], capture_output=True, timeout=120, check=False)
    ended = os.times()
    return (
        ended.children_user
        + ended.children_system
        - started.children_user
        - started.children_system
    )


if __name__ == "__main__":
    main()
