"""The contract of fused layers, and how an implementation is described. See the package for the dimensions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from meshserve.kernels.experts import ExpertStep
from meshserve.kernels.implementation import Cost, Implementation
from meshserve.kernels.linear import QuantizedMatrix, xla
from meshserve.kernels.p2p import P2PGroup
from meshserve.kernels.paged_attention import AttentionStep, PagedBatch
from meshserve.kernels.router import RouterOptions


class LayerWeights(NamedTuple):
    """The weights stacked over layers, row-major [out, in] as Hugging Face stores them.

    The matrices are arrays, or `kernels.linear.QuantizedMatrix` values; see `unsupported_reason`. With a router, the
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
    router: RouterOptions | None = None  # how tokens choose experts, if the layers have any
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShapes:
    """What decides whether and for which steps an implementation can serve a model, on one device's block."""

    weights: LayerWeights  # or their shapes
    cache: jax.Array  # [L, P, K, 2, S, H], or its shape
    num_devices: int = 1  # that share the layers
    router: RouterOptions | None = None  # how tokens choose experts, if the layers have any
    has_divided_pages: bool = False  # devices share the pages of a KV head (context parallel)
    has_kv_scales: bool = False  # the checkpoint has scales for keys and values
    has_mixed_layers: bool = False  # only some layers have experts
    has_drafts: bool = False  # a request may have several new tokens
    has_fp8_products: bool = False  # larger steps multiply FP8 weights on FP8 tensor cores

    @property
    def layer_bytes(self) -> float:
        """The bytes of the matrices of one layer, without scales."""
        matrices = (self.weights.qkv, self.weights.o, self.weights.gate_up, self.weights.down)
        arrays = [matrix.data if isinstance(matrix, QuantizedMatrix) else matrix for matrix in matrices]
        num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        return num_bytes / self.weights.qkv.shape[0]

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.weights.qkv, QuantizedMatrix)


class DecodeCost(Protocol):
    """Estimates what one layer of a step takes; `experts` is None for layers without them."""

    def __call__(self, shapes: DecodeShapes, step: AttentionStep, experts: ExpertStep | None) -> Cost: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeImplementation(Implementation[DecodeShapes]):
    """An implementation of the fused layers, and of the output head after them."""

    kernels: DecodeKernels
    cost: DecodeCost
    max_tokens: Callable[[DecodeShapes], int]  # of a decode step that takes less time than with separate operations
    max_prompt_tokens: Callable[[DecodeShapes], int]  # the same of a step with prompts
    head: Callable[..., jax.Array] = xla.linear  # as `backend.Kernels.head`


def unsupported_layers(shapes: DecodeShapes) -> str | None:
    """Returns why no implementation supports a model's layers, or None."""
    if shapes.has_divided_pages:
        return "pages are divided among devices (cp), which merge their attention in every layer"
    if shapes.weights.router is not None:
        if shapes.num_devices > 1:
            return "layers with experts are fused on one device only"
        if shapes.has_mixed_layers:
            return "some layers of the model have experts and some do not"
    if shapes.cache.dtype.itemsize == 1 and shapes.has_kv_scales:
        return "the checkpoint has scales for the KV cache, which the fused layers do not apply"
    return None
