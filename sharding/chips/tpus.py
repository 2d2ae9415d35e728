"""The table of TPUs, and the entry of virtual CPU devices."""

from .chip import GIB, Chip

TPUS = (
    Chip(
        name="v5e",
        kind="TPU v5 lite",
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        flops_per_second=197e12,
        link_bytes_per_second=100e9,
        is_unrolled=False,
        sum_options={
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
            "xla_enable_async_all_reduce": "true",
        },
    ),
    Chip(
        name="v6e",
        kind="TPU v6 lite",
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_second=1640e9,
        flops_per_second=918e12,
        link_bytes_per_second=224e9,
        is_unrolled=False,
        sum_options={"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"},
    ),
    Chip(
        name="v5p",
        kind="TPU v5",
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        flops_per_second=459e12,
        link_bytes_per_second=300e9,
        is_unrolled=False,
    ),
    Chip(
        name="tpu7x",
        kind="TPU7x",
        devices_per_chip=2,
        hbm_bytes=int(94.75 * GIB),
        hbm_bytes_per_second=3690e9,
        flops_per_second=1153e12,
        link_bytes_per_second=300e9,
        is_unrolled=False,
        # Without this, XLA copies all stacked weights into tiles of 16 rows in every step.
        compiler_options={"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
    ),
)

CPU = Chip(name="cpu", kind="cpu", platform="cpu", hbm_bytes=0, hbm_bytes_per_second=0.0, is_unrolled=False)
