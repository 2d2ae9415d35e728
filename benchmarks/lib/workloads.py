"""Defines reproducible token-id workloads.

Uses only the standard library, because baselines in other interpreters import it. Ids are uniform in 0 to 10,000; the
draws of `nano_vllm` are those of nano-vllm's own bench.py.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

MAX_TOKEN_ID = 10_000
OUTPUT_TOKENS = 64  # in each turn of a conversation
AT_A_TIME = 8  # turns of conversations that run at the same time, unless a benchmark is told otherwise
MAX_CONVERSATION_ID = 1_799  # the demo model also has these


class Work(NamedTuple):
    """A prompt and the number of tokens to generate."""

    prompt_token_ids: list[int]
    max_tokens: int


def fixed(seed: int, num_requests: int, num_input_tokens: int, num_output_tokens: int, max_id: int) -> list[Work]:
    """Draws requests of equal lengths."""
    draw = random.Random(seed)
    return [Work(_ids(draw, num_input_tokens, max_id), num_output_tokens) for _ in range(num_requests)]


def nano_vllm(seed: int, num_requests: int, low: int, high: int, max_id: int) -> list[Work]:
    """Draws prompt and output lengths uniformly in `low` to `high`; all prompts are drawn first, each after its length.

    With seed 0, 256 requests and 100 to 1,024 tokens, there are 142,827 input tokens and 133,966 output tokens.
    """
    draw = random.Random(seed)
    prompts = [_ids(draw, draw.randint(low, high), max_id) for _ in range(num_requests)]
    return [Work(prompt, draw.randint(low, high)) for prompt in prompts]


def _ids(draw: random.Random, num_tokens: int, max_id: int) -> list[int]:
    return [draw.randint(0, max_id) for _ in range(num_tokens)]


class Turn(NamedTuple):
    """One turn of a conversation: its prompt begins with that of the turn before."""

    number: int
    user: int
    prompt_token_ids: list[int]


def conversations(num_users: int, num_turns: int, turn_tokens: int) -> Iterator[Turn]:
    """Yields every user's first turn, then every second turn, and so on; each is `turn_tokens` longer than the last."""
    texts = [_ids(random.Random(user), num_turns * turn_tokens, MAX_CONVERSATION_ID) for user in range(num_users)]
    for number in range(num_turns):
        for user, text in enumerate(texts):
            yield Turn(number, user, text[: (number + 1) * turn_tokens])
