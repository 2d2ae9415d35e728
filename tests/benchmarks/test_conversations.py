"""Tests that conversations are served to vLLM in the order and at the concurrency of our own benchmark."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.benchmarks.baselines.vllm_conversations import _serve
from meshserve.benchmarks.engine import prefix
from meshserve.benchmarks.lib.workloads import conversations

USERS, TURNS, TOKENS = 5, 3, 7


class Engine:
    """Ends the oldest request after two tokens; names its outputs as vLLM 0.26 does."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.running: dict[str, int] = {}
        self.most_running = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: object) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.running[name] = 0
        self.most_running = max(self.most_running, len(self.running))

    def step(self) -> list[Any]:
        name = next(iter(self.running))
        self.running[name] += 1
        num_tokens = self.running[name]
        if num_tokens == 2:
            del self.running[name]
        output = SimpleNamespace(token_ids=[1] * num_tokens)
        return [SimpleNamespace(request_id=name, outputs=[output], finished=num_tokens == 2, num_cached_tokens=3)]


def test_each_turn_begins_with_the_turn_before() -> None:
    turns = list(conversations(USERS, TURNS, TOKENS))
    assert [(turn.number, turn.user) for turn in turns] == [
        (turn, user) for turn in range(TURNS) for user in range(USERS)
    ]
    for turn in turns[USERS:]:
        before = turns[(turn.number - 1) * USERS + turn.user]
        assert turn.prompt_token_ids[:-TOKENS] == before.prompt_token_ids


def test_vllm_gets_the_same_turns_at_the_same_concurrency() -> None:
    engine, turns = Engine(), list(conversations(USERS, TURNS, TOKENS))
    first, num_cached_tokens = _serve(engine, turns, None, 4)
    assert len(first) == len(turns) and min(first) > 0
    assert num_cached_tokens == 3 * len(turns)
    assert engine.prompts == [turn.prompt_token_ids for turn in turns]
    assert engine.most_running == 4


VLLM = """
from types import SimpleNamespace
__version__ = "0"
class SamplingParams:
    def __init__(self, **fields): self.__dict__ |= fields
class LLM:
    def __init__(self, num_gpu_blocks_override, max_num_seqs, kv_offloading_size=0, kv_offloading_backend="", **more):
        assert max_num_seqs == 5 and more["enable_prefix_caching"] and more["max_model_len"] == 3 * 7 + 64
        assert (kv_offloading_size, kv_offloading_backend) in [(0.5, "native"), (0, "")]
        self.num_cached, self.running, self.llm_engine = int(1000 * kv_offloading_size), [], self
        cache = SimpleNamespace(num_gpu_blocks=num_gpu_blocks_override, block_size=16)
        self.vllm_config = SimpleNamespace(cache_config=cache)
    def generate(self, prompts, params, use_tqdm): assert len(prompts[0]["prompt_token_ids"]) == 21
    def reset_prefix_cache(self, reset_connector): assert reset_connector
    def add_request(self, name, prompt, params):
        assert params.ignore_eos and params.max_tokens == 64
        self.running.append(name)
    def step(self):
        output = SimpleNamespace(token_ids=[1])
        name = self.running.pop(0) + "-a1b2"
        return [SimpleNamespace(request_id=name, outputs=[output], finished=True, num_cached_tokens=self.num_cached)]
"""


def test_vllm_has_as_many_tokens_on_the_device_and_as_much_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "vllm.py").write_text(VLLM)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} -S "$@"\n')
    interpreter.chmod(0o755)
    prefix.main(
        ["--model=qwen3-8b", "--host-cache-gib=0.5", "--prefix=0", "--only-vllm", f"--users={USERS}",
         f"--turns={TURNS}", f"--turn-tokens={TOKENS}", "--at-a-time=4", f"--python-vllm={interpreter}",
         '--set-vllm={"max_num_seqs": 5}', "--set", "page_size=32", "num_pages=10"]
    )  # fmt: skip
    with_tier, without = capsys.readouterr().out.splitlines()
    assert "vllm 0 with offloading, 320 tokens on the device: 5 users, 3 turns of 7 tokens, 4 at a time:" in with_tier
    assert "; 7500 prompt tokens cached;" in with_tier and "; 0 prompt tokens cached;" in without
    assert without.startswith("vllm 0 without offloading")
