"""Grouped-query attention over the pages of the KV cache, with norms of the query and key heads."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import RMSNorm, inverse_rms, rms_norm
from meshserve.kernels.paged_attention.storage import FP8, scaled_access
from meshserve.sharding.layout import ShardLayout, split_group

from ...backend.step_context import StepContext
from ...model_files.model_config import ModelConfig
from ..declaration import Declare
from .residual import add_product
from .rope import rotate

QKV, OUT = "attention.qkv", "attention.out"  # names of the projections


class Attention(nnx.Module):
    """Grouped-query attention with normalized q and k."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        embed_dim, head_dim = config.embed_dim, config.head_dim
        qkv_shape = layout.qkv_shape(head_dim, embed_dim)
        self.qkv = declare.matrix(QKV, qkv_shape, ("kv_heads", None, None), row_unit=head_dim)
        self.q_norm = declare((head_dim,), (None,))
        self.k_norm = declare((head_dim,), (None,))
        out_shape = (embed_dim, config.num_query_heads * head_dim)
        self.out = declare.matrix(OUT, out_shape, (None, "query_heads"))
        has_scales = config.quantization is not None and config.quantization.has_kv_scales
        scale_shape = (layout.num_groups, 2)  # scales of the keys and of the values in an 8-bit cache
        self.kv_scale = declare(scale_shape, ("kv_heads", None), jnp.dtype("float32")) if has_scales else None
        self.head_dim, self.eps = head_dim, config.rms_norm_eps

    def __call__(
        self, x: jax.Array, norm: RMSNorm, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Adds attention, after a norm, to x [T, D].

        Returns:
          The sum [T, D], and the cache with this step's keys and values.
        """
        if self.kv_scale is not None and cache.dtype == FP8:  # `prepare` would write without the scales
            scaled = scaled_access(context.attend, context.write, self.kv_scale[...])
            context = context._replace(prepare=None, **scaled)
        rows = context.products(x, self.qkv[...], name=QKV, layer=layer, prologue=norm)
        if not isinstance(layer, int):  # in a loop, or the TPU compiler splits the weights instead of the rows
            rows = jax.lax.optimization_barrier(rows)
        if context.prepare is not None:
            q, cache = context.prepare(rows, cache, context.batch, layer=layer)
        else:
            q, cache = self._prepare(rows, cache, layer, context)
        attended = context.attend(q, cache, context.batch, layer=layer, scale=self.head_dim**-0.5)
        attended = attended.reshape(x.shape[0], -1)
        product = partial(context.products, attended, self.out[...], name=OUT, layer=layer)
        return add_product(x, product, context.p2p_all_reduce), cache

    def _prepare(
        self, rows: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Computes `QKNormRope` with XLA operations."""
        heads = rows.reshape(rows.shape[0], self.qkv.shape[0], -1, self.head_dim)
        q, k, v = split_group(heads)
        of_q = of_k = None
        if context.has_statistics_apart:
            # Without the barrier, XLA's CUDA compiler first copies q and k out of `heads`, and these become its slowest
            # kernels.
            inverse = jax.lax.optimization_barrier(inverse_rms(heads[:, :, :-1], self.eps))
            of_q, of_k = inverse[:, :, :-1], inverse[:, :, -1]
        q = rotate(rms_norm(q, self.q_norm[...], self.eps, of_q), context.cos, context.sin)
        k = rotate(rms_norm(k, self.k_norm[...], self.eps, of_k), context.cos, context.sin)
        return q, context.write(cache, k, v, context.batch, layer=layer)
