"""A server counts the experts that Hugging Face's router chooses, in every split, with a router that prefers some."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meshserve.benchmarks.lib.offline_engine import OfflineEngine
from meshserve.benchmarks.lib.workloads import Work
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program import expert_tokens
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup.launch import open_model
from tests import checkpoints

pytestmark = pytest.mark.usefixtures("greedy_programs")

NUM_EXPERTS, NUM_CHOSEN, MAX_TOKENS = 12, 3, 6
PROMPT_LENGTHS = (1, 4, 11)
SHAPES = {"experts": {"num_hidden_layers": 2}, "dense_first": {"num_hidden_layers": 3, "mlp_only_layers": [0]}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose routers prefer the first experts."""
    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN}
    saved = {}
    for name, shape in SHAPES.items():
        directory = tmp_path_factory.mktemp(name)
        checkpoints.save_checkpoint(directory, **checkpoints.TINY_EXPERTS | experts | shape)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        for key in tensors:
            if key.endswith("mlp.gate.weight"):
                tensors[key] *= (1.0 / torch.arange(1, NUM_EXPERTS + 1))[:, None]
        save_file(tensors, path, {"format": "pt"})
        saved[name] = directory
    return saved


def chosen_by_hugging_face(directory: Path, texts: list[list[int]]) -> np.ndarray:
    """Returns the tokens of each expert, [layers with experts, experts]; in the last layer, those that have logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    counts: Any = 0
    for text, length in zip(texts, PROMPT_LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        chosen = [scores.topk(NUM_CHOSEN, dim=-1).indices for scores in logits]
        chosen[-1] = chosen[-1][length - 1 :]  # only the last token of a prompt
        counts += np.array([np.bincount(each.flatten().numpy(), minlength=NUM_EXPERTS) for each in chosen])
    return counts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("experts", {"tp": 1}),
        ("experts", {"tp": 1, "decode_layers": "reference"}),
        ("experts", {"tp": 4}),
        ("experts", {"tp": 8, "expert_parallel": True}),
        ("dense_first", {"tp": 2, "expert_parallel": True}),
    ],
)
def test_a_server_counts_every_token_once(
    name: str, options: dict[str, Any], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tokens, "_SECONDS_BETWEEN_COPIES", 0.0)
    prompts = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320)
    config = ServeConfig(
        model=str(models[name]), dtype="float32", page_size=8, num_pages=24, max_running=4, max_step_tokens=16,
        max_context=64, logits_processors=False, prefix_cache=False, **options,
    )  # fmt: skip
    engine = OfflineEngine(config, *open_model(str(models[name]), random_weights=False))
    with engine:
        engine.run([Work(tuple(prompt), MAX_TOKENS) for prompt in prompts], temperature=0.0)
        texts = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, engine.tokens, strict=True)]
        expected = chosen_by_hugging_face(models[name], texts)

        runner = engine.engine.runner
        assert isinstance(runner, StepRunner) and runner.expert_tokens is not None
        runner._state.last_tokens.block_until_ready()
        np.testing.assert_array_equal(runner._state.expert_tokens, expected)
        balance = runner.expert_tokens.balance()
        assert balance.expert_tokens.tolist() == expected.sum(axis=0).tolist()
        assert balance.expert_imbalance == pytest.approx((expected.max(axis=1) / expected.mean(axis=1)).mean())
        assert balance.expert_imbalance > 1.5
        tp, per_device = options["tp"], -(-NUM_EXPERTS // options["tp"])
        if options.get("expert_parallel"):
            assert balance.device_tokens.tolist() == [
                expected[:, device * per_device : (device + 1) * per_device].sum() for device in range(tp)
            ]
            assert balance.device_imbalance > 1.2
        else:
            assert balance.device_tokens.tolist() == [expected.sum()] * tp and balance.device_imbalance == 1
