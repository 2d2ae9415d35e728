"""The memory that steps write their logits and hidden states to, the same each time.

An output at another address in each step moves the temporaries, too, and XLA then sets every kernel of a command buffer
anew. With several GPUs that takes the host longer than the step takes them (docs/log). So a step is given the arrays
that the last one of its shape brought, donated, and brings them back.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.mesh import named_sharding

from ..model.qwen3 import Kernels
from .batch import Bucket

OutputBufferKey = tuple[str, int]  # "logits" of so many requests, "hidden" states of so many tokens


def output_buffer_keys(bucket: Bucket) -> tuple[OutputBufferKey, ...]:
    """What a bucket's step keeps, in the order of `StepOutput`."""
    if bucket.num_steps > 1:
        return ()
    logits = ("logits", bucket.num_requests)
    return (logits,) if bucket.is_decode else (logits, ("hidden", bucket.num_tokens))


def output_buffer_shapes(
    kernels: Kernels, params: nnx.State, buckets: Iterable[Bucket], mesh: Mesh
) -> dict[OutputBufferKey, jax.ShapeDtypeStruct]:
    """What the steps of all these buckets keep, with shardings; nothing where `kernels` does not. `params` may be
    shapes."""
    if not kernels.has_output_buffers:
        return {}
    shape_of = {"logits": logits_shape, "hidden": hidden_shape}
    keys = [key for bucket in buckets for key in output_buffer_keys(bucket)]
    return {(name, size): shape_of[name](params, size, mesh) for name, size in keys}


def written_over(buffers: Sequence[jax.Array], output: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The output [N, M] each, as if written to the arrays that were kept, which XLA makes nothing of.

    It is what a program needs these arguments for: unused ones are dropped before it is compiled, and if jit was told
    to leave them (`keep_unused`), then jax's caches hold its programs for ever (0.11 and 0.12).
    """
    return tuple(jax.lax.dynamic_update_slice(old, new, (0, 0)) for old, new in zip(buffers, output, strict=True))


def logits_shape(params: nnx.State, num_requests: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """[B, V] float32, with its sharding; V is padded to whole shards."""
    vocab_size, _ = params["embedding"].get_value().shape
    sharding = named_sharding(mesh, (None, "vocab"))
    return jax.ShapeDtypeStruct((num_requests, vocab_size), jnp.float32, sharding=sharding)


def hidden_shape(params: nnx.State, num_tokens: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """[T, D] of the parameters' type, with its sharding."""
    embedding = params["embedding"].get_value()
    sharding = named_sharding(mesh, ())
    return jax.ShapeDtypeStruct((num_tokens, embedding.shape[1]), embedding.dtype, sharding=sharding)
