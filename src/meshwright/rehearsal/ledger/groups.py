"""Who talks to whom: every way in which compilers write groups of devices.

- listed: `{{0,1},{2,3}}`; `{}` is everybody;
- counted: `[4,2]<=[2,2,2]T(0,2,1)`: the numbers 0, 1, 2, ... shaped, transposed, cut in rows;
- by mesh: `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`: axes of a mesh of the compiler's
  own making, a part of one written `'a':(2)4` (4 members, 2 blocks before them), devices in order
  unless a counted or listed order is given.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.rehearsal.programs import Instruction
from meshwright.rehearsal.programs.attributes import whole_numbers

_INNER = re.compile(r"\{([\d,\s-]*)\}")
_COUNTED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"['\"]([^'\"]+)['\"]=(\d+)")
_AXIS_REF = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")

Groups = tuple[np.ndarray, ...]


def written_groups(instruction: Instruction) -> str:
    """The groups of a collective as its text has them; without a word, everybody is one."""
    plain = instruction.attribute("replica_groups") or "{}"
    if not plain.startswith("mesh"):
        return plain
    by_mesh = _MESH.search(instruction.rest)  # its value has commas of its own
    return by_mesh[0] if by_mesh else plain


@functools.lru_cache(maxsize=1024)
def read_groups(text: str, devices: int) -> Groups:
    """One array of device numbers per group.

    >>> [group.tolist() for group in read_groups("[2,2]<=[2,2]T(1,0)", 4)]
    [[0, 2], [1, 3]]
    """
    if text.startswith("mesh["):
        return tuple(_by_mesh(text, devices))
    if text.startswith("["):
        return tuple(_counted(text))
    if text.startswith("{"):
        listed = [np.array(whole_numbers(inner)) for inner in _INNER.findall(text)]
        return tuple(group for group in listed if group.size) or (np.arange(devices),)
    raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")


def read_pairs(text: str) -> np.ndarray:
    """Senders and receivers, one pair a row."""
    return np.array(whole_numbers(text), np.int64).reshape(-1, 2)


def _counted(text: str) -> np.ndarray:
    found = _COUNTED.match(text)
    if found is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    shape, before, order = (whole_numbers(part) for part in found.groups())
    ids = np.arange(math.prod(before or shape)).reshape(before or shape)
    return ids.transpose(order or range(ids.ndim)).reshape(shape if before else (-1,))


def _by_mesh(text: str, devices: int) -> np.ndarray:
    found = _MESH.match(text)
    if found is None:
        raise MeshwrightError(f"replica groups of an unknown form: {text[:80]}")
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(found[1])}
    ids = np.arange(devices) if not found[2] else _device_order(found[2])
    sizes, chosen = _split(axes, _AXIS_REF.findall(found[3]))
    grid = ids.reshape(sizes)
    members = math.prod(sizes[dim] for dim in chosen)
    return np.moveaxis(grid, chosen, range(-len(chosen), 0)).reshape(-1, members)


def _device_order(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`, `[8]<=[2,4]T(1,0)`, or numbers in a row."""
    if not text.startswith("["):
        return np.array(whole_numbers(text))
    return _counted(text).ravel()


def _split(
    axes: dict[str, int], references: list[tuple[str, str, str]]
) -> tuple[list[int], list[int]]:
    """The mesh's sizes with axes cut where only a part is meant, and the dims that are meant."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for order, (name, before, members) in enumerate(references):
        first, count = (int(before), int(members)) if members else (1, axes[name])
        parts.setdefault(name, []).append((first, count, order))
    sizes: list[int] = []
    dims: dict[int, int] = {}
    for name, size in axes.items():
        done = 1
        for first, count, order in sorted(parts.get(name, [])):
            sizes.append(first // done)
            dims[order] = len(sizes)
            sizes.append(count)
            done = first * count
        sizes.append(size // done)
    return sizes, [dims[order] for order in range(len(references))]
