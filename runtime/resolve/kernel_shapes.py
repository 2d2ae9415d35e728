"""The shapes of a model on one device's block, from which follows which kernels can serve it and what they cost.

`KernelShapes` gives each operation of `kernels` its own.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels import decode_layers
from meshserve.kernels.decode_layers import DecodeShapes, LayerWeights
from meshserve.kernels.decode_layers.sm90_calls import CACHED_LAYER_BYTES
from meshserve.kernels.experts import ExpertShapes, ExpertWeights
from meshserve.kernels.linear import LinearShapes, Matrix, QuantizedMatrix
from meshserve.kernels.p2p import P2PShapes
from meshserve.kernels.paged_attention import AttentionShapes
from meshserve.sharding.layout import ShardLayout

from ..api.errors import ConfigError
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..program.step import CacheShape, state_shapes
from ..weights.registry import abstract_model, architecture_of

_STACK = "layers"  # of the layers that may be fused; others have no experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """The shapes of a model as the devices of a mesh hold it."""

    model: ModelConfig
    layout: ShardLayout
    dtype: jnp.dtype  # of activations and of weights that are not quantized
    cache_dtype: jnp.dtype
    page_size: int
    has_drafts: bool = False  # a request may have several tokens in a step

    @property
    def is_quantized(self) -> bool:
        """Whether projections of the layers are quantized on the devices."""
        return self.model.layer_quantization is not None

    @cached_property
    def stacks(self) -> dict[str, LayerWeights]:
        """The shapes of a device's shard of the layers, by the name of their stack."""
        _, abstract = abstract_model(self.model, self.layout, self.dtype)
        is_weight = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731

        def shard(weight: nnx.Variable) -> nnx.Variable:
            sizes = zip(weight.shape, weight.axes, strict=True)
            shape = [size // (1 if axis is None else self.layout.num_shards) for size, axis in sizes]
            return weight.replace(jax.ShapeDtypeStruct(tuple(shape), weight.get_value().dtype))

        weights_of = architecture_of(self.model).layer_weights
        return {name: weights_of(jax.tree.map(shard, abstract[name], is_leaf=is_weight)) for name in self.model.stacks}

    @property
    def layers(self) -> LayerWeights:
        """The shapes of a device's shard of the layers that may be fused."""
        return self.stacks[_STACK]

    @cached_property
    def cache_page(self) -> Any:
        """The shape of one page of the cache on a device, [L, 1, K, 2, S, H]."""
        whole = state_shapes(self.model, self.layout, CacheShape(1, self.page_size, 1, 1), self.cache_dtype).cache.shape
        shape = (*whole[:2], whole[2] // self.layout.num_shards, *whole[3:])
        return jax.ShapeDtypeStruct(shape, self.cache_dtype)

    def projections(self, stack: str = _STACK) -> dict[str, Matrix]:
        """Returns the shapes of one layer's projections on a device, by name, without experts."""
        weights = self.stacks[stack]
        names = ("qkv", "o") if weights.router is not None else ("qkv", "o", "gate_up", "down")
        return {name: _one_of(getattr(weights, name)) for name in names}

    @property
    def attention(self) -> AttentionShapes:
        return AttentionShapes.of(self.layout.group_size, self.dtype, self.cache_page)

    @property
    def linear(self) -> LinearShapes:
        matrices = {name: value for name, value in self.projections().items() if isinstance(value, QuantizedMatrix)}
        return LinearShapes(matrices=matrices, dtype=self.dtype)

    @property
    def experts(self) -> ExpertShapes | None:
        """None for a model without experts."""
        if self.model.experts is None:
            return None
        return ExpertShapes(weights=ExpertWeights(self.layers.gate_up, self.layers.down), dtype=self.dtype)

    def decode_layers(self, *, has_fp8_products: bool = False) -> DecodeShapes:
        """Returns the shapes of fused layers.

        Args:
          has_fp8_products: Whether steps that are not fused multiply FP8 weights on FP8 tensor cores.
        """
        quantization = self.model.quantization
        return decode_layers.DecodeShapes(
            weights=self.layers,
            cache=self.cache_page,
            num_devices=self.layout.num_shards,
            router=self.model.experts.router if self.model.experts is not None else None,
            has_divided_pages=self.layout.cp > 1,
            has_kv_scales=quantization is not None and quantization.has_kv_scales,
            has_mixed_layers=len(self.model.stacks) > 1,
            has_drafts=self.has_drafts,
            has_fp8_products=has_fp8_products,
        )

    def p2p(self, *, is_one_process: bool) -> P2PShapes:
        return P2PShapes(dtype=self.dtype, is_one_process=is_one_process)


def _one_of(stack: Matrix) -> Matrix:
    """Returns the shape of one matrix of a stack."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)


def served_model(config: ServeConfig, model: ModelConfig, platform: str) -> ModelConfig:
    """Returns a quantized model as the devices hold it: with `--dequantize`, its layers in the activations' dtype.

    Decode steps of layers of up to 32 MiB in bfloat16 are as fast as with fewer bytes, or faster: their kernels wait
    for each other, not for weights. Prefill of 1,024 and more tokens is slower, 16 % at 4,096 (docs/log/decode.md).

    Raises:
      ConfigError: Weights of experts are to be dequantized.
    """
    quantization = model.layer_quantization
    if quantization is None or config.dequantize == "never":
        return model
    if config.dequantize == "always" and model.experts is not None:
        raise ConfigError("--dequantize always: the weights of experts stay quantized. Use auto or never.")
    is_small = 2 * _num_layer_weights(model) <= CACHED_LAYER_BYTES and model.experts is None
    is_faster = is_small and model.pooling is None and platform == "gpu"
    if not is_faster and config.dequantize == "auto":
        return model
    return dataclasses.replace(model, quantization=quantization.held_plain())


def _num_layer_weights(model: ModelConfig) -> int:
    """Returns the number of weights in the projections of a dense layer."""
    heads = (2 * model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    return (heads + 3 * model.mlp_dim) * model.embed_dim
