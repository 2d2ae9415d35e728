"""Qwen3 mixture of experts, written per shard: the dense model with experts in place of some or all MLPs.

Step 6 of 10, as `qwen3`. A router scores all experts for each token, and the token goes through the few best. A shard
computes its block of the experts (`sharding.expert_layout`) for all tokens, and one all-reduce adds up the shards'
outputs, whether experts are split by tensor or by expert.

Layers with experts are stacked in `layers`. A model that also has layers with a single MLP stacks those in
`dense_layers`; its layers are unrolled on every backend, because a loop needs layers that are alike.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.experts import ExpertWeights, Routing
from meshserve.kernels.linear import rms_norm
from meshserve.sharding.collectives import all_reduce
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.model_config import ExpertsConfig, ModelConfig
from ..quantisation.declaration import Declare
from .qwen3 import DecoderLayer, MLPContext, Qwen3, slice_stack

_MATRICES = frozenset({"gate_up", "down"})  # of the experts, read where they lie in the stack


def route(x: jax.Array, router: jax.Array, config: ExpertsConfig) -> Routing:
    """Returns the experts that each token of x [T, D] goes through, by the router's rows [experts, D].

    Scores and weights are float32.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    scores = jnp.einsum("td,ed->te", x, router, precision=precision, preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.num_chosen)
    if config.is_normalized:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(experts, weights)


class Experts(nnx.Module):
    """The router and this shard's experts of one layer. The experts' matrices are those of all layers of the stack."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        assert config.experts is not None and layout.experts is not None
        self.config, self.layout = config.experts, layout.experts
        rows, mlp_dim, embed_dim = self.layout.num_rows, self.layout.block_mlp_dim, config.embed_dim
        self.router = declare((self.config.num_experts, embed_dim), (None, None))
        self.gate_up = declare.matrix("experts.gate_up", (rows, 2, mlp_dim, embed_dim), ("experts", None, None, None))
        self.down = declare.matrix("experts.down", (rows, embed_dim, mlp_dim), ("experts", None, None))

    def __call__(self, x: jax.Array, index: int | jax.Array, context: MLPContext) -> jax.Array:
        """Applies the experts of the stack's layer `index` to x [T, D]; returns the all-reduced output [T, D]."""
        experts, weights = route(x, self.router[...], self.config)
        if context.positions is not None:
            experts = jnp.where(context.positions[:, None] < 0, -1, experts)  # padding reads no expert's weights
        if context.chosen is not None:
            context.chosen.append(experts)
        experts -= self.layout.first_expert(jax.lax.axis_index(TENSOR_AXIS))
        matrices = ExpertWeights(self.gate_up[...], self.down[...])
        routing, num_experts = Routing(experts, weights), self.config.num_experts
        output = context.experts(x, matrices, routing, layer=index, num_experts=num_experts)
        return all_reduce(output, context.p2p_all_reduce)


class SparseLayer(DecoderLayer):
    """A decoder layer with experts in place of the MLP."""

    def declare_mlp(self, config: ModelConfig, layout: ShardLayout, declare: Declare) -> None:
        self.experts = Experts(config, layout, declare)
        self.model_layers = config.stacks["layers"]

    def after_mlp(self, x: jax.Array, layer: int | jax.Array, context: MLPContext) -> jax.Array:
        index = self.model_layers.index(layer) if isinstance(layer, int) else layer
        return x + self.experts(rms_norm(x, self.mlp_norm[...], self.eps), index, context)


class Qwen3Moe(Qwen3):
    """The whole model."""

    layer_types = {"layers": SparseLayer, "dense_layers": DecoderLayer}  # by the name of the stack

    def layer(self, index: int | jax.Array) -> DecoderLayer:
        """Returns one decoder layer, with the experts' matrices of its whole stack: they are read where they lie."""
        stack = "layers"
        if isinstance(index, int):
            stack = next(name for name, layers in self.config.stacks.items() if index in layers)
            index = self.config.stacks[stack].index(index)
        structure, matrices, stacked = nnx.split(
            getattr(self, stack), lambda path, _: "experts" in path and not _MATRICES.isdisjoint(path), ...
        )
        return nnx.merge(structure, matrices, jax.tree.map(partial(slice_stack, index=index), stacked))
