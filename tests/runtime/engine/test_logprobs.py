"""Tests log-probabilities against Hugging Face, and requests with logits processors, at every TP size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshserve.runtime.commands.cli import main
from tests import checkpoints

TP_SIZES = (1, 4, 8)
# With 4 tokens per step, prompts need many chunks, mixed with decodes. The cache is too small, so some are preempted.
OPTIONS = ("--dtype=float32", "--max-running=4", "--max-step-tokens=4", "--page-size=16", "--num-pages=14")
MAX_TOKENS = 10
PROMPTS = checkpoints.random_prompts((1, 2, 17, 64, 150), vocab_size=320)
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
DRAWN: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"logit_bias": {"5": 4.0, "6": 3.5}, "min_p": 0.05},
    {"bad_token_ids": list(range(0, 200)), "top_k": 40},
    {"allowed_token_ids": list(range(100, 140)), "logprobs": 2},
    {"stop_token_ids": list(range(64)), "min_tokens": 7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 0},
    {},
]


def generate(model: Path, directory: Path, tp: int, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        main(["generate", f"--model={model}", f"--tp={tp}", *OPTIONS, f"--input={source}", f"--output={target}"]) == 0
    )
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary size is divisible by no TP size except 1."""
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=333, tie_word_embeddings=False)


class Answers(dict[int, list[dict[str, Any]]]):
    """The answers at each TP size, computed on first use."""

    def __init__(self, make: Callable[[int], list[dict[str, Any]]]):
        self._make = make

    def __missing__(self, tp: int) -> list[dict[str, Any]]:
        self[tp] = self._make(tp)
        return self[tp]


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """All requests in one batch: greedy ones with log-probabilities, then sampled ones with logits processors."""
    directory = tmp_path_factory.mktemp("answers")
    lines = [{**GREEDY, "prompt_token_ids": prompt, "logprobs": 5, "prompt_logprobs": 20} for prompt in PROMPTS]
    lines += [
        {"max_tokens": 24, "seed": 7 * index, "prompt_token_ids": PROMPTS[3], **fields}
        for index, fields in enumerate(DRAWN)
    ]
    # Has the last prompt's pages available, but must not use them.
    lines.append({**GREEDY, "prompt_token_ids": PROMPTS[-1], "prompt_logprobs": 0, "n": 2})
    return Answers(lambda tp: generate(model, directory, tp, lines))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("tp", TP_SIZES)
def test_they_are_those_of_hugging_face(tp: int, model: Path, answers) -> None:
    for prompt, answer in zip(PROMPTS, answers[tp], strict=False):
        tokens = [*prompt, *answer["token_ids"]]
        _, logits = checkpoints.hidden_states(model, tokens)
        expected = log_softmax(logits.numpy())  # at position t, of token t + 1
        found = [*answer.get("prompt_logprobs", []), *answer["logprobs"]]
        assert [position["token_id"] for position in found] == tokens[1:]
        assert len(answer["logprobs"]) == MAX_TOKENS
        for at, position in enumerate(found):
            assert abs(position["logprob"] - expected[at, tokens[at + 1]]) < 1e-4
            assert len(position["top"]) == (20 if at < len(prompt) - 1 else 5)
            values = [value for _, value in position["top"]]
            assert values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(expected[at])[::-1][: len(values)], atol=1e-4)
            for token_id, value in position["top"]:
                assert abs(value - expected[at, token_id]) < 1e-4


@pytest.mark.parametrize("tp", TP_SIZES)
def test_a_shared_prompt_is_computed_again_for_its_log_probabilities(tp: int, answers) -> None:
    first, second = answers[tp][-2:]
    expected = answers[tp][len(PROMPTS) - 1]["prompt_logprobs"]
    assert [position["token_id"] for position in first["prompt_logprobs"]] == PROMPTS[-1][1:]
    for found, wanted in zip(first["prompt_logprobs"], expected, strict=True):
        assert found["top"] == [] and abs(found["logprob"] - wanted["logprob"]) < 1e-4
    assert "prompt_logprobs" not in second, "they are part of the first sample"
    assert first["token_ids"] == second["token_ids"] == answers[tp][len(PROMPTS) - 1]["token_ids"]


def test_the_tp_size_does_not_change_a_token(answers) -> None:
    for tp in TP_SIZES[1:]:
        assert [answer["token_ids"] for answer in answers[tp]] == [answer["token_ids"] for answer in answers[1]]


def test_every_control_is_kept_to(answers) -> None:
    drawn = [answer["token_ids"] for answer in answers[4][len(PROMPTS) : len(PROMPTS) + len(DRAWN)]]
    plain = drawn[-1]
    assert len(set(drawn[0])) < len(drawn[0]) or drawn[0] != plain
    assert {5, 6} & set(drawn[2]), "a bias of 4 makes them likely"
    assert min(drawn[3]) >= 200
    assert set(drawn[4]) <= set(range(100, 140))
    assert 7 <= len(drawn[5]) < 24 and min(drawn[5]) >= 64, "neither before the 7th token, nor in the output"
    assert len({tuple(tokens) for tokens in drawn}) == len(drawn)
    first = answers[4][len(PROMPTS) + 4]["logprobs"]
    assert all(len(position["top"]) == 2 for position in first)
    assert any(position["logprob"] < position["top"][-1][1] for position in first), (
        "the top log-probabilities are those of the unprocessed distribution"
    )
