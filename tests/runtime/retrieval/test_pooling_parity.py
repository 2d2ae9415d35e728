"""Tests that results equal Hugging Face's last-token pooling at every TP size, however prompts are computed."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.api.request import DEFAULT_OPTIONS, NOT_FINITE, FinishReason, Output, RequestOptions
from meshserve.runtime.cluster.replay import from_message, to_message
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.program.pooled_rows import POOLING_PARAMS
from meshserve.runtime.retrieval.embedding_defaults import EmbeddingDefaults, read_embedding_defaults
from meshserve.runtime.retrieval.prompt_formats import PromptFormat
from meshserve.runtime.retrieval.results import EmbeddingForm, relevance
from meshserve.runtime.startup.launch import Launched, launch
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.convert import convert
from tests import checkpoints
from tests.waiting import WAIT_SECONDS

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 150)
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied_2_kv_heads": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "odd_vocab_and_mlp": {"vocab_size": 333, "intermediate_size": 90, "tie_word_embeddings": False},
}
# Steps of 64 tokens cut the longest prompts in chunks, and hold several of the short ones.
SMALL = ServeConfig(
    model="", dtype="float32", max_running=8, max_step_tokens=64, page_size=16, num_pages=256, cache_dir=""
)


class Pool:
    """An engine that is fed with whole batches."""

    def __init__(self, stack: ExitStack, config: ServeConfig):
        self._changed = threading.Condition()
        self._outputs: list[Output] = []
        self.launched: Launched = launch(config, self._deliver)
        stack.callback(self.launched.close)
        self.launched.engine.start()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self._outputs += outputs
            self._changed.notify()

    def outputs(self, prompts: Sequence[Sequence[int]], options: RequestOptions = DEFAULT_OPTIONS) -> list[Output]:
        self._outputs.clear()
        self.launched.engine.submit_prompts("a", prompts, POOLING_PARAMS, options)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._outputs) >= len(prompts), WAIT_SECONDS)
        return sorted(self._outputs, key=lambda output: output.index)

    def __call__(self, prompts: Sequence[Sequence[int]], options: RequestOptions = DEFAULT_OPTIONS) -> np.ndarray:
        """Returns the results [B, N]."""
        outputs = self.outputs(prompts, options)
        assert all(output.finish_reason is FinishReason.LENGTH for output in outputs), outputs
        return np.stack([output.pooled for output in outputs])

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self._outputs)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_equal_hugging_face(shape: str, tmp_path: Path):
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model", **SHAPES[shape])
    prompts = checkpoints.random_prompts(LENGTHS, 256)
    expected = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    for tp in (1, 2, 4, 8) if shape == "tied" else (1, 8):
        with ExitStack() as stack:
            pool = Pool(stack, replace(SMALL, model=str(model), tp=tp))
            assert pool.launched.info.task == "embed"
            assert pool.launched.info.embedding_dimensions == expected.shape[1]
            together = pool(prompts)
            np.testing.assert_allclose(unit(together), expected, rtol=0, atol=1e-5, err_msg=f"tp {tp}")
            cached = pool(prompts)  # the full pages of every prompt are in the prefix cache now
            assert pool.num_cached_tokens == sum((length - 1) // 16 * 16 for length in LENGTHS)
            np.testing.assert_allclose(unit(cached), expected, rtol=0, atol=1e-5)


def test_small_steps_on_fused_layers_give_the_same_embeddings(tmp_path: Path):
    """Steps of up to 128 tokens: one text, several, a chunk, and after a cached prefix."""
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts(LENGTHS, 256)
    expected = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    with ExitStack() as stack:
        options = {"decode_layers": "reference", "attention": "reference", "max_step_tokens": 256}
        pool = Pool(stack, replace(SMALL, model=str(model), **options))
        for _ in range(2):
            alone = np.concatenate([pool([prompt]) for prompt in prompts])
            np.testing.assert_allclose(unit(alone), expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(unit(pool(prompts)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 8])
def test_any_chunking_alone_and_without_a_prefix_cache(tp: int, tmp_path: Path):
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts(LENGTHS, 256)
    expected = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    for options in ({"max_running": 2, "max_step_tokens": 7}, {"max_step_tokens": 512, "prefix_cache": False}):
        with ExitStack() as stack:
            pool = Pool(stack, replace(SMALL, model=str(model), tp=tp, **options))
            alone = np.concatenate([pool([prompt]) for prompt in prompts])
            np.testing.assert_allclose(unit(alone), expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(unit(pool(prompts)), expected, rtol=0, atol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_hugging_faces(tmp_path: Path):
    """Two computations in bfloat16 round differently, so both are compared with float32.

    A random model of three layers and 48 dimensions magnifies rounding: Hugging Face's own cosine is about 1 - 2e-4.
    """
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts(LENGTHS, 256)
    exact = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    theirs = unit(checkpoints.pooled_last_tokens(model, prompts, torch.bfloat16).numpy())
    with ExitStack() as stack:
        ours = unit(Pool(stack, replace(SMALL, model=str(model), tp=2, dtype="bfloat16"))(prompts))
    ours_off, theirs_off = (1 - (rows * exact).sum(axis=1) for rows in (ours, theirs))
    assert ours_off.mean() < 2 * theirs_off.mean() < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_equal_hugging_face(shape: str, tmp_path: Path):
    """Also where the tokens "yes" and "no" lie on other shards than the first."""
    model = checkpoints.save_reranker_checkpoint(tmp_path / "model", **SHAPES[shape])
    tokenizer = open_tokenizer(model)
    prompts_of = PromptFormat(tokenizer, "Find what is meant.")
    pairs = [("a query", "d" * length) for length in (0, 1, 30, 90)] + [("another", "short")]
    prompts = [prompts_of.reranked(query, document) for query, document in pairs]
    no, yes = (tokenizer.token_id(token) for token in ("no", "yes"))
    assert 128 < no and 128 < yes
    expected = checkpoints.yes_no_scores(model, prompts, no, yes)
    for tp in (1, 2, 4, 8) if shape == "tied" else (1, 8):
        with ExitStack() as stack:
            pool = Pool(stack, replace(SMALL, model=str(model), tp=tp, task="rerank"))
            for _ in range(2):  # the second time with cached pages
                results = pool(prompts)
                assert results.shape == (len(pairs), 2)
                scores = [relevance(result) for result in results]
                np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5, err_msg=f"tp {tp}")
            assert pool.num_cached_tokens > 0


def test_sentence_transformers_gives_the_same_embeddings(tmp_path: Path):
    library = pytest.importorskip("sentence_transformers", reason="comes with the extra test")
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    (model / "2_Normalize").mkdir()
    instruction = "Find it"
    theirs = library.SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
    texts = ["short", "a longer text " * 5, ""]
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(model)))
        for prompt, form in (
            (None, PromptFormat(pool.launched.tokenizer)),
            (f"Instruct: {instruction}\nQuery:", PromptFormat(pool.launched.tokenizer, instruction)),
        ):
            expected = theirs.encode(texts, prompt=prompt)
            found = EmbeddingForm(model_dimensions=48, dimensions=48).embedding(pool(list(map(form.embedded, texts))))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        short = EmbeddingForm(model_dimensions=48, dimensions=16).embedding(pool([form.embedded("short")]))
        theirs.truncate_dim = 16
        expected = theirs.encode(["short"], prompt=prompt, normalize_embeddings=True)
        np.testing.assert_allclose(short, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "num_modules"),
    [
        ({"default_prompt_name": "query"}, 3),
        ({"default_prompt_name": "document"}, 3),
        ({"prompts": {}, "default_prompt_name": "query"}, 3),
        ({}, 2),
        ({"truncate_dim": 16}, 3),
        ({"truncate_dim": 16}, 2),
        ({"truncate_dim": 1000}, 3),
        ({"default_prompt_name": "query", "truncate_dim": 20}, 2),
    ],
    ids=str,
)
def test_defaults_are_those_of_sentence_transformers(pool_of_texts, settings: dict[str, Any], num_modules: int):
    library = pytest.importorskip("sentence_transformers", reason="comes with the extra test")
    model, pool = pool_of_texts
    modules = json.loads((model / "modules.json").read_text())
    (model / "config_sentence_transformers.json").write_text(json.dumps({**PROMPTS, **settings}))
    (model / "modules.json").write_text(json.dumps(modules[:num_modules]))
    try:
        theirs = library.SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
        expected = theirs.encode(TEXTS)
        defaults = read_embedding_defaults(model)
    finally:
        (model / "modules.json").write_text(json.dumps(modules))
    format_ = PromptFormat(pool.launched.tokenizer, prompt=defaults.prompt)
    found = defaults.form(48).embedding(pool([format_.embedded(text) for text in TEXTS]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


TEXTS = ["short", "a longer text " * 5, ""]
PROMPTS = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def pool_of_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Pool]]:
    model = checkpoints.save_embedding_checkpoint(tmp_path_factory.mktemp("texts") / "model")
    (model / "2_Normalize").mkdir()
    (model / "config_sentence_transformers.json").write_text(json.dumps({**PROMPTS, "truncate_dim": 9}))
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(model)))
        assert pool.launched.embedding == EmbeddingDefaults(dimensions=9)
        yield model, pool


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"default_prompt_name": "other"}, "default_prompt_name is 'other'; allowed are .*query, document, x"),
        ({"default_prompt_name": "x"}, "default_prompt_name is 'x'"),
        ({"truncate_dim": 0}, "truncate_dim is 0"),
        ({"truncate_dim": "16"}, "truncate_dim is '16'"),
    ],
)
def test_defaults_that_mean_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], named: str):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"x": 1}, **settings}))
    with pytest.raises(UnsupportedModelError, match=named):
        read_embedding_defaults(tmp_path)


def test_what_is_not_as_with_sentence_transformers_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert read_embedding_defaults(tmp_path) == EmbeddingDefaults() and not caplog.records
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": True}))
    read_embedding_defaults(tmp_path)
    assert "cuts texts to 512 tokens (max_seq_length" in caplog.text and "(do_lower_case of" in caplog.text


def test_a_result_that_is_not_finite_ends_with_an_error(tmp_path: Path):
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][7] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(model)))
        [output] = pool.outputs([[1, 2, 3]])
    assert output.finish_reason is FinishReason.ERROR and output.pooled is None
    assert output.message == NOT_FINITE


def test_pages_are_free_again_at_once_and_cached(tmp_path: Path):
    """The cache holds four pages, so each of these prompts needs the pages of those before it."""
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts([50] * 6, 256)
    expected = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(model), num_pages=5))
        np.testing.assert_allclose(unit(pool(prompts)), expected, rtol=0, atol=1e-5)
        load = pool.launched.engine.load()
        assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, 5)


def test_an_orbax_checkpoint_of_an_embedding_model(tmp_path: Path):
    """It has no output head, although config.json of the source says that the model is not tied."""
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    convert(model, tmp_path / "orbax", devices=jax.devices("cpu"))
    prompts = checkpoints.random_prompts((5, 40), 256)
    expected = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(tmp_path / "orbax"), tp=2))
        np.testing.assert_allclose(unit(pool(prompts)), expected, rtol=0, atol=1e-5)


def test_followers_of_a_cluster_get_pooling_steps():
    bucket = Bucket(64, 8, 4, is_pooling=True)
    assert from_message(to_message(bucket)) == bucket
    assert bucket.kind == "pooling" and bucket != Bucket(64, 8, 4)
