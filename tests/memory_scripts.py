"""Scripts that measure their own memory, each in an interpreter of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_clear_refs = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux"
)


def run_script(code: str, deadline: float = 600) -> Any:
    """What it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=deadline,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
