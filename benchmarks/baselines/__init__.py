"""Runs the same token-id workloads on Hugging Face, vLLM and meshserve, on one device, each in its own process.

    meshserve bench baselines      # Qwen3-0.6B, 4 prompts of 32 ids, 100 new tokens
    meshserve bench baselines --python-vllm /opt/vllm/bin/python --workload nano-vllm --engines hf-batched vllm ours
    meshserve bench full_load --python-vllm /opt/vllm/bin/python     # a server through gRPC beside vLLM

A baseline is another engine that serves the same models.

This module imports only the standard library at the top level, because interpreters without jax import other modules of
this package.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    from .compare import main as run

    return run(arguments)
