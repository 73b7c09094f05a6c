"""Checkpoints: a tree saved with Orbax, checked, and restored onto any other mesh."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import PartitionError, listing, short
from meshwright.partitioning.checkpoints import swap
from meshwright.partitioning.checkpoints.checksums import checksums
from meshwright.partitioning.checkpoints.index import (
    NAME,
    Entry,
    python_entry,
    read_index,
    write_index,
)
from meshwright.partitioning.checkpoints.leaves import (
    Words,
    empty,
    flatten,
    from_stored,
    leaf_problems,
    to_stored,
    type_name,
    where,
)
from meshwright.partitioning.checkpoints.orbax_files import (
    cause,
    entries_by_orbax,
    orbax,
    read_arrays,
    write_arrays,
)
from meshwright.partitioning.checkpoints.places import absolute, check_destination, find
from meshwright.partitioning.checkpoints.processes import add_up, is_first, together
from meshwright.partitioning.checkpoints.targets import target_problems
from meshwright.partitioning.leaves import is_array
from meshwright.spec.checks import check_flag


def save_checkpoint(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Write a tree of arrays, on any mesh, into the directory `path` (`~` is your home).

    The directory is an Orbax checkpoint with one more file, `meshwright.json`: shape, type and
    checksum of every leaf. Python numbers and strings are in it too. With `overwrite`, the
    checkpoint before stays whole until this one is: killed at any moment, one of them is found.
    In a run of several processes all of them call this, with a path that all of them see.

    >>> import jax, tempfile
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 2})
    Traceback (most recent call last):
    ...
    meshwright.errors.PartitionError: ...step_1: there is a checkpoint already. ...
    """
    with together():
        overwrite = check_flag("overwrite", overwrite)
        orbax()
        place = absolute(path)
        leaves = flatten(tree)
        _refuse(f"save_checkpoint({short(str(path))})", "written", leaf_problems(leaves))
        if is_first():
            check_destination(place, overwrite)
    try:
        _write(place, leaves)
    except PartitionError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        with contextlib.suppress(OSError):  # the first error is the one to tell
            if is_first():
                swap.abandon(place)
        raise PartitionError(
            f"{place}: could not be written. A checkpoint that was there before still is. "
            f"({cause(error)})"
        ) from error


def restore_checkpoint(path: str | os.PathLike[str], target: Any, *, verify: bool = True) -> Any:
    """The tree saved at `path`, every array placed as the target's leaf of the same path says.

    `target` is a tree of `jax.ShapeDtypeStruct` with shardings, or of placed arrays, on any mesh;
    of Python numbers and strings only the type counts. Paths, shapes and types must be those that
    were saved; all differences are reported before data is read. Every value is then checked
    against the checksum it was saved with, unless `verify=False`.

    >>> import jax, tempfile
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from meshwright.meshes import mesh
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> rows = NamedSharding(mesh("fsdp:-1"), PartitionSpec("fsdp"))
    >>> shape = jax.ShapeDtypeStruct((8, 4), "float32", sharding=rows)
    >>> tree = restore_checkpoint(path, {"w": shape, "step": 0})
    >>> tree["step"], len(tree["w"].addressable_shards)
    (1, 8)
    """
    with together():
        verify = check_flag("verify", verify)
        orbax()
        place = find(absolute(path))
        saved = _saved(place, verify)
        wanted = flatten(target)
        faults = target_problems(saved, wanted)
        _refuse(f"restore_checkpoint({short(str(path))})", "read", faults)
    with together():
        stored = read_arrays(place, {w: leaf for w, leaf in wanted if saved[w].is_on_disk})
    if verify:
        _verify(place, saved, stored)
    return _rebuild(target, wanted, saved, stored)


def _write(place: Path, leaves: Sequence[tuple[Words, Any]]) -> None:
    """Arrays by Orbax, then the index, then the swap; the first process does what one must do."""
    arrays = {words: to_stored(value) for words, value in leaves if is_array(value)}
    filled = {words: array for words, array in arrays.items() if array.size}
    sums = dict(zip(filled, add_up(checksums(list(filled.values()))), strict=True))
    folder = swap.workshop(place) / "writing"
    with together():
        if is_first():
            swap.prepare(place)
    if filled:
        write_arrays(folder, filled)
    with together():
        if is_first():
            folder.mkdir(exist_ok=True)
            write_index(folder, [_entry(words, value, sums) for words, value in leaves])
            swap.commit(place)


def _entry(words: Words, value: Any, sums: Mapping[Words, int]) -> Entry:
    if not is_array(value):
        return python_entry(words, value)
    return Entry(words, type_name(value.dtype), tuple(value.shape), f"{sums.get(words, 0):016x}")


def _verify(place: Path, saved: Mapping[Words, Entry], stored: Mapping[Words, jax.Array]) -> None:
    sums = add_up(checksums(list(stored.values())))
    wrong = [
        f"{where(words)}: {saved[words]} has other values than were saved."
        for words, total in zip(stored, sums, strict=True)
        if f"{total:016x}" != saved[words].checksum
    ]
    if wrong:
        raise PartitionError(
            f"{place}: the checksums of {len(wrong)} of {len(stored)} arrays do not fit; the files "
            f"are damaged. Restore another checkpoint.{_lines(wrong)}"
        )


def _rebuild(
    target: Any,
    wanted: Sequence[tuple[Words, Any]],
    saved: Mapping[Words, Entry],
    stored: Mapping[Words, jax.Array],
) -> Any:
    leaves = []
    for words, leaf in wanted:
        if saved[words].is_python:
            leaves.append(saved[words].value)
        else:
            array = stored[words] if words in stored else empty(leaf)
            leaves.append(from_stored(array, leaf))
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _saved(place: Path, verify: bool) -> dict[Words, Entry]:
    """What the checkpoint holds: by the index, or without one by what Orbax knows."""
    try:
        entries = read_index(place)
    except PartitionError:
        if verify:
            raise
        entries = None
    if entries is None and verify:
        raise PartitionError(
            f"{place}: the checksum file {NAME} is missing, so the values cannot be verified. Put "
            "it back, or pass verify=False to read the arrays unchecked."
        )
    if entries is None:
        entries = entries_by_orbax(place)
    return {entry.words: entry for entry in entries}


def _refuse(what: str, done: str, faults: Iterable[str]) -> None:
    found = list(faults)
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise PartitionError(f"{what}: {count}, nothing was {done}.{_lines(found)}")


def _lines(texts: Sequence[str]) -> str:
    return listing((f"\n  {text}" for text in texts), 6).replace(", \n", "\n")
