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

from typing import NamedTuple, Protocol

import jax

from meshserve.kernels.linear import Matrix, QuantisedMatrix

from . import gpu, reference, tiles, tpu, xla


class ExpertWeights(NamedTuple):
    """The weights stacked over layers, row-major [out, in] as Hugging Face stores them. Both may be quantised."""

    gate_up: Matrix  # [L, E, 2, F, D]: gate, then up
    down: Matrix  # [L, E, D, F]

    @property
    def quantised(self) -> tuple[QuantisedMatrix, QuantisedMatrix] | None:
        """`gate_up` and `down` if both are quantised, else None."""
        if isinstance(self.gate_up, QuantisedMatrix) and isinstance(self.down, QuantisedMatrix):
            return self.gate_up, self.down
        return None


class Routing(NamedTuple):
    """The experts that each token chose."""

    experts: jax.Array  # [T, k] int32, distinct within a token; one outside of 0..E-1 is not computed here
    weights: jax.Array  # [T, k] float32: by which each expert's output is multiplied


class Experts(Protocol):
    """The interface of an implementation."""

    def __call__(
        self, x: jax.Array, weights: ExpertWeights, routing: Routing, *, layer: int | jax.Array, num_experts: int
    ) -> jax.Array:
        """Computes, for each token t, the sum over j of weights[t, j] * down(silu(gate(x[t])) * up(x[t])).

        Args:
          x: [T, D]. Rows without an expert of this block may hold anything, even NaN.
          weights: the experts of all layers.
          routing: the choices of the tokens.
          layer: index of the layer.
          num_experts: number of experts that the tokens chose from, on all devices together. It only tells how many
            tokens an expert gets on average.

        Returns:
          [T, D] in x's dtype, accumulated in float32; 0 for tokens without an expert of this block.
        """
        ...


IMPLEMENTATIONS: dict[str, Experts] = {
    "reference": reference.experts,
    "xla": xla.experts,
    "cuda": gpu.experts,
    "tpu": tpu.experts,
    "tpu_interpreted": tpu.interpreted,
}


def implementation(name: str, device: jax.Device | None = None) -> Experts:
    """Returns the named implementation.

    Args:
      name: "reference" (every expert for every token, for tests), "xla" (any backend), "cuda" (Hopper GPUs), "tpu", or
        "tpu_interpreted" (the TPU kernel in Pallas' interpreter; runs on any backend, for tests, thousands of times
        slower).
      device: the device that it must run on; None means this process's first device.

    Raises:
      ValueError: there is no such implementation, or it cannot run on the device; the message says why.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"moe_backend is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    platform = jax.default_backend() if device is None else device.platform
    if name == "tpu" and platform != "tpu":
        raise ValueError(f"moe_backend 'tpu' cannot run: the backend is {platform}. Use 'xla'.")
    if name == "cuda" and (reason := gpu.unavailable_reason(device)):
        raise ValueError(f"moe_backend 'cuda' cannot run: {reason}. Use 'xla'.")
    return IMPLEMENTATIONS[name]


def scratch_bytes(
    *, num_tokens: int, num_chosen: int, num_experts: int, num_local: int, embed_dim: int, itemsize: int
) -> int:
    """Returns about how much memory a layer of a step takes: the rows of all tiles, before and after the experts.

    The CUDA kernels take less: they do not pad.
    """
    num_choices = num_tokens * num_chosen
    num_rows = tiles.tile_rows(num_choices, num_experts, 32 // itemsize)
    return 2 * tiles.most_tiles(num_choices, num_local, num_rows) * num_rows * embed_dim * itemsize


def default_name(platform: str) -> str:
    """Returns the name of the implementation for a platform of jax, provided that it supports device and shapes."""
    return {"tpu": "tpu", "gpu": "cuda"}.get(platform, "xla")
