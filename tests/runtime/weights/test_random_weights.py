"""Weights that are made up: served like any others, of a model directory or of a published size without files."""

import json
from pathlib import Path

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.generate import generate_file
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.weights import registry
from meshserve.runtime.weights.locate import find_model

PROMPTS = [
    {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "ignore_eos": True},
    {"prompt_token_ids": [5, 100_000, 151_935], "max_tokens": 6, "temperature": 1.0, "seed": 1, "ignore_eos": True},
    {"prompt": "Yes or no?", "max_tokens": 6, "temperature": 0, "constraint": {"choice": ["yes", "no"]}},
]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_size_serves_without_any_files(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_case: bool
) -> None:
    if tp == 1 and not every_case:
        pytest.skip("two devices are enough in `make test`")
    monkeypatch.setitem(registry.ARCHITECTURES["qwen3"].sizes, "qwen3-0.6b", registry._size(2, 64, 96, 8, True))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, PROMPTS)))
    config = ServeConfig(
        model="qwen3-0.6b", random_weights=True, tp=tp, num_pages=20, max_running=4, max_step_tokens=4,
        max_context=100, cache_dir="",
    )  # fmt: skip
    assert generate_file(config, source, target) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(line["token_ids"]) for line in lines[:2]] == [6, 6]
    assert max(lines[1]["token_ids"]) > 10_000  # in the size's vocabulary, not the tokenizer's
    assert lines[2]["text"] in ("yes", "no")


def test_a_directory_without_weights_will_do(tmp_path: Path) -> None:
    demo = find_model("demo", random_weights=True)
    assert demo.weights is None
    for path in demo.small.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert find_model(str(tmp_path), random_weights=True).weights is None
    assert find_model(str(tmp_path)).weights is not None
    with pytest.raises(ConfigError, match="no such directory"):
        find_model("qwen3-9b", random_weights=True)
