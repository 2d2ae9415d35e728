"""Random bodies of every route of the OpenAI port: valid ones in which something has become something else."""

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

_MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "seed": 1, "stop": ["a"], "stop_token_ids": [5], "n": 2,
    "ignore_eos": True, "min_tokens": 1, "prompt_logprobs": 1, "priority": 0, "cache_salt": "a", "max_tokens": 2,
    "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "user": "me",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "structured_outputs": {"regex": "a*"}, "guided_choice": ["a", "b"], "json_schema": "{}", "regex": "a",
    "allowed_token_ids": [5], "bad_token_ids": [6], "model": "demo", "store": False, "metadata": {"a": "b"},
}  # fmt: skip
# A body with every field of a route, of which each random one has some.
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": _SAMPLING | {"prompt": ["a", [5, 6]], "logprobs": 1, "echo": True, "suffix": None},
    "/v1/chat/completions": _SAMPLING | {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]}, *_MESSAGES,
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "d"},
        ],
        "logprobs": True, "top_logprobs": 2, "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False, "reasoning_effort": "none", "enable_thinking": False, "thinking_token_budget": 2,
        "chat_template_kwargs": {"enable_thinking": True}, "continue_final_message": False, "modalities": ["text"],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        ],
        "instructions": "a", "max_output_tokens": 2, "temperature": 0.5, "top_p": 0.9, "stream": True,
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "top_logprobs": 1, "store": False,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
        "include": ["message.output_text.logprobs"], "previous_response_id": None, "truncation": "disabled",
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}], "max_tokens": 2, "stop_sequences": ["a"], "stream": True,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "a", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": True}
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1}, "metadata": {"user_id": "a"}, "top_k": 5,
        "output_config": {"format": {"type": "json_schema", "schema": {}}}, "context_management": {"edits": []},
    },
    "/v1/messages/count_tokens": {
        "messages": _MESSAGES, "system": "a", "tools": [{"name": "f", "input_schema": {"type": "object"}}]
    },
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 8, "normalize": True},
    "/v1/score": {"text_1": "a", "text_2": ["a", {"text": "b"}], "instruction": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    "/tokenize": {"prompt": "a", "messages": _MESSAGES, "tools": [_TOOL], "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 5, 2**31, 2**63, -(2**63), 10**19, 0.5, -0.0, 1e308, "", "a", "\0", "ß",
    "a" * 300, [], {}, [[]], [None], [1, "a"], {"": None}, {"type": []}, {"type": {}}, {"a": {"b": [1]}},
    [{"type": "text"}], "function",
)  # fmt: skip


def random_body(draw: random.Random) -> tuple[str, bytes]:
    """Returns a path and a body for it."""
    path = draw.choice([*BODIES])
    body = {name: value for name, value in BODIES[path].items() if draw.random() < 0.4}
    body |= {name: value for name, value in BODIES[path].items() if name in ("prompt", "messages", "input")}
    body = json.loads(json.dumps(body))
    for _ in range(draw.randrange(1, 4)):
        body = _changed(draw, body)
    data = json.dumps(body).encode()
    if draw.random() < 0.1:
        place = draw.randrange(len(data))
        data = data[:place] + draw.randbytes(draw.randrange(3)) + data[place + draw.randrange(3) :]
    return path, data


def _changed(draw: random.Random, value: Any) -> Any:
    """Returns a value of which one part has been changed, removed or repeated."""
    if not isinstance(value, list | dict) or not value or draw.random() < 0.2:
        return copy.deepcopy(draw.choice(_VALUES))
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = draw.choice(keys)
    kind = draw.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.15 and isinstance(value, list):
        value.append(copy.deepcopy(value[key]))
    elif kind < 0.2 and isinstance(value, dict):
        value[draw.choice(["type", "role", "text", "a", "strict", "name"])] = copy.deepcopy(draw.choice(_VALUES))
    else:
        value[key] = _changed(draw, value[key])
    return value
