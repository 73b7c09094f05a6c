"""`predict_run`: the step time of a training run that is described by its sizes alone.

It is put together from the products of a layer, attention, what goes through memory,
recomputation, exchanges, the pipeline's bubble, the optimizer, and the host that starts kernels.
Sizes, bytes and bubbles are counted; wires, memory, attention and the law of small products are
those of rehearsals; what is left is `Reached`, fitted once to published runs.

`benchmarks/published_plans.py` prints this model against published step times.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from meshwright.hardware.chips import CHIPS, Chip
from meshwright.planning.described_runs import (
    DescribedRun,
    Products,
    domain_size,
    exchange_seconds,
    gpu_axis,
)
from meshwright.rehearsal.collectives.costs import copy_seconds
from meshwright.rehearsal.kernel_speeds import TPU_MULTIPLIER, Speeds, speeds

# Whose part of nominal is taken for products: chips of a generation have one.
_GENERATION = {"v100": "a100", "h200": "h100", "gb200": "b200", "gb300": "b300"}
# Counted by hand: bytes that go through memory, as times that an array is read or written. What is
# fused differs, so a pass more or less is a choice; these were made with rows on A100s in view.
_PASSES = 14.0  # tokens x embed: two norms, two residual sums, biases, dropout; forward
_ACTIVATION = 1.0  # what products of the feed-forward layer and of q, k, v make, once more each
_SCORES = 8.0  # scores that are kept in memory: product, scaling, mask, softmax, dropout, product
_BACKWARD = 1.5  # as many bytes backward as forward, and the forward pass's results
_SCORES_BACKWARD = 1.2
_ATTENTION_BACKWARD = 2.5  # five products for two
_LOSS = 46.0  # bytes for a logit: in 16 and 32 bits, softmax, its gradient
_UPDATE = 30.0  # bytes for a weight: gradient, copy, two moments in 32 bits, read and written
_EMBED = 6.0  # tokens x embed: lookup and its gradient
_ROUTED = 6.0  # tokens x chosen experts x embed: sorted, sent, and summed again
_CAST = 6.0  # bytes for an element of products in 8 or 4 bits: rounded, transposed, scaled
# Bytes of a weight: as it is gathered, and its gradient as it is summed.
_WEIGHT, _GRADIENT = 2, 4
_FULL_POWER = 700.0  # watts of an H100
# Not counted, and too few rows to fit them: seconds that PyTorch takes to start a microbatch, and
# what of tp's exchanges is left if they are cut into pieces (torchtitan: steps 5 to 14 % shorter).
_START_MICROBATCH = 1e-3
_ASYNC_TP = 0.7


@dataclasses.dataclass(frozen=True)
class Reached:
    """What published runs reach: the constants that were fitted, none of them to a single run.

    - `a100`, `h100`, `b200`, `b300`: the part of nominal that large products reach on GPUs of that
      generation, `early_h100` with the libraries of its first year; `mxu128` and `mxu256` on TPUs
      with multipliers of that side. `fp8`, `nvfp4`: how much faster than bf16.
    - `flash_ampere`, `flash_hopper`: the part of nominal that PyTorch's attention of 2023 reached.
    - `experts`, `experts_tpu`: how much longer products of experts take than one product of their
      size, on GPUs and on TPUs: uneven loads, capacity, sorting.
    - `start`: seconds that PyTorch takes to start the kernels of a layer once; `start_unfused` more
      where the softmax of scores is not one kernel. `sharpness`: how host and device times add up;
      infinite is the longer one. `wait_tp`: seconds more that eight GPUs of a tp axis wait for each
      other, fewer by the logarithm.
    - `hidden`: the part of the exchange of weights and gradients between GPUs that runs beside
      layers; `hidden_inside` of that inside of layers (tp, ep); `hidden_ici` of both on TPUs.
    """

    a100: float = 0.775
    h100: float = 0.657
    early_h100: float = 0.643
    b200: float = 0.642
    b300: float = 0.866
    mxu128: float = 0.855
    mxu256: float = 0.694
    fp8: float = 1.72
    nvfp4: float = 3.01
    flash_ampere: float = 0.295
    flash_hopper: float = 0.171
    experts: float = 3.12
    experts_tpu: float = 1.39
    start: float = 1.05e-3
    wait_tp: float = 0.152e-3
    start_unfused: float = 0.414e-3
    sharpness: float = 3.17
    hidden: float = 0.356
    hidden_inside: float = 0.359
    hidden_ici: float = 0.546


FITTED = Reached()


@dataclasses.dataclass(frozen=True)
class RunTime:
    """Seconds of a step of a run, and its parts, which add up to it.

    `parts`: products, attention, memory (norms, sums, casts), vocabulary, recomputation, what of
    the exchanges of tp, cp, ep and fsdp is waited for, waiting for the host, the pipeline's
    hand-over and bubble, gradients, optimizer.
    """

    seconds: float
    parts: dict[str, float]


def predict_run(run: DescribedRun, reached: Reached = FITTED) -> RunTime:
    """Predict the step time of a described run.

    >>> from meshwright.hardware.chips import CHIPS
    >>> from meshwright.planning.described_runs import Transformer
    >>> gpt3 = Transformer(96, 12288, 49152, 96, 96, 128, 51200, gated=False)
    >>> run = DescribedRun(gpt3, CHIPS["a100"], 64, 2048, 64, 1, tp=8, pp=8, vp=3, remat="full",
    ...     attention="scores", sequence_parallel=False, eager=True, overlap=False)
    >>> print(f"{predict_run(run).seconds:.1f} s")  # published (arXiv 2205.05198): 18.1
    18.9 s
    """
    layer = _layer(run, reached)
    device = sum(layer.values())
    host = _host_seconds(run, reached)
    waited = (device**reached.sharpness + host**reached.sharpness) ** (1 / reached.sharpness)
    layer["host"] = waited - device + _waiting_seconds(run, reached) if host else 0.0
    seconds = device + layer["host"]
    layer["fsdp"] = _fsdp_seconds(run, reached, seconds)
    stage = run.model.layers / run.pp * (seconds + layer["fsdp"])
    # Where layers cannot be shared out evenly, stages with the vocabulary are taken to have fewer.
    vocabulary = _vocabulary_seconds(run, reached) / (1 if _is_even(run) else run.pp)
    rounds = run.microbatches * run.model.layers / run.pp
    parts = {name: rounds * each for name, each in layer.items()}
    parts["vocabulary"] = run.microbatches * vocabulary
    parts["pipeline"] = 0.0
    if run.pp > 1:
        total = _pipeline_seconds(run, stage, vocabulary)
        parts["pipeline"] = total - run.microbatches * (stage + vocabulary)
    parts["gradients"] = _gradient_seconds(run, reached, stage + vocabulary)
    weights = _device_weights(run) / (run.replicas if run.sharded_update or run.fsdp > 1 else 1)
    parts["optimizer"] = 0.0 if run.frozen else weights * _UPDATE / _speeds(run.chip).bytes
    return RunTime(sum(parts.values()), parts)


# A layer, one microbatch: forward, backward, and what is computed again in between.


def _layer(run: DescribedRun, reached: Reached) -> dict[str, float]:
    """Seconds on the device, by part; exchanges as far as they are waited for."""
    model, tokens = run.model, run.microbatch * run.seq / run.cp
    wide = 2 if model.gated else 1
    projections = model.projections / model.embed
    out = model.heads * model.head if not model.attention_weights else 0.3 * projections
    product = functools.partial(_product_seconds, run, reached)
    qkv = product(tokens, model.embed, (projections - out) / run.tp)
    output = product(tokens, out / run.tp, model.embed)
    up, down, width = 0.0, 0.0, 0.0
    moe = 1 - model.dense_layers / model.layers if model.experts else 0.0
    if moe < 1:
        up = (1 - moe) * product(tokens, model.embed, wide * model.mlp / run.tp)
        down = (1 - moe) * product(tokens, model.mlp / run.tp, model.embed)
        width = (1 - moe) * model.mlp / run.tp
    if moe:
        expert_up, expert_down = _expert_seconds(run, reached, tokens, wide)
        up, down = up + moe * expert_up, down + moe * expert_down
        width += moe * (model.active * model.expert_mlp + model.shared_mlp) / run.tp
    forward, backward = _attention_seconds(run, reached)
    memory = _memory_seconds(run, tokens, wide, width, moe)
    products = qkv + output + up + down
    again = {
        "none": 0.0,
        "minimal": 0.5 * memory,
        "selective": forward if run.attention == "scores" else 0.0,
        "context": qkv + up + memory,
        "mlp": up + memory,
        "qkv": output + up + memory,
        "full": products + forward + memory,
    }[run.remat]
    return {
        "products": products * (2 if run.frozen else 3),
        "attention": forward + backward,
        "memory": memory * (1 + _BACKWARD),
        "recomputation": again,
        "tp": _tp_seconds(run, reached, tokens),
        "cp": _cp_seconds(run, tokens),
        "ep": moe * _ep_seconds(run, reached, tokens),
    }


def _product_seconds(
    run: DescribedRun,
    reached: Reached,
    m: float,
    k: float,
    n: float,
    products: Products | None = None,
    count: float = 1,
) -> float:
    """Seconds of `count` products `m x k` by `k x n` side by side, in the run's dtype or in one."""
    dtype, chip = products or run.products, run.chip
    flops = 2.0 * m * k * n * count
    nominal = chip.tflops * 1e12 / chip.cores
    faster = {"bf16": 1.0, "fp8": reached.fp8, "nvfp4": reached.nvfp4}[dtype]
    if run.is_tpu:
        part = reached.mxu128 if TPU_MULTIPLIER[chip.name] == 128 else reached.mxu256
        # Only TPU7x multiplies 8-bit floating-point numbers faster (cloud docs).
        return flops / (nominal * part * (faster if chip.name == "tpu7x" else 1.0))
    # A product is limited by its number of tiles: the faster the chip, the larger it has to be. The
    # law was measured on one H200.
    rate = nominal * faster * math.sqrt(run.watts / _FULL_POWER if run.watts else 1.0)
    side = math.cbrt(flops / 2)
    h200 = CHIPS["h200"]
    half = h200.speeds["half side"] * math.sqrt(rate / (h200.tflops * 1e12))
    hopper = reached.early_h100 if run.attention == "flash" else reached.h100
    parts = {"a100": reached.a100, "h100": hopper, "b200": reached.b200, "b300": reached.b300}
    part = parts[_GENERATION.get(chip.name, chip.name)]
    return flops * (1 + half / side) / (rate * part)


def _expert_seconds(
    run: DescribedRun, reached: Reached, tokens: float, wide: int
) -> tuple[float, float]:
    """Seconds of the experts' products: the first one or two of each, and the last."""
    model = run.model
    local = max(1.0, model.experts / run.ep)
    rows = tokens * model.active / model.experts * run.ep
    more = reached.experts_tpu if run.is_tpu else reached.experts
    product = functools.partial(_product_seconds, run, reached)
    up = more * product(rows, model.embed, wide * model.expert_mlp / run.tp, count=local)
    down = more * product(rows, model.expert_mlp / run.tp, model.embed, count=local)
    if model.shared_mlp:
        up += product(tokens, model.embed, wide * model.shared_mlp / run.tp)
        down += product(tokens, model.shared_mlp / run.tp, model.embed)
    return up, down


def _attention_seconds(run: DescribedRun, reached: Reached) -> tuple[float, float]:
    """Seconds of a layer's attention, forward and backward."""
    model, chip, speed = run.model, run.chip, _speeds(run.chip)
    heads = run.microbatch * model.heads / run.tp / run.cp
    keys = (1 - model.local) * run.seq + model.local * min(2 * model.window, run.seq)
    scores = heads * run.seq * keys
    if run.attention == "scores":
        product = functools.partial(_product_seconds, run, reached, products="bf16", count=heads)
        products = product(run.seq, model.head, run.seq) + product(run.seq, run.seq, model.head)
        memory = 2 * scores * _SCORES / speed.bytes
        return products + memory, 2 * products + _SCORES_BACKWARD * memory
    flops = 4 * scores * model.head / 2  # kernels leave out what the causal mask hides
    if speed.tpu is not None:
        part = reached.mxu128 if TPU_MULTIPLIER[chip.name] == 128 else reached.mxu256
        multiplied = flops / (chip.tflops * 1e12 / chip.cores * part)
        vectors = scores / 2 * speed.tpu.operations / speed.tpu.vectors
        return multiplied + vectors, _ATTENTION_BACKWARD * multiplied + _BACKWARD * vectors
    if run.attention == "flash":
        hopper = _GENERATION.get(chip.name, chip.name) != "a100"
        rate = chip.tflops * 1e12 * (reached.flash_hopper if hopper else reached.flash_ampere)
        return flops / rate, _ATTENTION_BACKWARD * flops / rate
    size = 128 if model.head >= 96 else 64
    forward = speed.kernels[f"cudnn attention forward {size}"]
    backward = speed.kernels[f"cudnn attention backward {size}"]
    return flops / forward, _ATTENTION_BACKWARD * flops / backward


def _memory_seconds(run: DescribedRun, tokens: float, wide: int, width: float, moe: float) -> float:
    """Seconds of what is no product, forward: norms, sums, activations, routing, casts."""
    model = run.model
    cut = run.tp if run.sequence_parallel else 1
    heads = (model.heads + 2 * model.kv_heads) * model.head / run.tp
    elements = model.embed / cut * _PASSES + (width * (wide + 1) + heads) * _ACTIVATION
    elements += moe * model.embed * model.active * _ROUTED
    size = 2 * tokens * elements
    if run.products != "bf16" and not run.is_tpu:
        size += _CAST * tokens * (2 * model.embed + width + model.heads * model.head / run.tp)
    return size / _speeds(run.chip).bytes


def _host_seconds(run: DescribedRun, reached: Reached) -> float:
    """Seconds that starting a layer's kernels takes: forward, backward and again if recomputed."""
    if not run.eager:
        return 0.0
    # Megatron's kernel for the softmax of scores takes rows and heads in fours.
    unfused = run.attention == "scores" and run.microbatch * run.model.heads / run.tp % 4
    more = reached.start_unfused if unfused else 0.0
    return _passes(run) * (reached.start + more)


def _waiting_seconds(run: DescribedRun, reached: Reached) -> float:
    """Seconds that GPUs of a tp axis wait for the one whose host is the last, at every sum."""
    return _passes(run) * reached.wait_tp * math.log2(run.tp) / 3


def _passes(run: DescribedRun) -> int:
    """How often a layer is gone through: forward, backward, and again if it is recomputed."""
    return 3 if run.remat == "full" else 2


def _vocabulary_seconds(run: DescribedRun, reached: Reached) -> float:
    """Seconds of embedding, logits and loss, forward and backward, for a microbatch."""
    model, tokens = run.model, run.microbatch * run.seq / run.cp
    part = model.vocab / run.tp
    logits = 3 * _product_seconds(run, reached, tokens, model.embed, part, "bf16")
    memory = tokens * (part * _LOSS + 2 * model.embed * _EMBED) / _speeds(run.chip).bytes
    return logits + memory + (_START_MICROBATCH if run.eager else 0.0)


# Between layers and devices.


def _tp_seconds(run: DescribedRun, reached: Reached, tokens: float) -> float:
    """Seconds of the two sums of a layer, forward, backward and again if recomputed."""
    if run.tp == 1:
        return 0.0
    size = 2 * tokens * run.model.embed
    if run.sequence_parallel:
        kinds = ("all-gather", "reduce-scatter")
        once = sum(exchange_seconds(run, kind, size, "tp") for kind in kinds)
    else:
        once = exchange_seconds(run, "all-reduce", size, "tp")
    hidden = reached.hidden_ici if run.is_tpu else reached.hidden_inside if run.overlap else 0.0
    left = (1 - hidden) * (_ASYNC_TP if run.async_tp else 1.0)
    return 2 * once * _passes(run) * left


def _cp_seconds(run: DescribedRun, tokens: float) -> float:
    """Seconds of moving keys and values: three times, two of them hidden by attention (assumed)."""
    keys = 2 * 2 * tokens * run.cp * run.model.kv_heads * run.model.head / run.tp
    return exchange_seconds(run, "all-gather", keys, "cp") if run.cp > 1 else 0.0


def _ep_seconds(run: DescribedRun, reached: Reached, tokens: float) -> float:
    """Seconds of sending tokens to their experts and back, forward and backward.

    A token goes once to each device that has an expert for it, or to each NVLink domain, where it
    is handed on.
    """
    if run.ep == 1:
        return 0.0
    places = run.ep if run.is_tpu else gpu_axis(run, "ep")[1]
    places = places if places > 1 else run.ep
    copies = places * (1 - (1 - 1 / places) ** run.model.active)
    once = exchange_seconds(run, "all-to-all", 2 * tokens / run.tp * copies * run.model.embed, "ep")
    return 4 * once * (1 - (reached.hidden_ici if run.is_tpu else reached.hidden_inside))


def _fsdp_seconds(run: DescribedRun, reached: Reached, beside: float) -> float:
    """Seconds that a layer waits for its weights, and for its gradients' sums."""
    if run.fsdp == 1:
        return 0.0
    size = _WEIGHT * run.model.layer_weights() / run.tp / (run.ep if run.model.experts else 1)
    gathers = exchange_seconds(run, "all-gather", size, "fsdp") * (2 if run.regather else 1)
    sums = exchange_seconds(run, "reduce-scatter", size * (2 if run.is_tpu else 1), "fsdp")
    hidden = reached.hidden_ici if run.is_tpu else reached.hidden
    return gathers + sums - hidden * min(gathers + sums, beside)


def _gradient_seconds(run: DescribedRun, reached: Reached, beside: float) -> float:
    """Seconds that a step waits for the sums of gradients over replicas."""
    weights = _device_weights(run)
    if run.frozen or run.replicas == 1:
        return 0.0
    if run.fsdp > 1:
        # Between slices of TPUs nothing is hidden: MaxText-64B on v5e takes 13.3 s on one slice of
        # 256 chips and 14.0 s on two, and their gradients 0.6 s over the network.
        summed = exchange_seconds(run, "all-reduce", _GRADIENT * weights / run.fsdp, "dp")
        return summed - (0.0 if run.is_tpu else reached.hidden * min(summed, beside))
    if not run.overlap:
        return exchange_seconds(run, "all-reduce", 2 * weights, "dp")
    summed = exchange_seconds(run, "reduce-scatter", _GRADIENT * weights, "dp")
    summed += exchange_seconds(run, "all-gather", _WEIGHT * weights, "dp")
    return summed - reached.hidden * min(summed, beside)


def _pipeline_seconds(run: DescribedRun, stage: float, vocabulary: float) -> float:
    """Seconds of all microbatches in a 1F1B pipeline, interleaved with `vp` > 1.

    The slowest stage works without a pause; filling and emptying takes one microbatch in each of
    the others, and with chunks a part of that.
    """
    slowest = stage + vocabulary
    others = (run.pp - 1) * (stage if _is_even(run) else slowest)
    size = 2 * run.microbatch * run.seq / run.cp * run.model.embed / run.tp
    far = run.devices // run.pp >= domain_size(run) if not run.is_tpu else run.slices >= run.pp
    # A TPU's table has no start of copies: a GPU's is taken, microseconds in either case.
    table = _speeds(run.chip if not run.is_tpu else CHIPS["h200"]).table
    hop = copy_seconds(size, run.chip.network if far else run.chip.link, far, table)
    start = _START_MICROBATCH if run.eager else 0.0
    # Chunks hand over more often, and beside computation.
    pace = slowest + 2 * hop * (1 if run.vp == 1 else 0.3 * run.vp) + start
    return run.microbatches * pace + (others + 2 * (run.pp - 1) * hop) / run.vp


def _is_even(run: DescribedRun) -> bool:
    return run.model.layers % (run.pp * run.vp) == 0


def _device_weights(run: DescribedRun) -> float:
    """Weights of a device before FSDP cuts them: its stage, its part of tp and of the experts."""
    cut = run.tp * run.pp * (run.ep if run.model.experts else 1)
    layers = run.model.layers * run.model.layer_weights() / cut
    return layers + run.model.vocab * run.model.embed / run.tp


@functools.lru_cache(maxsize=64)
def _speeds(chip: Chip) -> Speeds:
    return speeds(chip)
