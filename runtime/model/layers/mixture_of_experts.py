"""A mixture of experts in place of the MLP.

Each token goes through the few experts that a router chooses (`kernels.router`). A shard computes its block of the
experts (`sharding.expert_layout`) for all tokens, and one all-reduce adds up the shards' outputs, whether experts are
split by tensor or by expert.
"""

import jax
from flax import nnx

from meshserve.kernels.experts import ExpertWeights, Routing
from meshserve.kernels.router.reference import route
from meshserve.sharding.collectives import all_reduce
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import TENSOR_AXIS

from ...backend.step_context import MLPContext
from ...model_files.model_config import ModelConfig
from ..declaration import Declare


class MixtureOfExperts(nnx.Module):
    """The router and this shard's experts of one layer. The experts' matrices are those of all layers of the stack."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        assert config.experts is not None and layout.experts is not None
        self.config, self.layout = config.experts, layout.experts
        rows, mlp_dim, embed_dim = self.layout.num_rows, self.layout.block_mlp_dim, config.embed_dim
        self.router = declare((self.config.num_experts, embed_dim), (None, None))
        self.gate_up = declare.matrix("experts.gate_up", (rows, 2, mlp_dim, embed_dim), ("experts", None, None, None))
        self.down = declare.matrix(
            "experts.down", (rows, embed_dim, mlp_dim), ("experts", None, None), is_slice=mlp_dim < self.layout.mlp_dim
        )

    def __call__(self, x: jax.Array, index: int | jax.Array, context: MLPContext) -> jax.Array:
        """Applies the experts of the stack's layer `index` to x [T, D]; returns the all-reduced output [T, D]."""
        experts, weights = route(x, self.router[...], self.config.router, context.positions)
        if context.chosen is not None:
            context.chosen.append(experts)
        experts -= self.layout.first_expert(jax.lax.axis_index(TENSOR_AXIS))
        matrices = ExpertWeights(self.gate_up[...], self.down[...])
        routing, num_experts = Routing(experts, weights), self.config.num_experts
        output = context.experts(x, matrices, routing, layer=index, num_experts=num_experts)
        return all_reduce(output, context.p2p_all_reduce)
