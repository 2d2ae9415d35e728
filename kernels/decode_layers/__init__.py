"""A decode step's layers on one device's block: one new token a request, through a range of layers in one call.

Qwen3's layer: RMSNorm, projection to query, key and value, RMSNorm of every query and key head, rotary position (half
split), key and value written to the token's page, attention over the request's positions so far, projection and
residual, RMSNorm, silu(gate) * up, down projection and residual. Norm statistics, softmax and sums are float32.

`decode_layers` is the whole of it. On a mesh, sums over devices follow the `output` and the `down` projection: peers
add up within the call. For devices that are no peers its five parts are here too, each for one layer: `qkv`,
`attention`, `output`, `gate_up`, `down`.

Dimensions: L layers, D embed, K kv heads of this block, G query heads a kv head, H head dim, F mlp of this block,
P pages, S page size (tokens a page), B requests.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax

from meshserve.kernels.p2p import P2PGroup

from . import gpu, reference


class LayerWeights(NamedTuple):
    """Stacked over layers, row-major [out, in] as Hugging Face stores them."""

    input_norm: jax.Array  # [L, D]
    qkv: jax.Array  # [L, K, (G + 2) * H, D]: of each kv head its G query heads, then its key, then its value
    q_norm: jax.Array  # [L, H]
    k_norm: jax.Array  # [L, H]
    o: jax.Array  # [L, D, K * G * H]
    post_norm: jax.Array  # [L, D]
    gate_up: jax.Array  # [L, 2, F, D]: gate, then up
    down: jax.Array  # [L, D, F]

    def group_size(self, head_dim: int) -> int:
        """Query heads of each KV head, as the rows of `qkv` tell."""
        return self.qkv.shape[2] // head_dim - 2


class DecodeBatch(NamedTuple):
    """Where the requests stand. A padding row has position -1: it writes nothing and its result means nothing."""

    positions: jax.Array  # [B] int32: of the current token, from 0
    page_table: jax.Array  # [B, max_pages] int32: entries beyond what a request owns are never used


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings:
    epsilon: float  # added to the mean square in each RMSNorm
    softmax_scale: float  # multiplies the attention scores
    rotary_scale: float = 1.0  # multiplies cosine and sine (YaRN's attention factor)
    p2p: P2PGroup | None = (
        None  # of the mesh on which `decode_layers` adds up, at most 2 MiB of x; None: a device alone
    )


class DecodeKernels(Protocol):
    """An implementation. Caches are [L, P, K, 2, S, H] (key, value) and updated in place where donated. None lets the
    contents of pages that a request does not own into its result, NaN included. A layer is compiled in."""

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
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, D], the residual stream before the first of `layers` (None: all; consecutive); inverse_frequencies
        [H / 2] float32, of the rotary position. Returns the residual stream after the last of `layers`, before the
        final norm, and the cache."""
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
        """Input norm to rotary position: q [B, K, G, H], and the cache with key and value written."""
        ...

    def attention(
        self, q: jax.Array, cache: jax.Array, batch: DecodeBatch, *, settings: LayerSettings, layer: int
    ) -> jax.Array:
        """q [B, K, G, H] over positions 0..positions[b]: [B, K * G * H]; 0 for padding rows."""
        ...

    def output(
        self, attended: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int
    ) -> jax.Array:
        """residual + attended o^T: [B, D]. Without a residual the product alone (a device's share of a sum)."""
        ...

    def gate_up(self, x: jax.Array, weights: LayerWeights, *, settings: LayerSettings, layer: int) -> jax.Array:
        """Norm of x [B, D] by post_norm, then silu(gate) * up: [B, F]."""
        ...

    def down(self, activated: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int) -> jax.Array:
        """residual + activated down^T: [B, D]. Without a residual the product alone."""
        ...


IMPLEMENTATIONS: dict[str, DecodeKernels] = {"reference": reference, "cuda": gpu}


def implementation(name: str, device: jax.Device | None = None) -> DecodeKernels:
    """The named implementation for a device, this process's first if None: "reference" (any backend), or "cuda"
    (Hopper, bfloat16).

    Raises:
      ValueError: there is no such implementation, or it cannot run there; says why.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"decode layers are {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    if name == "cuda":
        reason = gpu.unavailable_reason(device)
        if reason:
            raise ValueError(f"decode layers 'cuda' cannot run: {reason}. Take 'reference'.")
    return IMPLEMENTATIONS[name]


def unsupported_reason(weights: LayerWeights, cache: jax.Array) -> str | None:
    """Why "cuda" does not take these shapes or types (shapes and dtypes alone are read), or None where it does."""
    return gpu.unsupported_reason(weights, cache)
