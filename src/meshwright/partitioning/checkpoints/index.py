"""The file beside the arrays: for every leaf its path, shape, type and checksum."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import PartitionError, short

NAME = "meshwright.json"
FORMAT = 1

# Leaves that are no arrays, and how text brings them back exactly.
PYTHON_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A leaf as it was saved: an array with its checksum, or a Python value as text."""

    words: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] = ()
    checksum: str = ""
    text: str | None = None

    @property
    def path(self) -> str:
        return "/".join(self.words)

    @property
    def is_python(self) -> bool:
        return self.text is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether Orbax holds it: Python values and arrays without elements are not there."""
        return not self.is_python and 0 not in self.shape

    @property
    def value(self) -> Any:
        """The Python value."""
        text = self.text or ""
        if self.dtype == "float":
            return float.fromhex(text)
        return text == "True" if self.dtype == "bool" else PYTHON_TYPES[self.dtype](text)

    def __str__(self) -> str:
        return f"Python {self.dtype}" if self.is_python else type_text(self.dtype, self.shape)


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """
    >>> type_text("float32", (8, 2))
    'float32[8,2]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def python_entry(words: tuple[str, ...], value: Any) -> Entry:
    """An entry that holds the value itself."""
    text = value.hex() if isinstance(value, float) else str(value)
    return Entry(words, type(value).__name__, text=text)


def write_index(folder: Path, entries: Sequence[Entry]) -> None:
    leaves = [dataclasses.asdict(entry) for entry in entries]
    content = {"format": FORMAT, "leaves": leaves, "sha256": _digest(leaves)}
    (folder / NAME).write_text(json.dumps(content, indent=1))


def read_index(folder: Path) -> list[Entry] | None:
    """What was saved, or `None` when the file is missing. Damage of the file itself is found."""
    file = folder / NAME
    try:
        content = json.loads(file.read_bytes())
        leaves, known = content["leaves"], content["format"] == FORMAT
        if known and content["sha256"] != _digest(leaves):
            raise ValueError("its own sha256 does not fit")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PartitionError(
            f"{file}: the checksum file is damaged ({type(error).__name__}: {short(str(error))}). "
            "Restore another checkpoint, or pass verify=False to read the arrays unchecked."
        ) from error
    if not known:
        raise PartitionError(
            f"{file}: has format {short(content['format'])}, this version reads {FORMAT}. "
            "Restore with the version that wrote it."
        )
    return [_entry(leaf) for leaf in leaves]


def _entry(leaf: dict[str, Any]) -> Entry:
    return Entry(**{**leaf, "words": tuple(leaf["words"]), "shape": tuple(leaf["shape"])})


def _digest(leaves: Any) -> str:
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()
