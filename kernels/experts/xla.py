"""Experts with XLA's own products, for backends without a kernel: a loop over tiles, each with one expert.

The loop ends with the last tile that has tokens, so experts that no token chose are not read. XLA's `ragged_dot` is no
alternative there: on CPUs and GPUs it multiplies every token by every expert. Quantized experts are dequantized tile by
tile.
"""

import math

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost
from meshserve.kernels.linear import layer_of

from .contract import ExpertShapes, ExpertsImplementation, ExpertStep, ExpertWeights, Routing
from .tiles import add_up, arrange, tile_rows

_LEAST_TILE_ROWS = 8
# On a GPU, a loop whose end the device knows is in no graph: the host launches the kernels of every tile (about ten,
# with the copy by which it learns whether there is another) and waits for each.
_LAUNCHES_PER_TILE = 10


def experts(
    x: jax.Array, weights: ExpertWeights, routing: Routing, *, layer: int | jax.Array, num_experts: int
) -> jax.Array:
    """See `Experts`."""
    _, num_local, embed_dim, mlp_dim = weights.down.shape
    num_rows = tile_rows(routing.experts.size, num_experts, _LEAST_TILE_ROWS)
    tiles = arrange(routing.experts, num_local=num_local, num_rows=num_rows)
    rows = x[tiles.token]

    def of_tile(index: jax.Array, outputs: jax.Array) -> jax.Array:
        expert, start = tiles.expert[index], index * num_rows
        tile = jax.lax.dynamic_slice_in_dim(rows, start, num_rows)
        gate_up, down = (layer_of(stack, (layer, expert)).astype(x.dtype) for stack in weights)
        gate, up = jnp.split(_product(tile, gate_up.reshape(2 * mlp_dim, embed_dim)), 2, axis=1)
        output = _product(jax.nn.silu(gate) * up, down)
        return jax.lax.dynamic_update_slice_in_dim(outputs, output, start, 0)

    outputs = jax.lax.fori_loop(0, tiles.num_tiles, of_tile, jnp.zeros_like(rows))
    return add_up(outputs, tiles, routing.weights)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies x [T, in] by the transpose of weight [out, in]."""
    return jnp.einsum("ti,oi->to", x, weight, precision="highest" if x.dtype == jnp.float32 else None)


def cost(shapes: ExpertShapes, step: ExpertStep) -> Cost:
    """Estimates the cost on a GPU: each tile copies its expert out of the stack, in the dtype of the tokens."""
    num_rows = tile_rows(math.ceil(step.num_choices), step.num_experts, _LEAST_TILE_ROWS)
    num_tiles = min(step.num_choices, step.num_read + step.num_choices / num_rows)
    copied_bytes = shapes.num_weights * shapes.dtype.itemsize
    return Cost(
        num_bytes=num_tiles * (shapes.stored_bytes + 2 * copied_bytes),
        operations=2.0 * num_tiles * num_rows * shapes.num_weights,
        num_launches=_LAUNCHES_PER_TILE * num_tiles,
        scratch_bytes=copied_bytes,
    )


IMPLEMENTATION = ExpertsImplementation(name="xla", automatic_on=("cpu", "gpu", "tpu"), experts=experts, cost=cost)
