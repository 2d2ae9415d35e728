"""The kernels of a server: an implementation of each contract, and the options with which steps are built from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax

from meshserve.kernels.decode_layers import DecodeKernels
from meshserve.kernels.experts import Experts
from meshserve.kernels.experts import xla as xla_experts
from meshserve.kernels.linear import Linear, xla
from meshserve.kernels.p2p import P2PGroup, P2POperations
from meshserve.kernels.paged_attention import PagedAttention, PartialAttention, QKNormRope, WriteKV, write_kv
from meshserve.kernels.readback import TokenReadback
from meshserve.kernels.sampling import FindThreshold
from meshserve.sharding.collectives import Exchange, P2PAllReduce, all_gather

from .products import PlainProducts, Products

LIBRARY_TOKENS = 64  # from this size on, library GEMMs are at least as fast as XLA's in steps that are not fused
LIBRARY_ROWS = 8  # minimum rows of logits with library GEMMs; for fewer, cuBLAS converts the table to float32


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels and options with which a backend computes the layers."""

    attend: PagedAttention
    attend_part: PartialAttention | None = None  # `attend` for devices that divide pages among them
    linear: Linear = xla.linear
    head: Callable[..., jax.Array] = xla.linear  # `linear` of the output head, without `prologue` and `residual`
    write: WriteKV = write_kv
    prepare: QKNormRope | None = None  # replaces `write` and the norms and rotation before it
    decode: DecodeKernels | None = None  # fused layers for small decode steps
    max_fused_tokens: int = 64  # largest decode step that runs on them
    max_fused_prompt_tokens: int = 0  # largest step with prompts that does, but for its last layer
    experts: Experts = xla_experts.experts  # for layers that have experts
    is_unrolled: bool = False  # unrolls the layers instead of looping over them
    has_statistics_apart: bool = False  # in large steps without `prepare`; see `Attention`
    has_library_gemms: bool = False  # of LIBRARY_TOKENS or more beside fused layers; see `chips.compiler_options`
    has_output_buffers: bool = False  # reused by steps; see `output_buffers`
    find_threshold: FindThreshold | None = None  # sampling threshold kernel, if one device has the whole vocabulary
    readback: TokenReadback | None = None  # reads tokens of steps with drafts from pinned host memory
    p2p: P2PGroup | None = None  # set if the devices of the mesh can access each other's memory
    p2p_operations: P2POperations | None = None  # set together with `p2p`
    adapted: Callable[[jax.Array], Products] | None = None  # the products of tokens, by the slots of their requests

    def fused(self, num_tokens: int, *, is_decode: bool) -> DecodeKernels | None:
        """Returns the fused decode kernels if they run the step, else None."""
        most_tokens = self.max_fused_tokens if is_decode else self.max_fused_prompt_tokens
        return self.decode if num_tokens <= most_tokens else None

    @property
    def products(self) -> PlainProducts:
        """The products of layers for tokens that bring no adapters along."""
        return PlainProducts(self.linear)

    def products_of(self, slots: jax.Array) -> Products:
        """Returns the products of tokens with what their requests bring along; `slots` [T] are the requests'."""
        return self.products if self.adapted is None else self.adapted(slots)

    def with_adapters(self, adapted: Callable[[jax.Array], Products]) -> "Kernels":
        """Returns these kernels for steps whose tokens bring adapters along, without the fused layers."""
        return replace(self, adapted=adapted, decode=None, max_fused_tokens=0, max_fused_prompt_tokens=0)

    @property
    def p2p_all_reduce(self) -> P2PAllReduce | None:
        """The P2P all-reduce of the mesh, or None without P2P access."""
        if self.p2p is None or self.p2p_operations is None:
            return None
        return partial(self.p2p_operations.p2p_all_reduce, p2p=self.p2p)

    @property
    def exchange(self) -> Exchange:
        """The operation that gathers small arrays, such as each shard's best tokens, from all shards."""
        if self.p2p is None or self.p2p_operations is None:
            return all_gather
        return partial(self.p2p_operations.p2p_all_gather, p2p=self.p2p)
