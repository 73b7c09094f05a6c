"""Outcomes kept on disk, one file each, by the key of their job.

A file holds a checksum, then the outcome, compressed. One that is damaged counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path

from meshwright.rehearsal.compiler.jobs import Job, Outcome

_CHECKSUM = 32  # bytes


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshwright"


def load(folder: Path, job: Job) -> Outcome | None:
    """What is kept for this job, if anything is."""
    try:
        content = _file(folder, job).read_bytes()
        checksum, packed = content[:_CHECKSUM], content[_CHECKSUM:]
        if hashlib.sha256(packed).digest() != checksum:
            return None
        return Outcome(**json.loads(zlib.decompress(packed)))
    except (OSError, ValueError, TypeError, zlib.error):
        return None


def save(folder: Path, job: Job, outcome: Outcome) -> None:
    """Keep an outcome; a folder that cannot be written only costs the time of another compile."""
    packed = zlib.compress(json.dumps(outcome.to_json()).encode(), level=1)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(packed).digest() + packed)
            Path(name).replace(_file(folder, job))
        finally:
            Path(name).unlink(missing_ok=True)


def _file(folder: Path, job: Job) -> Path:
    return folder / f"{job.key}.rehearsal"
