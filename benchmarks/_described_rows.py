"""Published runs as rows of a CSV file, read into descriptions that `predict_run` takes.

A row needs sizes (layers, hidden, ffn, heads, seq), a batch, hardware, chips, and a time: seconds,
or tokens or TFLOP a second for each chip. Other columns may be missing, and be in any order. What a
row does not say is taken from the family of its model and from its framework, as the tables here
have it. A row that cannot be described raises `CannotDescribe`, which says why.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import CHIPS, Chip
from meshwright.planning.described_runs import OTHER_CHIPS, DescribedRun, Transformer

Row = Mapping[str, str]


class CannotDescribe(Exception):
    """Why a row has no description here."""


@dataclasses.dataclass(frozen=True)
class Described:
    """A row, its description, and its published seconds."""

    row: Row
    run: DescribedRun
    seconds: float

    @property
    def name(self) -> str:
        axes = ("fsdp", "tp", "pp", "vp", "cp", "ep")
        sizes = {axis: getattr(self.run, axis) for axis in axes}
        mesh = ", ".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1)
        words = f"{text(self.row, 'model')} {text(self.row, 'hardware')} x{text(self.row, 'chips')}"
        return f"{words} {self.run.products} {mesh or 'dp'} microbatch {self.run.microbatch:g}"


def read_described(path: Path) -> tuple[list[Described], list[tuple[Row, str]]]:
    """Return the rows of a file that can be described, and the others with the reason."""
    described, skipped = [], []
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                described.append(describe(row))
            except (CannotDescribe, MeshwrightError) as error:
                skipped.append((row, str(error).splitlines()[0]))
    return described, skipped


def describe(row: Row) -> Described:
    """Describe the run of a row."""
    chip = _chip(row)
    model = _model(row)
    seq, chips = int(_needed(row, "seq")), int(_needed(row, "chips"))
    devices = chips * chip.cores
    axes = {axis: max(1, int(number(row, axis) or 1)) for axis in ("tp", "pp", "cp", "ep", "fsdp")}
    replicas = max(1, devices // (axes["tp"] * axes["pp"] * axes["cp"]))
    batch = number(row, "global_batch")
    if not batch:
        raise CannotDescribe("no global_batch")
    run = DescribedRun(
        model,
        chip,
        devices,
        seq,
        int(batch),
        _microbatch(row, chip, devices, replicas, batch, axes["pp"]),
        **axes,
        vp=max(1, int(number(row, "vp") or 1)) if axes["pp"] > 1 else 1,
        slices=_slices(row, chip, chips),
        products=_products(row),
        remat=_remat(row, chip, model, batch / replicas * seq / axes["cp"] / axes["tp"]),
        watts=_first(r"(\d+)\s*w\b", text(row, "hardware")),
        **_software(row, chip),
    )
    return Described(row, run, _seconds(row, run, chips))


def text(row: Row, column: str) -> str:
    return (row.get(column) or "").strip()


def number(row: Row, column: str) -> float:
    """Return a column's number, 0 where there is none that a size or a time could be."""
    try:
        value = float(text(row, column).replace(",", "") or 0)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


def _needed(row: Row, column: str) -> float:
    value = number(row, column)
    if value <= 0:
        raise CannotDescribe(f"no {column}")
    return value


def _first(pattern: str, words: str) -> float:
    found = re.search(pattern, words, re.IGNORECASE)
    return float(found[1]) if found else 0.0


# Hardware. Longer names first: GB200 has B200 in it.
_NAMES = ("gb300", "gb200", "b300", "b200", "h200", "h100", "a100", "v100")
_TPUS = {"v5e": "v5e", "v5 ?lite": "v5e", "v5p": "v5p", "v6e": "v6e", "trillium": "v6e"}
_TPUS |= {r"tpu ?v?7x?|ironwood": "tpu7x", "v4": "v4"}


def _chip(row: Row) -> Chip:
    words = text(row, "hardware").lower()
    for name in _NAMES:
        if name in words:
            return _as_built(OTHER_CHIPS.get(name) or CHIPS[name], row)
    for pattern, name in _TPUS.items():
        if re.search(pattern, words):
            return CHIPS[name]
    known = ", ".join([*_NAMES, *dict.fromkeys(_TPUS.values())])
    raise CannotDescribe(f"hardware {words!r} is not one of {known}")


def _as_built(chip: Chip, row: Row) -> Chip:
    """Change what the row says is different: the network, and the memory of an A100 of 40 GB."""
    words = " ".join(text(row, column) for column in ("note", "source"))
    gigabits = _first(r"inter\w*\s+(\d+) ?gb/s per node", words)
    gigabits = gigabits or _first(r"(\d+) ?gbps node-node", words)
    changes: dict[str, Any] = {"network": gigabits / 8 / chip.domain} if gigabits else {}
    if chip.name == "a100" and re.search(r"40 ?gb", text(row, "hardware"), re.IGNORECASE):
        changes |= {"memory_gb": 40, "memory_tbps": 1.555}  # datasheet, 40 GB version
    return dataclasses.replace(chip, **changes)


def _slices(row: Row, chip: Chip, chips: int) -> int:
    """As many slices as the note says, or as the chips need."""
    if chip.family != "tpu":
        return 1
    return int(_first(r"(\d+) slice", text(row, "note"))) or -(-chips // chip.pod)


# Models. What a row does not have: the width of heads, and of experts and how many a token meets;
# from the models' own configuration files.
_FAMILIES: dict[str, dict[str, Any]] = {
    r"qwen3.*30b": {"head": 128, "active": 8, "expert_mlp": 768},
    r"qwen3.*235b": {"head": 128, "active": 8, "expert_mlp": 1536},
    r"qwen3": {"head": 128},
    # Latent attention: projections of 187 million weights in all.
    r"deepseek.*v3": {
        "head": 128,
        "active": 8,
        "expert_mlp": 2048,
        "shared_mlp": 2048,
        "dense_layers": 3,
        "attention_weights": 187_107_328,
    },
    r"gpt-?oss": {"head": 64, "active": 4, "expert_mlp": 2880, "local": 0.5, "window": 128},
    r"mixtral": {"head": 128, "active": 2},
    r"gemma-?3": {"head": 256, "local": 5 / 6, "window": 1024},
    r"gemma": {"head": 256},
}
_PLAIN = r"gpt|mpt|turing|megatron|opt|bloom|palm"  # two products in the feed-forward layer
_KNOWN = rf"llama|qwen|mi[sx]tral|gemma|deepseek|nemotron|{_PLAIN}"
_VOCAB = 51_200  # GPT-2's, padded as Megatron does


def _model(row: Row) -> Transformer:
    name = text(row, "model").lower()
    columns = ("layers", "hidden", "ffn", "heads")
    if missing := [column for column in columns if not number(row, column)]:
        raise CannotDescribe(f"no {', '.join(missing)}")
    layers, embed, mlp, heads = (int(number(row, column)) for column in columns)
    more = dict(next((each for key, each in _FAMILIES.items() if re.match(key, name)), {}))
    kv_heads = int(number(row, "kv_heads")) or heads
    vocab = int(number(row, "vocab")) or _VOCAB
    head = more.pop("head", 0) or max(1, embed // heads)
    gated = "oss" in name or not re.match(_PLAIN, name)
    experts = int(number(row, "experts"))
    if experts > 1:
        more = {"experts": experts, "active": 2 if experts <= 16 else 8, "expert_mlp": mlp} | more
    else:
        more = {name: more[name] for name in ("local", "window") if name in more}
        if not re.match(_KNOWN, name) and number(row, "params_b"):
            head, gated = _by_weights(row, head, kv_heads, vocab)
    return Transformer(layers, embed, mlp, heads, kv_heads, head, vocab, gated=gated, **more)


def _by_weights(row: Row, head: int, kv_heads: int, vocab: int) -> tuple[int, bool]:
    """Return the width of heads and whether the feed-forward layer is gated, from all weights."""
    layers, embed, mlp, heads = (int(number(row, c)) for c in ("layers", "hidden", "ffn", "heads"))

    def off(choice: tuple[int, bool, int]) -> float:
        width, gated, tables = choice
        model = Transformer(layers, embed, mlp, heads, kv_heads, width, vocab, gated=gated)
        weights = layers * model.layer_weights() + tables * vocab * embed
        unusual = 0.03 * (width != head) + 0.03 * (not gated)
        return abs(weights / 1e9 / number(row, "params_b") - 1) + unusual

    widths = dict.fromkeys((head, 64, 128, 256))
    found = min(((w, g, t) for w in widths for g in (True, False) for t in (1, 2)), key=off)
    return found[0], found[1]


# How a step is computed: by the framework, where the row does not say.


def _is_jax(row: Row, chip: Chip) -> bool:
    words = text(row, "framework").lower()
    return chip.family == "tpu" or any(each in words for each in ("jax", "maxtext", "pax"))


def _microbatch(
    row: Row, chip: Chip, devices: int, replicas: int, batch: float, stages: int
) -> float:
    """Rows that a replica computes at once. JAX's frameworks count them for each device."""
    rows = number(row, "micro_batch")
    if not rows:
        rows = 1.0 if stages > 1 else batch / replicas
    if _is_jax(row, chip) and stages == 1 and abs(rows * devices - batch) < 1e-6 * batch:
        return batch / replicas
    return min(rows, batch / replicas)


def _products(row: Row) -> Any:
    words = text(row, "precision").lower()
    return "nvfp4" if "fp4" in words else "fp8" if "fp8" in words else "bf16"


def _remat(row: Row, chip: Chip, model: Transformer, tokens: float) -> Any:
    """What is computed again. `tokens`: those of a device in a step, if none are accumulated."""
    words = text(row, "remat").lower()
    for start, remat in (("full", "full"), ("none", "none"), ("minimal", "minimal")):
        if words.startswith(start):
            return remat
    if "selective" in words:
        return "selective"
    # What is saved, on the device or on the host, is not computed again.
    for saved, remat in (("context", "context"), ("out_proj", "mlp"), ("qkv", "qkv")):
        if saved in words:
            return remat
    if re.search(r"\bq,\s*k,\s*v", words) or (not words and chip.family == "tpu"):
        return "qkv"
    # A run in JAX that does not say, and whose activations do not fit: 34 bytes for each token and
    # width of a layer (arXiv 2205.05198).
    kept = 34 * tokens * model.embed * model.layers
    if not words and _is_jax(row, chip) and not model.experts and kept > chip.memory_gb * 1e9:
        return "full"
    return "none"


def _software(row: Row, chip: Chip) -> dict[str, Any]:
    framework, note = text(row, "framework").lower(), text(row, "note").lower()
    # Megatron of 2021 to 2023: scores in memory, sums of gradients after the backward pass.
    old = any(each in framework for each in ("deepspeed", "megatron-lm", "alpa"))
    jax = _is_jax(row, chip)
    composer = "composer" in framework
    return {
        "attention": "scores" if old else "flash" if composer else "fused",
        "sequence_parallel": not old or "sequence" in text(row, "remat").lower(),
        "eager": not jax,
        "overlap": not old,
        "sharded_update": not old,
        "regather": "shard_grad_op" not in note,
        "async_tp": "async" in note,
        "frozen": "lora" in note,
    }


# The published time.


def _seconds(row: Row, run: DescribedRun, chips: int) -> float:
    if seconds := number(row, "step_time_s"):
        return seconds
    tokens = run.batch * run.seq / chips
    if speed := number(row, "tokens_per_s_per_chip"):
        return tokens / speed
    if tflops := number(row, "tflops_per_chip"):
        # As MaxText counts: 6 for each weight that a token meets, and attention that is causal.
        model = run.model
        weights = model.layers * model.layer_weights(active=True) + model.vocab * model.embed
        attention = model.layers * model.heads * model.head * run.seq
        return tokens * 6 * (weights + attention) / (tflops * 1e12)
    raise CannotDescribe("no step_time_s, tokens_per_s_per_chip or tflops_per_chip")
