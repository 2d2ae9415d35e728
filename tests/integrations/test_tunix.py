"""Tunix's rollout worker: it samples and scores with the actor's weights, which it takes after each step.

Runs with stand-ins for what it needs of Tunix, or with `--tunix` (make test-tunix) with the package itself.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from meshserve import LLM
from meshserve.runtime.api.errors import InvalidRequestError, UnavailableFeatureError
from tests import checkpoints
from tests.integrations import fake_tunix
from tests.trainer_trees import tunix_tree

SIZES: dict[str, Any] = {"num_hidden_layers": 2}
SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "cache_dir": "",
    "show_progress": False,
}  # fmt: skip
PROMPTS = ["the sea", "a much longer prompt than this", "the sea"]
PAD, BEGIN, END = 300, 301, 302  # beyond the 256 bytes


class Bytes:
    """The byte tokenizer of the checkpoints, with the methods that Tunix asks for."""

    def __init__(self, llm: LLM, begin: int = 0):
        self._tokenizer, self._begin = llm.get_tokenizer(), begin

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode([token for token in token_ids if token < 256])

    def bos_id(self) -> int:
        return self._begin

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


class Tree(nnx.Module):
    """A module whose parameters have the paths of a nested dictionary."""

    def __init__(self, tree: dict[Any, Any]):
        for name, value in tree.items():
            setattr(self, str(name), Tree(value) if isinstance(value, dict) else nnx.Param(value))


@pytest.fixture(scope="module")
def tunix(pytestconfig: pytest.Config) -> Iterator[ModuleType]:
    """`meshserve.integrations.tunix`."""
    folder = pytestconfig.getoption("--tunix")
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setattr(sys, "path", [*sys.path, str(Path(folder).resolve())])
        else:
            for name, module in fake_tunix.modules().items():
                patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "meshserve.integrations.tunix", raising=False)
        yield importlib.import_module("meshserve.integrations.tunix")
        sys.modules.pop("meshserve.integrations.tunix")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        checkpoints.save_checkpoint(tmp_path_factory.mktemp(f"model{seed}"), seed=seed, **SIZES) for seed in range(3)
    ]


@pytest.fixture(scope="module")
def llm(models: list[Path]) -> Iterator[LLM]:
    with LLM(models[0], tp=2, **SMALL) as llm:
        yield llm


def actor(model: Path) -> Tree:
    arrays = {name: jnp.asarray(array) for name, array in load_file(model / "model.safetensors").items()}
    return Tree(tunix_tree(arrays, num_heads=(8, 4)))


def config(tunix: ModuleType, **changes: Any) -> Any:
    given = {"max_tokens_to_generate": 6, "max_prompt_length": 16, "temperature": 1.0, "eos_tokens": [END]}
    return tunix.RolloutConfig(**given | changes)


def test_samples_with_the_weights_of_the_actor(tunix: ModuleType, llm: LLM, models: list[Path]):
    worker = tunix.MeshserveRollout(rollout_actor=actor(models[1]), tokenizer=Bytes(llm), mesh=None,
                                    rollout_config=config(tunix), llm=llm)  # fmt: skip
    ids = [Bytes(llm).encode(prompt) for prompt in PROMPTS]
    for model in (models[1], models[2]):
        if model is models[2]:
            version, params = worker.model_version, nnx.state(actor(model), nnx.Param)
            with (  # as RLCluster does on CPU devices
                jax.transfer_guard_host_to_device("disallow_explicit"),
                jax.transfer_guard_device_to_host("disallow_explicit"),
            ):
                worker.update_params(params, (nnx.Param,))
            assert worker.model_version == llm.weight_version == str(int(version) + 1)
        output = worker.generate(PROMPTS, config(tunix, temperature=0.0, top_p=None, top_k=-1))
        wanted = checkpoints.greedy(model, ids, 6)
        assert [list(tokens) for tokens in output.tokens] == wanted
        assert output.text == [Bytes(llm).decode(tokens) for tokens in wanted]
    assert output.logits is None and output.logprobs is None
    padded = output.left_padded_prompt_tokens
    assert padded.shape == (3, 32) and padded.dtype == np.int32, "the next power of two"
    assert [list(row[32 - len(each) :]) for row, each in zip(padded, ids, strict=True)] == ids
    assert (padded[0, : 32 - len(ids[0])] == PAD).all()
    assert worker.generate(PROMPTS[:1], config(tunix)).left_padded_prompt_tokens.shape == (1, 16)
    assert worker.model() is None and (worker.pad_id(), worker.eos_id()) == (PAD, END)


def test_log_probabilities_are_those_of_the_model(tunix: ModuleType, llm: LLM, models: list[Path]):
    worker = tunix.MeshserveRollout(rollout_actor=actor(models[1]), tokenizer=Bytes(llm), llm=llm)
    output = worker.generate(PROMPTS, config(tunix, return_logprobs=True, seed=5))
    completions = np.full((3, 9), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    completions[1, 4:] = PAD  # a shorter one
    found = np.asarray(worker.get_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), completions))
    assert found.shape == (3, 9) and (found[:, 6:] == 0).all() and (found[1, 4:] == 0).all()
    for prompt, row, values, sampled in zip(PROMPTS, completions, found, output.logprobs, strict=True):
        tokens = row[row != PAD]
        context, before = Bytes(llm).encode(prompt), 0.0
        for length in range(1, len(tokens) + 1):  # the sums of transformers
            total = checkpoints.log_likelihood(models[1], context, tokens[:length].tolist())
            assert values[length - 1] == pytest.approx(total - before, abs=1e-4)
            before = total
        np.testing.assert_allclose(sampled[: len(tokens)], values[: len(tokens)], atol=1e-4)
    assert [len(each) for each in output.logprobs] == [6, 6, 6]


def test_the_temperature_is_in_sampled_log_probabilities(tunix: ModuleType, llm: LLM):
    worker = tunix.MeshserveRollout(None, Bytes(llm), llm=llm)
    output = worker.generate(PROMPTS[:1], config(tunix, return_logprobs=True, temperature=0.01, seed=1))
    assert np.exp(output.logprobs[0]).min() > 0.5, "nearly greedy"


def test_seeds(tunix: ModuleType, llm: LLM):
    first, second = (tunix.MeshserveRollout(None, Bytes(llm), llm=llm) for _ in range(2))

    def sampled(worker: Any, seed: Any) -> list[tuple[int, ...]]:
        return [tuple(tokens) for tokens in worker.generate(PROMPTS, config(tunix, seed=seed)).tokens]

    calls = [sampled(first, jax.random.PRNGKey(3)) for _ in range(2)]
    assert [sampled(second, jax.random.key(3)) for _ in range(2)] == calls, "both kinds of keys"
    assert calls[0] != calls[1] and calls[0][0] != calls[0][2], "equal prompts have samples of their own"
    assert sampled(first, 3) != sampled(second, 4)
    assert sampled(first, None) != sampled(first, None)


def test_equal_prompts_are_samples_of_one_request(tunix: ModuleType, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    worker, generate, asked = tunix.MeshserveRollout(None, Bytes(llm), llm=llm), llm.generate, []

    def counted(prompts: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        return generate(prompts, *arguments, **options)

    monkeypatch.setattr(llm, "generate", counted)
    output = worker.generate(["the sea"] * 70 + ["the sky"], config(tunix, max_tokens_to_generate=1))
    assert asked == [3] and len(output.tokens) == 71, "70 samples are more than a request may have"


def test_end_tokens_are_tunixs(tunix: ModuleType, llm: LLM):
    """All tokens below 200 end a sample, and are no part of it; without a list, the tokenizer's token does."""
    worker = tunix.MeshserveRollout(None, Bytes(llm, begin=BEGIN), llm=llm)
    prompt = "the sea"
    whole = list(worker.generate([prompt], config(tunix, temperature=0.0, max_tokens_to_generate=12)).tokens[0])
    ended = worker.generate([prompt], config(tunix, temperature=0.0, max_tokens_to_generate=12, eos_tokens=[whole[4]]))
    assert list(ended.tokens[0]) == whole[: whole.index(whole[4])]
    assert ended.left_padded_prompt_tokens[0, -8:].tolist() == [BEGIN, *Bytes(llm).encode(prompt)]
    free = worker.generate([prompt], config(tunix, temperature=0.0, max_tokens_to_generate=12, eos_tokens=None))
    assert list(free.tokens[0]) == whole


def test_what_cannot_be_taken_changes_nothing(tunix: ModuleType, llm: LLM, models: list[Path]):
    worker = tunix.MeshserveRollout(actor(models[1]), Bytes(llm), llm=llm)
    version, tokens = worker.model_version, [list(worker.generate(PROMPTS, config(tunix, temperature=0.0)).tokens[0])]
    with pytest.raises(UnavailableFeatureError, match="LoRA parameters only. Train all"):
        worker.update_params(nnx.state(actor(models[2]), nnx.Param), (nnx.LoRAParam,))
    damaged = nnx.state(actor(models[2]), nnx.Param)
    damaged["final_norm"]["w"][...] = jnp.full(48, jnp.nan)
    with pytest.raises(InvalidRequestError, match="NaN"):
        worker.update_params(damaged, (nnx.Param,))
    with pytest.raises(TypeError, match="images; MeshserveRollout.generate takes no further"):
        worker.generate(PROMPTS, config(tunix), images=None)
    assert worker.model_version == version
    assert [list(worker.generate(PROMPTS, config(tunix, temperature=0.0)).tokens[0])] == tokens


def test_without_tunix_the_error_says_what_to_install():
    code = "import sys; sys.modules['tunix'] = None; import meshserve.integrations.tunix"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1 and "needs google-tunix 0.1.7, which cannot be imported" in result.stderr
    assert "pip install google-tunix" in result.stderr
