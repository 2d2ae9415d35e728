"""What the layers of a step share: where its tokens belong, and the operations that compute it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from meshserve.kernels.experts import Experts
from meshserve.kernels.experts import xla as xla_experts
from meshserve.kernels.linear import xla
from meshserve.kernels.paged_attention import PagedAttention, PagedBatch, RopeSettings, WriteKV, write_kv
from meshserve.sharding.collectives import P2PAllReduce

from .context_parallel import divide_pages
from .fused_decode import attention_of_decodes
from .kernels import Kernels
from .products import PlainProducts, Products

LARGE_STEP_TOKENS = 512  # from this size on, a step is bound by its matmuls instead of kernel launches


class MLPContext(NamedTuple):
    """Values shared by the MLPs of all layers of a step."""

    p2p_all_reduce: P2PAllReduce | None = None
    experts: Experts = xla_experts.experts
    positions: jax.Array | None = None  # [T] int32, -1 for padding; None if no token is padding
    products: Products = PlainProducts(xla.linear)
    chosen: list[jax.Array] | None = None  # receives what each layer's tokens chose; see `Forward.chosen`

    def take(self, tokens: jax.Array) -> "MLPContext":
        """Returns the context of these tokens of the step: indices [N]; those beyond all tokens are padding."""
        assert self.positions is not None
        positions = self.positions.at[tokens].get(mode="fill", fill_value=-1)
        return self._replace(positions=positions, products=self.products.take(tokens))


class StepContext(NamedTuple):
    """Values shared by all layers of a step."""

    batch: PagedBatch
    cos: jax.Array  # [T, H / 2]
    sin: jax.Array
    attend: PagedAttention
    products: Products = PlainProducts(xla.linear)
    write: WriteKV = write_kv
    prepare: Callable[..., tuple[jax.Array, jax.Array]] | None = None  # `QKNormRope` with its settings
    p2p_all_reduce: P2PAllReduce | None = None
    has_statistics_apart: bool = False
    experts: Experts = xla_experts.experts
    chosen: list[jax.Array] | None = None

    @property
    def mlp(self) -> MLPContext:
        """The part of it that the MLPs use."""
        return MLPContext(self.p2p_all_reduce, self.experts, self.batch.positions, self.products, self.chosen)


def step_context(
    kernels: Kernels,
    batch: PagedBatch,
    rope: RopeSettings,
    products: Products,
    *,
    cp: int = 1,
    has_single_tokens: bool = False,
) -> StepContext:
    """Returns what the layers of a step share if they are not fused.

    Args:
      kernels: The kernels of the server.
      batch: Where each token belongs.
      rope: The rotary angles of the tokens, and the norms of the heads.
      products: The products of the layers.
      cp: Number of devices that divide each page; above 1, the tokens are in the order of `by_remainder`.
      has_single_tokens: Whether no request has more than one token.
    """
    attend, prepare = kernels.attend, None
    if has_single_tokens and kernels.decode is not None:
        attend = attention_of_decodes(rope.epsilon, batch, kernels.decode)
    if kernels.prepare is not None:
        prepare = partial(kernels.prepare, settings=rope)
    context = StepContext(
        batch,
        rope.cos,
        rope.sin,
        attend,
        products=products,
        write=kernels.write,
        prepare=prepare,
        p2p_all_reduce=kernels.p2p_all_reduce,
        has_statistics_apart=kernels.has_statistics_apart and batch.positions.shape[0] >= LARGE_STEP_TOKENS,
        experts=kernels.experts,
        chosen=[],
    )
    if cp == 1:
        return context
    assert kernels.attend_part is not None
    return context._replace(**divide_pages(batch, cp, kernels.attend_part, kernels.write, prepare))
