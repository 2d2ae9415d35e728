"""Embeds the texts of `bench embed` with vLLM's engine and random weights, all at once. Needs vllm.

    python -m meshserve.benchmarks.baselines.vllm_embed --model-dir DIRECTORY --texts 10000 --tokens uniform:20:500

DIRECTORY has the config.json and a tokenizer of the model; vLLM pools nothing without one. Runs in vLLM's interpreter,
so it imports only the standard library and what needs no more. One untimed run of other texts comes first, as in
`bench embed`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from meshserve.benchmarks.lib.traffic import Lengths, Traffic

from .vllm_common import argument_parser, engine_arguments


def run(arguments: Sequence[str]) -> dict[str, object]:
    """Returns the figures of the timed run."""
    options = _parser().parse_args(arguments)
    import vllm

    llm = vllm.LLM(**engine_arguments(options.model_dir, json.loads(options.settings), runner="pooling"))
    num_tokens, seconds = 0, 0.0
    for seed in (options.seed + 1, options.seed):
        traffic = Traffic(
            num_requests=options.texts, input_lengths=options.tokens, output_lengths=Lengths.parse("fixed:1"), seed=seed
        )
        prompts = [{"prompt_token_ids": work.prompt_token_ids} for work in traffic.requests()]
        num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        began = time.perf_counter()
        outputs = llm.embed(prompts, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert len(outputs) == options.texts, f"{len(outputs)} results"
    return {
        "engine": f"vllm {vllm.__version__}",
        "num_texts": options.texts,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("Measure vLLM's embeddings.")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--tokens", type=Lengths.parse, default=Lengths.parse("uniform:20:500"))
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
