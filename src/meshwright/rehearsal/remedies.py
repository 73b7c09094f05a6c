"""Find what would make a step need less memory, cheapest first, and try it.

A remedy is listed where there is evidence in the program that it helps: donation that was missed,
scores that a flash kernel never writes, two moments in float32, layers whose values wait for the
backward pass. `mesh_remedies` has those that cut the step otherwise, or over more hardware. Peaks
are estimated (`peak_estimates`) or, with `check`, compiled. Where the step is a model of this
package a remedy is a command; else it is the line of code to write.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshwright import _compat
from meshwright.rehearsal.mesh_remedies import (
    argument_bytes_of,
    data_rows,
    data_shards,
    larger_slice,
    other_meshes,
)
from meshwright.rehearsal.model_commands import changed_words, rehearse_command
from meshwright.rehearsal.peak_estimates import PeakEstimate, Saved, Scales
from meshwright.rehearsal.remedy_table import Remedies, Remedy
from meshwright.rehearsal.request import Request, batch_shape, changed_model, shrunk
from meshwright.rehearsal.step_arguments import has_rows, is_jitted

if TYPE_CHECKING:  # `result` imports this file
    from meshwright.rehearsal.result import Rehearsal

_NOTEWORTHY = 0.02  # of the peak: what saves less is not listed
_LANES = 128  # positions in a block of a TPU's flash kernel


def find_remedies(result: Rehearsal, *, check: bool) -> Remedies:
    """List all remedies that apply, cheapest first; with `check`, compile them."""
    estimate = PeakEstimate(result)
    remedies = (
        *_donation(result, estimate),
        *_flash_attention(result, estimate),
        *_moments(result, estimate),
        *other_meshes(result, estimate),
        *_rematerialisation(result, estimate),
        *_smaller_batch(result, estimate),
        *_offload(result, estimate),
        *_shorter_sequence(result, estimate),
        *larger_slice(result, estimate),
    )
    return Remedies(result, map(_try, remedies) if check else remedies)


def _try(remedy: Remedy) -> Remedy:
    """Compile a remedy, if it can be made here."""
    # In the function because of a cycle: `api` makes rehearsals, and those know their remedies.
    from meshwright.rehearsal.api import trial

    return (
        remedy if remedy.request is None else dataclasses.replace(remedy, **trial(remedy.request))
    )


def of_model(result: Rehearsal, what: str, request: Request, peak: int) -> Iterator[Remedy]:
    """Yield a change of a model, as a command where the model has a name."""
    before = result.memory.peak
    if before - peak < _NOTEWORTHY * before:
        return
    command = rehearse_command(request)
    how = changed_words(result.request, request) if command else _code(result.request, request)
    yield Remedy(what, how, peak, before, request, command)


def _code(before: Request, after: Request) -> str:
    """Say in Python what differs between the requests of a model."""
    words = []
    if (old := before.model) is not None and (new := after.model) is not None:
        words = [
            f"{field.name}={getattr(new.config, field.name)!r}"
            for field in dataclasses.fields(new.config)
            if getattr(new.config, field.name) != getattr(old.config, field.name)
        ]
    if batch_shape(before) != batch_shape(after):
        words.append("batch={}, seq={}".format(*batch_shape(after)))
    return ", ".join(words)


def of_code(result: Rehearsal, what: str, how: str, peak: int) -> Iterator[Remedy]:
    """Yield a change that only the author of the step can make."""
    before = result.memory.peak
    if before - peak >= _NOTEWORTHY * before:
        yield Remedy(what, how, peak, before)


# Arguments are matched with results by shape and dtype, each result once, in the order of the
# arguments: (params, opt_state, batch) -> (params, opt_state, loss) donates 0 and 1.
def _donation(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    request = result.request
    if result.memory.aliased or is_jitted(request.function):
        return
    taken = {*request.donate_argnums, *request.data}
    unmatched = collections.Counter(map(_shape_and_dtype, result.results))
    chosen = []
    for i in (i for i in range(len(request.args)) if i not in taken):
        leaves = collections.Counter(map(_shape_and_dtype, jax.tree.leaves(request.args[i])))
        if leaves and not leaves - unmatched:
            unmatched -= leaves
            chosen.append(i)
    if chosen:
        donated = (*request.donate_argnums, *chosen)
        peak = result.memory.peak
        yield Remedy(
            "donate what the step replaces",
            f"donate_argnums={donated if len(donated) > 1 else donated[0]}",
            peak - estimate.argument_bytes(chosen),
            peak,
            dataclasses.replace(request, donate_argnums=donated),
        )


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf)))


def _flash_attention(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Attention by a kernel, where scores are among the buffers at the peak."""
    family = result.placement.topology.chip.family
    what = "attention by a flash kernel"
    if family == "cpu" or not estimate.bytes_of("scores"):
        return
    peak = estimate.peak({"scores": 0.0})
    request = result.request
    if request.model is None:
        how = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn')"
        if family == "tpu":
            how = "make_splash_mha(...) of jax.experimental.pallas.ops.tpu.splash_attention"
        yield from of_code(result, what, how, peak)
    elif _takes_kernel(request, family):
        # The stand-in has no kernels: it takes the compiler of the hardware.
        auto = changed_model(request, attention="auto")
        yield from of_model(result, what, dataclasses.replace(auto, compiler="vendor"), peak)


def _takes_kernel(request: Request, family: str) -> bool:
    """Whether a model's attention can be a kernel there, as `models.attention` has it."""
    config: Any = getattr(request.model, "config", None)
    _, length = batch_shape(request)
    if length is None or not _compat.compiler_installed(family):
        return False
    if family == "tpu":
        return length % _LANES == 0
    return config.compute in ("bfloat16", "float16") and config.head <= 128 and not config.head % 8


def _moments(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Optimizer moments in bfloat16, where there are two trees of them in float32."""
    what, request, memory = "optimizer moments in bfloat16", result.request, result.memory
    if request.model is not None:
        changed = changed_model(request, moments="bfloat16")
        arguments = argument_bytes_of(changed)
        if arguments is not None:
            yield from of_model(result, what, changed, estimate.peak({}, arguments=arguments))
        return
    first = _first_moments(estimate)
    if first:
        # Without donation the new moments lie beside the old ones.
        copies = 1 if memory.aliased else 2
        saved = copies * first // 2
        how = "optax.adamw(..., mu_dtype=jnp.bfloat16), the first of the two"
        yield from of_code(result, what, how, memory.peak - saved)


def _first_moments(estimate: PeakEstimate) -> int:
    """Bytes on a device of the first moments in float32; 0 where there are no two trees of them."""
    rows = [row for row in estimate.state_rows if row.shape and row.text.startswith("f32")]
    named = [row for row in rows if "mu" in row.path.split("/")]
    if named and any("nu" in row.path.split("/") for row in rows):
        return sum(row.device_bytes for row in named)
    # Without Optax's names: three arrays of every shape are a parameter and its two moments.
    shapes = collections.Counter(row.shape for row in estimate.state_rows if row.shape)
    if not shapes or any(count % 3 for count in shapes.values()):
        return 0
    in_float32 = collections.Counter(row.shape for row in rows)
    if any(in_float32[shape] < 2 * count // 3 for shape, count in shapes.items()):
        return 0
    whole = {row.shape: row.device_bytes for row in rows}
    return sum(whole[shape] * (count // 3) for shape, count in shapes.items())


def _smaller_batch(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Half the batch at once, twice, where every device keeps a row."""
    request = result.request
    smaller = shrunk(request.args, request.data, 2) if request.data else None
    rows = 0 if smaller is None else data_rows(smaller, request.data)
    if smaller is None or not rows or rows % data_shards(result.placement.spec):
        return
    half: Scales = {"activation": 0.5, "scores": 0.5}
    if request.model is not None:
        parts = request.model.config.accumulation
        if request.model.config.stages > 1 or rows % (parts * data_shards(result.placement.spec)):
            return
        # The gradients of the parts are added up beside those of a part.
        gradients = sum(
            row.device_bytes for row in estimate.state_rows if row.path.startswith("state/params")
        )
        changed = changed_model(request, accumulation=2 * parts)
        peak = estimate.peak(half, more=gradients)
        yield from of_model(result, "accumulate gradients over half batches", changed, peak)
        return
    data = argument_bytes_of(dataclasses.replace(request, args=smaller))
    yield Remedy(
        "halve the batch",
        f"{rows} rows instead of {2 * rows}; jax.lax.scan over both halves adds up gradients",
        estimate.peak(half, arguments=data),
        result.memory.peak,
        dataclasses.replace(request, args=smaller),
    )


def _rematerialisation(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Compute the values of layers again, where those that wait are a good part of the peak."""
    request, saved = result.request, estimate.saved
    if saved is None or _is_rematerialised(result):
        return
    # A layer is computed again at a time, and the inputs of all are kept.
    peak = estimate.peak({}, without=saved.names, more=saved.inputs + saved.bytes // saved.layers)
    if request.model is None:
        how = "jax.checkpoint around each layer (nn.remat, eqx.filter_checkpoint, nnx.remat)"
        yield from of_code(result, "rematerialise layers", how, peak)
    else:
        changed = changed_model(request, remat="full", saved=(), offloaded=())
        yield from of_model(result, "rematerialise layers", changed, peak)


def _is_rematerialised(result: Rehearsal) -> bool:
    """Whether layers are computed again by now; a model's, whether all of them but the input."""
    if result.request.model is not None:
        return result.request.model.config.remat in ("full", "custom")
    compiled = result if result.text else result.estimate
    names = ("rematted_computation", "checkpoint/")
    return compiled is not None and any(name in compiled.text for name in names)


def _offload(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Keep the inputs of layers in the host's memory, where they are a good part of the peak."""
    request, saved = result.request, estimate.saved
    if result.placement.topology.chip.family == "cpu" or result.host_transfers is not None:
        return
    if saved is None or result.offloads:  # it does already; a refused program shows no transfers
        return
    # Two layers at a time: one in use, one on its way.
    at_once = 2 * saved.inputs // saved.layers + _recomputed(saved, result)
    peak = estimate.peak({}, without=saved.names, more=at_once)
    what = "offload the inputs of layers to the host"
    if request.model is None:
        how = (
            "jax.checkpoint(layer, policy=jax.checkpoint_policies"
            ".save_and_offload_only_these_names(...))"
        )
        yield from of_code(result, what, how, peak)
    elif hasattr(request.model.config, "kv_heads") and not result.stand_in:
        names = ("decoder_layer_input",)
        changed = changed_model(request, remat="custom", saved=(), offloaded=names)
        yield from of_model(result, what, changed, peak)


def _recomputed(saved: Saved, result: Rehearsal) -> int:
    """Bytes of the one layer that is computed again; they are there already if it is by now."""
    return 0 if _is_rematerialised(result) else saved.bytes // saved.layers


def _shorter_sequence(result: Rehearsal, estimate: PeakEstimate) -> Iterator[Remedy]:
    """Half the positions, where data are tokens."""
    request, what = result.request, "halve the sequence"
    scales: Scales = {"activation": 0.5, "scores": 0.25}
    if request.model is not None:
        _, length = batch_shape(request)
        if length is None or length % 2:
            return
        config: Any = request.model.config
        kernel = config.attention != "dot" and length % _LANES == 0
        if (length // 2) % config.tiles or (kernel and (length // 2) % _LANES):
            return
        changed = changed_model(request, seq=length // 2)
        arguments = argument_bytes_of(changed)
        if arguments is not None:
            yield from of_model(result, what, changed, estimate.peak(scales, arguments=arguments))
        return
    length = token_length(request)
    if length is None or length % 2:
        return
    shorter = tuple(
        jax.tree.map(lambda leaf: _halved(leaf, length), arg) if number in request.data else arg
        for number, arg in enumerate(request.args)
    )
    changed = dataclasses.replace(request, args=shorter)
    arguments = argument_bytes_of(changed)
    if arguments is not None:
        how = f"rows of {length // 2} tokens instead of {length}"
        before, peak = result.memory.peak, estimate.peak(scales, arguments=arguments)
        if before - peak >= _NOTEWORTHY * before:
            yield Remedy(what, how, peak, before, changed)


def token_length(request: Request) -> int | None:
    """The length of rows of tokens: the one second dim of the integers among the data."""
    lengths = {
        leaf.shape[1]
        for leaf in _data_leaves(request)
        if len(leaf.shape) == 2 and np.issubdtype(leaf.dtype, np.integer)
    }
    return lengths.pop() if len(lengths) == 1 else None


def _data_leaves(request: Request) -> Sequence[Any]:
    leaves: Iterable[Any] = (x for i in request.data for x in jax.tree.leaves(request.args[i]))
    return [leaf for leaf in leaves if hasattr(leaf, "dtype") and has_rows(leaf)]


def _halved(leaf: Any, length: int) -> Any:
    """An array of `length` positions with half of them."""
    if len(getattr(leaf, "shape", ())) < 2 or leaf.shape[1] != length:
        return leaf
    shape = (leaf.shape[0], length // 2, *leaf.shape[2:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)  # type: ignore[no-untyped-call]
