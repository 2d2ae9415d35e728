"""Runs the layers of a decode step on one device's block: a few new tokens, a range of layers in one call.

A Qwen3 layer is: RMSNorm, projection to query, key and value, RMSNorm of every query and key head, rotary position
embedding (half split), writing key and value to the token's page, attention over the request's positions so far, output
projection and residual, RMSNorm, silu(gate) * up, down projection and residual. Norm statistics, softmax and sums use
float32. With experts, the last part is a router and `kernels.experts`.

`decode_layers` does all of this. On a mesh, the results of the `output` and `down` projections are summed over the
devices by the P2P all-reduce within the call. For devices without peer access, its five parts are available one layer
at a time: `qkv`, `attention`, `output`, `gate_up`, `down`. Layers with experts run on one device only.

Dimensions: L layers, D embed, K kv heads of this block, G query heads per kv head, H head dim, F mlp of this block,
P pages, S page size (tokens per page), B requests.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from meshserve.kernels.p2p import P2PGroup
from meshserve.kernels.paged_attention import PagedBatch

from . import gpu, reference


class LayerWeights(NamedTuple):
    """The weights stacked over layers, row-major [out, in] as Hugging Face stores them.

    The matrices are arrays, or `kernels.linear.QuantisedMatrix` values; see `unsupported_reason`. With a router, the
    layers have E experts in place of the MLP: `gate_up` is [L, E, 2, F, D] and `down` [L, E, D, F].
    """

    input_norm: jax.Array  # [L, D]
    qkv: Any  # [L, K, (G + 2) * H, D]: for each kv head, its G query heads, then its key, then its value
    q_norm: jax.Array  # [L, H]
    k_norm: jax.Array  # [L, H]
    o: Any  # [L, D, K * G * H]
    post_norm: jax.Array  # [L, D]
    gate_up: Any  # [L, 2, F, D]: gate, then up
    down: Any  # [L, D, F]
    router: jax.Array | None = None  # [L, E, D]

    def group_size(self, head_dim: int) -> int:
        """Returns the number of query heads per KV head, from the shape of `qkv`."""
        return self.qkv.shape[2] // head_dim - 2


class DecodeBatch(NamedTuple):
    """Positions and pages of the requests. A padding request has position -1: it writes nothing, and its result is
    unspecified.

    A request may have several new tokens, of consecutive positions: they are consecutive rows with the same pages, and
    each attends to those before it. In this package, each such row is called a request.
    """

    positions: jax.Array  # [B] int32: position of the current token, from 0
    page_table: jax.Array  # [B, max_pages] int32: entries beyond the pages that a request owns are never used


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Constants of the layers, and the devices that share them."""

    epsilon: float  # added to the mean square in each RMSNorm
    softmax_scale: float  # multiplies the attention scores
    rotary_scale: float = 1.0  # multiplies cosine and sine (YaRN's attention factor)
    num_chosen: int = 0  # experts that a token goes through, if the layers have experts
    is_normalized: bool = True  # the weights of a token's experts add up to 1
    has_drafts: bool = False  # a request may have several new tokens
    p2p: P2PGroup | None = None  # group over which `decode_layers` sums, at most 2 MiB of x; None: a single device


class DecodeKernels(Protocol):
    """The interface of an implementation.

    Caches are [L, P, K, 2, S, H] (key, value) and are updated in place if donated. The contents of pages that a request
    does not own, even NaN, must not affect its result. Layer indices are compile-time constants; the reference also
    takes arrays in `attention`.
    """

    def decode_layers(
        self,
        x: jax.Array,
        weights: LayerWeights,
        cache: jax.Array,
        batch: DecodeBatch,
        inverse_frequencies: jax.Array,
        *,
        settings: LayerSettings,
        layers: range | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Runs consecutive layers.

        Args:
          x: [B, D], the residual stream before the first of `layers`.
          weights: the stacked weights.
          cache: the KV cache.
          batch: the requests.
          inverse_frequencies: [H / 2] float32, of the rotary position embedding.
          settings: constants of the layers.
          layers: consecutive layer indices; None means all.

        Returns:
          The residual stream after the last of `layers`, before the final norm; the cache; and the experts that each
          request chose, [layers that ran, B, k] int32, -1 for padding requests (None without a router).
        """
        ...

    def prompt_layers(
        self,
        x: jax.Array,
        weights: LayerWeights,
        cache: jax.Array,
        batch: PagedBatch,
        inverse_frequencies: jax.Array,
        *,
        settings: LayerSettings,
        layers: range | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs consecutive layers of a step whose tokens [T] may belong to the same request, on one device.

        See `decode_layers` for arguments and result. A token attends to the positions of its request up to its own.
        """
        ...

    def qkv(
        self,
        x: jax.Array,
        weights: LayerWeights,
        cache: jax.Array,
        batch: DecodeBatch,
        inverse_frequencies: jax.Array,
        *,
        settings: LayerSettings,
        layer: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the layer up to the rotary embedding and cache write. Returns q [B, K, G, H] and the cache."""
        ...

    def attention(
        self, q: jax.Array, cache: jax.Array, batch: DecodeBatch, *, settings: LayerSettings, layer: int | jax.Array
    ) -> jax.Array:
        """Attends with q [B, K, G, H] to positions 0..positions[b]. Returns [B, K * G * H]; 0 for padding requests."""
        ...

    def output(
        self, attended: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int
    ) -> jax.Array:
        """Returns residual + attended o^T, [B, D]. Without a residual, only the product (a device's summand)."""
        ...

    def gate_up(self, x: jax.Array, weights: LayerWeights, *, settings: LayerSettings, layer: int) -> jax.Array:
        """Normalizes x [B, D] by post_norm and returns silu(gate) * up, [B, F]."""
        ...

    def down(self, activated: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int) -> jax.Array:
        """Returns residual + activated down^T, [B, D]. Without a residual, only the product."""
        ...


IMPLEMENTATIONS: dict[str, DecodeKernels] = {"reference": reference, "cuda": gpu}


def implementation(name: str, device: jax.Device | None = None) -> DecodeKernels:
    """Returns the named implementation.

    Args:
      name: "reference" (any backend) or "cuda" (Hopper, bfloat16).
      device: the device that it must run on; None means this process's first device.

    Raises:
      ValueError: there is no such implementation, or it cannot run on the device; the message says why.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"decode_layers is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    if name == "cuda":
        reason = gpu.unavailable_reason(device)
        if reason:
            raise ValueError(f"decode_layers 'cuda' cannot run: {reason}. Use 'reference'.")
    return IMPLEMENTATIONS[name]


def unsupported_reason(weights: LayerWeights, cache: jax.Array, name: str = "cuda") -> str | None:
    """Returns why an implementation does not support these shapes or dtypes, or None if it does.

    Array contents are not read, so that shapes suffice.
    """
    return gpu.unsupported_reason(weights, cache) if name == "cuda" else None
