"""What the GPU compiler must know about a GPU that is not there."""

from __future__ import annotations

from meshwright.hardware import Chip

# Per chip: the name its driver reports, compute capability, streaming multiprocessors, FP32
# lanes in each, shared memory per multiprocessor and per block (bytes), L2 cache (bytes),
# clock (GHz). From the vendor's architecture white papers and the compute capability tables of
# the programming guide.
_FACTS: dict[str, tuple[str, tuple[int, int], int, int, int, int, int, float]] = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 166912, 41943040, 1.41),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 232448, 52428800, 1.98),
    "h200": ("NVIDIA H200", (9, 0), 132, 128, 233472, 232448, 62914560, 1.98),
    "b200": ("NVIDIA B200", (10, 0), 148, 128, 233472, 232448, 132644864, 1.965),
    "gb200": ("NVIDIA GB200", (10, 0), 152, 128, 233472, 232448, 132644864, 1.965),
}


def target_config(chip: Chip) -> str:
    """The compiler's description of the chip, as a text proto."""
    name, (major, minor), cores, lanes, shared, shared_block, cache, clock = _FACTS[chip.name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_block}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.memory_tbps * 1e12)}
  device_memory_size: {int(chip.memory_gb * 1e9)}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 6 }}
device_description_str: "{name}"
"""
