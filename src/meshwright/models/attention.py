"""Attention: the products written out, or a flash kernel of the platform the step is for.

A flash kernel never writes the scores of a whole row to memory. `attend` takes the platform's own:
splash attention on TPUs, cuDNN's on NVIDIA's GPUs; on a CPU there is none, and `"auto"` is the
products written out. The platform is that of the ambient mesh (`jax.set_mesh`, or the mesh of a
rehearsal), or else of JAX's default backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshwright import _compat
from meshwright.errors import ModelError, near, short
from meshwright.models.weights import activation_axes, auto_axes, constrain
from meshwright.trees.specs import make_spec

# "auto": the platform's flash kernel where it takes these shapes, else "dot". "flash": that kernel,
# or an error that says why not. The others are implementations by name: the products written out,
# splash and the older flash kernel that come with JAX, and cuDNN's.
ATTENTION = ("auto", "flash", "dot", "splash", "pallas", "cudnn")
_FLASH = {"tpu": "splash", "gpu": "cudnn"}  # by platform
_MADE_FOR = {"splash": "tpu", "pallas": "tpu", "cudnn": "gpu"}
_LANES = 128  # TPU kernels work on blocks of a multiple of this many positions
_CUDNN_HEAD = 128  # the widest head that cuDNN takes on every GPU it supports


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks of TPU kernels, in positions of queries (`q`) and of keys (`kv`).

    `_dkv` and `_dq` are those of the backward pass, `_compute` the part of a block of keys that is
    computed at once. `fused_backward` computes all gradients in one kernel of splash. `batch` is
    how many rows the older kernel takes at once. A block is at most the sequence.

    >>> Blocks(q=1024, fused_backward=True).q_dkv
    512
    """

    q: int = 512
    kv: int = 512
    kv_compute: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512
    kv_dkv_compute: int = 512
    q_dq: int = 512
    kv_dq: int = 512
    kv_dq_compute: int = 512
    fused_backward: bool = False
    batch: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % _LANES:
                raise ModelError(
                    f"blocks: {name}={short(size)} is not a multiple of {_LANES}, which TPU "
                    "kernels work on. Use 128, 256, 512, 1024 or 2048.",
                    option="blocks",
                )
        for whole, part in _PARTS.items():
            if getattr(self, whole) % getattr(self, part):
                raise ModelError(
                    f"blocks: {part}={getattr(self, part)} does not divide "
                    f"{whole}={getattr(self, whole)}. Use the same size, or a half or a quarter.",
                    option="blocks",
                )

    def sizes(self) -> dict[str, int]:
        """Return the sizes in positions, by name."""
        names = [field.name for field in dataclasses.fields(self) if field.type == "int"]
        return {name: getattr(self, name) for name in names if name != "batch"}

    def cut_to(self, length: int) -> Blocks:
        """Return blocks of at most `length`; raises `ModelError` for those that do not divide it.

        The default sizes are made smaller until they divide.
        """
        if self == dataclasses.replace(Blocks(), batch=self.batch):
            return self._resized(dict.fromkeys(self.sizes(), _dividing(length, self.q)))
        sizes = {name: min(size, length) for name, size in self.sizes().items()}
        for name, size in sizes.items():
            if length % size:
                raise ModelError(
                    f"blocks: {name}={size} does not divide a sequence of {length}. "
                    "Use a block that does, or another seq.",
                    option="blocks",
                )
        return self._resized(sizes)

    def _resized(self, sizes: dict[str, Any]) -> Blocks:
        return dataclasses.replace(self, **sizes)


# Splash with heads of 128 and 256, forward and backward, compiled by libtpu for v5e and v6e and
# timed by the model of `rehearsal`: one kernel for all gradients takes 0.75 to 0.83 of the time of
# two. It writes the queries' gradients once per block of keys, to be summed: 8 are free, 16 tripled
# the peak at 8,192 positions. Larger blocks waste more at the mask's edge (1,024 takes 1.06 to 1.2
# of 512), 2,048 overflows VMEM on v5e. Published runs on v6e are fused as well, in blocks of 2,048.
_MOST_SUMMED = 8


def tuned_blocks(positions: int, length: int) -> Blocks:
    """Return splash's blocks for a device's `positions` of queries and `length` keys.

    >>> tuned_blocks(8192, 8192).q, tuned_blocks(32768, 32768).fused_backward
    (1024, False)
    """
    for most in (512, 1024):
        size = _dividing(positions, most)
        if length <= _MOST_SUMMED * size:
            sizes = dict.fromkeys(Blocks().sizes(), size)
            sizes |= dict.fromkeys(_PARTS.values(), _dividing(size, 512))
            return Blocks(**sizes, fused_backward=True)
    return Blocks().cut_to(positions)


def _dividing(length: int, most: int) -> int:
    """Return the largest block of at most `most` that divides `length`."""
    return max(size for size in range(_LANES, most + 1, _LANES) if length % size == 0)


_PARTS = {"kv": "kv_compute", "kv_dkv": "kv_dkv_compute", "kv_dq": "kv_dq_compute"}


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    attention: str = "auto",
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute softmax(query key^T / sqrt(head)) value, with grouped heads.

    (batch, seq, heads, head) in and out; keys and values may have fewer heads, each shared by a
    group of queries' heads. Where the sequence is sharded, queries stay so and every device gathers
    all keys and values. `attention` is one of `ATTENTION`; `interpret` runs splash without a TPU.
    Raises `ModelError` where a kernel that is asked for cannot take these arrays.
    """
    # Gathered over `seq` here, once, and not inside the products.
    key = constrain(key, "batch", None, "heads", None)
    value = constrain(value, "batch", None, "heads", None)
    kernel = choose_kernel(attention, query)
    if kernel == "dot":
        mixed = dot_product_attention(query, key, value, causal=causal)
    elif kernel == "cudnn":
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation="cudnn"
        )
    else:
        mixed = _tpu_attention(kernel, query, key, value, causal, blocks, interpret=interpret)
    return constrain(mixed, "batch", "seq", "heads", None)


def choose_kernel(attention: str, query: jax.Array) -> str:
    """Return which implementation computes: one of the names in `ATTENTION` from "dot" on."""
    if attention == "dot":
        return attention
    platform = target_platform()
    kernel = _FLASH.get(platform) if attention in ("auto", "flash") else attention
    if kernel is None:
        if attention == "auto":
            return "dot"
        raise ModelError(
            f"attention='flash': there is no flash kernel for {platform}. Use 'auto', which takes "
            "one where there is one, or 'dot'.",
            option="attention",
        )
    other = platform in _FLASH and _MADE_FOR[kernel] != platform
    problem = (
        f"it is a kernel for {_MADE_FOR[kernel]}, and this is for {platform}."
        if other
        else _kernel_problem(kernel, query)
    )
    if not problem:
        return kernel
    if attention == "auto":
        return "dot"
    raise ModelError(
        f"attention={attention!r}: {problem} Change it, or use attention='dot'.", option="attention"
    )


def target_platform() -> str:
    """Return what the traced program is for: "tpu", "gpu" or "cpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform: str = jax.default_backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform


def check_attention(name: str) -> None:
    """Refuse a name that is not in `ATTENTION`."""
    if name not in ATTENTION:
        raise ModelError(
            f"attention: {short(name)} is not one of {', '.join(ATTENTION)}."
            f"{near(name, ATTENTION)}",
            option="attention",
        )


def _kernel_problem(kernel: str, query: jax.Array) -> str:
    """Say why a kernel cannot take these queries, or nothing."""
    _, length, _, head = query.shape
    shards = math.prod(_axis_sizes(auto_axes(), "seq", length))
    if kernel != "cudnn":
        if length // shards % _LANES:
            return (
                f"a device's part of the sequence, {length // shards} positions, is no multiple "
                f"of {_LANES}."
            )
        if kernel == "pallas" and shards > 1:
            return "it takes whole sequences, and the mesh splits them."
        return ""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, and queries are {query.dtype}."
    if head > _CUDNN_HEAD or head % 8:
        return f"cuDNN takes heads of at most {_CUDNN_HEAD}, a multiple of 8, and not {head}."
    if shards > 1:
        return "cuDNN takes whole sequences, and the mesh splits them."
    return ""


def _axis_sizes(axes: Mapping[str, int], name: str, size: int) -> list[int]:
    return [axes[axis] for axis in activation_axes(axes, name, size)]


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Compute attention by its products, as `attend` with `"dot"`: all scores are in memory."""
    batch, length, heads, head = query.shape
    kv_heads = key.shape[2]
    # Grouped queries instead of repeated keys: nothing is copied.
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum("bqhgk,bthk->bhgqt", grouped, key, preferred_element_type=jnp.float32)
    scores *= head**-0.5
    if causal:
        # Every position sees itself, so no row of scores is all -inf.
        past = jnp.arange(length)[:, None] >= jnp.arange(length)
        scores = jnp.where(past, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhgqt,bthk->bqhgk", weights, value).reshape(query.shape)


# In: arrays of all devices, by the names of their dims. Out: the same. The compiler cannot split a
# Pallas kernel, so a shard_map does: over the axes of the batch, of the heads and, for splash, of
# the queries' positions. Invariant: a device has the keys and values of all its queries' groups.
# Example: 64 heads on 8 of keys, tp:16: keys are repeated to 16 heads, one per device.
def _tpu_attention(
    kernel: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    causal: bool,
    blocks: Blocks | None,
    *,
    interpret: bool,
) -> jax.Array:
    axes = auto_axes()
    batch, length, heads, head = query.shape
    rows = activation_axes(axes, "batch", batch)
    of_heads = activation_axes(axes, "heads", heads)
    of_seq = activation_axes(axes, "seq", length)
    shards = math.prod(axes[axis] for axis in of_heads)
    per_device = length // math.prod(axes[axis] for axis in of_seq)
    # Scaled here: the kernels compute exp(q k) as it is.
    query = (query * head**-0.5).astype(query.dtype)
    kv_heads = heads if kernel == "pallas" else math.lcm(key.shape[2], shards)
    key, value = (jnp.repeat(x, kv_heads // x.shape[2], axis=2) for x in (key, value))
    if blocks is None and kernel == "splash":
        blocks = tuned_blocks(per_device, length)
    else:
        blocks = (blocks or Blocks()).cut_to(per_device)
    operands: list[Any] = [query, key, value]
    # Entries of specs: an empty tuple splits over no axis.
    of_queries, of_keys = make_spec((rows, of_seq, of_heads)), make_spec((rows, (), of_heads))
    specs: list[Any] = [of_queries, of_keys, of_keys]
    if kernel == "pallas":
        run: Callable[..., jax.Array] = _pallas_kernel(causal, blocks)
    else:
        run = _run_splash
        shape = (length, heads // shards, length // per_device)
        operands.insert(0, _splash_kernel(*shape, causal, blocks, interpret))
        specs.insert(0, _splash_specs(operands[0], of_seq) if axes else None)
    if axes:
        run = jax.shard_map(
            run,
            in_specs=tuple(specs),
            out_specs=of_queries,
            axis_names=set(axes),
            check_vma=False,  # Pallas kernels do not say along which axes their results vary
        )
    mixed: jax.Array = run(*operands)
    return mixed


def _splash_kernel(
    length: int, heads: int, seq_shards: int, causal: bool, blocks: Blocks, interpret: bool
) -> Any:
    """Make the kernel: it holds which blocks of each device's queries and keys the mask leaves."""
    splash = _compat.tpu_attention("splash_attention")
    kind = splash.CausalMask if causal else splash.FullMask
    fused = blocks.fused_backward
    return splash.make_splash_mha(
        splash.MultiHeadMask([kind((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=blocks.q,
            block_kv=blocks.kv,
            block_kv_compute=blocks.kv_compute,
            block_q_dkv=blocks.q_dkv,
            block_kv_dkv=blocks.kv_dkv,
            block_kv_dkv_compute=blocks.kv_dkv_compute,
            block_q_dq=None if fused else blocks.q_dq,
            block_kv_dq=None if fused else blocks.kv_dq,
            use_fused_bwd_kernel=fused,
        ),
        head_shards=1,
        q_seq_shards=seq_shards,
        # Rematerialisation may save the results by this name, see `remat`.
        residual_checkpoint_name="context",
        interpret=interpret,
    )


def _splash_specs(splash: Any, of_seq: tuple[str, ...]) -> Any:
    """Return the specs of the arrays in a kernel: split as queries' positions are."""
    spec = make_spec((None, of_seq))
    mesh = jax.sharding.get_abstract_mesh()
    return splash.manual_sharding_spec(jax.sharding.NamedSharding(mesh, spec))


def _run_splash(splash: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    by_head = (x.swapaxes(1, 2) for x in (query, key, value))
    mixed: jax.Array = jax.vmap(splash)(*by_head).swapaxes(1, 2)
    return mixed


def _pallas_kernel(causal: bool, blocks: Blocks) -> Callable[..., jax.Array]:
    flash = _compat.tpu_attention("flash_attention")

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        sizes = flash.BlockSizes(
            block_q=blocks.q,
            block_k_major=blocks.kv,
            block_k=blocks.kv_compute,
            block_b=min(blocks.batch, query.shape[0]),
            block_q_major_dkv=blocks.q_dkv,
            block_q_dkv=blocks.q_dkv,
            block_k_major_dkv=blocks.kv_dkv,
            block_k_dkv=blocks.kv_dkv_compute,
            block_q_dq=blocks.q_dq,
            block_k_major_dq=blocks.kv_dq,
            block_k_dq=blocks.kv_dq_compute,
        )
        by_head = (x.swapaxes(1, 2) for x in (query, key, value))
        mixed: jax.Array = flash.flash_attention(*by_head, causal=causal, block_sizes=sizes)
        return mixed.swapaxes(1, 2)

    return run
