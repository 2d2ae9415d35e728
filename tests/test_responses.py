"""The unmodified client of OpenAI's Responses API against a real server of a model that thinks and calls tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from .openai_server import Server, serving

openai = pytest.importorskip("openai", reason="comes with the test extra")
pydantic = pytest.importorskip("pydantic", reason="comes with openai")

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {
    "type": "function", "name": "get_weather", "description": "Returns the weather of a city.",
    "parameters": {**CITY, "additionalProperties": False}, "strict": True,
}  # fmt: skip
QUESTION = {"role": "user", "content": "Who art thou?"}
NO_THINKING = {"reasoning": {"effort": "none"}}


class Play(pydantic.BaseModel):
    acts: Literal[4, 5]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, second_model: Path) -> Iterator[Server]:
    flags = (f"--model={second_model}", "--served-name=org/thinker", "--tp=1", "--max-context=1024")
    with serving(tmp_path_factory.mktemp("responses") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def _contents(response: Any) -> list[Any]:
    """Returns what a response says, without the ids of its items."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


def _whole_and_streamed(client: Any, **options: Any) -> Any:
    """Returns the answer, which has been checked to be the same in a stream, and in the deltas of one."""
    whole = client.responses.create(model="thinker", **options)
    events = list(client.responses.create(model="thinker", **options, stream=True))
    streamed = events[-1].response
    assert _contents(streamed) == _contents(whole) and streamed.status == whole.status
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for index, item in enumerate(streamed.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[-1].type == "response.output_item.done"
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
    return whole


def test_text(client):
    options = {"temperature": 0, "max_output_tokens": 24, "instructions": "Be brief.", **NO_THINKING}
    done = _whole_and_streamed(client, **options, input="Who art thou?")
    assert done.output_text and done.model == "org/thinker" and done.store is False
    assert done.status == "completed" or done.incomplete_details.reason == "max_output_tokens"
    content = [{"type": "input_text", "text": "Who art thou?"}]
    same = client.responses.create(model="thinker", **options, input=[{"role": "user", "content": content}])
    assert same.output_text == done.output_text
    with client.responses.stream(model="thinker", **options, input="Who art thou?") as stream:
        assert [event.text for event in stream if event.type == "response.output_text.done"] == [done.output_text]
    turns = [QUESTION, *done.output, {"role": "user", "content": "And then?"}]
    again = client.responses.create(model="thinker", input=turns, max_output_tokens=2, **NO_THINKING)
    assert again.usage.input_tokens > done.usage.input_tokens


def test_reasoning_is_an_item_of_its_own_and_a_schema_comes_after_it(client, server: Server):
    think = client.with_options(base_url=server.url.removesuffix("/v1")).post(
        "/tokenize", body={"prompt": "<think>"}, cast_to=object
    )["tokens"][0]
    schema = {"type": "object", "properties": {"acts": {"enum": [4, 5]}}, "required": ["acts"]}
    form = {"type": "json_schema", "name": "play", "schema": {**schema, "additionalProperties": False}}
    extra = {"seed": 5, "logit_bias": {str(think): 50.0}, "thinking_token_budget": 12}
    options = {"input": "Who art thou?", "max_output_tokens": 200, "temperature": 1.0, "extra_body": extra}
    done = _whole_and_streamed(client, **options, text={"format": form}, include=["reasoning.encrypted_content"])
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output[0].content[0].text and json.loads(done.output_text)["acts"] in (4, 5)
    with client.responses.stream(model="thinker", **options, text={"format": form}) as stream:
        assert stream.get_final_response().output_text == done.output_text
    assert 0 < done.usage.output_tokens_details.reasoning_tokens <= 14, "the budget and the tags"
    turns = [QUESTION, *done.output, {"role": "user", "content": "And then?"}]
    assert client.responses.create(model="thinker", input=turns, max_output_tokens=2).usage.output_tokens == 2


def test_helpers_of_the_client_parse_answers_and_send_them_back(client):
    options = {"model": "thinker", "max_output_tokens": 300, "extra_body": {"seed": 5, "thinking_token_budget": 4}}
    turns = [{"role": "user", "content": "Who art thou?"}]
    done = client.responses.parse(**options, input=turns, text_format=Play)
    assert done.output_parsed.acts in (4, 5)
    turns += [*done.output, {"role": "user", "content": "And then?"}]
    again = client.responses.parse(**options, input=turns, text_format=Play)
    assert again.output_parsed.acts in (4, 5) and again.usage.input_tokens > done.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_a_loop_of_tools(client, choice):
    """In two turns, as an agent takes them, with the items that the client makes."""
    options = {"max_output_tokens": 200, "tools": [WEATHER], "extra_body": {"seed": 1}, **NO_THINKING}
    done = _whole_and_streamed(client, **options, input=[QUESTION], tool_choice=choice)
    [call] = done.output
    assert call.type == "function_call" and call.name == "get_weather" and done.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "15 degrees"}
    again = _whole_and_streamed(client, **options, input=[QUESTION, *done.output, result], tool_choice=choice)
    assert again.usage.input_tokens > done.usage.input_tokens and again.output[0].type == "function_call"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\[0\].type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"extra_body": {"max_tokens": 3}}, "max_output_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(client, options, field):
    with pytest.raises(openai.BadRequestError, match=field):
        client.responses.create(**{"model": "thinker", "input": "Who art thou?", **options})
