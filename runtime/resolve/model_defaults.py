"""Options whose default depends on the model: the dtypes, and the length of the context."""

from ..api.errors import ConfigError
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig

_DEFAULT_MAX_CONTEXT = 32_768  # tokens, if the model allows more and max_context is not set


def serving_dtype(config: ServeConfig, model: ModelConfig, platform: str) -> str:
    """Returns the dtype of activations, of weights that are not quantized and, by default, of the cache.

    The default for float16 checkpoints is bfloat16, which has the range of float32. On CPUs it is always float32,
    because XLA computes in float32 there, and before jax 0.11.2 copies a bfloat16 cache in every step.
    """
    if config.dtype != "auto":
        return config.dtype
    return "float32" if model.dtype == "float32" or platform == "cpu" else "bfloat16"


def cache_dtype(config: ServeConfig, model: ModelConfig, platform: str) -> str:
    """Returns the dtype of the KV cache on JAX's `platform`."""
    return "float8_e4m3fn" if config.kv_dtype == "fp8" else serving_dtype(config, model, platform)


def context_tokens(config: ServeConfig, model: ModelConfig) -> int:
    """Returns the maximum number of prompt and output tokens of a request.

    Raises:
      ConfigError: max_context exceeds what the model supports.
    """
    if config.max_context > model.longest_context:
        scaled = f" times a rope factor of {model.rope.factor:g}" if model.rope.factor > 1.0 else ""
        raise ConfigError(
            f"max_context is {config.max_context}; the model supports {model.longest_context} tokens "
            f"(max_position_embeddings{scaled}). Lower it, or configure YaRN rope scaling in the model's config.json."
        )
    return config.max_context or min(model.longest_context, _DEFAULT_MAX_CONTEXT)
