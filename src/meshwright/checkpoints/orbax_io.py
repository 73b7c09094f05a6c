"""Read and write arrays with Orbax, loaded on first use; checksums that no resharding changes."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoints.manifest import (
    MANIFEST_NAME,
    Entry,
    Words,
    leaves_with_words,
    stored_form,
    where,
)
from meshwright.errors import CheckpointError, PartitionError, short

_SINGLE = "array"  # the name on the disk of a tree that is one array
_LONGEST_WRITE = 24 * 60 * 60  # seconds; Orbax wants a number, and its ten minutes are few


def orbax() -> Any:
    """Import Orbax, or raise an error that says how to install it."""
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
    """Return a reader for this process alone, without Orbax's barriers between processes.

    What one process cannot read must not leave the others waiting in a barrier.
    """
    ocp = orbax()
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"meshwright_{process}",
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def write_arrays(folder: Path, arrays: Mapping[Words, Any]) -> None:
    """Write arrays in their stored form; all processes call this together."""
    with _writer() as checkpointer:
        checkpointer.save(folder, args=orbax().args.StandardSave(_nested(arrays)))


def start_writing(folder: Path, arrays: Mapping[Words, Any], barrier: Callable[[], Any]) -> Any:
    """Begin to write arrays; return Orbax's writer, to wait for and to close.

    Orbax has copied them to the host by then: they may be donated or deleted. Its threads wait for
    those of the other processes in `barrier`, which raises if one of them has failed; Orbax's own
    would wait until its timeout.
    """
    ocp = orbax()
    checkpointer = ocp.AsyncCheckpointer(
        ocp.StandardCheckpointHandler(),
        async_options=ocp.options.AsyncOptions(
            timeout_secs=_LONGEST_WRITE,
            barrier_sync_fn=lambda **_: barrier(),
            create_directories_asynchronously=False,
        ),
    )
    try:
        checkpointer.save(folder, args=ocp.args.StandardSave(_nested(arrays)))
    except BaseException:
        checkpointer.close()
        raise
    return checkpointer


def read_arrays(folder: Path, targets: Mapping[Words, Any]) -> dict[Words, jax.Array]:
    """Read the arrays in their stored form, placed as the targets say."""
    if not targets:
        return {}
    forms = {words: stored_form(target) for words, target in targets.items()}
    try:
        with _reader() as checkpointer:
            item = (
                _nested(forms)
                if (folder / MANIFEST_NAME).exists()
                else _as_saved(checkpointer, folder, forms)
            )
            tree = checkpointer.restore(folder, args=orbax().args.StandardRestore(item))
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        why = first_cause(error)
        raise CheckpointError(
            f"{folder}: {_named_in(why, targets)} could not be read; a file is damaged or missing. "
            f"Restore another checkpoint. ({why})"
        ) from error
    by_words = dict(leaves_with_words(tree))
    return {words: by_words[words or (_SINGLE,)] for words in targets}


def entries_by_orbax(folder: Path) -> list[Entry]:
    """Read what a checkpoint without a manifest holds; its entries have no checksums."""
    try:
        with _reader() as checkpointer:
            leaves = leaves_with_words(_metadata(checkpointer, folder))
        return [Entry(words, str(leaf.dtype), tuple(leaf.shape)) for words, leaf in leaves]
    except Exception as error:  # Orbax and TensorStore raise whatever they like
        raise CheckpointError(
            f"{folder}: Orbax cannot say what it holds. Restore another checkpoint. "
            f"({first_cause(error)})"
        ) from error


def _metadata(checkpointer: Any, folder: Path) -> Any:
    """Read a tree with shape and type of each array, in the structure Orbax saved."""
    return checkpointer.metadata(folder).item_metadata.tree


def _as_saved(checkpointer: Any, folder: Path, forms: Mapping[Words, Any]) -> Any:
    """Arrange the forms in the structure Orbax saved: without a manifest it may be another's."""
    saved = _metadata(checkpointer, folder)
    leaves = [forms[words] for words, _ in leaves_with_words(saved)]
    return jax.tree.unflatten(jax.tree.structure(saved), leaves)


def _nested(flat: Mapping[Words, Any]) -> dict[str, Any]:
    """Nest arrays in dicts by their words, as any reader of Orbax understands them."""
    tree: dict[str, Any] = {}
    for words, value in flat.items():
        *outer, last = words or (_SINGLE,)
        inside = tree
        for word in outer:
            inside = inside.setdefault(word, {})
        inside[last] = value
    return tree


def _named_in(text: str, targets: Iterable[Words]) -> str:
    """Return the leaf an error of TensorStore is about: `"a.b/0.0"` is a chunk of `a/b`."""
    named = [words for words in targets if f'"{".".join(words or (_SINGLE,))}/' in text]
    return where(max(named, key=lambda words: len("/".join(words)))) if named else "an array"


def first_cause(error: BaseException) -> str:
    """Describe the innermost cause of an error in one line; Orbax wraps it several times."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line if len(line) <= 300 else line[:296] + ' ...'}"


# Checksums: one number for the content of an array, the same however the array is sharded.
#
# Every element is hashed with its index in the whole array to 64 bits, and the hashes are added up
# modulo 2**64. A sum does not depend on the order, so each process sums the shards that it holds,
# on any mesh, and no host ever needs the whole array. A change of one element always changes the
# sum; other damage goes unseen with a chance of about 2**-64. It guards against accidents, not
# attackers.

MODULUS = 1 << 64
BLOCK = 1 << 15  # elements hashed at a time: the intermediate values stay in the processor's cache

# Odd factors, so that each step is one-to-one modulo 2**64: two values of one element never
# collide. The rounds are those of SplitMix64.
_INDEX_FACTOR = 0x9E3779B97F4A7C15
_VALUE_FACTOR = 0xD6E8FEB86659FD93
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31

# A shard as unsigned integers, the flat index of its first element, the strides of the whole array.
Shard = tuple[NDArray[Any], int, tuple[int, ...]]


def checksums(arrays: Sequence[Any]) -> list[int]:
    """Return the checksum of each array, several at a time: numpy releases the GIL."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(checksum, arrays))


def host_shards(array: Any) -> list[Shard]:
    """Copy to the host what this process sums of an array; `shards_checksum` may come later."""
    return list(_shards(array))


def shards_checksum(shards: Iterable[Shard]) -> int:
    """Return the sum over shards."""
    return sum(_shard_sum(*shard) for shard in shards) % MODULUS


def checksum(array: Any) -> int:
    """Return the sum over those elements that this process holds; each element counts once.

    Over several processes, add theirs modulo 2**64.

    >>> import numpy as np
    >>> whole = np.arange(6.0).reshape(2, 3)
    >>> checksum(whole) == checksum(whole[::-1])
    False
    """
    return shards_checksum(_shards(array))


def _shards(array: Any) -> Iterator[Shard]:
    """Yield the shards of an array that this process sums.

    Of copies on several devices one counts, replica 0, which one process alone holds. A numpy array
    is the same in every process, and process 0 sums it.
    """
    if not isinstance(array, jax.Array):
        if jax.process_index() == 0:
            yield _as_integers(np.asarray(array), array.shape, [0] * len(array.shape))
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            starts = [cut.start or 0 for cut in shard.index]
            yield _as_integers(_on_host(shard.data), array.shape, starts)


def _on_host(data: jax.Array) -> NDArray[Any]:
    """Copy to the host through a second handle.

    JAX caches the host copy in the array that was asked, so a checkpoint would hold every array on
    the host until the user drops it; the second handle is dropped at once.
    """
    handle = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(handle)


def _as_integers(data: NDArray[Any], shape: Sequence[int], starts: Sequence[int]) -> Shard:
    """View a shard as unsigned integers. Elements of 16 bytes become two of eight."""
    data = np.ascontiguousarray(data).reshape(data.shape or (1,))
    shape, starts = [*(shape or (1,))], [*(starts or (0,))]
    if data.dtype.itemsize > 8:
        data = data.view(np.uint64).reshape(*data.shape, -1)
        shape, starts = [*shape, data.shape[-1]], [*starts, 0]
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return data.view(f"u{data.dtype.itemsize}"), first, strides


def _shard_sum(data: NDArray[Any], first: int, strides: tuple[int, ...]) -> int:
    """Return the sum of a shard, which is cut along its first dim of size > 1 down to blocks."""
    if data.size <= BLOCK:
        return _block_sum(data, first, strides)
    dim = next(dim for dim, size in enumerate(data.shape) if size > 1)
    step = max(1, BLOCK // math.prod(data.shape[dim + 1 :]))
    before = (slice(None),) * dim
    return sum(
        _shard_sum(data[(*before, slice(at, at + step))], first + at * strides[dim], strides)
        for at in range(0, data.shape[dim], step)
    )


def _block_sum(data: NDArray[Any], first: int, strides: tuple[int, ...]) -> int:
    """Hash a block in place (numpy's uint64 wraps around, which is the modulus) and add it up."""
    hashes = data.astype(np.uint64)
    hashes *= np.uint64(_VALUE_FACTOR)
    hashes += _scaled_indices(data.shape, first, strides)
    for shift, factor in _ROUNDS:
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(_LAST)
    return int(hashes.sum(dtype=np.uint64))


def _scaled_indices(
    shape: tuple[int, ...], first: int, strides: tuple[int, ...]
) -> NDArray[np.uint64]:
    """Return each element's index in the whole array times `_INDEX_FACTOR`, modulo 2**64."""
    per_dim = [
        np.arange(size, dtype=np.uint64) * np.uint64(stride * _INDEX_FACTOR % MODULUS)
        for size, stride in zip(shape, strides, strict=True)
    ]
    per_dim[0] += np.uint64(first * _INDEX_FACTOR % MODULUS)
    return functools.reduce(np.add.outer, per_dim)
