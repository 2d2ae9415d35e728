"""Chats whose answers come divided into their parts: over gRPC as over OpenAI's API, and resumed."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client.answers import Answer, answered
from meshserve.runtime.client.client import AsyncClient, CallError, Client
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.text.answers.answer_parts import AnswerPart
from tests.dictation import TEMPLATES, Dictating, dictating, tokenizer
from tests.runtime.loopback import Running
from tests.waiting import WAIT_SECONDS

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <a>", "days": 3}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln <a>\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
NO_CALL = "See <tool_call>\nlater</tool_call> and <tool_c"
SAID = {
    "hybrid": f"<think>\nIs it <b> 25?\n\n</think>\n\nLet me see. ünd\n{JSON_CALL}\n{JSON_CALL}",
    "hybrid, no thought": f"Let me see.\n\n{NO_CALL}",
    "thinking": f"Is it 25? </thin\n</think>\n\nLet me see.\n{JSON_CALL}",
    "thinking, cut off": "Is it 25? \n\n",
    "instruct": f"<think> is a tag.\n{JSON_CALL}",
    "coder": f"Let me see.\n{XML_CALL}\n{XML_CALL}",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """By template."""
    started = {}
    listen = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
    with contextlib.ExitStack() as stack:
        for name in TEMPLATES:
            model = tokenizer(tmp_path_factory.mktemp(name), name)
            started[name] = stack.enter_context(dictating(model, listen))
        yield started


def served(servers: dict[str, Running], case: str) -> Running:
    server = servers[case.partition(",")[0]]
    assert isinstance(server.engine, Dictating)
    server.engine.said = SAID[case]
    return server


def parts_of(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.tool_calls]


def over_http(server: Running, **fields: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.handle.openai_port or 0, timeout=WAIT_SECONDS)
    body = {"messages": MESSAGES, "tools": [WEATHER], **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    message = json.load(connection.getresponse())["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls


@pytest.mark.parametrize("case", SAID)
def test_the_parts_are_those_of_openais_api(servers, case):
    server = served(servers, case)
    with Client(server.target) as client:
        chunks = list(client.chat(MESSAGES, tools=[WEATHER], answer={}))
        plain = list(client.chat(MESSAGES, tools=[WEATHER]))
    assert "".join(chunk.text for chunk in chunks) == "" and not any(chunk.parts for chunk in plain)
    assert "".join(chunk.text for chunk in plain) == SAID[case]
    answer = answered(chunks)
    assert answer.finish_reason is FinishReason.STOP
    assert parts_of(answer) == over_http(server)
    assert bool(answer.reasoning) == (SAID[case].startswith("<think>\n") or case.startswith("thinking"))
    assert len(answer.tool_calls) == SAID[case].count("get_weather")
    for call in answer.tool_calls:
        assert call.name == "get_weather" and call.values() == {"city": "Köln <a>", "days": 3}


@pytest.mark.parametrize("case", SAID)
def test_a_stream_goes_on_behind_any_token(servers, case):
    server = served(servers, case)
    with grpc.insecure_channel(server.target) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")], tools=[json.dumps(WEATHER)])
        request.answer.SetInParent()
        whole = list(stub.Chat(request))
        for number in range(1, len(whole), 5):
            tokens = [token for response in whole[:number] for token in response.token_ids]
            resumed = pb.ChatRequest()
            resumed.CopyFrom(request)
            resumed.resumed_token_ids.extend(tokens)
            resumed.sampling.num_resumed_tokens = len(tokens)
            rest = list(stub.Chat(resumed))
            assert text_of(whole[:number] + rest) == text_of(whole), tokens
            usages = [responses[-1].finish.usage.num_reasoning_tokens for responses in (rest, whole)]
            assert usages[0] == usages[1]


def text_of(responses: Sequence[pb.ChatResponse]) -> list[str]:
    """Returns the parts as text, with neighbours of one kind joined."""
    joined: list[str] = []
    kind = ""
    for part in (part for response in responses for part in response.parts):
        new = part.WhichOneof("kind") or ""
        text = part.arguments.text if new == "arguments" else part.call.name if new == "call" else getattr(part, new)
        joined = [*joined[:-1], joined[-1] + text] if new == kind != "call" else [*joined, f"{new}: {text}"]
        kind = new
    return joined


class Breaking(pb_grpc.InferenceServiceServicer):
    """Passes calls on to a server, and breaks off each stream after some messages, or after some tokens."""

    def __init__(self, stub: Any, every: int, by_tokens: bool):
        self._stub, self._every, self._by_tokens = stub, every, by_tokens
        self.num_broken = 0

    def Tokenize(self, request, context):
        return self._stub.Tokenize(request)

    def GetModelInfo(self, request, context):
        return self._stub.GetModelInfo(request)

    def Chat(self, request, context):
        number = 0
        for response in self._stub.Chat(request):
            yield response
            number += len(response.token_ids) if self._by_tokens else 1
            if number == self._every and not response.HasField("finish"):
                self.num_broken += 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")


@contextlib.contextmanager
def breaking(target: str, every: int, *, by_tokens: bool = False) -> Iterator[tuple[Breaking, str]]:
    """Runs a `Breaking` before a server, and yields it and its address."""
    front = grpc.server(futures.ThreadPoolExecutor(4))
    with grpc.insecure_channel(target) as channel:
        script = Breaking(pb_grpc.InferenceServiceStub(channel), every, by_tokens)
        pb_grpc.add_InferenceServiceServicer_to_server(script, front)
        port = front.add_insecure_port("127.0.0.1:0")
        front.start()
        try:
            yield script, f"ipv4:127.0.0.1:{port}"
        finally:
            front.stop(0).wait()


@pytest.mark.parametrize("every", [4, 9])
def test_the_client_resumes_divided_answers(servers, every):
    server = served(servers, "hybrid")

    async def over_async_client(target: str) -> Answer:
        async with AsyncClient(target, resumes=3) as client:
            return answered([chunk async for chunk in client.chat(MESSAGES, tools=[WEATHER], answer={})])

    with breaking(server.target, every) as (script, target):
        with Client(server.target) as client:
            expected = answered(client.chat(MESSAGES, tools=[WEATHER], answer={}))
        with Client(target, resumes=3) as client:
            got = answered(client.chat(MESSAGES, tools=[WEATHER], answer={}))
        assert script.num_broken > 5
        assert parts_of(got) == parts_of(expected) == parts_of(asyncio.run(over_async_client(target)))
        assert got.usage is not None and expected.usage is not None
        assert got.usage.num_reasoning_tokens == expected.usage.num_reasoning_tokens > 5


@pytest.mark.parametrize("case", SAID)
def test_an_end_that_was_lost_is_asked_for_again(servers, case, monkeypatch):
    """All tokens have come, and with the end what had been held back, such as the beginning of a tag."""
    server = served(servers, case)
    num_tokens = len(server.engine.tokenizer.encode(SAID[case]))
    with Client(server.target) as client:
        expected = answered(client.chat(MESSAGES, tools=[WEATHER], answer={}, max_tokens=num_tokens))
    monkeypatch.setattr(server.engine, "is_end_apart", True)
    with breaking(server.target, num_tokens, by_tokens=True) as (script, target):
        is_held = lambda job: job.num_output == num_tokens and not script.num_broken  # noqa: E731
        monkeypatch.setattr(server.engine, "is_held", is_held)
        with Client(target, resumes=3) as client:
            chunks = list(client.chat(MESSAGES, tools=[WEATHER], answer={}, max_tokens=num_tokens))
    got = answered(chunks)
    assert script.num_broken == 1 and parts_of(got) == parts_of(expected)
    assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
    assert got.usage is not None and got.usage.num_output_tokens == num_tokens


def test_samples_and_single_calls(servers):
    server = served(servers, "coder")
    with Client(server.target) as client:
        chunks = list(client.chat(MESSAGES, tools=[WEATHER], n=3, answer={"parallel_tool_calls": False}))
    answers = [answered(chunks, index) for index in range(3)]
    assert [len(answer.tool_calls) for answer in answers] == [1, 1, 1]
    assert parts_of(answers[2]) == over_http(server, parallel_tool_calls=False)
    assert answers[0].message()["tool_calls"][0]["name"] == "get_weather"


def test_a_stop_string_ends_the_reasoning(servers):
    server = served(servers, "hybrid")
    with Client(server.target) as client:
        answer = answered(client.chat(MESSAGES, answer={}, stop=["<b>"]))
    assert parts_of(answer) == ("Is it ", "", []) == over_http(server, stop="<b>", tools=[])
    assert answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"answer": {"tool": "get_time"}, "tools": [WEATHER]}, "answer.tool"),
        ({"answer": {"any_tool": True}}, "answer.any_tool"),
        ({"answer": {"any_tool": False}, "tools": [WEATHER]}, "answer.any_tool"),
        ({"answer": {"thinking_token_budget": 2**21}}, "answer.thinking_token_budget"),
        (
            {"answer": {"any_tool": True}, "tools": [WEATHER], "constraint": {"json_object": True}},
            "answer.tool_choice",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused_by_name(servers, fields, field):
    with Client(served(servers, "hybrid").target) as client, pytest.raises(CallError) as caught:
        list(client.chat(MESSAGES, **fields))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT and caught.value.field == field


def test_resumed_tokens_and_their_number_belong_together(servers):
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")], resumed_token_ids=[5, 6])
    with grpc.insecure_channel(served(servers, "instruct").target) as channel:
        with pytest.raises(grpc.RpcError, match="num_resumed_tokens must be their number"):
            list(pb_grpc.InferenceServiceStub(channel).Chat(request))


def test_a_part_of_a_kind_to_come_is_left_out():
    from meshserve.runtime.text.answers.part_messages import answer_part

    parts: list[AnswerPart | None] = [answer_part(pb.AnswerPart())]
    assert parts == [None]
