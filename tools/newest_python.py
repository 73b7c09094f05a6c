"""Print the newest CPython here that is newer than the one running this, or nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# The versions that the pins of constraints/py313.txt have wheels for.
MINORS = range(12, 16)

# Runs in the candidate: a final, GIL-ful CPython with ensurepip (Debian splits it off).
PROBE = """
import ensurepip, sys, sysconfig, venv
ok = sys.implementation.name == "cpython" and sys.version_info.releaselevel == "final"
if ok and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(*sys.version_info[:3])
"""


def candidates() -> Iterator[str]:
    for minor in MINORS:
        if on_path := shutil.which(f"python3.{minor}"):
            yield on_path
    if root := os.environ.get("PYENV_ROOT") or ask("pyenv", "root"):
        yield from map(str, Path(root).glob("versions/*/bin/python3"))


def ask(*command: str) -> str:
    """What a command prints, or nothing: a pyenv shim may exist and still refuse to run."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def main() -> None:
    found: dict[tuple[int, ...], str] = {}
    for python in candidates():
        version = tuple(map(int, ask(python, "-c", PROBE).split()))
        if version[:1] == (3,) and version[1] in MINORS and version[:2] > sys.version_info[:2]:
            found.setdefault(version, python)
    if found:
        print(found[max(found)])


if __name__ == "__main__":
    main()
