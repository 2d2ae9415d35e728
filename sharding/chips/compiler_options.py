"""Chooses XLA's compiler options for programs over a mesh."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from .detection import chip_of

# Rematerialization is off because XLA does not see that a step updates the cache in place. With a cache of a third of
# the memory or more, it assumes that memory is short, and computes projections and gathered pages twice
# (docs/log/first_days.md).
#
# XLA's Triton matmuls that load their operands through the copy engine (TMA) fail with CUDA_ERROR_ILLEGAL_INSTRUCTION
# at their first copy, if autotuning selects one (jax 0.11.2, Hopper; docs/log/first_days.md). The override file lists
# configurations without TMA. Fusion autotuning may select TMA as well but accepts no such list, so it is off, and each
# fusion uses the emitter that XLA's cost model selects.
_GPU_OPTIONS: dict[str, str | bool] = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_gemm_autotuner_override_file": str(Path(__file__).with_name("gpu_gemms.txtpb")),
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
# What goes into CUDA graphs if our own calls are launched one by one instead, and for which programs this is done:
# those whose weights take longer to read (1.3 ms at 3 TB/s) than the host takes to launch their kernels.
_GRAPHS_WITHOUT_CALLS, _LONG_PROGRAM_BYTES = "FUSION,CUBLAS,CUBLASLT,CUDNN", 4 << 30


def compiler_options(
    mesh: Mesh, *, has_library_gemms: bool = False, awaited_weights: object = None
) -> dict[str, str | bool]:
    """Returns XLA's compiler options for programs over this mesh.

    Args:
      mesh: the mesh that the programs run on.
      has_library_gemms: on a GPU, always use cuBLAS for matrix multiplications instead of autotuning XLA's own kernels
        against it. cuBLAS then reads a layer's weights in place; after autotuning, XLA first copies them for cuBLAS.
      awaited_weights: the shapes of the weights of a program for which the device waits, because it is not dispatched
        ahead. On a GPU, a long one then begins with its first kernels while the host launches the others: it has short
        CUDA graphs between our own calls instead of a long one, of which nothing runs until all of it is launched.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        options = dict(_GPU_OPTIONS)
        if has_library_gemms:
            options["xla_gpu_enable_triton_gemm"] = False
        awaited_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(awaited_weights))
        if awaited_bytes >= _LONG_PROGRAM_BYTES * mesh.size:
            options["xla_gpu_enable_command_buffer"] = _GRAPHS_WITHOUT_CALLS
        return options
    chip = chip_of(device)
    if chip is None:
        return {}
    return {**chip.compiler_options, **(chip.sum_options if mesh.size > 1 else {})}
