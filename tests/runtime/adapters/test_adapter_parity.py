"""Tests that requests with adapters get the tokens of a Hugging Face model with the adapter merged by hand."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.errors import AdaptersOffError, UnknownAdapterError
from tests import adapters, checkpoints
from tests.runtime.weights.formats import formats

pytestmark = pytest.mark.usefixtures("greedy_programs")

MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
LENGTHS = (5, 17, 40, 9, 3, 21, 30, 12, 26)
SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 64, "max_running": 8, "max_step_tokens": 64, "max_context": 128,
    "logits_processors": False, "cache_dir": "", "show_progress": False,
}  # fmt: skip
# What makes eight adapters differ.
KINDS: Sequence[dict[str, Any]] = (
    {"r": 8},
    {"r": 4, "lora_alpha": 32, "use_rslora": True},
    {"r": 16, "targets": ("q_proj", "v_proj")},
    {"r": 2, "targets": ("gate_proj", "down_proj")},
    {"r": 8, "rank_pattern": {"q_proj": 12, "model.layers.1.mlp.up_proj": 3}, "alpha_pattern": {"o_proj": 5}},
    {"r": 1, "targets": ("o_proj",), "layers_to_transform": [1]},
    {"r": 8, "target_modules": "all-linear"},
    {"r": 24, "targets": ("k_proj", "up_proj")},
)
EXPERT_KINDS: Sequence[dict[str, Any]] = ({"targets": adapters.ATTENTION}, {"r": 3, "targets": ("k_proj",)})


def build(root: Path, kinds: Sequence[dict[str, Any]], **shape: Any) -> tuple[Path, dict[str, Path]]:
    """Writes a base model and an adapter of each kind."""
    base = checkpoints.save_checkpoint(root / "base", seed=1, **shape)
    names = [f"adapter-{index}" for index in range(len(kinds))]
    options = {name: {"strength": 0.6, **kind} for name, kind in zip(names, kinds, strict=True)}
    return base, {
        name: adapters.save_adapter(root / name, base, seed=7 + index, **options[name])
        for index, name in enumerate(names)
    }


def expected(root: Path, base: Path, paths: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """Returns what transformers generates for all prompts, by adapter."""
    prompts = checkpoints.random_prompts(LENGTHS, 320)
    found: dict[str | None, list[list[int]]] = {None: checkpoints.greedy(base, prompts, MAX_TOKENS)}
    for name, path in paths.items():
        merged = adapters.merge(root / f"merged-{name}", base, path)
        found[name] = checkpoints.greedy(merged, prompts, MAX_TOKENS)
        assert found[name] != found[None], f"{name} changes nothing, and would prove nothing"
    return found


def generated(llm: LLM, names: Sequence[str | None], indices: Sequence[int] | None = None) -> list[list[int]]:
    """Returns the tokens of prompts, each with an adapter or None."""
    prompts = checkpoints.random_prompts(LENGTHS, 320)
    chosen = [prompts[index] for index in (indices or range(len(names)))]
    return [list(each.outputs[0].token_ids) for each in llm.generate(chosen, GREEDY, adapter=names, use_tqdm=False)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], dict[str | None, list[list[int]]]]:
    root = tmp_path_factory.mktemp("dense")
    base, paths = build(root, KINDS)
    return base, paths, expected(root, base, paths)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)])
def test_eight_adapters_and_none_in_one_batch(tp: int, cp: int, dense: tuple[Any, ...], every_case: bool) -> None:
    """Chunked, because the step has fewer tokens than the prompts; then from cached pages, in another order."""
    if (tp, cp) != (8, 2) and not every_case:
        pytest.skip("only run with --every-case")
    base, paths, tokens = dense
    with LLM(base, tp=tp, cp=cp, adapters=paths, **SMALL) as llm:
        names = [*paths, None]
        assert generated(llm, names) == [tokens[name][index] for index, name in enumerate(names)]
        names = names[4:] + names[:4]
        assert generated(llm, names) == [tokens[name][index] for index, name in enumerate(names)]
        again = names[::-1]
        found = generated(llm, again, range(len(names) - 1, -1, -1))
        assert found == [tokens[name][index] for name, index in zip(again, range(len(names) - 1, -1, -1), strict=True)]
        with pytest.raises(UnknownAdapterError, match="there is no adapter 'other'; loaded are 'adapter-0'"):
            generated(llm, ["other"])


def test_more_adapters_than_slots_with_few_pages(dense: tuple[Any, ...], tmp_path: Path) -> None:
    """Adapters leave their slots for others, requests are preempted, and a replaced adapter serves no old page."""
    base, paths, tokens = dense
    few = {**SMALL, "num_pages": 9, "max_running": 4, "max_adapters": 2}
    with LLM(base, adapters=paths, **few) as llm:
        names = [None if index % 9 == 8 else f"adapter-{index % 8}" for index in range(27)]
        indices = [index % len(LENGTHS) for index in range(27)]
        assert generated(llm, names, indices) == [
            tokens[name][index] for name, index in zip(names, indices, strict=True)
        ]
        engine = llm._launched.engine
        assert engine.adapter_slots is not None and engine.adapter_slots.num_loads > 8
        changed = adapters.save_adapter(tmp_path / "changed", base, seed=99, strength=0.6)
        merged = checkpoints.greedy(
            adapters.merge(tmp_path / "merged", base, changed), checkpoints.random_prompts(LENGTHS, 320), MAX_TOKENS
        )
        before = generated(llm, ["adapter-0"], [2])
        engine.adapters.load("adapter-0", str(changed), replaces=True)
        assert generated(llm, ["adapter-0"], [2]) == [merged[2]] != before == [tokens["adapter-0"][2]]


def test_random_requests_over_many_adapters(tmp_path: Path, every_case: bool) -> None:
    """Each of several prompts with each adapter, in random order, over fewer slots than adapters."""
    num_adapters, num_slots, num_requests = (40, 8, 1000) if every_case else (10, 3, 60)
    draw = random.Random(5)
    kinds = [
        {"r": draw.choice([1, 2, 4]), "targets": draw.sample(adapters.ALL, draw.randint(3, 7)), "strength": 0.9}
        for _ in range(num_adapters)
    ]
    base, paths = build(tmp_path, kinds)
    prompts = checkpoints.random_prompts((4, 9, 35), 320)
    models: dict[str | None, Path] = {None: base}
    models |= {name: adapters.merge(tmp_path / f"merged-{name}", base, path) for name, path in paths.items()}
    tokens = {name: checkpoints.greedy(model, prompts, MAX_TOKENS) for name, model in models.items()}
    drawn = [(draw.choice(list(models)), draw.randrange(len(prompts))) for _ in range(num_requests)]
    with LLM(base, adapters=paths, max_adapters=num_slots, tp=2, **{**SMALL, "num_pages": 16}) as llm:
        names = [name for name, _ in drawn]
        found = llm.generate([prompts[index] for _, index in drawn], GREEDY, adapter=names, use_tqdm=False)
        engine = llm._launched.engine
        engine._scheduler.audit()
        assert engine.adapter_slots is not None and engine.adapter_slots.num_available == num_slots
        assert engine.adapter_slots.num_loads >= len(set(names)) - 1
    assert [list(each.outputs[0].token_ids) for each in found] == [tokens[name][index] for name, index in drawn]


@pytest.mark.parametrize("tp", [1, 4])
def test_attention_of_a_mixture_of_experts(tp: int, tmp_path: Path, every_case: bool) -> None:
    if tp == 4 and not every_case:
        pytest.skip("only run with --every-case")
    base, paths = build(tmp_path, EXPERT_KINDS, **checkpoints.TINY_EXPERTS)
    tokens = expected(tmp_path, base, paths)
    with LLM(base, tp=tp, adapters=paths, **SMALL) as llm:
        names = [*paths, None]
        assert generated(llm, names) == [tokens[name][index] for index, name in enumerate(names)]


def test_a_model_without_adapters_names_the_option(dense: tuple[Any, ...]) -> None:
    base, _, tokens = dense
    with LLM(base, **SMALL) as llm:
        with pytest.raises(AdaptersOffError, match="serves no adapters"):
            generated(llm, ["adapter-0"])
        assert generated(llm, [None]) == tokens[None][:1]


@pytest.mark.parametrize("name", ["fp8-channel", "packed-32"])
def test_quantized_bases(name: str, tmp_path: Path) -> None:
    """The product of the adapter is added to that of the quantized matrix, at TP 4."""
    checkpoint = formats.save(tmp_path / "base", name)
    plain = formats.save_plain(tmp_path / "plain", checkpoint)
    path = adapters.save_adapter(tmp_path / "a", plain, seed=3, strength=2.0)
    prompts = checkpoints.random_prompts(LENGTHS[:2], 96)
    merged = checkpoints.greedy(adapters.merge(tmp_path / "merged", plain, path), prompts, MAX_TOKENS)
    unchanged = checkpoints.greedy(plain, prompts, MAX_TOKENS)
    with LLM(tmp_path / "base", tp=4, adapters={"a": path}, **SMALL) as llm:
        found = llm.generate([*prompts, *prompts], GREEDY, adapter=["a", "a", None, None], use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in found] == merged + unchanged
    assert merged[0] != unchanged[0] and merged[1] != unchanged[1]
