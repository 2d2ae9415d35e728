"""Tests which task the files of a model name, and what a task makes of its config."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weights.model_task import published_task, with_task
from meshserve.runtime.weights.registry import named_model, read_model
from tests import checkpoints

LAST_TOKEN = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MODULES = ("Transformer", "Pooling", "Normalize")


def write_modules(directory: Path, pooling: Any = None, kinds: tuple[str, ...] = MODULES) -> Path:
    listed = [
        {"path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"} for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.fixture
def model() -> ModelConfig:
    return named_model("qwen3-8b")


def test_a_model_without_such_files_generates(tmp_path, model):
    assert published_task(tmp_path) == "generate"
    assert with_task(model, "auto", tmp_path) is model and model.task == "generate"


@pytest.mark.parametrize("pooling", [LAST_TOKEN, {"pooling_mode": "lasttoken"}], ids=["flags", "name"])
def test_an_embedding_model(tmp_path, model, pooling):
    write_modules(tmp_path, pooling)
    for task in ("auto", "embed"):
        config = with_task(model, task, tmp_path)
        assert config.task == "embed" and config.pooling.score_token_ids is None
        assert config.is_tied and not model.is_tied  # its output head is not needed
    assert with_task(model, "generate", tmp_path) is model


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "'pooling_mode_mean_tokens'"),
        ({**LAST_TOKEN, "pooling_mode_mean_tokens": True}, "pooling_mode_lasttoken, pooling_mode_mean_tokens"),
        ({"pooling_mode": "mean"}, "'mean'"),
        ({}, "not given"),
        (None, "does not exist"),
    ],
)
def test_another_pooling_is_refused(tmp_path, model, pooling, message):
    write_modules(tmp_path, pooling)
    for task in ("auto", "embed"):
        with pytest.raises(UnsupportedModelError, match=message):
            with_task(model, task, tmp_path)


def test_a_further_module_is_refused(tmp_path):
    write_modules(tmp_path, LAST_TOKEN, kinds=("Transformer", "Pooling", "Dense"))
    with pytest.raises(UnsupportedModelError, match="lists Dense"):
        published_task(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing"])
def test_damaged_modules(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match="list of objects|not valid JSON"):
        published_task(tmp_path)


def test_a_reranker(tmp_path, model):
    checkpoints.save_tokenizer_with_ends(tmp_path)
    config = with_task(model, "rerank", tmp_path)
    assert config.task == "rerank" and config.pooling.score_token_ids == (258, 257)
    assert not config.is_tied
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    assert with_task(model, "auto", tmp_path) == config
    with pytest.raises(UnsupportedModelError, match="--fp8-head"):
        with_task(named_model("qwen3-8b", fp8_head=True), "rerank", tmp_path)


def test_a_reranker_needs_its_two_tokens(tmp_path, model):
    checkpoints.save_byte_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no token 'no' and 'yes'"):
        with_task(model, "rerank", tmp_path)


def test_a_model_that_was_saved_without_its_head(tmp_path):
    """As fine-tuned embedding models are saved; Qwen3-Embedding names the class with the head."""
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    checkpoints.edit_config(model, architectures=["Qwen3Model"])
    assert with_task(read_model(model / "config.json"), "auto", model).task == "embed"
