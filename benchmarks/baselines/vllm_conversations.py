"""Serves the conversations of `bench prefix --users` with vLLM's engine and random weights. Needs vllm.

    python -m meshserve.benchmarks.baselines.vllm_conversations --model-dir DIRECTORY --users 14 --settings \
        '{"kv_offloading_size": 36, "kv_offloading_backend": "native", "num_gpu_blocks_override": 7000}'

DIRECTORY has the config.json of the model. Runs in vLLM's interpreter, so it imports only the standard library and
what needs no more. Two prompts that are as long as a last turn come first, untimed, as in `bench prefix`, which runs
this with `--python-vllm`.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.workloads import AT_A_TIME, MAX_CONVERSATION_ID, OUTPUT_TOKENS, Turn, conversations

from .vllm_common import argument_parser, engine_arguments, kv_tokens, sampling_params


def run(arguments: Sequence[str]) -> dict[str, object]:
    """Returns the figures of the timed run."""
    options = _parser().parse_args(arguments)
    began = time.perf_counter()
    import vllm

    longest = options.turns * options.turn_tokens
    llm = vllm.LLM(
        **engine_arguments(
            options.model_dir,
            json.loads(options.settings),
            skip_tokenizer_init=True,
            max_model_len=longest + OUTPUT_TOKENS,
            enable_prefix_caching=True,
        )
    )
    params = sampling_params(OUTPUT_TOKENS, 0.0)
    start_seconds = time.perf_counter() - began
    for number in range(2):
        ids = [random.Random(1000 + number).randint(0, MAX_CONVERSATION_ID) for _ in range(longest)]
        llm.generate([{"prompt_token_ids": ids}], [params], use_tqdm=False)
    llm.reset_prefix_cache(reset_connector=True)
    turns = list(conversations(options.users, options.turns, options.turn_tokens))
    began = time.perf_counter()
    first_seconds, num_cached_tokens = _serve(llm.llm_engine, turns, params, options.at_a_time)
    ended = time.perf_counter()
    by_turn: list[list[float]] = [[] for _ in range(options.turns)]
    for turn, first in zip(turns, first_seconds, strict=True):
        by_turn[turn.number].append(first)
    return {
        "engine": f"vllm {vllm.__version__}",
        "device_tokens": kv_tokens(llm.llm_engine),
        "num_users": options.users,
        "num_turns": options.turns,
        "turn_tokens": options.turn_tokens,
        "at_a_time": options.at_a_time,
        "num_cached_tokens": num_cached_tokens,
        "start_seconds": start_seconds,
        "span": (began, ended),
        "seconds": ended - began,
        "first_token_ms_by_turn": [round(1e3 * percentile(each, 50)) for each in by_turn],
    }


def main(arguments: Sequence[str]) -> None:
    found = json.dumps(run(arguments))
    report = _parser().parse_args(arguments).report
    report.write_text(found) if report else print(found)


def _serve(engine: Any, turns: Sequence[Turn], params: object, at_a_time: int) -> tuple[list[float], int]:
    """Serves each turn once the one `at_a_time` before it has ended.

    Returns:
      The seconds to their first tokens, and how many prompt tokens were in a cache, on the device or the host.
    """
    sent: list[float] = []
    first: dict[int, float] = {}
    cached: dict[int, int] = {}  # cached tokens of the turns that have ended
    while len(cached) < len(turns):
        while len(sent) < len(turns) and (len(sent) < at_a_time or len(sent) - at_a_time in cached):
            engine.add_request(str(len(sent)), {"prompt_token_ids": turns[len(sent)].prompt_token_ids}, params)
            sent.append(time.perf_counter())
        for output in engine.step():
            number = int(str(output.request_id).split("-")[0])
            if output.outputs[0].token_ids:
                first.setdefault(number, time.perf_counter() - sent[number])
            if output.finished:
                cached[number] = output.num_cached_tokens or 0
    return [first[number] for number in range(len(turns))], sum(cached.values())


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("Measure conversations with vLLM.")
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME)
    parser.add_argument("--report", type=Path, help="write the figures to this file instead of stdout")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
