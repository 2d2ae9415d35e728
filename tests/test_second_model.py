"""Tests that the second model of the tests has the traits of published Qwen3 models."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from meshserve.runtime.text.tokenizer import Tokenizer

from .second_model import IM_END, SPECIAL_TOKENS, TEXT_TOKENS


@pytest.fixture(scope="module")
def tokenizer(second_model: Path) -> Tokenizer:
    return Tokenizer(second_model)


def test_the_tokenizer_normalizes_and_has_added_tokens(tokenizer: Tokenizer, second_model: Path):
    assert tokenizer.encode("Vie\u0302\u0323t") == tokenizer.encode("Vi\u1ec7t")
    added = [tokenizer.encode(text) for text in (*SPECIAL_TOKENS, *TEXT_TOKENS)]
    assert {len(token_ids) for token_ids in added} == {1}
    assert tokenizer.decode([token_id for [token_id] in added]) == "".join(TEXT_TOKENS)
    assert tokenizer.token_id(IM_END) in tokenizer.eos_token_ids and len(tokenizer.eos_token_ids) == 2
    theirs = AutoTokenizer.from_pretrained(second_model)
    for text in ("<think>\n\nIs it 25?</think>", "Được rồi e\u0301", f"{IM_END}한국어", '{"name": ["x"]}\n'):
        assert tuple(theirs(text)["input_ids"]) == tokenizer.encode(text)


def test_the_template_thinks_about_the_last_question_only(tokenizer: Tokenizer):
    answered = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "3"},
    ]
    started = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n3<|im_end|>\n"
    assert tokenizer.render_chat(answered) == started + "<|im_start|>assistant\n"
    rendered = tokenizer.render_chat(answered, enable_thinking=False)
    assert rendered == started + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    called = [
        *answered,
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]
    rendered = tokenizer.render_chat(called, tools=[{"type": "function", "function": {"name": "f"}}])
    assert rendered.startswith("<|im_start|>system\n# Tools") and '\n<tools>\n{"type": "function"' in rendered
    assert rendered.endswith(
        '<|im_start|>assistant\n<think>\nso\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
