"""Tests the client against a scripted service: the requests it sends, and how it interprets the responses."""

import asyncio
import re
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client.client import AsyncClient, CallError, Chunk, Client, Completion, Finish, Usage
from tests.waiting import WAIT_SECONDS

FINISH = pb.Finish(reason=pb.FINISH_REASON_STOP, usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=4))
ANSWER = [
    pb.GenerateResponse(text="The", token_ids=[1]),
    pb.GenerateResponse(token_ids=[2, 3]),
    pb.GenerateResponse(text=" sea", token_ids=[4], finish=FINISH),
]
USAGE = Usage(num_prompt_tokens=3, num_output_tokens=4)
CHUNKS = [
    Chunk(text="The", token_ids=(1,), finish=None),
    Chunk(text="", token_ids=(2, 3), finish=None),
    Chunk(text=" sea", token_ids=(4,), finish=Finish(reason=FinishReason.STOP, usage=USAGE)),
]
WHOLE = Completion(text="The sea", token_ids=(1, 2, 3, 4), finish_reason=FinishReason.STOP, usage=USAGE)


class Script(pb_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.answer = ANSWER
        self.target = ""

    def Generate(self, request, context):
        self.requests.append(request)
        yield from self.answer


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    script = Script()
    pb_grpc.add_InferenceServiceServicer_to_server(script, server)
    script.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(0).wait()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with Client(script.target) as client:
        yield client


def test_what_is_left_out_is_not_sent(script, client):
    client.complete("hello")
    assert script.requests[-1] == pb.GenerateRequest(text="hello", sampling=pb.SamplingParams())
    assert not script.requests[-1].HasField("request_id")
    client.complete([1, 2], request_id="a", temperature=0.0, top_k=0, seed=0, ignore_eos=False, stop=("x", "y"))
    sent = pb.SamplingParams(temperature=0.0, top_k=0, seed=0, ignore_eos=False, stop=["x", "y"])
    expected = pb.GenerateRequest(request_id="a", token_ids=pb.TokenIds(token_ids=[1, 2]), sampling=sent)
    assert script.requests[-1] == expected
    client.complete([])  # an empty list of token ids is sent, for the server to judge
    assert script.requests[-1].WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"top_k": -1}, {"top_k": 0}),  # off, also where the model's default is another
        ({"top_k": 0}, {"top_k": 0}),
        ({"seed": -1}, {}),
        (dict.fromkeys(("max_tokens", "stop", "seed", "constraint", "logprobs", "n", "priority", "logit_bias")), {}),
    ],
)
def test_values_that_mean_off_in_vllm_are_off(script, client, given, sent):
    client.complete("hello", **given)
    assert script.requests[-1] == pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sent))


def test_chunks_and_the_whole(client):
    assert list(client.generate("hello")) == CHUNKS
    assert client.complete("hello") == WHOLE


def test_the_async_client_does_the_same(script):
    async def main():
        async with AsyncClient(script.target) as client:
            assert [chunk async for chunk in client.generate("hello")] == CHUNKS
            assert await client.complete("hello") == WHOLE
            with pytest.raises(CallError) as caught:
                await client.model_info()
            assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(CallError, match="not ready within 0.15 s"):
                await client.wait_until_ready(0.15)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": "a", "stop": "END"}, TypeError, "stop is the string 'END'"),
        ({"prompt": "a", "max_tokens": -1}, ValueError, "max_tokens is -1: "),
        ({"prompt": "a", "temperature": "hot"}, TypeError, "temperature is 'hot': "),
        ({"prompt": "a", "logit_bias": {"x": 1.0}}, TypeError, "logit_bias is {'x': 1.0}: "),
        ({"prompt": "a", "max_token": 1}, ValueError, "no sampling field 'max_token'. Did you mean max_tokens?"),
        ({"prompt": [-1]}, ValueError, "out of range"),
        ({"prompt": "a", "n": 2}, ValueError, "complete_samples"),  # their texts would be mixed
    ],
)
def test_what_cannot_be_sent_raises_before_the_call_and_names_the_field(script, client, arguments, error, message):
    num_requests = len(script.requests)
    with pytest.raises(error, match=re.escape(message)):
        client.complete(**arguments)
    assert len(script.requests) == num_requests


def test_errors(script, client, monkeypatch):
    with pytest.raises(CallError, match="UNIMPLEMENTED") as caught:
        client.load()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__, "a traceback shows one error"
    failed = pb.Finish(reason=pb.FINISH_REASON_ERROR, message="the cache is corrupt")
    monkeypatch.setattr(script, "answer", [ANSWER[0], pb.GenerateResponse(finish=failed)])
    stream = client.generate("hello")
    assert next(stream) == CHUNKS[0]
    with pytest.raises(CallError, match="the cache is corrupt"):
        next(stream)
    monkeypatch.setattr(script, "answer", ANSWER[:1])
    with pytest.raises(CallError, match="before its last message"):
        client.complete("hello")
    with Client("127.0.0.1:1", ready_seconds=0) as nobody, pytest.raises(CallError) as caught:
        nobody.complete("hello", timeout_seconds=WAIT_SECONDS)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
