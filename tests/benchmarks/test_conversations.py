"""Tests that conversations are served to vLLM in the order and at the concurrency of our own benchmark."""

from types import SimpleNamespace
from typing import Any

from meshserve.benchmarks.baselines.vllm_conversations import _serve
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
        return [SimpleNamespace(request_id=name, outputs=[output], finished=num_tokens == 2)]


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
    first = _serve(engine, turns, None, 4)
    assert len(first) == len(turns) and min(first) > 0
    assert engine.prompts == [turn.prompt_token_ids for turn in turns]
    assert engine.most_running == 4
