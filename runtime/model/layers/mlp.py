"""The feed-forward network of a dense layer."""

from functools import partial

import jax
from flax import nnx

from meshserve.kernels.linear import RMSNorm, silu_product
from meshserve.sharding.layout import ShardLayout

from ...backend.step_context import MLPContext
from ...model_files.model_config import ModelConfig
from ..declaration import Declare
from .residual import add_product

GATE_UP, DOWN = "mlp.gate_up", "mlp.down"  # names of the projections


class MLP(nnx.Module):
    """Feed-forward network with SwiGLU activation."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        self.gate_up = declare.matrix(GATE_UP, (2, layout.mlp_dim, config.embed_dim), (None, "mlp", None))
        self.down = declare.matrix(DOWN, (config.embed_dim, layout.mlp_dim), (None, "mlp"))

    def __call__(self, x: jax.Array, norm: RMSNorm, layer: int | jax.Array, context: MLPContext) -> jax.Array:
        """Adds the MLP, after a norm, to x [T, D]."""
        halves = context.products(x, self.gate_up[...], name=GATE_UP, layer=layer, prologue=norm)
        down = partial(context.products, halves, self.down[...], name=DOWN, layer=layer, prologue=silu_product)
        return add_product(x, down, context.p2p_all_reduce)
