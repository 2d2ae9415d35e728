"""Tests that NaN in a model's weights ends the requests that meet it, with an error, and changes no other output.

The model's embedding of one token is NaN. A request meets it in its prompt, or once it has sampled the token itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshserve.runtime.api.request import NOT_FINITE
from meshserve.runtime.commands.generate import generate_file
from meshserve.runtime.options.serve_config import ServeConfig
from tests import checkpoints

SERVE: dict[str, Any] = {
    "dtype": "float32", "max_running": 4, "max_step_tokens": 4, "page_size": 16, "num_pages": 64, "cache_dir": "",
}  # fmt: skip
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.9, "logprobs": 2, "prompt_logprobs": 1, "frequency_penalty": 0.5},
)
PROMPTS = checkpoints.random_prompts([20] * 12, vocab_size=320)
MAX_TOKENS = 14


def completions(model: Path, folder: Path, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    samplings = SAMPLING if options.get("logits_processors", True) else SAMPLING[:-1]
    lines = [
        {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": index, **sampling}
        for index, prompt in enumerate(prompts)
        for sampling in samplings[index % len(samplings) :][:1]
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(ServeConfig(model=str(model), **SERVE | options), folder / "in.jsonl", folder / "out.jsonl")
    return [json.loads(line, parse_constant=refuse) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 4},
        {"max_decode_steps": 4, "logits_processors": False},
        {"draft_tokens": 3, "logits_processors": False},
    ],
    ids=["tp", "multi_step", "drafts"],
)
def test_nan_ends_the_requests_that_meet_it(options: dict[str, Any], tmp_path: Path) -> None:
    model = checkpoints.save_checkpoint(tmp_path / "model", tie_word_embeddings=False, num_hidden_layers=2)
    whole = completions(model, tmp_path, PROMPTS, **options)
    bad_token = whole[0]["token_ids"][5]
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][bad_token] = np.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    prompts = [*PROMPTS, [*PROMPTS[1], bad_token], [bad_token, *PROMPTS[2]]]
    spoiled = completions(model, tmp_path, prompts, **options)
    for prompt, line, expected in zip(PROMPTS, spoiled, whole, strict=False):
        met = [index for index, token in enumerate(expected["token_ids"][:-1]) if token == bad_token]
        if bad_token in prompt or met:
            kept = 0 if bad_token in prompt else met[0] + 1
            expected = expected | {"token_ids": expected["token_ids"][:kept], "finish_reason": "error"}
            assert line["error"] == NOT_FINITE
        assert (line["token_ids"], line["finish_reason"]) == (expected["token_ids"], expected["finish_reason"])
    assert {line["finish_reason"] for line in spoiled} == {"length", "error"}
    for line in spoiled[len(PROMPTS) :]:
        assert (line["token_ids"], line["error"]) == ([], NOT_FINITE)
