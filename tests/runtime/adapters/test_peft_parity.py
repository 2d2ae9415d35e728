"""Tests that requests with adapters get the tokens of PEFT itself on Hugging Face's Qwen3, from what PEFT has saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshserve import LLM, SamplingParams
from tests import adapters, checkpoints
from tests.runtime.adapters.test_adapter_parity import SMALL

peft = pytest.importorskip("peft", reason="comes with the test extra")
pytestmark = pytest.mark.usefixtures("greedy_programs")

MAX_TOKENS = 36
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
LENGTHS = (5, 17, 40, 9, 3, 21, 30, 12, 26)
# Eight adapters: ranks 8, 64 and 256, and what else PEFT lets differ.
KINDS: Sequence[Mapping[str, Any]] = (
    {"r": 8},
    {"r": 64},
    {"r": 256, "lora_alpha": 64},
    {"r": 64, "lora_alpha": 32, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    {"r": 8, "target_modules": "all-linear"},
    {"r": 8, "rank_pattern": {"q_proj": 12, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"o_proj": 5}},
    {"r": 256, "use_rslora": True, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0, 2]},
    {"r": 64, "target_modules": r".*\.(k_proj|gate_proj)"},
)
EXPERT_KINDS: Sequence[Mapping[str, Any]] = tuple(
    {"r": rank, "target_modules": list(targets)}
    for rank, targets in ((8, adapters.ATTENTION), (64, ("q_proj", "o_proj")), (256, ("k_proj", "v_proj")))
)


class Reference:
    """A base model, adapters that PEFT has saved, and what PEFT generates with them."""

    def __init__(self, root: Path, kinds: Sequence[Mapping[str, Any]], **shape: Any):
        self.base = checkpoints.save_checkpoint(root / "base", seed=1, **shape)
        self.prompts = checkpoints.random_prompts(LENGTHS, 320)
        self.paths = {f"adapter-{index}": root / f"adapter-{index}" for index in range(len(kinds))}
        for index, (path, kind) in enumerate(zip(self.paths.values(), kinds, strict=True)):
            self._train(path, index, kind)
        self._models: dict[str | None, Any] = {None: self._model()}
        self._tokens: dict[tuple[str | None, int], list[int]] = {}
        names: list[str | None] = [None, *self.paths]
        assert len({str(self.tokens(name, 2)) for name in names}) == len(names), "an adapter changes nothing"

    def _model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()

    def _train(self, path: Path, seed: int, kind: Mapping[str, Any]) -> None:
        """Saves an adapter whose matrices B are random instead of zeros."""
        options = {"lora_alpha": 16, "target_modules": list(adapters.ALL), **kind}
        model = peft.get_peft_model(self._model(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    up = module.lora_B["default"].weight
                    size = 0.6 / module.scaling["default"] * up.shape[1] ** -0.5
                    up.copy_(torch.randn(up.shape, generator=draw) * size)
        model.save_pretrained(path)

    def tokens(self, name: str | None, index: int) -> list[int]:
        """Returns what follows a prompt with an adapter, or with none."""
        if name not in self._models:
            assert name is not None
            self._models[name] = peft.PeftModel.from_pretrained(self._model(), self.paths[name]).eval()
        if (name, index) not in self._tokens:
            ids = torch.tensor([self.prompts[index]])
            with torch.no_grad():
                output = self._models[name].generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=MAX_TOKENS,
                    max_new_tokens=MAX_TOKENS,
                )  # fmt: skip
            self._tokens[name, index] = output[0, ids.shape[1] :].tolist()
        return self._tokens[name, index]

    def check(self, llm: LLM, asked: Sequence[tuple[str | None, int]]) -> None:
        """Compares a batch of prompts, each with its adapter or None."""
        names = [name for name, _ in asked]
        prompts = [self.prompts[index] for _, index in asked]
        outputs = llm.generate(prompts, GREEDY, adapter=names, use_tqdm=False)
        found = [list(each.outputs[0].token_ids) for each in outputs]
        assert found == [self.tokens(name, index) for name, index in asked]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("dense"), KINDS)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_eight_adapters_and_none_in_one_batch(tp: int, dense: Reference, every_case: bool) -> None:
    """In chunks, because a step has fewer tokens than the prompts; from cached pages; each adapter alone."""
    if tp != 2 and not every_case:
        pytest.skip("only run with --every-case")
    names: list[str | None] = [*dense.paths, None]
    with LLM(dense.base, tp=tp, adapters=dense.paths, **SMALL) as llm:
        assert llm._launched.engine.adapter_slots is not None
        dense.check(llm, [(name, index) for index, name in enumerate(names)])
        dense.check(llm, [(name, 2) for name in names])  # the longest prompt with each
        dense.check(llm, [(name, 2) for name in names[::-1]])
        for name in (names[2], None):
            dense.check(llm, [(name, 2), (name, 6)])


def test_preempted_requests_and_fewer_slots_than_adapters(dense: Reference) -> None:
    """So few pages that requests are preempted, and two slots for eight adapters."""
    few = {**SMALL, "num_pages": 12, "max_running": 4, "max_adapters": 2}
    with LLM(dense.base, tp=1, adapters=dense.paths, **few) as llm:
        engine = llm._launched.engine
        preempted: list[Any] = []
        plan = engine._scheduler.plan

        def planned(now: float) -> Any:
            found = plan(now)
            preempted.extend(found.preempted if found is not None else ())
            return found

        engine._scheduler.plan = planned  # type: ignore[method-assign]
        names: list[str | None] = [*dense.paths, None]
        dense.check(llm, [(names[index % 9], index * 5 % 9) for index in range(18)])
        assert preempted and engine.adapter_slots is not None and engine.adapter_slots.num_loads > 8
        engine._scheduler.audit()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_attention_of_a_mixture_of_experts(tp: int, experts: Reference, every_case: bool) -> None:
    if tp != 4 and not every_case:
        pytest.skip("only run with --every-case")
    with LLM(experts.base, tp=tp, adapters=experts.paths, **SMALL) as llm:
        names: list[str | None] = [*experts.paths, None]
        for _ in range(2):
            experts.check(llm, [(name, index) for index in (2, 4) for name in names])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("experts"), EXPERT_KINDS, **checkpoints.TINY_EXPERTS)
