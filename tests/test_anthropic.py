"""The unmodified client of Anthropic's API against a real server of a model that thinks and calls tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from .openai_server import Server, serving

anthropic = pytest.importorskip("anthropic", reason="comes with the test extra")
pydantic = pytest.importorskip("pydantic", reason="comes with anthropic")

MESSAGES = [{"role": "user", "content": "Who art thou?"}]
GREEDY = {"extra_body": {"temperature": 0}}  # newer clients have no parameter for it
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {
    "name": "get_weather", "description": "Returns the weather of a city.",
    "input_schema": {**CITY, "additionalProperties": False},
}  # fmt: skip


class Play(pydantic.BaseModel):
    acts: Literal[4, 5]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, second_model: Path) -> Iterator[Server]:
    flags = (f"--model={second_model}", "--served-name=org/thinker", "--tp=1", "--max-context=1024")
    with serving(tmp_path_factory.mktemp("anthropic") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def _contents(message: Any) -> list[Any]:
    """Returns what a message says, without the ids of calls and what the client adds to streams."""
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


def _whole_and_streamed(client: Any, **options: Any) -> Any:
    """Returns the answer, which has been checked to be the same in a stream."""
    whole = client.messages.create(model="thinker", **options)
    with client.messages.stream(model="thinker", **options) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert _contents(streamed) == _contents(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    first, last = whole.usage, streamed.usage
    assert first.input_tokens + first.cache_read_input_tokens == last.input_tokens + last.cache_read_input_tokens
    assert events[0] == "message_start" and events[-1] == "message_stop"
    return whole


def test_text_without_thinking(client):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    options = {"messages": MESSAGES, "max_tokens": 24, "system": system, **GREEDY}
    message = _whole_and_streamed(client, **options)
    assert [block.type for block in message.content] == ["text"] and message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn") and message.model == "org/thinker"
    counted = client.messages.count_tokens(model="thinker", messages=MESSAGES, system=system)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_stop_sequences_are_named(client):
    options = {"messages": MESSAGES, "max_tokens": 60, **GREEDY}
    text = client.messages.create(model="thinker", **options).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = _whole_and_streamed(client, **options, stop_sequences=["never said", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]


def test_thinking_has_blocks_of_its_own_and_a_budget(client, server: Server):
    think = client.post("/tokenize", body={"prompt": "<think>"}, cast_to=object)["tokens"][0]
    options = {"messages": MESSAGES, "max_tokens": 200}
    options["extra_body"] = {"temperature": 1.0, "seed": 5, "logit_bias": {str(think): 50.0}}
    options["thinking"] = {"type": "enabled", "budget_tokens": 12}
    schema = {"type": "object", "properties": {"acts": {"enum": [4, 5]}}, "required": ["acts"]}
    options["output_config"] = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    message = _whole_and_streamed(client, **options)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking and json.loads(message.content[1].text)["acts"] in (4, 5)
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And then?"}]
    again = client.messages.create(model="thinker", messages=turns, max_tokens=2)
    assert again.usage.output_tokens == 2


def test_helpers_of_the_client_parse_answers_and_send_them_back(client, server: Server):
    """With thinking, whose blocks go back, too."""
    think = client.post("/tokenize", body={"prompt": "<think>"}, cast_to=object)["tokens"][0]
    options = {"model": "thinker", "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 12}}
    options["extra_body"] = {"temperature": 1.0, "seed": 5, "logit_bias": {str(think): 50.0}}
    done = client.messages.parse(**options, messages=MESSAGES, output_format=Play)
    assert [block.type for block in done.content] == ["thinking", "text"] and done.parsed_output.acts in (4, 5)
    turns = [*MESSAGES, {"role": "assistant", "content": done.content}, {"role": "user", "content": "And then?"}]
    again = client.messages.parse(**options, messages=turns, output_format=Play)
    assert again.parsed_output.acts in (4, 5)
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "15 degrees"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [done.content[0], call]},
        {"role": "user", "content": [result]},
    ]
    counted = client.messages.count_tokens(
        model="thinker", messages=turns, tools=[WEATHER], thinking=options["thinking"]
    ).input_tokens
    answer = client.messages.create(**{**options, "max_tokens": 20}, messages=turns, tools=[WEATHER])
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=lambda c: c["type"])
def test_a_loop_of_tools(client, choice):
    """In two turns, as an agent takes them, with the blocks that the client makes."""
    options = {"max_tokens": 200, "tools": [WEATHER], "extra_body": {"seed": 1}}
    message = _whole_and_streamed(client, **options, messages=MESSAGES, tool_choice=choice)
    [call] = message.content
    assert message.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "get_weather" and call.input["city"] in ("Paris", "Rome")
    text = {"type": "text", "text": "15 degrees"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text]}
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="thinker", messages=turns, tools=[WEATHER]).input_tokens
    again = _whole_and_streamed(client, **options, messages=turns, tool_choice=choice)
    assert counted == again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert counted > message.usage.input_tokens + message.usage.cache_read_input_tokens
    failed = [*turns[:-1], {"role": "user", "content": [{**result, "is_error": True}]}]
    assert client.messages.count_tokens(model="thinker", messages=failed, tools=[WEATHER]).input_tokens > counted


def test_an_answer_that_the_caller_has_begun_goes_on(client):
    turns = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    counted = client.messages.count_tokens(model="thinker", messages=turns).input_tokens
    done = _whole_and_streamed(client, messages=turns, max_tokens=4, **GREEDY)
    assert counted == done.usage.input_tokens + done.usage.cache_read_input_tokens


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content\[0\].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"stop_sequence": ["x"]}}, "did you mean stop_sequences"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"top_p": 9}}, "top_p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(client, options, field):
    with pytest.raises(anthropic.BadRequestError, match=field) as caught:
        client.messages.create(**{"model": "thinker", "messages": MESSAGES, "max_tokens": 4, **options})
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude", messages=MESSAGES, max_tokens=4)
    assert caught.value.body["error"]["type"] == "not_found_error"
