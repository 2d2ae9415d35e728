"""The contract of paged attention: a step's arrays, the operations, and how an implementation is described.

See the package for the dimensions.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost, Implementation


class PagedBatch(NamedTuple):
    """Maps tokens to requests and requests to pages. Padding is a token at position -1 or a request without tokens."""

    positions: jax.Array  # [T] int32: position of the token in its request, from 0; -1 for padding
    token_request: jax.Array  # [T] int32: index of the token's request in this batch
    page_table: jax.Array  # [B, max_pages] int32: entries beyond the pages that a request owns are never used


class PagedAttention(Protocol):
    """The interface of an implementation.

    The contents of pages that a request does not own, even NaN, must not affect its result.
    """

    def __call__(
        self, q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
    ) -> jax.Array:
        """Computes softmax(q k^T * scale) v over positions 0..positions[t] for each token t.

        Args:
          q: [T, K, G, H].
          cache: [L, P, K, 2, S, H], with this step's keys and values already written; in q's dtype, or e4m3 where the
            implementation supports it.
          batch: the tokens and requests of the step.
          layer: index of the layer.
          scale: multiplies the scores.

        Returns:
          [T, K, G, H] in q's dtype, accumulated in float32; 0 for padding tokens.
        """
        ...


class PartialAttention(Protocol):
    """The interface of an implementation whose results for parts of the keys can be merged: see `context_split`."""

    def __call__(
        self, q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        """Computes `PagedAttention` and, [T, K, G] float32, the logarithm of each query's sum of exp(scores).

        The latter is unspecified for padding tokens.
        """
        ...


class WriteKV(Protocol):
    """The interface of an operation that writes a step's keys and values to the cache: see `reference.write_kv`."""

    def __call__(
        self, cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array
    ) -> jax.Array: ...


class RopeSettings(NamedTuple):
    """Parameters of the heads' RMSNorm and rotary embedding, shared by all layers of a step."""

    q_norm: jax.Array  # [L, H]: gain of the query heads' RMSNorm
    k_norm: jax.Array  # [L, H]: gain of the key heads' RMSNorm
    cos: jax.Array  # [T, H / 2] float32: cosines of the rotary angles
    sin: jax.Array  # [T, H / 2] float32
    epsilon: float  # added to the mean square in each RMSNorm


class QKNormRope(Protocol):
    """The interface of an operation that does everything between the QKV projection and attention in one pass."""

    def __call__(
        self,
        rows: jax.Array,
        cache: jax.Array,
        batch: PagedBatch,
        settings: RopeSettings,
        *,
        layer: int | jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Normalizes and rotates queries and keys, and writes keys and values to the cache.

        Args:
          rows: [T, K * (G + 2) * H]: for each kv head, its query heads, then its key, then its value.
          cache: [L, P, K, 2, S, H].
          batch: the tokens and requests of the step.
          settings: parameters of the norms and the rotary embedding.
          layer: index of the layer.

        Returns:
          q [T, K, G, H], normalized and rotated, also of padding tokens, and the cache with each token's key
          (normalized and rotated) and value. Padding tokens write nothing.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """What decides whether an implementation can serve a model, on one device's block."""

    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    page_size: int
    dtype: jnp.dtype  # of queries
    cache_dtype: jnp.dtype

    @classmethod
    def of(cls, group: int, dtype: jnp.dtype, cache: jax.Array) -> "AttentionShapes":
        """Returns the shapes of a call with a cache [L, P, K, 2, S, H], or its shape."""
        _, _, kv_heads, _, page_size, head_dim = cache.shape
        return cls(
            kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=page_size, dtype=dtype, cache_dtype=cache.dtype
        )

    @property
    def key_bytes(self) -> int:
        """The bytes of the key and the value of one position, of all KV heads of the block."""
        return self.kv_heads * 2 * self.head_dim * self.cache_dtype.itemsize

    @property
    def pair_operations(self) -> int:
        """The operations for a token and a position that it attends to: its scores, and the weighted values."""
        return 4 * self.kv_heads * self.group * self.head_dim


class AttentionStep(NamedTuple):
    """What a step asks of attention, in each layer."""

    num_tokens: int
    num_keys: float  # positions whose keys and values are needed, those of each request once
    num_pairs: float  # of a token and a position that it attends to
    longest: float  # positions of the longest request


class AttentionCost(Protocol):
    """Estimates what attention takes in one layer of a step."""

    def __call__(self, shapes: AttentionShapes, step: AttentionStep) -> Cost: ...


def least_cost(shapes: AttentionShapes, step: AttentionStep) -> Cost:
    """Returns the cost of an implementation that reads each key once and computes nothing that is masked."""
    return Cost(num_bytes=step.num_keys * shapes.key_bytes, operations=step.num_pairs * shapes.pair_operations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionImplementation(Implementation[AttentionShapes]):
    """An implementation of paged attention, and of what it brings along."""

    attend: PagedAttention
    attend_part: PartialAttention
    cost: AttentionCost
    write: WriteKV
    prepare: QKNormRope | None = None  # None: `write` after separate operations of XLA, which are as fast
