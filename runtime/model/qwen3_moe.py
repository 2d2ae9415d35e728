"""Qwen3 mixture of experts: a decoder with experts in place of some or all MLPs.

Step 6 of 10, as `qwen3`. Layers with experts are stacked in `layers`. A model that also has layers with a single MLP
stacks those in `dense_layers`; its layers are unrolled on every backend, because a loop needs layers that are alike.
"""

import jax

from meshserve.kernels.linear import rms_norm
from meshserve.sharding.layout import ShardLayout

from ..backend.step_context import MLPContext
from ..model_files.model_config import ModelConfig
from .declaration import Declare
from .layers.decoder import Decoder, DecoderLayer
from .layers.mixture_of_experts import MixtureOfExperts


class SparseLayer(DecoderLayer):
    """A decoder layer with experts in place of the MLP."""

    def declare_mlp(self, config: ModelConfig, layout: ShardLayout, declare: Declare) -> None:
        self.experts = MixtureOfExperts(config, layout, declare)
        self.model_layers = config.stacks["layers"]

    def after_mlp(self, x: jax.Array, layer: int | jax.Array, context: MLPContext) -> jax.Array:
        index = self.model_layers.index(layer) if isinstance(layer, int) else layer
        return x + self.experts(rms_norm(x, self.mlp_norm[...], self.eps), index, context)


class Qwen3Moe(Decoder):
    """The whole model."""

    layer_types = {"layers": SparseLayer, "dense_layers": DecoderLayer}  # by the name of the stack
