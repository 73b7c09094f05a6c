"""Which directory a checkpoint goes to or comes from, and what is refused there."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.errors import PartitionError, listing, short
from meshwright.partitioning.checkpoints.index import NAME
from meshwright.partitioning.checkpoints.swap import current

_ORBAX_MARK = "_CHECKPOINT_METADATA"


def absolute(path: str | os.PathLike[str]) -> Path:
    """The directory that is meant, `~` and links followed."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text.strip() or "://" in text:
        raise PartitionError(f"path {short(text)} is not a directory of a file system. Pass one.")
    try:
        place = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop, an unknown user, a zero byte
        raise PartitionError(
            f"path {short(text)} leads nowhere ({short(str(error))}). Pass another."
        ) from error
    if not place.name:
        raise PartitionError(
            f"path {short(text)} is the root. Name a directory for the checkpoint."
        )
    return place


def check_destination(place: Path, overwrite: bool) -> None:
    if place.exists() and not place.is_dir():
        raise PartitionError(f"{place}: is a file. Name a directory for the checkpoint.")
    there = current(place)
    if there is None:
        return
    if not _is_checkpoint(there):
        raise PartitionError(
            f"{place}: holds {_content(there)} but no checkpoint; nothing in it was touched. "
            "Name another directory."
        )
    if not overwrite:
        raise PartitionError(
            f"{place}: there is a checkpoint already. Pass overwrite=True to replace it, or name "
            "another directory."
        )


def find(place: Path) -> Path:
    """Where the checkpoint of this name is."""
    if place.exists() and not place.is_dir():
        raise PartitionError(f"{place}: is a file. Name the directory of a checkpoint.")
    there = current(place)
    if there is None:
        raise PartitionError(f"{place}: no checkpoint here. Save one with save_checkpoint.")
    if not _is_checkpoint(there):
        raise PartitionError(
            f"{place}: holds {_content(there)} but no checkpoint. Name the directory that "
            "save_checkpoint wrote."
        )
    return there


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (NAME, _ORBAX_MARK))


def _content(folder: Path) -> str:
    return listing(sorted(short(item.name, 40) for item in folder.iterdir()), 4)
