"""One model behind templates with the traits of the published ones: hybrid, Thinking-2507, Instruct-2507 and Coder.

What other people have reported of servers with OpenAI's API, with each of them, over the port of a real engine; what
concerns thinking and tools over gRPC as well.
"""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.client.answers import answered
from meshserve.runtime.client.client import Client
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.launch import launch

from .dictation import TEMPLATES, tokenizer
from .runtime.loopback import Running, serving
from .waiting import WAIT_SECONDS

SMALL: dict[str, Any] = {
    "tp": 1, "dtype": "float32", "page_size": 16, "num_pages": 128, "max_running": 8, "max_step_tokens": 32,
    "max_context": 1024, "cache_dir": "",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
BUDGET = 8
Post = Callable[..., Any]


@pytest.fixture(scope="module")
def served(second_model: Path) -> Iterator[tuple[Running, Callable[[Any], None]]]:
    """A server, and what gives it another tokenizer."""
    queues = OutputQueues()
    launched = launch(ServeConfig(model=str(second_model), **SMALL), queues.deliver)
    edge = Edge(queues)

    def attach(template: Any) -> None:
        edge.attach(Backend(launched.engine, template, launched.info, launched.grammars))

    attach(launched.tokenizer)
    launched.engine.start()
    listen = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
    try:
        with serving(edge, queues, listen) as server:
            yield server, attach
    finally:
        launched.close()


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest, served, tmp_path: Path) -> str:
    """The name of the template that the server has now."""
    served[1](tokenizer(tmp_path, request.param))
    return request.param


@pytest.fixture
def post(served) -> Post:
    """Sends a body to a path, and returns the answer; of a stream, its chunks."""

    def send(path: str, body: dict[str, Any], status: int = 200) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", served[0].handle.openai_port, timeout=WAIT_SECONDS)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == status, text
        if not body.get("stream"):
            return json.loads(text)
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    return send


def thinking(post: Post, template: str) -> dict[str, Any]:
    """Returns fields with which a model with random weights thinks, if the template lets it, and does not go on."""
    if template != "hybrid":
        return {"thinking_token_budget": BUDGET}
    [begin] = post("/tokenize", {"prompt": "<think>"})["tokens"]
    return {"thinking_token_budget": BUDGET, "logit_bias": {str(begin): 50.0}}


def joined(chunks: list[Any]) -> tuple[str, str, list[list[str]]]:
    """Returns reasoning, content and calls of a stream."""
    reasoning, content, calls = "", "", []
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning, content, calls


def parts_of(message: dict[str, Any]) -> tuple[str, str, list[list[str]]]:
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls


def test_a_format_holds_behind_the_reasoning(served, template, post):
    """It used to be that the content was null, or that the reasoning was constrained."""
    fields = thinking(post, template)
    body = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "seed": 3, **fields}
    [choice] = post("/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) == {"city", "days"}
    assert bool(choice["message"].get("reasoning_content")) == (template in ("hybrid", "thinking"))
    streamed = joined(post("/v1/chat/completions", {**body, "stream": True}))
    assert streamed == parts_of(choice["message"]) and "think>" not in streamed[1]
    with Client(served[0].target) as client:
        bias = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
        chunks = client.chat(
            MESSAGES, constraint={"json_schema": SCHEMA}, max_tokens=200, seed=3, logit_bias=bias,
            answer={"thinking_token_budget": BUDGET},
        )  # fmt: skip
        ours = answered(chunks)
    assert (ours.reasoning, ours.content, []) == streamed


def test_a_forced_tool_is_called_behind_the_reasoning(served, template, post):
    fields = thinking(post, template)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 300, "seed": 1, **fields}
        [found] = post("/v1/chat/completions", body)["choices"]
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        reasoning, content, [[name, arguments]] = parts_of(found["message"])
        assert name == "get_weather" and set(json.loads(arguments)) == {"city", "days"}
        assert joined(post("/v1/chat/completions", {**body, "stream": True})) == (reasoning, "", [[name, arguments]])
    with Client(served[0].target) as client:
        bias = {int(key): value for key, value in fields.get("logit_bias", {}).items()}
        chunks = client.chat(
            MESSAGES, tools=[WEATHER], max_tokens=300, seed=1, logit_bias=bias,
            answer={"thinking_token_budget": BUDGET, "tool": "get_weather"},
        )  # fmt: skip
        ours = answered(chunks)
    assert ours.reasoning == reasoning and [[call.name, call.arguments] for call in ours.tool_calls] == [
        [name, arguments]
    ]


def test_thinking_can_be_turned_off_where_the_template_can(template, post):
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 2, "enable_thinking": False}
    message = post("/v1/chat/completions", body)["choices"][0]["message"]
    assert bool(message.get("reasoning_content")) == (template == "thinking")
    assert bool(message["content"]) == (template != "thinking"), "twelve random tokens end no reasoning"


def test_an_answer_without_a_tag_is_no_reasoning(template, post):
    [begin] = post("/tokenize", {"prompt": "<think>"})["tokens"]
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 4, "bad_token_ids": [begin]}
    message = post("/v1/chat/completions", body)["choices"][0]["message"]
    assert bool(message.get("reasoning_content")) == (template == "thinking")
    assert bool(message["content"]) == (template != "thinking")


def test_histories_as_clients_send_them_back(template, post):
    function = {"name": "get_weather", "arguments": '{"city": "Rome", "days": 2}'}
    bare = {"name": "get_weather", "arguments": ""}
    called = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }  # fmt: skip
    messages = [
        *MESSAGES, called, {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny.", "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
        {**called, "tool_calls": [{"id": "call_2", "type": "function", "function": bare}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [WEATHER]}
    prompt = post("/detokenize", {"tokens": post("/tokenize", body)["tokens"]})["prompt"]
    assert "None" not in prompt and "sunny" in prompt and "And \nnow?" in prompt and "rain" in prompt
    written = "<function=get_weather>\n<parameter=city>\nRome" if template == "coder" else '"city": "Rome"'
    assert prompt.count("<tool_call>\n") >= 2 and written in prompt
    assert post("/v1/chat/completions", {**body, "max_tokens": 4})["usage"]["completion_tokens"] > 0


def test_texts_that_are_not_normalized_or_hold_tokens(template, post):
    """A choice that is not NFC, and texts with the text of added and of special tokens."""
    options = {"messages": MESSAGES, "max_tokens": 100, "enable_thinking": False, **thinking(post, template)}
    for structure, expected in (
        ({"choice": ["e\u0301"]}, "e\u0301"),
        ({"regex": "<think>[ab]{2}</tool_call>"}, None),
        ({"json": {"const": "x<|im_end|>"}}, '"x<|im_end|>"'),
    ):
        [choice] = post("/v1/chat/completions", {**options, "structured_outputs": structure})["choices"]
        content = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert content == expected if expected is not None else content.startswith("<think>") and len(content) == 21


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"top_k": -1}, 200, ""),
        ({"model": "org/second-model"}, 404, "model"),
        ({"messages": [{"role": "User", "content": "Hi"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": FORMAT, "tools": [WEATHER], "tool_choice": "required"}, 400, "tool_choice"),
    ],
)
def test_fields_are_honoured_or_refused_by_name(template, post, change, status, field):
    answer = post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "seed": 0, **change}, status)
    if status != 200:
        assert field in f"{answer['error']['param']}: {answer['error']['message']}"


def test_completions_have_biases_log_probabilities_and_tokens_as_prompts(post):
    tokens = post("/tokenize", {"prompt": "Paris today"})["tokens"]
    body = {"prompt": [tokens, tokens[:3]], "max_tokens": 4, "temperature": 0, "logprobs": 2}
    free = post("/v1/completions", body)["choices"]
    assert [choice["index"] for choice in free] == [0, 1]
    for choice in free:
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == 4 and all(len(top) >= 2 for top in found["top_logprobs"])
    biased = post("/v1/completions", {**body, "logit_bias": {str(tokens[0]): 100}, "return_token_ids": True})["choices"]
    assert [choice["token_ids"] for choice in biased] == [[tokens[0]] * 4] * 2
