"""Lays out the operands of kernel calls: some so that a step does not update its CUDA command buffer's kernels."""

import jax
import jax.numpy as jnp


def beside_tokens(x: jax.Array) -> jax.Array:
    """Pads x [T] with T zeros, so that XLA does not place it in the buffer of the step's sampled tokens.

    XLA would reuse that buffer for an array of at most the same size, T. Its address changes with every step, and then
    all kernels of a call that reads from it must be updated in the command buffer. For Qwen3-0.6B that update takes 87
    to 127 us if a decode step's layers are affected, and 44 to 57 us if not (docs/log/first_days.md).
    """
    return jnp.pad(x, (0, x.shape[0]))


def activation_bytes(num_tokens: int, columns: int) -> int:
    """Returns the bytes of activations in the form that products with quantized weights take (weight_formats.cuh)."""
    return num_tokens * (2 * columns + columns // 64)
