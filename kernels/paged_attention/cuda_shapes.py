"""The shapes and dtypes that the CUDA kernels of paged attention take."""

import jax
import jax.numpy as jnp

from .contract import AttentionShapes
from .storage import FP8

MAX_GROUP = 8  # query heads per kv head in one call


def check(name: str, group: int, dtype: jnp.dtype, cache: jax.Array, layer: int | jax.Array) -> None:
    """Checks the shapes and dtypes of a call, which the kernels themselves do not check.

    Raises:
      TypeError: `layer` is not a Python number.
      ValueError: A shape or dtype is not supported; the message has the implementation's name.
    """
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number: unroll the layers")
    reason = unsupported_shapes(AttentionShapes.of(group, dtype, cache))
    if reason is not None:
        raise ValueError(f"attention {name!r}: {reason}. Use 'reference'.")


def unsupported_shapes(shapes: AttentionShapes) -> str | None:
    """Returns why the kernels do not support shapes or dtypes, or None if they do."""
    checks = (
        (shapes.head_dim in (64, 128), f"head_dim is {shapes.head_dim}; 64 and 128 are supported"),
        (1 <= shapes.group <= MAX_GROUP, f"there are {shapes.group} query heads per kv head; 1 to 8 are supported"),
        (shapes.page_size % 16 == 0, f"page_size is {shapes.page_size}; a multiple of 16 is needed"),
        (shapes.dtype == jnp.bfloat16, f"heads are {shapes.dtype}; bfloat16 is needed"),
        (
            shapes.cache_dtype in (jnp.bfloat16, FP8),
            f"the cache is {shapes.cache_dtype}; bfloat16 or {FP8} is needed",
        ),
    )
    return next((reason for holds, reason in checks if not holds), None)
