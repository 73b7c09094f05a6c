"""Save a tree with Orbax, checked, and restore it onto any other mesh; replace it atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright._checks import check_flag
from meshwright._processes import fail_together
from meshwright._text import plural_noun
from meshwright.checkpoints.manifest import (
    MANIFEST_NAME,
    Entry,
    Words,
    empty_stored,
    from_stored,
    leaf_problems,
    leaves_with_words,
    python_entry,
    read_manifest,
    target_problems,
    to_stored,
    type_name,
    where,
    write_manifest,
)
from meshwright.checkpoints.orbax_io import (
    MODULUS,
    checksums,
    entries_by_orbax,
    first_cause,
    orbax,
    read_arrays,
    write_arrays,
)
from meshwright.errors import CheckpointError, PartitionError, listing, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import is_array, problem_lines


def save_checkpoint(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Write a tree of arrays, on any mesh, into the directory `path` (`~` is your home).

    The directory is an Orbax checkpoint with one more file, `meshwright.json`: shape, type and
    checksum of every leaf. Python numbers and strings are in it too. With `overwrite`, the
    old checkpoint stays complete until the new one is: a process that is killed, at any moment,
    leaves one of the two.
    In a run of several processes all of them call this, with a path that all of them see.

    Raises `PartitionError`, in every process, if a leaf cannot be saved, the directory holds
    something else, or there is a checkpoint and `overwrite` is false.

    >>> import jax, tempfile
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 2})
    Traceback (most recent call last):
    ...
    meshwright.errors.PartitionError: ...step_1: there is a checkpoint already. ...
    """
    with fail_together("checkpoint", PartitionError):
        overwrite = check_flag("overwrite", overwrite)
        orbax()
        folder = checkpoint_folder(path)
        leaves = leaves_with_words(tree)
        refuse_problems(f"save_checkpoint({short(str(path))})", "written", leaf_problems(leaves))
        if is_main_process():
            check_destination(folder, overwrite)
    try:
        _write(folder, leaves)
    except PartitionError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        with contextlib.suppress(OSError):  # the first error is the one to report
            if is_main_process():
                clear_failed_save(folder)
        raise PartitionError(
            f"{folder}: could not be written. A checkpoint that was there before still is. "
            f"({first_cause(error)})"
        ) from error


def restore_checkpoint(path: str | os.PathLike[str], target: Any, *, verify: bool = True) -> Any:
    """Read the tree saved at `path`; place every array as the target's leaf of the same path says.

    `target` is a tree of `jax.ShapeDtypeStruct` with shardings, or of placed arrays, on any mesh;
    of Python numbers and strings only the type counts. Paths, shapes and types must be those that
    were saved; all differences are reported before data is read. Every value is then checked
    against the checksum it was saved with, unless `verify=False`. In a run of several processes all
    of them call this, and a `PartitionError` in one is raised in all.

    >>> import jax, tempfile
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from meshwright.meshes.build import mesh
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> save_checkpoint(path, {"w": jax.numpy.ones((8, 4)), "step": 1})
    >>> rows = NamedSharding(mesh("fsdp:-1"), PartitionSpec("fsdp"))
    >>> shape = jax.ShapeDtypeStruct((8, 4), "float32", sharding=rows)
    >>> tree = restore_checkpoint(path, {"w": shape, "step": 0})
    >>> tree["step"], len(tree["w"].addressable_shards)
    (1, 8)
    """
    with fail_together("checkpoint", PartitionError):
        verify = check_flag("verify", verify)
        orbax()
        folder = find_checkpoint(checkpoint_folder(path))
        saved = _read_entries(folder, verify)
        wanted = leaves_with_words(target)
        problems = target_problems(saved, wanted)
        refuse_problems(f"restore_checkpoint({short(str(path))})", "read", problems)
    # A damaged file may concern one process alone; the others must not go on to the collective of
    # `sum_over_processes` and wait there for it.
    with fail_together("checkpoint", PartitionError):
        stored = read_arrays(folder, {w: leaf for w, leaf in wanted if saved[w].is_on_disk})
    if verify:
        _verify(folder, saved, stored)
    return _rebuild(target, wanted, saved, stored)


def _write(folder: Path, leaves: Sequence[tuple[Words, Any]]) -> None:
    """Write the arrays by Orbax, then the manifest, then swap the directories.

    Orbax writes from all processes; directories and the manifest are the main process's alone. Each
    block that fails together is also a barrier: no process writes before the directory is prepared,
    and none returns before the checkpoint has its name.
    """
    arrays = {words: to_stored(value) for words, value in leaves if is_array(value)}
    filled = {words: array for words, array in arrays.items() if array.size}
    # First, so that an array that cannot be read fails before the disk is touched.
    sums = dict(zip(filled, sum_over_processes(checksums(list(filled.values()))), strict=True))
    writing = staging_folder(folder) / "writing"
    with fail_together("checkpoint", PartitionError):
        if is_main_process():
            prepare_staging(folder)
    if filled:
        write_arrays(writing, filled)
    with fail_together("checkpoint", PartitionError):
        if is_main_process():
            writing.mkdir(exist_ok=True)
            write_manifest(writing, with_checksums(entries_of(leaves), sums))
            commit(folder)


def entries_of(leaves: Sequence[tuple[Words, Any]]) -> list[Entry]:
    """Make the entry of every leaf; those of arrays have no checksums yet."""
    return [
        Entry(words, type_name(value.dtype), tuple(value.shape))
        if is_array(value)
        else python_entry(words, value)
        for words, value in leaves
    ]


def with_checksums(entries: Iterable[Entry], sums: Mapping[Words, int]) -> list[Entry]:
    """Give the arrays among the entries their checksums."""
    return [
        entry
        if entry.is_python
        else dataclasses.replace(entry, checksum=f"{sums.get(entry.words, 0):016x}")
        for entry in entries
    ]


def _verify(folder: Path, saved: Mapping[Words, Entry], stored: Mapping[Words, jax.Array]) -> None:
    sums = sum_over_processes(checksums(list(stored.values())))
    problems = [
        f"{where(words)}: {saved[words]} has other values than were saved."
        for words, total in zip(stored, sums, strict=True)
        if f"{total:016x}" != saved[words].checksum
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: the checksums of {len(problems)} of {len(stored)} arrays do not fit; the "
            f"files are damaged. Restore another checkpoint.{problem_lines(problems)}"
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
            array = stored[words] if words in stored else empty_stored(leaf)
            leaves.append(from_stored(array, leaf))
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _read_entries(folder: Path, verify: bool) -> dict[Words, Entry]:
    """Read what the checkpoint holds: by the manifest, or without one by what Orbax knows."""
    try:
        entries = read_manifest(folder)
    except PartitionError:
        if verify:
            raise
        entries = None
    if entries is None and verify:
        raise CheckpointError(
            f"{folder}: the checksum file {MANIFEST_NAME} is missing, so the values cannot be "
            "verified. Put it back, or pass verify=False to read the arrays unchecked.",
            option="verify",
        )
    if entries is None:
        entries = entries_by_orbax(folder)
    return {entry.words: entry for entry in entries}


def refuse_problems(what: str, done: str, problems: Iterable[str]) -> None:
    """Raise one error with all problems, if there are any."""
    listed = list(problems)
    if listed:
        count = f"{len(listed)} {plural_noun(len(listed), 'problem')}"
        raise PartitionError(f"{what}: {count}, nothing was {done}.{problem_lines(listed)}")


# Which directory a checkpoint goes to or comes from, and what is refused there.

_ORBAX_MARK = "_CHECKPOINT_METADATA"  # a file that Orbax writes into every checkpoint


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """Return the directory that is meant, `~` and links followed."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    # Orbax would take gs://..., but the swap below needs renames of a file system.
    if not isinstance(text, str) or not text.strip() or "://" in text:
        raise PartitionError(
            f"path {short(text)} is not a directory of a file system. Pass one.", option="path"
        )
    try:
        folder = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop, an unknown user, a zero byte
        raise PartitionError(
            f"path {short(text)} cannot be resolved ({short(str(error))}). Pass another.",
            option="path",
        ) from error
    if not folder.name:
        raise PartitionError(
            f"path {short(text)} is the root. Name a directory for the checkpoint.", option="path"
        )
    return folder


def check_destination(folder: Path, overwrite: bool) -> None:
    """Refuse to write where something other than a checkpoint is, or one without `overwrite`."""
    if folder.exists() and not folder.is_dir():
        raise PartitionError(f"{folder}: is a file. Name a directory for the checkpoint.")
    current = current_folder(folder)
    if current is None:
        return
    if not is_checkpoint(current):
        raise PartitionError(
            f"{folder}: holds {_content(current)} but no checkpoint; nothing in it was touched. "
            "Name another directory."
        )
    if not overwrite:
        raise PartitionError(
            f"{folder}: there is a checkpoint already. Pass overwrite=True to replace it, or name "
            "another directory.",
            option="overwrite",
        )


def find_checkpoint(folder: Path) -> Path:
    """Return where the checkpoint of this name is."""
    if folder.exists() and not folder.is_dir():
        raise PartitionError(f"{folder}: is a file. Name the directory of a checkpoint.")
    current = current_folder(folder)
    if current is None:
        raise CheckpointError(f"{folder}: no checkpoint here. Save one with save_checkpoint.")
    if not is_checkpoint(current):
        raise CheckpointError(
            f"{folder}: holds {_content(current)} but no checkpoint. Name the directory that "
            "save_checkpoint wrote."
        )
    return current


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory has a file that only checkpoints have."""
    return any((folder / name).is_file() for name in (MANIFEST_NAME, _ORBAX_MARK))


def _content(folder: Path) -> str:
    return listing(sorted(short(item.name, 40) for item in folder.iterdir()), 4)


# Put a finished directory in the place of another so that no kill, at any moment, loses both. A
# directory that is not empty cannot be replaced by one rename, so there are two, and a moment
# between them in which `name` does not exist.
#
# Beside `name` stands `.name.meshwright`, with up to three directories:
#
#     writing   unfinished, worthless after a kill
#     new       complete, about to take its place
#     old       the one before, about to be deleted
#
# Invariant: `name` is complete whenever it is there. When it is not, `new` is the one that counts.


def staging_folder(path: Path) -> Path:
    """Return the hidden directory beside a checkpoint: on its file system, as renames must be."""
    return path.with_name(f".{path.name}.meshwright")


def current_folder(path: Path) -> Path | None:
    """Return where the checkpoint of this name is now, also after a swap that was cut short."""
    for folder in (path, staging_folder(path) / "new"):
        if folder.is_dir() and any(folder.iterdir()):
            return folder
    return None


def prepare_staging(path: Path) -> Path:
    """Finish or clear what a killed save left, and return where to write."""
    finish_save(path)
    staging_folder(path).mkdir(parents=True)
    return staging_folder(path) / "writing"


def commit(path: Path) -> None:
    """Let what was written take its place. From the first rename on, it counts."""
    staging = staging_folder(path)
    _sync_tree(staging / "writing")
    (staging / "writing").rename(staging / "new")
    _sync(staging)
    _publish(path)


def clear_staging(path: Path) -> None:
    """Delete the staging folder. `new` loses its name first: half deleted, it must not be found."""
    staging = staging_folder(path)
    if (staging / "new").exists():
        _delete(staging / "old")
        (staging / "new").rename(staging / "old")
    _delete(staging)


def discard(path: Path) -> None:
    """Delete a checkpoint, and what a killed save left of it. It loses its name first."""
    clear_staging(path)
    if path.exists():
        staging_folder(path).mkdir(parents=True)
        path.rename(staging_folder(path) / "old")
        _delete(staging_folder(path))


def finish_save(path: Path) -> None:
    """Finish or clear what a killed save left."""
    if current_folder(path) == staging_folder(path) / "new":
        _publish(path)
    clear_staging(path)


def clear_failed_save(path: Path) -> None:
    """Clear up after a save that failed; what has been completed stays."""
    if not (staging_folder(path) / "new").exists():
        _delete(staging_folder(path))


def _publish(path: Path) -> None:
    """Rename `new` to `path`; what was there goes to `old` and is deleted last."""
    staging = staging_folder(path)
    if path.exists():
        _delete(staging / "old")
        path.rename(staging / "old")
    (staging / "new").rename(path)
    # A rename is on the disk when the directories of both names are.
    _sync(staging)
    _sync(path.parent)
    _delete(staging)


def _delete(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_tree(folder: Path) -> None:
    """Force every byte and every name below a folder to the disk, before anything is renamed."""
    for inside, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(inside) / name)
        _sync(Path(inside))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Several processes that save or restore as one.

_LIMBS = (0, 16, 32, 48)  # a sum of 16-bit parts fits 32 bits on up to 65,536 processes


def is_main_process() -> bool:
    """Whether this process does what only one may do: directories, the manifest."""
    return jax.process_index() == 0


def sum_over_processes(sums: Sequence[int]) -> list[int]:
    """Return each sum over all processes, modulo 2**64.

    By one collective over a device of each process. The 64-bit sums travel as four 16-bit parts,
    since JAX narrows 64-bit integers to 32 bits unless x64 is enabled.
    """
    if jax.process_count() == 1 or not sums:
        return list(sums)
    parts = np.array([[total >> at & 0xFFFF for at in _LIMBS] for total in sums], np.uint32)
    # Reversed, so that the first device of each process is the one that stays.
    device_of = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([device_of[process] for process in sorted(device_of)]), ("process",))
    stacked = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        NamedSharding(mesh, make_spec(["process"])), parts[None]
    )
    replicated = NamedSharding(mesh, make_spec())
    total = jax.jit(lambda stacked: stacked.sum(axis=0), out_shardings=replicated)(stacked)
    rows = np.asarray(total.addressable_data(0)).tolist()
    return [sum(part << at for part, at in zip(row, _LIMBS, strict=True)) % MODULUS for row in rows]
