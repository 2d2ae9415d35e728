"""Describes Hopper GPUs to XLA's CUDA compiler, so that any host can compile for them without a GPU."""

import jax
from jax.experimental import topologies

from .chip import Chip

# XLA's GpuTargetConfigProto of an SXM5 card. The fields in which Hopper GPUs differ are filled in.
_DESCRIPTION = """
gpu_device_info {{
  name: "{kind}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {num_multiprocessors} fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 device_memory_size: {hbm_bytes} memory_bandwidth: {hbm_bytes_per_second}
  pcie_bandwidth: 34359738368 device_interconnect_info {{ active_links: 18 }} collective_memory_granularity: 2097152
  driver_version: "13.0.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" device_description_str: "{kind}" dnn_version_info {{ major: 9 minor: 10 }}
"""


class NoCompilerError(RuntimeError):
    """The compiler for these devices is not installed; the message says how to install it."""


def gpu_topology(chip: Chip, num_devices: int) -> topologies.TopologyDescription:
    """Returns the topology of `num_devices` Hopper GPUs on one host.

    Raises:
      NoCompilerError: jax's CUDA build is not installed.
    """
    description = _DESCRIPTION.format(
        kind=chip.kind,
        num_multiprocessors=chip.num_multiprocessors,
        hbm_bytes=chip.hbm_bytes,
        hbm_bytes_per_second=int(chip.hbm_bytes_per_second),
    )
    shape = f"1x1x{num_devices}"
    try:
        return topologies.get_topology_desc("hopper", "cuda", topology=shape, target_config=description)
    except (RuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise NoCompilerError(
            f"programs for {chip.kind} need XLA's CUDA compiler: {error}. Install meshserve with the extra [cuda], or, "
            "if nvcc and ptxas are on PATH, jax[cuda13-local]; neither needs a GPU."
        ) from None
