"""The experts of a mixture-of-experts layer, on one device's block: each token goes through the few that it chose.

An expert is a feed-forward network with SwiGLU activation. A device holds some experts whole, or a slice of every
expert's intermediate dimension, or both; what it computes is its summand of the layer's output, and the model adds the
summands up. The kernel does not know which of the two it is: choices of experts that this block does not hold are left
out, and slices need no care.

An implementation takes the weights of all layers and the index of one. Cutting a layer out of the stack first would
copy every expert of it wherever the product is a kernel of its own, also those that no token chose.

Dimensions: T tokens, k experts chosen by a token, L layers, E experts of this block, F intermediate size of this block,
D embed.
"""

import jax

from meshserve.kernels.implementation import in_order, named

from . import reference, sm80, sm90, tiles, tpu, xla
from .contract import Experts, ExpertShapes, ExpertsImplementation, ExpertStep, ExpertWeights, Routing

__all__ = [
    "IMPLEMENTATIONS",
    "ExpertShapes",
    "ExpertStep",
    "ExpertWeights",
    "Experts",
    "ExpertsImplementation",
    "Routing",
    "implementation",
    "scratch_bytes",
]


# In order of preference: cuda (Hopper GPUs), tpu, portable (NVIDIA GPUs since Ampere), xla (any backend),
# reference (every expert for every token, for tests), and tpu_interpreted (the TPU kernel in Pallas' interpreter; any
# backend, for tests, far slower).
IMPLEMENTATIONS = in_order(
    sm90.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    sm80.IMPLEMENTATION,
    xla.IMPLEMENTATION,
    reference.IMPLEMENTATION,
    tpu.INTERPRETED,
)


def implementation(name: str, device: jax.Device | None = None) -> Experts:
    """Returns the experts of a named implementation. See `kernels.implementation.named` for the errors."""
    return named(IMPLEMENTATIONS, "moe_backend", name, device).experts


def scratch_bytes(
    *, num_tokens: int, num_chosen: int, num_experts: int, num_local: int, embed_dim: int, itemsize: int
) -> int:
    """Returns about how much memory a layer of a step takes: the rows of all tiles, before and after the experts.

    The CUDA kernels take less: they do not pad.
    """
    num_choices = num_tokens * num_chosen
    num_rows = tiles.tile_rows(num_choices, num_experts, 32 // itemsize)
    return 2 * tiles.most_tiles(num_choices, num_local, num_rows) * num_rows * embed_dim * itemsize
