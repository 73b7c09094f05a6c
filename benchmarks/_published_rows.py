"""Published training runs, read from a file and made into programs to rehearse.

A JSON file has `{"rows": [...]}`, all that a program needs (data/tpu_recipes.json); a CSV
file has a line per run with less detail (data/published.csv). A run that cannot be built raises
`CannotBuild`, which says why.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.models.attention import Blocks
from meshwright.models.decoder import Decoder, DecoderConfig
from meshwright.models.remat import NAMES


class CannotBuild(Exception):
    """Why a published run has no program here."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run as a program: a model, its mesh and hardware, and the measured seconds.

    `flags` are for the TPU compiler (LIBTPU_INIT_ARGS).
    """

    name: str
    model: Decoder
    mesh: str
    hardware: str
    slices: int
    batch: int
    seq: int
    flags: str
    seconds: float


class TransposedDecoder(Decoder):
    """A decoder whose feed-forward weights are split by fsdp over `mlp`, and not over `embed`.

    MaxText calls such an axis fsdp_transpose.
    """

    def rules(self, mesh: Any) -> list[Any]:
        none: Any = None
        last, first = P(none, none, "fsdp"), P(none, "fsdp")
        turned = {"gate": last, "up": last, "down": first}
        return [
            (pattern, turned.get(pattern.rpartition("/")[2], spec) if "/mlp/" in pattern else spec)
            for pattern, spec in super().rules(mesh)
        ]


def read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a file with their names, not looked at yet."""
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [(row["name"], row) for row in rows]
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as lines:
            return [
                (f"{row['model']} {row['hardware']} x{row['chips']}", row)
                for row in csv.DictReader(lines)
            ]
    raise SystemExit(f"{path}: rows are in a .json or a .csv file.")


def build(name: str, row: dict[str, Any]) -> Run:
    """Make the program of a row of either form."""
    return _from_json(name, row) if isinstance(row.get("model"), dict) else _from_csv(name, row)


# Rows of JSON: every setting is written down, most in MaxText's words.

_AXES = {
    "data": "dp",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "tensor": "tp",
    "sequence": "sp",
    "context": "cp",
}


def _from_json(name: str, row: dict[str, Any]) -> Run:
    settings = _settings(row) | _remat(row["remat"]) | _attention(row["attention"])
    mesh = {axis: size for axis, size in row["mesh"].items() if size > 1}
    transposed = "fsdp_transpose" in mesh
    if unknown := [axis for axis in mesh if axis not in _AXES]:
        raise CannotBuild(f"no axis {unknown[0]} in these models")
    if transposed and ("fsdp" in mesh or "tensor" in mesh):
        raise CannotBuild("fsdp_transpose beside fsdp or tensor")
    per_device = row.get("per_device_batch_as_measured", row["per_device_batch"])
    measured = row["measured"]
    seconds = measured.get("step_seconds") or measured.get("step_seconds_derived")
    if not seconds:
        raise CannotBuild("no step time is published")
    hardware = f"{row['hardware']}:{row['topology'].split()[0]}"
    devices = mw.topology(hardware).num_devices * row["slices"]
    family = TransposedDecoder if transposed else Decoder
    return Run(
        name=name,
        model=family(name, DecoderConfig(**settings)),
        mesh=", ".join(f"{_AXES[axis]}:{size}" for axis, size in mesh.items()),
        hardware=hardware,
        slices=row["slices"],
        batch=round(per_device * devices),
        seq=row["sequence"],
        flags=(row.get("xla_flags") or {}).get("libtpu_init_args") or "",
        seconds=float(seconds),
    )


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    model = row["model"]
    if model.get("experts"):
        raise CannotBuild("a mixture of experts")
    kind = model["mlp_kind"]
    curves = [curve for curve in ("silu", "gelu", "relu") if curve in kind]
    if not curves:
        raise CannotBuild(f"feed-forward layer {kind!r}")
    activations = row.get("sharding", "").partition("activations:")[2]
    tiling = re.search(r"num_vocab_tiling=(\d+)", row.get("notes", ""))
    moments = model.get("adam_moments", "")
    return {
        "layers": model["layers"],
        "embed": model["embed"],
        "heads": model["query_heads"],
        "kv_heads": model["kv_heads"],
        "head": model["head_dim"],
        "mlp": model["mlp"],
        "vocab": model["vocab"],
        "seq": row["sequence"],
        "theta": float(model.get("rope_theta", 10_000)),
        "params": model.get("weight_dtype", "float32"),
        "compute": model.get("activation_dtype", "bfloat16"),
        "moments": "bfloat16" if moments.startswith(("bf16", "bfloat16")) else "",
        "gated": "gated" in kind and "not gated" not in kind,
        "activation": curves[0],
        "parallel": "parallel" in model.get("norm", "").lower(),
        "tied": bool(model.get("tied_embedding")),
        "lookup": "one_hot" if model.get("use_iota_embed") else "gather",
        "tiles": int(tiling[1]) if tiling else 1,
        "split_embed": bool(re.search(r"\bembed\b[^;]*->tensor", activations)),
    }


def _attention(attention: dict[str, Any]) -> dict[str, Any]:
    kernel = attention["kernel"]
    known = {"flash_attention": "pallas", "splash": "splash", "cudnn": "cudnn"}
    chosen = next((ours for word, ours in known.items() if word in kernel), None)
    if chosen is None:
        raise CannotBuild(f"attention by {kernel!r}")
    sizes = {
        name: attention[key]
        for name, keys in _BLOCKS.items()
        for key in keys
        if isinstance(attention.get(key), int)
    }
    if not sizes:
        return {"attention": chosen}
    # A part of a block that is not written down is the whole block.
    for whole in ("kv", "kv_dkv", "kv_dq"):
        sizes.setdefault(f"{whole}_compute", sizes.get(whole, 512))
    rows = re.search(r"\d+", str(attention.get("block_b", 1)))
    fused = bool(attention.get("fused_bwd"))
    blocks = Blocks(**sizes, fused_backward=fused, batch=int(rows[0]) if rows else 1)
    return {"attention": chosen, "blocks": blocks}


# Our names of blocks, and those of splash and of the older kernel.
_BLOCKS = {
    "q": ("block_q",),
    "kv": ("block_kv", "block_k_major"),
    "kv_compute": ("block_kv_compute", "block_k"),
    "q_dkv": ("block_q_dkv", "block_q_major_dkv"),
    "kv_dkv": ("block_kv_dkv", "block_k_major_dkv"),
    "kv_dkv_compute": ("block_kv_dkv_compute", "block_k_dkv"),
    "q_dq": ("block_q_dq",),
    "kv_dq": ("block_kv_dq", "block_k_major_dq"),
    "kv_dq_compute": ("block_k_dq",),
}


def _remat(remat: dict[str, Any]) -> dict[str, Any]:
    saved, offloaded = remat.get("saved_on_device", ()), remat.get("offloaded_to_pinned_host", ())
    if "dots_with_no_batch_dims" in str(saved):
        return {"remat": "dots"}
    names = [name for name in (*saved, *offloaded) if name in NAMES]
    if names and not isinstance(saved, str):
        return {"remat": "custom", "saved": tuple(saved), "offloaded": tuple(offloaded)}
    policies = {"save_qkv_proj": "save_qkv", "minimal": "minimal", "full": "full", "none": "none"}
    if remat["policy"] not in policies:
        raise CannotBuild(f"remat policy {remat['policy']!r}")
    return {"remat": policies[remat["policy"]]}


# Rows of CSV: sizes, mesh and times; the family of the model says the rest.

_SHORT_NAMES = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}
_CHIPS = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "TPU7x": "tpu7x"}
_GPUS = ("GB200", "B200", "H200", "H100", "A100")


def _from_csv(name: str, row: dict[str, Any]) -> Run:
    sizes = _sizes(row)
    axes = {axis: int(float(row[axis] or 1)) for axis in ("dp", "fsdp", "tp", "cp")}
    for axis in ("pp", "ep"):
        if int(float(row[axis] or 1)) > 1:
            raise CannotBuild(f"{axis}:{row[axis]}")
    mesh = {axis: size for axis, size in axes.items() if size > 1}
    hardware, slices, devices = _hardware(row)
    count = 1
    for size in mesh.values():
        count *= size
    if count != devices:
        raise CannotBuild(f"a mesh of {count} devices on {devices}")
    batch = int(sizes.pop("global_batch"))
    micro = float(row["micro_batch"] or 0)
    by_rows = axes["dp"] * axes["fsdp"]
    if micro and batch != round(micro * devices) and batch != round(micro * by_rows):
        raise CannotBuild(f"gradients accumulated over microbatches of {micro:g}")
    return Run(
        name=name,
        model=Decoder(name, DecoderConfig(**sizes, **_csv_remat(row), **_csv_family(row))),
        mesh=", ".join(f"{axis}:{size}" for axis, size in mesh.items()) or "dp:1",
        hardware=hardware,
        slices=slices,
        batch=batch,
        seq=sizes["seq"],
        flags="",
        seconds=_csv_seconds(row, batch, sizes["seq"]),
    )


def _sizes(row: dict[str, Any]) -> dict[str, Any]:
    if row["experts"]:
        raise CannotBuild("a mixture of experts")
    columns = {
        "layers": "layers",
        "embed": "hidden",
        "heads": "heads",
        "mlp": "ffn",
        "vocab": "vocab",
        "seq": "seq",
        "global_batch": "global_batch",
    }
    if missing := [column for column in columns.values() if not row[column]]:
        raise CannotBuild(f"no {', '.join(missing)} in the row")
    sizes = {ours: int(float(row[column])) for ours, column in columns.items()}
    heads = sizes["heads"]
    kv_heads = int(float(row["kv_heads"] or heads))
    # MaxText's own sizes have heads of 256 or 128 that do not add up to the width.
    head = sizes["embed"] // heads if "MaxText" not in row["model"] else 0
    if not head or head % 2:
        raise CannotBuild("the width of a head is not in the row")
    return sizes | {"kv_heads": kv_heads, "head": head}


def _hardware(row: dict[str, Any]) -> tuple[str, int, int]:
    """Return hardware by our name, how many slices of it, and all JAX devices."""
    words, chips = row["hardware"], int(row["chips"])
    many = re.search(r"(\d+) slice", row["note"])
    slices = int(many[1]) if many else 1
    for word, ours in _CHIPS.items():
        if word in words:
            # The names of v4, v5p and 7x count cores.
            count = chips // slices * (2 if ours in ("v4", "v5p", "tpu7x") else 1)
            try:
                topology = mw.topology(f"{ours}-{count}")
            except MeshwrightError as error:
                raise CannotBuild(f"{chips // slices} chips of {ours}: {error}") from error
            return topology.name, slices, topology.num_devices * slices
    for gpu in _GPUS:
        if gpu in words:
            return (f"{gpu.lower()}:{min(chips, 8)}x{-(-chips // 8)}", 1, chips)
    raise CannotBuild(f"hardware {words!r}")


def _csv_remat(row: dict[str, Any]) -> dict[str, Any]:
    words = row["remat"].lower()
    if "offload" in words and ":" in words:
        listed = re.split(r"[,\s]+", words.partition(":")[2].partition("offload")[0].strip())
        names = tuple(_SHORT_NAMES.get(name, name) for name in listed)
        if all(name in NAMES for name in names):
            return {"remat": "custom", "offloaded": names}
    if words.startswith("qkv_proj_offloaded"):
        return {"remat": "custom", "offloaded": tuple(_SHORT_NAMES.values())}
    for policy in ("full", "none", "minimal"):
        if words.startswith(policy):
            return {"remat": policy}
    raise CannotBuild(f"remat {row['remat']!r}")


def _csv_family(row: dict[str, Any]) -> dict[str, Any]:
    products = {"bf16": "compute", "fp8": "fp8"}.get(row["precision"])
    if products is None:
        raise CannotBuild(f"precision {row['precision']!r}")
    common = {"compute": "bfloat16", "products": products}
    if re.match(r"llama|qwen|mistral", row["model"].lower()):
        return common
    if row["model"].lower().startswith("gpt"):
        return common | {"gated": False, "activation": "gelu", "tied": True}
    raise CannotBuild(f"the layers of {row['model']} are not known here")


def _csv_seconds(row: dict[str, Any], batch: int, seq: int) -> float:
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if row["tokens_per_s_per_chip"]:
        return batch * seq / float(row["chips"]) / float(row["tokens_per_s_per_chip"])
    raise CannotBuild("no step time is published")
