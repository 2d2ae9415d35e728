"""Tests adapters together with log-probabilities, draft tokens, a change of the TP size, and embeddings."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.request import RequestOptions
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.sharding.memory import shard_bytes
from tests import adapters, checkpoints
from tests.runtime.retrieval.test_pooling_parity import SMALL, Pool, unit

NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=1, prompt_logprobs=1)


def test_logprobs_drafts_and_a_change_of_the_tp_size(tmp_path: Path) -> None:
    base = checkpoints.save_checkpoint(tmp_path / "base", seed=1)
    paths = {f"a{seed}": adapters.save_adapter(tmp_path / f"a{seed}", base, seed=seed, strength=0.6) for seed in (1, 2)}
    names = ["a1", None, "a2"]
    models = [base if name is None else adapters.merge(tmp_path / f"m-{name}", base, paths[name]) for name in names]
    [phrase] = checkpoints.random_prompts((6,), 320)
    prompts = [[*phrase, *phrase, index] for index in range(3)]  # repeats itself, so that there are drafts
    expected = [
        checkpoints.greedy(model, [prompt], NUM_TOKENS)[0] for model, prompt in zip(models, prompts, strict=True)
    ]
    with LLM(
        base, tp=1, adapters=paths, dtype="float32", page_size=16, num_pages=32, max_running=4, max_step_tokens=8,
        max_context=64, draft_tokens=2, draft_min_match=1, max_adapters=2, cache_dir="", show_progress=False,
    ) as llm:  # fmt: skip
        for tp in (1, 2):
            if tp > 1:
                assert llm._launched.resharder.change_tp(tp) > 0
                assert not any(each.is_on_device for each in llm._launched.engine.adapters.list())
            server, runner = llm._launched.resharder.server, llm._launched.engine.runner
            assert isinstance(runner, StepRunner) and runner._adapters is not None
            assert server.adapter_bytes == runner._adapters.bank.device_bytes > 0
            assert runner.figures.weight_bytes == server.adapter_bytes + shard_bytes(runner.params)
            outputs = llm.generate(prompts, GREEDY, adapter=names, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in outputs] == expected
            for model, prompt, output in zip(models, prompts, outputs, strict=True):
                assert output.prompt_logprobs is not None
                found = sum(at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True))
                assert found == pytest.approx(checkpoints.log_likelihood(model, prompt[:1], prompt[1:]), abs=1e-3)
                tokens = output.outputs[0].token_ids
                assert output.outputs[0].cumulative_logprob == pytest.approx(
                    checkpoints.log_likelihood(model, prompt, tokens), abs=1e-3
                )
            assert all(each.is_on_device for each in llm._launched.engine.adapters.list())


def test_embeddings(tmp_path: Path) -> None:
    """Prompts with and without an adapter share no page, and each gets its own model's embedding."""
    like = checkpoints.save_checkpoint(tmp_path / "like", seed=1)
    base = checkpoints.save_embedding_checkpoint(tmp_path / "base", seed=1)
    path = adapters.save_adapter(tmp_path / "a", like, seed=2, strength=0.6)
    merged = adapters.merge(tmp_path / "merged", base, path)
    prompts = checkpoints.random_prompts((5, 33), 256)
    plain, adapted = (unit(checkpoints.pooled_last_tokens(model, prompts).numpy()) for model in (base, merged))
    assert np.abs(plain - adapted).max() > 0.1
    with ExitStack() as stack:
        pool = Pool(stack, replace(SMALL, model=str(base), tp=2, adapter=(f"a={path}",)))
        for _ in range(2):
            np.testing.assert_allclose(unit(pool(prompts)), plain, rtol=0, atol=1e-5)
            np.testing.assert_allclose(unit(pool(prompts, RequestOptions(adapter="a"))), adapted, rtol=0, atol=1e-5)
