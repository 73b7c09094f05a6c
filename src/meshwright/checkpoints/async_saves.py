"""`Checkpoints`: a directory with one checkpoint per step, written while training goes on.

A save has two halves. In the first, `save` copies the values to the host, where no later step
changes them, and has Orbax begin to write. In the second, a thread computes checksums, waits for
Orbax, writes the manifest, moves the directory into place and deletes old ones. The processes meet
in that thread through the coordination service: a collective there could cross one of the
training loop's. If the second half fails, the next call says so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np

from meshwright._checks import check_flag, check_integer
from meshwright._processes import combine_texts, fail_together
from meshwright._show import short_repr
from meshwright.checkpoints.checkpoint import (
    check_destination,
    checkpoint_folder,
    clear_failed_save,
    commit,
    current_folder,
    discard,
    entries_of,
    finish_save,
    is_checkpoint,
    is_main_process,
    prepare_staging,
    refuse_problems,
    staging_folder,
    with_checksums,
)
from meshwright.checkpoints.manifest import (
    MANIFEST_NAME,
    Entry,
    Words,
    leaf_problems,
    leaves_with_words,
    to_stored,
    write_manifest,
)
from meshwright.checkpoints.orbax_io import (
    MODULUS,
    Shard,
    first_cause,
    host_shards,
    orbax,
    shards_checksum,
    start_writing,
)
from meshwright.errors import MeshwrightError, PartitionError, short
from meshwright.trees.walk import is_array

_STEP = re.compile(r"(?P<hidden>\.?)step_(?P<step>0|[1-9][0-9]*)(?P<staging>(\.meshwright)?)")
_numbers = itertools.count()


class Checkpoints:
    """Saves the state of a training loop every so many steps, beside the loop; keeps the last.

    Each is a directory `step_N` under `path`, whole or not there, with checksums, as
    `save_checkpoint` writes it; `resume` goes on from the newest. All processes make the object and
    call it alike. Use it with `with`, or call `wait` at the end.

    Args:
      path: the directory, on a file system that all processes see. It is made if need be.
      every: `save` does nothing at other steps than the multiples of this.
      keep: how many checkpoints stay: the one saved last, and the newest of the others. `None`
        keeps all.

    >>> import jax, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with Checkpoints(path, every=10, keep=2) as checkpoints:
    ...     for step in range(1, 36):
    ...         begun = checkpoints.save(step, {"w": jax.numpy.full(8, step)})
    >>> checkpoints.steps()
    [20, 30]
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 1, keep: int | None = 3
    ) -> None:
        self.every = check_integer("every", every, error=PartitionError)
        self.keep = keep if keep is None else check_integer("keep", keep, error=PartitionError)
        self.path = steps_folder(path)
        orbax()
        # Objects are made in the same order in all processes, so this number names theirs.
        self._purpose = f"checkpoints/{next(_numbers)}"
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []
        self._last: int | None = None
        weakref.finalize(self, _print_unheard, self._failures)

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Begin to save the state after so many steps; return whether this is a step to save at.

        First waits for the save before, and raises if that failed. When it returns, the state may
        be donated: its values have been copied to the host. `force` saves at any step; a step that
        this object has saved is not saved again. One that is there from an earlier run is replaced.
        """
        step = check_integer("step", step, least=0, error=PartitionError)
        force = check_flag("force", force, error=PartitionError)
        if step % self.every and not force:
            return False
        self.wait()
        if step == self._last:
            return False
        folder = self.path / f"step_{step}"
        with fail_together("checkpoint", PartitionError):
            leaves = leaves_with_words(state)
            where = f"Checkpoints({short(str(self.path))}).save({step})"
            refuse_problems(where, "written", leaf_problems(leaves))
            if is_main_process():
                check_destination(folder, overwrite=True)
                prepare_staging(folder)
        second_half = _SecondHalf(folder, self._purpose, self.keep, entries_of(leaves))
        second_half.copy(leaves)
        self._last = step
        self._thread = threading.Thread(
            target=_run, args=(second_half, self._failures), name="meshwright checkpoint"
        )
        self._thread.start()
        return True

    def wait(self) -> None:
        """Wait until the save under way is on the disk; raise if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failures:
            self._last = None
            raise self._failures.pop()

    def steps(self) -> list[int]:
        """Return the steps that are on the disk, in order."""
        return sorted(saved_steps(self.path))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except MeshwrightError as failure:
            if error is None:
                raise
            error.add_note(f"Also: {failure}")

    def __repr__(self) -> str:
        keep = "all" if self.keep is None else str(self.keep)
        return short_repr(self, f"{self.path}: every {self.every} steps, keep {keep}")


def steps_folder(path: str | os.PathLike[str]) -> Path:
    """Return the directory of all steps; refuse what cannot be one."""
    folder = checkpoint_folder(path)
    if folder.exists() and not folder.is_dir():
        raise PartitionError(f"{folder}: is a file. Name a directory.", option="path")
    if is_checkpoint(folder):
        raise PartitionError(
            f"{folder}: is a checkpoint itself. Name the directory above it, {folder.parent}.",
            option="path",
        )
    return folder


def saved_steps(path: Path) -> dict[int, Path]:
    """Return the directory of every step that has one, whole or not; by the number."""
    steps = {step for step, _ in _step_items(path)}
    return {step: path / f"step_{step}" for step in steps if current_folder(path / f"step_{step}")}


def _step_items(path: Path) -> list[tuple[int, bool]]:
    """Return the step of every item of ours, and whether it is a staging folder."""
    names = [item.name for item in path.iterdir()] if path.is_dir() else []
    matches = [match for name in names if (match := _STEP.fullmatch(name))]
    return [
        (int(match["step"]), bool(match["hidden"]))
        for match in matches
        if bool(match["hidden"]) == bool(match["staging"])
    ]


class _SecondHalf:
    """A save under way: what was copied to the host, and the work that is left."""

    def __init__(
        self, folder: Path, purpose: str, keep: int | None, entries: Sequence[Entry]
    ) -> None:
        self.folder, self.purpose, self.keep, self.entries = folder, purpose, keep, entries
        self.shards: dict[Words, list[Shard]] = {}
        self.writer: Any = None
        self.problem: Exception | None = None
        self.has_met_failure = False

    def copy(self, leaves: Sequence[tuple[Words, Any]]) -> None:
        """Copy all values to the host, and have Orbax begin to write them.

        An error of Orbax in one process is kept for `finish`, where the others will wait for it.
        """
        with fail_together("checkpoint", PartitionError):
            arrays = {words: _own(to_stored(value)) for words, value in leaves if is_array(value)}
            filled = {words: array for words, array in arrays.items() if array.size}
            self.shards = {words: host_shards(array) for words, array in filled.items()}
        try:
            if filled:
                writing = staging_folder(self.folder) / "writing"
                self.writer = start_writing(writing, filled, self.meet)
        except Exception as error:  # Orbax and TensorStore raise whatever they like
            self.problem = error

    def finish(self) -> None:
        """Do what is left, with the threads of the other processes."""
        sums: dict[Words, int] = {}
        try:
            sums = {words: shards_checksum(shards) for words, shards in self.shards.items()}
        except Exception as error:
            self.problem = self.problem or error
        self.shards = {}
        try:
            # Also after a problem: Orbax's thread meets those of the others, and this one may not
            # meet them meanwhile.
            if self.writer is not None:
                self.writer.wait_until_finished()
            if self.problem is not None:
                raise self.problem
            totals = self.meet(sums=list(sums.values()))
            if is_main_process():
                self._publish(dict(zip(sums, totals, strict=True)))
            self.meet()
        except Exception as error:
            self._give_up(error)

    def _publish(self, sums: dict[Words, int]) -> None:
        writing = staging_folder(self.folder) / "writing"
        writing.mkdir(exist_ok=True)
        write_manifest(writing, with_checksums(self.entries, sums))
        commit(self.folder)
        try:
            if self.keep is not None:
                delete_old(self.folder, self.keep)
        except OSError as error:
            raise PartitionError(
                f"{self.folder}: is saved, but older ones could not be deleted ({error}). Delete "
                "them by hand."
            ) from error

    def _give_up(self, error: Exception) -> NoReturn:
        """Tell the other processes, which wait in a meeting; raise what is to be said."""
        text = str(error)
        if not isinstance(error, PartitionError):
            text = (
                f"{self.folder}: could not be written. The checkpoints before it are as they "
                f"were. ({first_cause(error)})"
            )
        if not self.has_met_failure:
            with contextlib.suppress(PartitionError):
                self.meet(text)
        # After the meeting no process writes any more.
        with contextlib.suppress(OSError):  # the first error is the one to report
            if is_main_process():
                clear_failed_save(self.folder)
        raise PartitionError(text) from error

    def meet(self, problem: str = "", sums: Sequence[int] = ()) -> list[int]:
        """Wait for the other processes; return the sums over all, or raise the first problem.

        A process that has failed takes part once more, in whichever meeting the others come to
        next, so that all have met equally often.
        """
        answer = combine_texts(self.purpose, json.dumps([problem, list(sums)]), _combine)
        silent = f"{self.folder}: could not be written: process 0 is not there any more."
        first, totals = json.loads(answer) if answer else (silent, [])
        if first:
            self.has_met_failure = True
            raise PartitionError(first)
        return [int(total) for total in totals]


def _combine(texts: Sequence[str]) -> str:
    problems, sums = zip(*map(json.loads, texts), strict=True)
    first = next((problem for problem in problems if problem), "")
    if first:
        return json.dumps([first, []])
    return json.dumps(["", [sum(column) % MODULUS for column in zip(*sums, strict=True)]])


def _run(second_half: _SecondHalf, failures: list[Exception]) -> None:
    try:
        second_half.finish()
    except Exception as error:
        failures.append(error)
    finally:
        if second_half.writer is not None:
            with contextlib.suppress(Exception):  # it has failed before, and that is kept
                second_half.writer.close()


def _print_unheard(failures: Sequence[Exception]) -> None:
    """Print failures that no call has raised, when the object or the program ends."""
    for failure in failures:
        hint = "Call Checkpoints.wait, or use it with `with`, to have this raised."
        print(f"meshwright: {failure} {hint}", file=sys.stderr, flush=True)


def _own(array: Any) -> Any:
    """Return an array that the caller cannot change while it is written."""
    return array if isinstance(array, jax.Array) else np.array(array)


def delete_old(folder: Path, keep: int) -> None:
    """Delete all checkpoints beside this one but the newest; clear what killed saves left.

    Without checksums it is none of ours, and stays.
    """
    path = folder.parent
    for step, is_staging in _step_items(path):
        if is_staging:
            finish_save(path / f"step_{step}")
    others = {
        step: other
        for step, other in saved_steps(path).items()
        if other != folder and (other / MANIFEST_NAME).is_file()
    }
    for step in sorted(others)[: max(0, len(others) - keep + 1)]:
        discard(others[step])
