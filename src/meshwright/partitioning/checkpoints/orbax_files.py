"""Reading and writing arrays with Orbax, which is loaded on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import PartitionError, short
from meshwright.partitioning.checkpoints.index import NAME, Entry
from meshwright.partitioning.checkpoints.leaves import Words, flatten, stored_form, where

_ALONE = "array"  # the name on the disk of a tree that is one array


def orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise PartitionError(
            "Checkpoints need Orbax, which cannot be imported here "
            f"({short(str(error))}). Run: pip install orbax-checkpoint"
        ) from error


def _writer() -> Any:
    ocp = orbax()
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _reader() -> Any:
    """Each process reads by itself: what one cannot read must not leave the others waiting."""
    ocp = orbax()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"meshwright_{me}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_arrays(folder: Path, arrays: Mapping[Words, Any]) -> None:
    with _writer() as checkpointer:
        checkpointer.save(folder, args=orbax().args.StandardSave(_nested(arrays)))


def read_arrays(place: Path, targets: Mapping[Words, Any]) -> dict[Words, jax.Array]:
    """The arrays in their form on the disk, placed as the targets say."""
    if not targets:
        return {}
    forms = {words: stored_form(target) for words, target in targets.items()}
    try:
        with _reader() as checkpointer:
            item = (
                _nested(forms) if (place / NAME).exists() else _as_saved(checkpointer, place, forms)
            )
            tree = checkpointer.restore(place, args=orbax().args.StandardRestore(item))
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        why = cause(error)
        raise PartitionError(
            f"{place}: {_named_in(why, targets)} could not be read; a file is damaged or missing. "
            f"Restore another checkpoint. ({why})"
        ) from error
    found = dict(flatten(tree))
    return {words: found[words or (_ALONE,)] for words in targets}


def entries_by_orbax(place: Path) -> list[Entry]:
    try:
        with _reader() as checkpointer:
            leaves = flatten(_metadata(checkpointer, place))
        return [Entry(words, str(leaf.dtype), tuple(leaf.shape)) for words, leaf in leaves]
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        raise PartitionError(
            f"{place}: Orbax cannot say what it holds. Restore another checkpoint. ({cause(error)})"
        ) from error


def _metadata(checkpointer: Any, place: Path) -> Any:
    """A tree with shape and type of each array, in the structure Orbax saved."""
    return checkpointer.metadata(place).item_metadata.tree


def _as_saved(checkpointer: Any, place: Path, forms: Mapping[Words, Any]) -> Any:
    """The forms in the structure Orbax saved, which need not be ours when we left no index."""
    saved = _metadata(checkpointer, place)
    leaves = [forms[words] for words, _ in flatten(saved)]
    return jax.tree.unflatten(jax.tree.structure(saved), leaves)


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
    """The leaf an error of TensorStore speaks of: `"a.b/0.0"` is a chunk of `a/b`."""
    named = [words for words in targets if f'"{".".join(words or (_ALONE,))}/' in text]
    return where(max(named, key=lambda words: len("/".join(words)))) if named else "an array"


def cause(error: BaseException) -> str:
    """What was first to go wrong, in a line."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line if len(line) <= 300 else line[:296] + ' ...'}"
