"""Tests that results equal Hugging Face's last-token pooling at every TP size, however prompts are computed."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshserve.runtime.api.request import FinishReason, Output, RequestOptions
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.pooling.pooled_rows import POOLING_PARAMS
from meshserve.runtime.startup.launch import Launched, launch
from tests import checkpoints
from tests.waiting import WAIT_SECONDS

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 150, 300)
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

    def __call__(self, prompts: Sequence[Sequence[int]], name: str = "a") -> np.ndarray:
        """Returns the results [B, N]."""
        self._outputs.clear()
        self.launched.engine.submit_prompts(name, prompts, POOLING_PARAMS, RequestOptions())
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._outputs) >= len(prompts), WAIT_SECONDS)
        assert all(output.finish_reason is FinishReason.LENGTH for output in self._outputs), self._outputs
        rows = {output.index: output.pooled for output in self._outputs}
        return np.stack([rows[index] for index in range(len(prompts))])

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


def test_bfloat16_is_as_near_to_float32_as_hugging_faces_bfloat16(tmp_path: Path):
    """Rounding of intermediate results differs, so two computations in bfloat16 are compared through float32."""
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts(LENGTHS, 256)
    exact = unit(checkpoints.pooled_last_tokens(model, prompts).numpy())
    theirs = unit(checkpoints.pooled_last_tokens(model, prompts, torch.bfloat16).numpy())
    with ExitStack() as stack:
        ours = unit(Pool(stack, replace(SMALL, model=str(model), tp=2, dtype="bfloat16"))(prompts))
    print("theirs", 1 - (theirs * exact).sum(1), "ours", 1 - (ours * exact).sum(1), "both", 1 - (theirs * ours).sum(1))
