"""Registry of model classes: maps config.json's `model_type` to everything specific to the class.

A new model class needs its module, its weight map, an entry in `ARCHITECTURES`, and a test. Entries refer to modules by
path, and the modules are imported when needed, because importing JAX takes seconds.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError, UnsupportedModelError
from ..model_files.config_file import read_config_file
from ..model_files.model_config import ModelConfig
from ..model_files.number_bounds import shown
from ..model_files.quantization import NOT_QUANTIZED, SCHEMES, Quantization

if TYPE_CHECKING:
    import jax.numpy as jnp
    from flax import nnx

    from meshserve.kernels.decode_layers import LayerWeights
    from meshserve.sharding.layout import ShardLayout

    from .weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class. Paths have the form "package.module:name", relative to `runtime`."""

    name: str  # as in config.json's `architectures`
    headless_name: str  # the same of a model that was saved without its output head, as embedding models may be
    model_type: str
    module: str  # path of the nnx module: (config, layout, dtype) -> model
    config: str  # path of the config class, which has `from_dict`
    weights: str  # path of the weight map
    fused_operands: str  # path: stacked layers -> operands of the fused decode kernels
    sizes: Mapping[str, Mapping[str, Any]]  # published size -> fields of its config.json beyond `common`
    common: Mapping[str, Any]  # fields of config.json shared by all sizes

    @property
    def weight_map(self) -> "WeightMap":
        """Mapping of parameters to names in a Hugging Face checkpoint."""
        return _resolved(self.weights)

    @property
    def layer_weights(self) -> "Callable[[nnx.State], LayerWeights]":
        """Function from the state of all layers to operands of the fused decode kernels."""
        return _resolved(self.fused_operands)

    def read_config(
        self, raw: Mapping[str, Any], quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False
    ) -> ModelConfig:
        """Parses a config.json of this class. `quantize` and `fp8_head` are as in `ServeConfig`.

        Raises:
          UnsupportedModelError: It has an option that is not implemented.
          ConfigError: The model cannot be quantized, or already is.
        """
        kind = raw.get("model_type", self.model_type)
        if kind != self.model_type:
            raise UnsupportedModelError(
                f"config.json: model_type is {shown(kind)}; meshserve implements {self.model_type!r} only."
            )
        quantization = raw.get("quantization_config")
        config = _resolved(self.config).from_dict({**raw, "model_type": kind, "quantization_config": None})
        if fp8_head:
            config = with_fp8_head(config)
        if quantization is not None:
            if quantize != NOT_QUANTIZED:
                raise ConfigError(
                    f"--quantize {quantize}: the model is already quantized (quantization_config in config.json). "
                    "Omit --quantize, or use the unquantized model."
                )
            from .formats.published import read_quantization  # not at module level: importing jax takes seconds

            unknown: list[str] = []
            read = read_quantization(quantization, config.dtype, unknown)
            notes = config.notes._replace(unknown=(*config.notes.unknown, *unknown))
            return self.with_quantization(dataclasses.replace(config, notes=notes), read)
        return self.with_quantization(config, _made(quantize, config)) if quantize != NOT_QUANTIZED else config

    def with_quantization(self, config: ModelConfig, quantization: Quantization) -> ModelConfig:
        """Returns the config of the model with quantized weights.

        A parameter is quantized on the devices if all tensors that form it, in all layers, are. If some are not, those
        that are will be dequantized when they are loaded.
        """
        if config.experts is not None:
            _check_experts(config, quantization)
        parameters = frozenset(
            f"layers.{key}"
            for key, modules in self.projection_modules(config).items()
            if all(
                quantization.of_module(module) is quantization and not quantization.skips(module) for module in modules
            )
        )
        return dataclasses.replace(config, quantization=dataclasses.replace(quantization, parameters=parameters))

    def projection_modules(self, config: ModelConfig) -> dict[str, list[str]]:
        """Returns the modules of a checkpoint that form each projection in all layers, by keys of the weight map."""
        weight_map = self.weight_map
        num_experts = config.experts.num_experts if config.experts is not None else 1

        def modules(key: str) -> list[str]:
            return [
                weight_map.layer_prefix.format(layer) + name.removesuffix(".weight").format(expert)
                for name in weight_map.layers[key].all_names
                for layer in range(config.num_layers)
                for expert in range(num_experts if "{}" in name else 1)
            ]

        return {key: modules(key) for key in sorted(weight_map.projections)}


def _check_experts(config: ModelConfig, quantization: Quantization) -> None:
    """Raises UnsupportedModelError if a model with experts has quantized weights that are not implemented for it."""
    assert config.experts is not None
    rows, columns = quantization.scale.block
    sizes = config.embed_dim, config.experts.mlp_dim
    if not columns:
        raise UnsupportedModelError(
            f"the weights are {quantization.name}; those of a model with experts may have scales for blocks, such as "
            "fp8-block-128x128, or for groups of columns."
        )
    if rows > 1 and (any(size > rows and size % rows for size in sizes) or rows != columns):
        raise UnsupportedModelError(
            f"hidden_size and moe_intermediate_size are {sizes[0]} and {sizes[1]}; with {quantization.name} weights, "
            f"multiples of {rows} are needed."
        )


def _size(layers: int, embed: int, mlp: int, query_heads: int, is_tied: bool, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "tie_word_embeddings": is_tied,
        **others,
    }


# For the Coder models, which were trained for long contexts.
_LONG = {"max_position_embeddings": 262_144, "rope_theta": 1e7}
_COMMON = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}


ARCHITECTURES = {
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        headless_name="Qwen3Model",
        model_type="qwen3",
        module="model.qwen3:Qwen3",
        config="model_files.model_config:ModelConfig",
        weights="weights.qwen3_weights:WEIGHT_MAP",
        fused_operands="model.layers.stack:layer_weights",
        sizes={
            "qwen3-0.6b": _size(28, 1024, 3072, 16, True),
            "qwen3-1.7b": _size(28, 2048, 6144, 16, True),
            "qwen3-4b": _size(36, 2560, 9728, 32, True),
            "qwen3-8b": _size(36, 4096, 12288, 32, False),
            "qwen3-14b": _size(40, 5120, 17408, 40, False),
            "qwen3-32b": _size(64, 5120, 25600, 64, False),
        },
        common={**_COMMON, "num_key_value_heads": 8},
    ),
    "qwen3_moe": Architecture(
        name="Qwen3MoeForCausalLM",
        headless_name="Qwen3MoeModel",
        model_type="qwen3_moe",
        module="model.qwen3_moe:Qwen3Moe",
        config="model_files.experts_config:MoeModelConfig",
        weights="weights.qwen3_moe_weights:WEIGHT_MAP",
        fused_operands="model.layers.stack:layer_weights",
        sizes={
            "qwen3-30b-a3b": _size(48, 2048, 6144, 32, False, moe_intermediate_size=768),
            "qwen3-coder-30b-a3b": _size(48, 2048, 5472, 32, False, moe_intermediate_size=768, **_LONG),
            "qwen3-235b-a22b": _size(94, 4096, 12288, 64, False, moe_intermediate_size=1536),
            "qwen3-coder-480b-a35b": _size(
                62, 6144, 8192, 96, False, moe_intermediate_size=2560, num_experts=160, num_key_value_heads=8, **_LONG
            ),
        },
        common={
            **_COMMON,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
}


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the model class of a parsed config."""
    return ARCHITECTURES[config.model_type]


def with_fp8_head(config: ModelConfig) -> ModelConfig:
    """Returns the config of the model with its output head in FP8; a tied one is a copy of the embedding."""
    from .formats.quantize import head_quantization  # not at module level: importing jax takes seconds

    return dataclasses.replace(config, head_quantization=head_quantization())


def _made(scheme: str, config: ModelConfig) -> Quantization:
    from .formats.quantize import made_quantization  # not at module level: importing jax takes seconds

    if scheme not in SCHEMES:
        raise ConfigError(f"quantize is {scheme!r}; allowed are {', '.join(SCHEMES)}.")
    columns = [config.embed_dim, config.num_query_heads * config.head_dim]
    if config.experts is not None:
        columns.append(config.experts.mlp_dim)
    if len(config.stacks) > 1 or config.experts is None:  # some layers, or all, have no experts
        columns.append(config.mlp_dim)
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    try:
        return made_quantization(scheme, columns, dtype)
    except ValueError as error:
        raise ConfigError(f"--quantize {scheme}: {error}") from None


def read_model(path: Path, quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False) -> ModelConfig:
    """Reads config.json (see `read_config_file`). `quantize` and `fp8_head` are as in `ServeConfig`.

    Raises:
      UnsupportedModelError: The file is missing, or its architecture or an option is not implemented.
      ConfigError: The model cannot be quantized in this scheme, or already is.
    """
    try:
        return model_config(read_config_file(path), quantize, fp8_head=fp8_head)
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist. --model takes a Hugging Face model directory.") from None


def model_config(raw: Mapping[str, Any], quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False) -> ModelConfig:
    """Reads a parsed config.json. Raises the same errors as `read_model`."""
    for architecture in ARCHITECTURES.values():
        if raw.get("architectures") in ([architecture.name], [architecture.headless_name]):
            return architecture.read_config(raw, quantize, fp8_head=fp8_head)
    if not raw.get("architectures") and raw.get("model_type") in tuple(ARCHITECTURES):
        architecture = ARCHITECTURES[raw["model_type"]]
        config = architecture.read_config(raw, quantize, fp8_head=fp8_head)
        assumed = (*config.notes.assumed, f"architectures = {json.dumps([architecture.name])}")
        return dataclasses.replace(config, notes=config.notes._replace(assumed=assumed))
    served = " or ".join(repr([architecture.name]) for architecture in ARCHITECTURES.values())
    raise UnsupportedModelError(
        f"config.json: architectures is {shown(raw.get('architectures'))}; supported: {served}."
    )


def abstract_model(config: ModelConfig, layout: "ShardLayout", dtype: "jnp.dtype") -> "tuple[nnx.GraphDef, nnx.State]":
    """Returns the model's structure and its parameters as shapes with logical axes. Allocates nothing."""
    from flax import nnx  # not at module level: importing jax takes seconds

    make = _resolved(architecture_of(config).module)
    return nnx.split(nnx.eval_shape(lambda: make(config, layout, dtype)))


def weight_bytes(config: ModelConfig, layout: "ShardLayout", dtype: "jnp.dtype") -> int:
    """Returns the bytes of all weights on one device, including padding and repeated heads."""
    _, abstract = abstract_model(config, layout, dtype)
    return device_bytes(abstract.flat_state().leaves, layout)


def device_bytes(weights: Iterable[Any], layout: "ShardLayout") -> int:
    """Returns the bytes of abstract weights on one device. Every sharded axis is a multiple of the number of shards."""
    total = 0
    for weight in weights:
        is_sharded = any(axis is not None for axis in weight.axes)
        array = weight.get_value()
        total += array.size * array.dtype.itemsize // (layout.num_shards if is_sharded else 1)
    return total


def is_published(name: str) -> bool:
    """Returns whether any model class has a published size of this name."""
    return any(name.lower() in architecture.sizes for architecture in ARCHITECTURES.values())


def named_model(name: str, quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False) -> ModelConfig:
    """Returns the config of a published size, for example "qwen3-8b", with weights quantized as `ServeConfig.quantize`.

    Raises:
      ConfigError: There is no such size.
    """
    return model_config(published_config(name), quantize, fp8_head=fp8_head)


def published_names() -> list[str]:
    """Returns the names of all published sizes."""
    return [size for architecture in ARCHITECTURES.values() for size in architecture.sizes]


def published_config(name: str) -> dict[str, Any]:
    """Returns the config.json of a published size. Raises the same errors as `named_model`."""
    for architecture in ARCHITECTURES.values():
        if size := architecture.sizes.get(name.lower()):
            kind = {"architectures": [architecture.name], "model_type": architecture.model_type}
            return {**kind, **architecture.common, **size}
    raise ConfigError(f"{name!r} is not a published size; allowed are {', '.join(published_names())}.")


def _resolved(path: str) -> Any:
    """Imports and returns the object that a path names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"..{module}", __package__), name)
