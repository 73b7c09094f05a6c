"""Checkpoints: a tree saved with Orbax, checked, and restored onto any other mesh."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import PartitionError, listing, short
from meshwright.partitioning import checkpoint_swap as swap
from meshwright.partitioning.checkpoint_index import (
    NAME,
    Entry,
    python_entry,
    read_index,
    write_index,
)
from meshwright.partitioning.checkpoint_leaves import (
    flatten,
    from_stored,
    leaf_problems,
    stored_form,
    to_stored,
)
from meshwright.partitioning.checkpoint_processes import add_up, is_first, together
from meshwright.partitioning.checkpoint_targets import target_problems
from meshwright.partitioning.checksums import checksums
from meshwright.partitioning.leaves import is_array

_ORBAX_MARK = "_CHECKPOINT_METADATA"
_ALONE = "array"  # the name on the disk of a tree that is one array

Words = tuple[str, ...]


def save_checkpoint(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Write a tree of arrays, on any mesh, into the directory `path`.

    The directory is an Orbax checkpoint with one more file, `meshwright.json`: shape, type and
    checksum of every leaf. Python numbers and strings are in it too. With `overwrite`, the
    checkpoint before stays whole until this one is: killed at any moment, one of them is found.
    In a run of several processes all of them call this, with a path that all of them see.

    >>> import jax, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder + "/step_1", {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> save_checkpoint(folder + "/step_1", {"w": jax.numpy.ones((8, 4)), "step": 2})
    Traceback (most recent call last):
    ...
    meshwright.errors.PartitionError: ...step_1: there is a checkpoint already. ...
    """
    ocp = _orbax()
    with together():
        place = _absolute(path)
        leaves = flatten(tree)
        _refuse(f"save_checkpoint({short(str(path))})", "written", leaf_problems(leaves))
        if is_first():
            _check_destination(place, overwrite)
    try:
        _write(ocp, place, leaves)
    except PartitionError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        if is_first():
            swap.abandon(place)
        raise PartitionError(
            f"{place}: could not be written ({type(error).__name__}: {_first_line(error)}). "
            "A checkpoint that was there before still is."
        ) from error


def restore_checkpoint(path: str | os.PathLike[str], target: Any, *, verify: bool = True) -> Any:
    """The tree saved at `path`, every array placed as the target's leaf of the same path says.

    `target` is a tree of `jax.ShapeDtypeStruct` with shardings, or of placed arrays, on any mesh;
    of Python numbers and strings only the type counts. It must have the same paths, shapes and types; all
    differences are reported before data is read. Every value is then checked against the
    checksum it was saved with, unless `verify=False`.

    >>> import jax, tempfile
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder + "/step_1", {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> rows = NamedSharding(jax.make_mesh((4,), ("fsdp",)), PartitionSpec("fsdp"))
    >>> shape = jax.ShapeDtypeStruct((8, 4), "float32", sharding=rows)
    >>> tree = restore_checkpoint(folder + "/step_1", {"w": shape, "step": 0})
    >>> tree["step"], tree["w"].sharding.spec
    (1, PartitionSpec('fsdp',))
    """
    ocp = _orbax()
    with together():
        place = _find(_absolute(path))
        saved = _saved(ocp, place, verify)
        wanted = flatten(target)
        faults = target_problems(saved, wanted)
        _refuse(f"restore_checkpoint({short(str(path))})", "read", faults)
    arrays = {words: leaf for words, leaf in wanted if not saved[words].is_python}
    stored = _read(ocp, place, {w: leaf for w, leaf in arrays.items() if not saved[w].is_empty})
    if verify:
        _verify(place, saved, stored)
    return _rebuild(target, wanted, saved, stored)


def _write(ocp: Any, place: Path, leaves: Sequence[tuple[Words, Any]]) -> None:
    """Arrays by Orbax, then the index, then the swap; the first process does what one must do."""
    arrays = {words: to_stored(value) for words, value in leaves if is_array(value)}
    filled = {words: array for words, array in arrays.items() if array.size}
    sums = dict(zip(filled, add_up(checksums(list(filled.values()))), strict=True))
    folder = swap.workshop(place) / "writing"
    with together():
        if is_first():
            swap.prepare(place)
    if filled:
        with _checkpointer(ocp) as checkpointer:
            checkpointer.save(folder, args=ocp.args.StandardSave(_nested(filled)))
    with together():
        if is_first():
            folder.mkdir(exist_ok=True)
            write_index(folder, [_entry(words, value, sums) for words, value in leaves])
            swap.commit(place)


def _entry(words: Words, value: Any, sums: Mapping[Words, int]) -> Entry:
    if not is_array(value):
        return python_entry(words, value)
    return Entry(words, str(value.dtype), tuple(value.shape), f"{sums.get(words, 0):016x}")


def _read(ocp: Any, place: Path, targets: Mapping[Words, Any]) -> dict[Words, jax.Array]:
    """The arrays in their form on the disk, placed as the targets say."""
    if not targets:
        return {}
    forms = {words: stored_form(target) for words, target in targets.items()}
    try:
        with _checkpointer(ocp) as checkpointer:
            tree = checkpointer.restore(place, args=ocp.args.StandardRestore(_nested(forms)))
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        raise PartitionError(
            f"{place}: {_named_in(str(error), targets)} could not be read "
            f"({type(error).__name__}: {_first_line(error)}). A file of the checkpoint is damaged "
            "or missing; restore another one."
        ) from error
    found = dict(flatten(tree))
    return {words: found[words or (_ALONE,)] for words in targets}


def _verify(place: Path, saved: Mapping[Words, Entry], stored: Mapping[Words, jax.Array]) -> None:
    sums = add_up(checksums(list(stored.values())))
    wrong = [
        f"{saved[words].path or '(the tree)'}: {saved[words]} has other values than were saved."
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
            array = stored[words] if words in stored else _empty(leaf)
            leaves.append(from_stored(array, leaf))
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _empty(target: Any) -> jax.Array:
    """An array without elements, which Orbax does not store."""
    form = stored_form(target)
    make = jax.jit(lambda: jax.numpy.zeros(form.shape, form.dtype), out_shardings=form.sharding)
    return make()


def _saved(ocp: Any, place: Path, verify: bool) -> dict[Words, Entry]:
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
        entries = _orbax_entries(ocp, place)
    return {entry.words: entry for entry in entries}


def _orbax_entries(ocp: Any, place: Path) -> list[Entry]:
    try:
        with _checkpointer(ocp) as checkpointer:
            tree = checkpointer.metadata(place).item_metadata.tree
        return [Entry(words, str(leaf.dtype), leaf.shape) for words, leaf in flatten(tree)]
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        raise PartitionError(
            f"{place}: Orbax cannot say what it holds ({type(error).__name__}: "
            f"{_first_line(error)}). Restore another checkpoint."
        ) from error


def _absolute(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text:
        raise PartitionError(f"path {short(text)} is not a directory of a file system. Pass one.")
    place = Path(text).resolve()
    if not place.name:
        raise PartitionError(
            f"path {short(text)} is the root. Name a directory for the checkpoint."
        )
    return place


def _check_destination(place: Path, overwrite: bool) -> None:
    if place.exists() and not place.is_dir():
        raise PartitionError(f"{place}: is a file. Name a directory for the checkpoint.")
    there = swap.current(place)
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


def _find(place: Path) -> Path:
    """Where the checkpoint of this name is."""
    if place.exists() and not place.is_dir():
        raise PartitionError(f"{place}: is a file. Name the directory of a checkpoint.")
    there = swap.current(place)
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


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise PartitionError(
            "Checkpoints need Orbax, which cannot be imported here "
            f"({short(str(error))}). Run: pip install orbax-checkpoint"
        ) from error


def _checkpointer(ocp: Any) -> Any:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _nested(flat: Mapping[Words, Any]) -> dict[str, Any]:
    """Dicts in dicts, as any reader of Orbax understands them."""
    tree: dict[str, Any] = {}
    for words, value in flat.items():
        *outer, last = words or (_ALONE,)
        inside = tree
        for word in outer:
            inside = inside.setdefault(word, {})
        inside[last] = value
    return tree


def _named_in(text: str, targets: Iterable[Words]) -> str:
    """The leaf that an error of Orbax speaks of: it writes `"a.b/0.0"` for a chunk of `a/b`."""
    named = [words for words in targets if f'"{".".join(words or (_ALONE,))}/' in text]
    return "/".join(max(named, key=len)) if named else "an array"


def _refuse(what: str, done: str, faults: Iterable[str]) -> None:
    found = list(faults)
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise PartitionError(f"{what}: {count}, nothing was {done}.{_lines(found)}")


def _lines(texts: Sequence[str]) -> str:
    return listing((f"\n  {text}" for text in texts), 6).replace(", \n", "\n")


def _first_line(error: Exception) -> str:
    return short((str(error).splitlines() or [""])[0], 200)
