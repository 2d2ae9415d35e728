"""The model classes that meshserve serves: one table from config.json's `model_type` to all that is particular to it.

A new model class takes its module, its weight map, an entry in `ARCHITECTURES`, and a test. Modules are named by their
path and imported when they are needed: the table itself is light, and importing jax takes seconds.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError, UnsupportedModelError
from ..api.model_config import ModelConfig, read_json

if TYPE_CHECKING:
    import jax.numpy as jnp
    from flax import nnx

    from meshserve.kernels.decode_layers import LayerWeights
    from meshserve.sharding.layout import ShardLayout

    from .weight_map import WeightMap


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model class. Paths are "package.module:name" within `runtime`."""

    name: str  # as config.json's `architectures` has it
    model_type: str
    module: str  # the nnx module: (config, layout, dtype) -> model
    config: str  # the class of its config, made by `from_dict`
    weights: str  # its weight map
    fused_operands: str  # stacked layers -> the operands of the fused decode kernels; empty: they do not serve it
    sizes: Mapping[str, Mapping[str, Any]]  # published size -> what its config.json says beside `common`
    common: Mapping[str, Any]  # what config.json says of every size

    @property
    def weight_map(self) -> "WeightMap":
        """Parameters by their names in a Hugging Face checkpoint."""
        return _resolved(self.weights)

    @property
    def layer_weights(self) -> "Callable[[nnx.State], LayerWeights] | None":
        """The operands of the fused decode kernels from the state of all layers; None where they do not serve it."""
        return _resolved(self.fused_operands) if self.fused_operands else None

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The model that a config.json of this class describes.

        Raises:
          UnsupportedModelError: it has an option that is not implemented.
        """
        kind = raw.get("model_type", self.model_type)
        if kind != self.model_type:
            raise UnsupportedModelError(
                f"config.json: model_type is {kind!r}; meshserve implements {self.model_type!r} only."
            )
        return _resolved(self.config).from_dict({**raw, "model_type": kind})


def _size(layers: int, embed: int, mlp: int, query_heads: int, is_tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "tie_word_embeddings": is_tied,
    }


ARCHITECTURES = {
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        module="model.qwen3:Qwen3",
        config="api.config:ModelConfig",
        weights="weights.qwen3_weights:WEIGHT_MAP",
        fused_operands="model.qwen3:layer_weights",
        sizes={
            "qwen3-0.6b": _size(28, 1024, 3072, 16, True),
            "qwen3-1.7b": _size(28, 2048, 6144, 16, True),
            "qwen3-4b": _size(36, 2560, 9728, 32, True),
            "qwen3-8b": _size(36, 4096, 12288, 32, False),
            "qwen3-14b": _size(40, 5120, 17408, 40, False),
            "qwen3-32b": _size(64, 5120, 25600, 64, False),
        },
        common={
            "vocab_size": 151_936,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "dtype": "bfloat16",
        },
    ),
}


def architecture_of(config: ModelConfig) -> Architecture:
    """The class of a model whose config has been read."""
    return ARCHITECTURES[config.model_type]


def read_model(path: Path) -> ModelConfig:
    """Reads config.json.

    Raises:
      UnsupportedModelError: the file is missing, or names an architecture or option that is not implemented.
    """
    try:
        return model_config(read_json(path))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist. --model takes a Hugging Face model directory.") from None


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json that has been parsed; raises as `read_model`."""
    for architecture in ARCHITECTURES.values():
        if raw.get("architectures") == [architecture.name]:
            return architecture.read_config(raw)
    served = " or ".join(repr([architecture.name]) for architecture in ARCHITECTURES.values())
    raise UnsupportedModelError(f"config.json: architectures is {raw.get('architectures')!r}; served is {served}.")


def abstract_model(config: ModelConfig, layout: "ShardLayout", dtype: "jnp.dtype") -> "tuple[nnx.GraphDef, nnx.State]":
    """The model's structure, and its parameters as shapes with their logical axes. Allocates nothing."""
    from flax import nnx  # here, because importing jax takes seconds

    make = _resolved(architecture_of(config).module)
    return nnx.split(nnx.eval_shape(lambda: make(config, layout, dtype)))


def is_published(name: str) -> bool:
    """Whether a model class has a published size of this name."""
    return any(name.lower() in architecture.sizes for architecture in ARCHITECTURES.values())


def named_model(name: str) -> ModelConfig:
    """The config of a published size, for example "qwen3-8b".

    Raises:
      ConfigError: there is no such size.
    """
    return model_config(published_config(name))


def published_config(name: str) -> dict[str, Any]:
    """What config.json says of a published size. Raises as `named_model`."""
    for architecture in ARCHITECTURES.values():
        if size := architecture.sizes.get(name.lower()):
            kind = {"architectures": [architecture.name], "model_type": architecture.model_type}
            return {**kind, **architecture.common, **size}
    known = ", ".join(size for architecture in ARCHITECTURES.values() for size in architecture.sizes)
    raise ConfigError(f"{name!r} is no published size; known are {known}.")


def _resolved(path: str) -> Any:
    """What a path of the table names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"..{module}", __package__), name)
