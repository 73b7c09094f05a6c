"""Reading and writing arrays with Orbax, which is loaded on first use."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoints.manifest import NAME, Entry, Words, flatten, stored_form, where
from meshwright.errors import PartitionError, short

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


# One number for the content of an array, the same however the array is cut.
#
# Every element is mixed with its place in the whole array to 64 bits, and these are added up modulo
# 2**64. A sum does not care for order, so each device's piece is summed where it lies, on any mesh,
# and no host ever needs the whole array. A change of one element always changes the sum; other
# damage goes unseen with a chance of about 2**-64. It guards against accidents, not attackers.


WORD = 1 << 64
BLOCK = 1 << 15  # elements mixed at a time: the intermediate values stay in the processor's cache

# Odd, so that each step is one-to-one. The rounds are those of SplitMix64.
_PLACE = 0x9E3779B97F4A7C15
_VALUE = 0xD6E8FEB86659FD93
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31

_Positions = NDArray[np.uint64]


def checksums(arrays: Sequence[Any]) -> list[int]:
    """The checksum of each array, several at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(checksum, arrays))


def checksum(array: Any) -> int:
    """The sum over those elements that this process holds; each element counts once.

    Over several processes, add theirs modulo 2**64.

    >>> import numpy as np
    >>> whole = np.arange(6.0).reshape(2, 3)
    >>> checksum(whole) == checksum(whole[::-1])
    False
    """
    return sum(_piece_sum(*piece) for piece in _pieces(array)) % WORD


def _pieces(array: Any) -> Iterator[tuple[NDArray[Any], int, tuple[int, ...]]]:
    """Each piece with the place of its first element and the strides of the whole array."""
    if not isinstance(array, jax.Array):
        if jax.process_index() == 0:
            yield _piece(np.asarray(array), array.shape, [0] * len(array.shape))
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            starts = [cut.start or 0 for cut in shard.index]
            yield _piece(_on_host(shard.data), array.shape, starts)


def _on_host(piece: jax.Array) -> NDArray[Any]:
    """Through a second handle, since JAX keeps a copy on the host as long as its handle lives."""
    handle = jax.make_array_from_single_device_arrays(piece.shape, piece.sharding, [piece])
    return np.asarray(handle)


def _piece(
    data: NDArray[Any], shape: Sequence[int], starts: Sequence[int]
) -> tuple[NDArray[Any], int, tuple[int, ...]]:
    """A piece as unsigned integers. Elements of 16 bytes become two of eight."""
    data = np.ascontiguousarray(data).reshape(data.shape or (1,))
    shape, starts = [*(shape or (1,))], [*(starts or (0,))]
    if data.dtype.itemsize > 8:
        data = data.view(np.uint64).reshape(*data.shape, -1)
        shape, starts = [*shape, data.shape[-1]], [*starts, 0]
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return data.view(f"u{data.dtype.itemsize}"), first, strides


def _piece_sum(data: NDArray[Any], first: int, strides: tuple[int, ...]) -> int:
    """The sum of a piece, cut along its first long dim until it is a block."""
    if data.size <= BLOCK:
        return _block_sum(data, first, strides)
    dim = next(dim for dim, size in enumerate(data.shape) if size > 1)
    step = max(1, BLOCK // math.prod(data.shape[dim + 1 :]))
    before = (slice(None),) * dim
    return sum(
        _piece_sum(data[(*before, slice(at, at + step))], first + at * strides[dim], strides)
        for at in range(0, data.shape[dim], step)
    )


def _block_sum(data: NDArray[Any], first: int, strides: tuple[int, ...]) -> int:
    words = data.astype(np.uint64)
    words *= np.uint64(_VALUE)
    words += _places(data.shape, first, strides)
    for shift, factor in _ROUNDS:
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(_LAST)
    return int(words.sum(dtype=np.uint64))


def _places(shape: tuple[int, ...], first: int, strides: tuple[int, ...]) -> _Positions:
    """Each element's place in the whole array times `_PLACE`, modulo 2**64."""
    per_dim = [
        np.arange(size, dtype=np.uint64) * np.uint64(stride * _PLACE % WORD)
        for size, stride in zip(shape, strides, strict=True)
    ]
    per_dim[0] += np.uint64(first * _PLACE % WORD)
    return functools.reduce(np.add.outer, per_dim)
