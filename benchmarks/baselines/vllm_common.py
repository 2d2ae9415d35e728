"""What the baselines on vLLM share: the arguments of its engine, sampling parameters, and what its KV cache holds.

Runs in vLLM's interpreter, so it imports only the standard library, and vllm where it is needed.
"""

import argparse
from typing import Any


def engine_arguments(model_dir: str, settings: dict[str, Any], **chosen: Any) -> dict[str, Any]:
    """Returns arguments of `vllm.LLM` or `AsyncEngineArgs` for random weights.

    By default in bfloat16 and without a prefix cache. `chosen`, those of a baseline, come before these defaults, and
    `settings`, those of the user, before both.
    """
    defaults = {"load_format": "dummy", "dtype": "bfloat16", "enable_prefix_caching": False}
    return {"model": model_dir, **defaults, **chosen, **settings}


def sampling_params(max_tokens: int, temperature: float, **chosen: Any) -> Any:
    """Returns `vllm.SamplingParams` for exactly `max_tokens` tokens, without their text."""
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **chosen)


def kv_tokens(engine: Any) -> int:
    """Returns how many tokens the KV cache of an `LLMEngine` or `AsyncLLM` holds on the device."""
    cache = engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser of the model and further settings, for baselines that are commands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-dir", required=True, help="has the config.json of the model")
    parser.add_argument("--settings", default="{}", help="further arguments of vllm.LLM, as JSON")
    return parser
