"""Tests what is read of generation_config.json, beside what transformers reads of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, Qwen3Config

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model_files.generation_config import read_eos_token_ids, read_sampling_defaults

# The generation_config.json of Qwen/Qwen3-8B.
PUBLISHED = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip


def write(directory: Path, generation: Any = None, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_the_published_files(tmp_path: Path):
    directory = write(tmp_path, PUBLISHED, eos_token_id=151645)
    assert read_eos_token_ids(directory) == {151643, 151645}
    assert read_sampling_defaults(directory) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("generation", "of_config"),
    [(None, 7), (None, [7, 8]), (None, None), ({"eos_token_id": 9}, 7), ({"eos_token_id": [9, 11]}, [9, 7])],
)
def test_end_tokens_are_those_of_transformers(generation: Any, of_config: Any, tmp_path: Path):
    directory = write(tmp_path, generation, eos_token_id=of_config)
    if generation is None:
        theirs = GenerationConfig.from_model_config(Qwen3Config.from_pretrained(directory)).eos_token_id
    else:
        theirs = GenerationConfig.from_pretrained(directory).eos_token_id
    expected = set() if theirs is None else {theirs} if isinstance(theirs, int) else set(theirs)
    assert read_eos_token_ids(directory) == expected


def test_config_json_names_end_tokens_that_generation_config_json_leaves_open(tmp_path: Path):
    """Transformers would never end here."""
    assert read_eos_token_ids(write(tmp_path, {"temperature": 0.5}, eos_token_id=7)) == {7}


def test_every_default(tmp_path: Path):
    fields = {
        "temperature": 0, "top_k": 5, "top_p": 1, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 77,
        "num_beams": 4, "do_sample": False, "max_length": 20, "typical_p": None,
    }  # fmt: skip
    assert read_sampling_defaults(write(tmp_path, fields)) == {
        "temperature": 0.0, "top_k": 5, "top_p": 1.0, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 77,
    }  # fmt: skip
    assert read_sampling_defaults(write(tmp_path, {"top_k": -1, "top_p": None})) == {"top_k": 0}
    assert read_sampling_defaults(write(tmp_path, {})) == {}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", "0.6", "a number"), ("temperature", True, "a number"), ("temperature", -1, "0 to 100"),
        ("top_p", 0, "above 0 and at most 1"), ("top_p", [0.9], "a number"), ("top_k", 20.5, "a whole number"),
        ("top_k", -2, "0 or more"), ("min_p", 2.0, "0 to 1"), ("repetition_penalty", 0.0, "0.01 to 100"),
        ("max_new_tokens", 0, "1 or more"), ("max_new_tokens", "9", "a whole number"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(field: str, value: Any, allowed: str, tmp_path: Path):
    with pytest.raises(UnsupportedModelError) as caught:
        read_sampling_defaults(write(tmp_path, {field: value}))
    message = str(caught.value)
    assert f"generation_config.json: {field} " in message and allowed in message
    assert "Correct it, or start with --generation-config=off." in message
