"""Unmodified clients of OpenAI's API against real servers: of the demo model, and of one that thinks."""

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from meshserve.runtime.client.client import Client
from meshserve.runtime.weights.locate import DEMO_DIRECTORY

from .certificates import certificate
from .checkpoints import log_likelihood
from .openai_server import Server, serving
from .waiting import WAIT_SECONDS

openai = pytest.importorskip("openai", reason="comes with the test extra")
pydantic = pytest.importorskip("pydantic", reason="comes with openai")

MESSAGES = [{"role": "user", "content": "Who art thou?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"king": {"type": "string", "maxLength": 12}, "acts": {"enum": [4, 5]}},
    "required": ["king", "acts"], "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "play", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("openai") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory, second_model: Path) -> Iterator[Server]:
    flags = (f"--model={second_model}", "--served-name=org/thinker", "--tp=1", "--max-context=1024")
    with serving(tmp_path_factory.mktemp("openai-thinking") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def thinker(thinking_server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=thinking_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=200, temperature=0)
    assert whole.choices[0].message.content and whole.choices[0].finish_reason in ("stop", "length")
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=200, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    parts, usage = [], None
    for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert len([part for part in parts if part]) > 1  # a busy server sends fewer, larger parts
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens, whole.usage.completion_tokens
    )  # fmt: skip


def test_usage_is_counted_from_the_first_chunk(client):
    options = {"model": "demo", "max_tokens": 20, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chat = client.chat.completions.create(messages=MESSAGES, **options)
    text = client.completions.create(prompt="HAMLET:", extra_body={"ignore_eos": True}, **options)
    for chunks in (list(chat), list(text)):
        usages = [chunk.usage for chunk in chunks]
        assert len({usage.prompt_tokens for usage in usages}) == 1 and usages[0].prompt_tokens > 0
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1]


def test_the_tokens_are_those_of_grpc(client, server: Server):
    done = client.completions.create(
        model="demo", prompt="HAMLET:\n", max_tokens=24, temperature=0.9, seed=7, extra_body={"return_token_ids": True}
    )
    with Client(server.target) as grpc_client:
        theirs = grpc_client.complete("HAMLET:\n", max_tokens=24, temperature=0.9, seed=7)
    assert tuple(done.choices[0].token_ids) == theirs.token_ids and done.choices[0].text == theirs.text


def test_several_prompts_and_samples(client):
    done = client.completions.create(model="demo", prompt=["HAMLET:", [5, 6, 7]], max_tokens=6, n=2, seed=3)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in done.choices}) == 4
    assert done.usage.completion_tokens == 24


def test_stop_strings(client):
    whole = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=40, temperature=0)
    word = whole.choices[0].text.split()[3]
    cut = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=40, temperature=0, stop=[word])
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_structured_output(client):
    done = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=300, temperature=1.5, seed=5, response_format=FORMAT
    )
    assert done.choices[0].finish_reason == "stop"
    value = json.loads(done.choices[0].message.content)
    assert set(value) == {"king", "acts"} and value["acts"] in (4, 5) and len(value["king"]) <= 12


def test_bias_and_penalties(client):
    def text(**options: Any) -> str:
        done = client.completions.create(model="demo", prompt="HAMLET:\n", max_tokens=24, temperature=0, **options)
        return done.choices[0].text

    assert text(logit_bias={"100": 100}) != text() != text(extra_body={"repetition_penalty": 2.0})


def test_log_probabilities_of_chats(client):
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    positions = chat.choices[0].logprobs.content
    assert len(positions) == chat.usage.completion_tokens
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.logprob == max(top.logprob for top in position.top_logprobs) <= 0, "greedy takes the likeliest"
    stream = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices if choice.logprobs]
    streamed = [position.logprob for choice in choices for position in choice.logprobs.content]
    assert streamed == pytest.approx([position.logprob for position in positions], abs=1e-4)


def test_texts_are_scored_without_generating(client):
    """As evaluation harnesses do: the log-probabilities of a text are those of generating it."""
    options = {"model": "demo", "temperature": 0, "logprobs": 1}
    generated = client.completions.create(**options, prompt="HAMLET:\n", max_tokens=8)
    text = "HAMLET:\n" + generated.choices[0].text
    scored = client.completions.create(**options, prompt=text, max_tokens=0, echo=True)
    found = scored.choices[0].logprobs
    assert scored.choices[0].text == text and found.token_logprobs[0] is None
    theirs = generated.choices[0].logprobs.token_logprobs
    assert found.token_logprobs[-len(theirs) :] == pytest.approx(theirs, abs=1e-4)
    assert [
        text[at : at + len(token)] for at, token in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens


def test_log_likelihoods_of_a_harness_are_those_of_hugging_face(client):
    """The requests are those of lm-eval's local-completions, and the answers are read as it does."""
    texts = (("HAMLET:\nTo be, or not to be, that is", " the question"), ("JULIET:\nO Romeo", ", wherefore art thou"))
    contexts = [_tokens(client, context) for context, _ in texts]
    wholes = [_tokens(client, context + text) for context, text in texts]
    body = {"model": "demo", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    done = client.completions.create(prompt=wholes, **body)
    for choice, context, whole in zip(done.choices, contexts, wholes, strict=True):
        found = choice.logprobs
        assert len(found.token_logprobs) == len(whole) + 1, "one is generated"
        rest = found.token_logprobs[len(context) : -1]
        assert sum(rest) == pytest.approx(log_likelihood(DEMO_DIRECTORY, context, whole[len(context) :]), abs=1e-3)
        tops = found.top_logprobs[len(context) : -1]
        assert all(max(top.values()) >= value for top, value in zip(tops, rest, strict=True))
    assert client.completions.create(prompt="HAMLET:", **body).choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
        ({"extra_body": {"audio": {"voice": "x"}}}, "audio"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(client, options, field):
    with pytest.raises(openai.BadRequestError, match=field):
        client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 4, **options})


def test_errors_have_openais_form(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and caught.value.body["param"] == "model"
    with pytest.raises(openai.BadRequestError, match="accepts 1023"):
        client.completions.create(model="demo", prompt="x y " * 2000, max_tokens=4)
    with pytest.raises(openai.APIStatusError, match="1024 tokens") as caught:  # more than they can hold
        client.completions.create(model="demo", prompt="word " * 4000, max_tokens=4)
    assert caught.value.status_code == 413


def test_the_model_is_listed(client, thinker):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert [model.id for model in thinker.models.list()] == ["org/thinker"]
    assert thinker.chat.completions.create(model="thinker", messages=MESSAGES, max_tokens=1).model == "org/thinker"


def test_thoughts_are_apart_and_constraints_come_after_them(thinker):
    budget = {"thinking_token_budget": 12}
    options = {"model": "thinker", "messages": MESSAGES, "max_tokens": 300, "seed": 5, "response_format": FORMAT}
    for seed in range(6):
        done = thinker.chat.completions.create(**options | {"seed": seed}, temperature=1.0, extra_body=budget)
        message = done.choices[0].message
        assert done.choices[0].finish_reason == "stop"
        assert set(json.loads(message.content)) == {"king", "acts"}
        assert "</think>" not in message.content
        assert done.usage.completion_tokens_details.reasoning_tokens <= 14, "the budget and the tags"
    biased = {"logit_bias": {str(_id(thinker, "<think>")): 50.0}, "extra_body": budget}
    done = thinker.chat.completions.create(**options, temperature=1.0, **biased)
    assert done.choices[0].message.reasoning_content and json.loads(done.choices[0].message.content)
    stream = thinker.chat.completions.create(**options, temperature=1.0, **biased, stream=True)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == done.choices[0].message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == done.choices[0].message.content


def _id(client: Any, token: str) -> int:
    [token_id] = _tokens(client, token)
    return token_id


def _tokens(client: Any, text: str) -> list[int]:
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    return root.post("/tokenize", body={"prompt": text}, cast_to=object)["tokens"]


def test_thinking_is_turned_off(thinker):
    options = {"model": "thinker", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    for off in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        done = thinker.chat.completions.create(**options, extra_body=off)
        assert done.choices[0].message.content and not hasattr(done.choices[0].message, "reasoning_content")
    effort = thinker.chat.completions.create(**options, reasoning_effort="none")
    assert effort.choices[0].message.content == done.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_that_must_be_called(thinker, choice):
    """In two turns, as an agent takes them, with the messages that the client makes."""
    options = {"model": "thinker", "max_tokens": 200, "tools": [WEATHER], "seed": 1}
    budget = {"extra_body": {"thinking_token_budget": 4}}
    done = thinker.chat.completions.create(**options, messages=MESSAGES, tool_choice=choice, **budget)
    [call] = done.choices[0].message.tool_calls
    assert done.choices[0].finish_reason == "tool_calls" and done.choices[0].message.content is None
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    stream = thinker.chat.completions.create(**options, messages=MESSAGES, tool_choice=choice, **budget, stream=True)
    deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert not "".join(delta.content or "" for delta in deltas)
    result = {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
    turns = [*MESSAGES, done.choices[0].message, result]
    again = thinker.chat.completions.create(**options, messages=turns)
    assert again.usage.prompt_tokens > done.usage.prompt_tokens


class Play(pydantic.BaseModel):
    king: str = pydantic.Field(max_length=12)
    acts: Literal[4, 5]


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of what it has parsed
def test_helpers_of_the_client_parse_answers_and_send_them_back(thinker):
    options = {"model": "thinker", "max_tokens": 300, "seed": 1, "extra_body": {"thinking_token_budget": 4}}
    done = thinker.chat.completions.parse(**options, messages=MESSAGES, response_format=Play)
    assert done.choices[0].message.parsed.acts in (4, 5)
    with thinker.chat.completions.stream(**options, messages=MESSAGES, response_format=Play) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed
    turns = [*MESSAGES, done.choices[0].message, {"role": "user", "content": "And then?"}]
    again = thinker.chat.completions.parse(**options, messages=turns, response_format=Play)
    assert again.choices[0].message.parsed.acts in (4, 5) and again.usage.prompt_tokens > done.usage.prompt_tokens
    options["tools"] = [openai.pydantic_function_tool(Weather, name="get_weather")]
    asked = thinker.chat.completions.parse(**options, messages=MESSAGES, tool_choice="required")
    [call] = asked.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
    turns = [*MESSAGES, asked.choices[0].message, result]
    last = thinker.chat.completions.create(**options | {"max_tokens": 12}, messages=turns, tool_choice="none")
    assert last.usage.prompt_tokens > 0 and not last.choices[0].message.tool_calls


def test_tokens_and_texts(thinking_server: Server):
    def post(path: str, body: dict[str, Any]) -> Any:
        url, data = thinking_server.url.removesuffix("/v1") + path, json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    found = post("/tokenize", {"prompt": "One, two", "return_token_strs": True})
    assert "".join(found["token_strs"]) == "One, two" and found["count"] == len(found["tokens"])
    assert post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "One, two"}
    with urllib.request.urlopen(
        thinking_server.url.removesuffix("/v1") + "/tokenizer_info", timeout=WAIT_SECONDS
    ) as it:
        info = json.load(it)
    assert info["eos_token"] == "<|im_end|>" and "enable_thinking" in info["chat_template"]
    chat = post("/tokenize", {"messages": MESSAGES, "enable_thinking": False})
    assert post("/detokenize", {"tokens": chat["tokens"]})["prompt"].endswith("<think>\n\n</think>\n\n")


def test_requests_that_no_route_takes(server: Server):
    root = server.url.removesuffix("/v1")
    for method, path, headers, status in (
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("GET", "/v1/models", {"Host": "example.com"}, 403),
        ("GET", "/health", {}, 200),
        ("GET", "/v1/models", {"X-Request-Id": "mine"}, 200),
    ):
        request = urllib.request.Request(root + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                assert answer.status == status
                assert answer.headers["X-Request-Id"] == headers.get("X-Request-Id", answer.headers["X-Request-Id"])
        except urllib.error.HTTPError as error:
            assert error.code == status, path
            assert re.search(r'"message"', error.read().decode())


def test_a_body_that_is_too_large_is_not_read(server: Server):
    request = urllib.request.Request(f"{server.url}/chat/completions", data=b" " * (17 << 20))
    with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)) as caught:
        urllib.request.urlopen(request, timeout=WAIT_SECONDS)
    assert getattr(caught.value, "code", 413) == 413


def test_with_a_certificate_the_api_is_encrypted(tmp_path: Path):
    files = certificate(tmp_path, "server")
    flags = (f"--tls-cert={files.certificate}", f"--tls-key={files.key}")
    trusted = ssl.create_default_context(cafile=str(files.certificate))
    with serving(tmp_path / "log", *flags) as server:
        assert server.url.startswith("https://")
        with urllib.request.urlopen(f"{server.url}/models", timeout=WAIT_SECONDS, context=trusted) as answer:
            assert json.load(answer)["data"][0]["id"] == "demo"
