"""Output buffers: arrays that steps of one shape reuse for their logits and hidden states.

An output at a different address in each step also moves the temporaries, and XLA then updates every kernel of a command
buffer. With several GPUs, this takes the host longer than the step takes the GPUs (docs/log/first_days.md). Each step
is therefore given the output arrays of the previous step of its shape, donated, and returns them.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.mesh import named_sharding

from ..backend.kernels import Kernels
from .batch import Bucket

OutputBufferKey = tuple[str, int]  # "logits" and number of requests, or "hidden" and number of tokens


def output_buffer_keys(bucket: Bucket) -> tuple[OutputBufferKey, ...]:
    """Returns the output buffers of a bucket's step, in the order of `StepOutput`."""
    if bucket.num_steps > 1 or bucket.is_pooling:
        return ()
    logits = ("logits", bucket.num_requests)
    return (logits,) if bucket.is_decode else (logits, ("hidden", bucket.num_tokens))


def output_buffer_shapes(
    kernels: Kernels, params: nnx.State, buckets: Iterable[Bucket], mesh: Mesh
) -> dict[OutputBufferKey, jax.ShapeDtypeStruct]:
    """Returns the output buffers of the steps of all these buckets, with shardings; none if `kernels` uses none.

    `params` may be shapes.
    """
    if not kernels.has_output_buffers:
        return {}
    shape_of = {"logits": logits_shape, "hidden": hidden_shape}
    keys = [key for bucket in buckets for key in output_buffer_keys(bucket)]
    return {(name, size): shape_of[name](params, size, mesh) for name, size in keys}


def write_over(buffers: Sequence[jax.Array], output: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the outputs, [N, M] each, as if written to the buffers. XLA removes the operation.

    It makes the buffers used arguments of the program, because unused ones are dropped before compilation. With jit's
    `keep_unused` instead, the caches of jax 0.11 and 0.12 hold the programs forever.
    """
    return tuple(jax.lax.dynamic_update_slice(old, new, (0, 0)) for old, new in zip(buffers, output, strict=True))


def logits_shape(params: nnx.State, num_requests: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the shape of logits, [B, V] float32, with its sharding. V is padded to whole shards."""
    vocab_size, _ = params["embedding"].get_value().shape
    sharding = named_sharding(mesh, (None, "vocab"))
    return jax.ShapeDtypeStruct((num_requests, vocab_size), jnp.float32, sharding=sharding)


def hidden_shape(params: nnx.State, num_tokens: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the shape of hidden states, [T, D] of the parameters' dtype, with its sharding."""
    embedding = params["embedding"].get_value()
    sharding = named_sharding(mesh, ())
    return jax.ShapeDtypeStruct((num_tokens, embedding.shape[1]), embedding.dtype, sharding=sharding)
