"""Putting a finished directory in the place of another so that no kill, at any moment, loses both.

Beside `name` stands `.name.meshwright`, with up to three directories:

    writing   unfinished, worthless after a kill
    new       complete, about to take its place
    old       the one before, about to be deleted

`name` itself is complete whenever it is there. When it is not, a `new` is the one that counts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def workshop(path: Path) -> Path:
    return path.with_name(f".{path.name}.meshwright")


def current(path: Path) -> Path | None:
    """Where the checkpoint of this name is now, also after a swap that was cut short."""
    for place in (path, workshop(path) / "new"):
        if place.is_dir() and any(place.iterdir()):
            return place
    return None


def prepare(path: Path) -> Path:
    """Finish or clear what a killed save left, and say where to write."""
    if current(path) == workshop(path) / "new":
        _publish(path)
    discard(path)
    workshop(path).mkdir(parents=True)
    return workshop(path) / "writing"


def commit(path: Path) -> None:
    """Let what was written take its place. From the first rename on, it counts."""
    shop = workshop(path)
    _sync_tree(shop / "writing")
    (shop / "writing").rename(shop / "new")
    _sync(shop)
    _publish(path)


def discard(path: Path) -> None:
    """Delete the workshop. `new` loses its name first: half deleted, it must not be found."""
    shop = workshop(path)
    if (shop / "new").exists():
        _delete(shop / "old")
        (shop / "new").rename(shop / "old")
    _delete(shop)


def abandon(path: Path) -> None:
    """Clear up after a save that failed; what has been completed stays."""
    if not (workshop(path) / "new").exists():
        _delete(workshop(path))


def _publish(path: Path) -> None:
    shop = workshop(path)
    if path.exists():
        _delete(shop / "old")
        path.rename(shop / "old")
    (shop / "new").rename(path)
    _sync(shop)
    _sync(path.parent)
    _delete(shop)


def _delete(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_tree(folder: Path) -> None:
    """Every byte and every name below a folder is on the disk before anything is renamed."""
    for inside, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(inside) / name)
        _sync(Path(inside))


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
