"""Checkpoints: a tree saved with Orbax, checked, and restored onto any other mesh."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from meshwright._checks import check_flag
from meshwright.checkpoints.manifest import (
    NAME,
    Entry,
    Words,
    empty,
    flatten,
    from_stored,
    leaf_problems,
    python_entry,
    read_index,
    target_problems,
    to_stored,
    type_name,
    where,
    write_index,
)
from meshwright.checkpoints.orbax_io import (
    WORD,
    cause,
    checksums,
    entries_by_orbax,
    orbax,
    read_arrays,
    write_arrays,
)
from meshwright.errors import LONGEST_MESSAGE, PartitionError, listing, short
from meshwright.trees.specs import make_spec
from meshwright.trees.walk import is_array


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
                abandon(place)
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
    >>> from meshwright.meshes.build import mesh
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
    folder = workshop(place) / "writing"
    with together():
        if is_first():
            prepare(place)
    if filled:
        write_arrays(folder, filled)
    with together():
        if is_first():
            folder.mkdir(exist_ok=True)
            write_index(folder, [_entry(words, value, sums) for words, value in leaves])
            commit(place)


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


# Which directory a checkpoint goes to or comes from, and what is refused there.


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


# Putting a finished directory in the place of another so that no kill, at any moment, loses both.
#
# Beside `name` stands `.name.meshwright`, with up to three directories:
#
#     writing   unfinished, worthless after a kill
#     new       complete, about to take its place
#     old       the one before, about to be deleted
#
# `name` itself is complete whenever it is there. When it is not, a `new` is the one that counts.


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


# Several processes that save or restore as one: they add up, and they fail together.


_LIMBS = (0, 16, 32, 48)  # a sum of 16-bit parts fits 32 bits on up to 65,536 processes


def is_first() -> bool:
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What fails in one process fails in all, with the same text; nobody waits alone."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return
    texts = _texts_of_all(str(problem) or repr(problem) if problem else "")
    first = next((text for text in texts if text), None)
    if first is not None:
        raise problem or PartitionError(first)


def add_up(sums: Sequence[int]) -> list[int]:
    """Each sum over all processes, modulo 2**64."""
    if jax.process_count() == 1 or not sums:
        return list(sums)
    parts = np.array([[total >> at & 0xFFFF for at in _LIMBS] for total in sums], np.uint32)
    rows = _over_processes(parts, lambda stacked: stacked.sum(axis=0)).tolist()
    return [sum(part << at for part, at in zip(row, _LIMBS, strict=True)) % WORD for row in rows]


def _over_processes(mine: NDArray[Any], combine: Callable[[Any], Any]) -> NDArray[Any]:
    """What `combine` makes of the arrays of all processes, stacked; all have the same shape."""
    heads = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([heads[process] for process in sorted(heads)]), ("process",))
    cut, whole = (NamedSharding(mesh, make_spec(axes)) for axes in (["process"], []))
    stacked = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        cut, mine[None]
    )
    return np.asarray(jax.jit(combine, out_shardings=whole)(stacked).addressable_data(0))


def _texts_of_all(text: str) -> list[str]:
    room = np.zeros(4 * LONGEST_MESSAGE, np.uint8)
    raw = np.frombuffer(text.encode()[: room.size], np.uint8)
    room[: raw.size] = raw
    rows = _over_processes(room, lambda stacked: stacked)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
