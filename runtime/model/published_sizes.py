"""The published Qwen3 dense models by name, for planning and measuring without their files."""

from typing import Any

from ..api.errors import ConfigError
from ..api.model_config import ModelConfig

# layers, embed, mlp, query heads, tied. All have 8 KV heads of dimension 128 and 151,936 tokens.
_SIZES = {
    "qwen3-0.6b": (28, 1024, 3072, 16, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, True),
    "qwen3-4b": (36, 2560, 9728, 32, True),
    "qwen3-8b": (36, 4096, 12288, 32, False),
    "qwen3-14b": (40, 5120, 17408, 40, False),
    "qwen3-32b": (64, 5120, 25600, 64, False),
}


def is_published(name: str) -> bool:
    return name.lower() in _SIZES


def named_model(name: str) -> ModelConfig:
    """The config of a published size, for example "qwen3-8b".

    Raises:
      ConfigError: there is no such size.
    """
    return ModelConfig.from_dict(published_config(name))


def published_config(name: str) -> dict[str, Any]:
    """What config.json says of a published size. Raises as `named_model`."""
    if name.lower() not in _SIZES:
        raise ConfigError(f"{name!r} is no published size; known are {', '.join(_SIZES)}.")
    num_layers, embed_dim, mlp_dim, num_query_heads, is_tied = _SIZES[name.lower()]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": embed_dim,
        "intermediate_size": mlp_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_query_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": is_tied,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
    }
