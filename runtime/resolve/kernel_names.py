"""The names of a server's kernels, and the reasons against better ones."""

import dataclasses
from typing import NamedTuple

from meshserve.kernels import decode_layers, paged_attention

OFF, XLA = "off", "xla"  # values of options that name none of an operation's implementations


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelNames:
    """The kernels that a server uses, named like the values of the options. None is "auto"."""

    attention: str
    decode_layers: str
    linear: str
    all_reduce: str
    gemm_backend: str
    moe_backend: str

    @property
    def has_decode_kernels(self) -> bool:
        """Whether small decode steps run on fused layers."""
        return self.decode_layers != OFF

    @property
    def has_p2p(self) -> bool:
        return self.all_reduce != XLA

    @property
    def has_gpu_kernels(self) -> bool:
        """Whether attention or fused layers run on kernels for GPUs, so that others are used beside them."""
        return self.has_gpu_decode_kernels or paged_attention.IMPLEMENTATIONS[self.attention].is_for_gpus

    @property
    def has_gpu_decode_kernels(self) -> bool:
        return self.has_decode_kernels and decode_layers.IMPLEMENTATIONS[self.decode_layers].is_for_gpus


class OptionRefusal(NamedTuple):
    """Why an implementation that comes before the chosen one cannot serve."""

    option: str
    chosen: str
    name: str
    reason: str
