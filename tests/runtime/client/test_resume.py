"""Tests the resumption of interrupted streams, against a scripted server and through restarts of servers."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client import resume
from meshserve.runtime.client.client import AsyncClient, CallError, Client, Usage
from meshserve.runtime.commands.local_cluster import reserved_port
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.text.tokenizer import TextStream, Tokenizer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.runtime.fake_adapters import FakeCatalog
from tests.runtime.loopback import VOCAB_SIZE, Job, running
from tests.waiting import WAIT_SECONDS, wait_for

TOKENIZER = Tokenizer(DEMO_DIRECTORY)
TEXT = "But soft! What light — näif — through yonder window breaks? STOP and never this"
TOKENS = TOKENIZER.encode(TEXT)


class Breaking(pb_grpc.InferenceServiceServicer):
    """Sends TOKENS, two per message, and breaks off where it is told to.

    Knows only the prompt "p", whose token is 1, and accepts resumed outputs as the server does.
    """

    def __init__(self) -> None:
        self.breaks: list[tuple[int, grpc.StatusCode]] = []
        self.requests: list[pb.GenerateRequest] = []
        self.target = ""
        self.default_sampling: pb.SamplingParams | None = pb.SamplingParams()
        self.max_context = 0
        self.num_ends_lost = 0  # streams that break off when all tokens and none of the end have been sent
        self.size = lambda: 2  # tokens of the next message

    def Tokenize(self, request, context):
        if self.breaks and self.breaks[0][0] < 0:
            context.abort(self.breaks.pop(0)[1], "not now")
        return pb.TokenizeResponse(token_ids=[1])

    def GetModelInfo(self, request, context):
        if self.default_sampling is None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not with this token")
        return pb.GetModelInfoResponse(default_sampling=self.default_sampling, max_context_tokens=self.max_context)

    def Generate(self, request, context):
        self.requests.append(request)
        prompt, sampling = list(request.token_ids.token_ids), request.sampling
        done = sampling.num_resumed_tokens
        assert prompt == [1, *TOKENS[:done]], "resumed with different tokens than were sent"
        text = TextStream(TOKENIZER, tuple(sampling.stop))
        text.push(TOKENS[:done])
        digest = f"digest of {request.adapter}" if request.adapter else ""
        last = min(len(TOKENS), done + (sampling.max_tokens or len(TOKENS)))
        stop_at, code = self.breaks.pop(0) if self.breaks else (len(TOKENS) + 1, None)
        while done < last:
            new = TOKENS[done : min(done + self.size(), last)]
            if done + len(new) > stop_at:
                context.abort(code, "broken off")
            done += len(new)
            said, has_stopped = text.push(new)
            if done == last and self.num_ends_lost:
                self.num_ends_lost -= 1
                yield pb.GenerateResponse(text=said, token_ids=new)
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken off before the end")
            if has_stopped or done == last:
                reason = pb.FINISH_REASON_STOP if has_stopped else pb.FINISH_REASON_LENGTH
                said += text.flush()
                yield pb.GenerateResponse(text=said, token_ids=new, finish=pb.Finish(reason=reason))
                return
            yield pb.GenerateResponse(text=said, token_ids=new, adapter_digest=digest)
            digest = ""


@pytest.fixture
def breaking() -> Iterator[Breaking]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    script = Breaking()
    pb_grpc.add_InferenceServiceServicer_to_server(script, server)
    script.target = f"ipv4:127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(0).wait()


@pytest.mark.parametrize("seed", range(20))
def test_wherever_it_breaks_the_output_is_the_same(breaking, seed):
    draw = random.Random(seed)
    points = sorted(draw.randrange(len(TOKENS)) for _ in range(draw.randrange(1, 6)))
    breaking.breaks = [(point, grpc.StatusCode.UNAVAILABLE) for point in [-1, *points]]
    stop = ["STOP"] if seed % 2 else []
    with Client(breaking.target, resumes=8) as client:
        done = client.complete("p", max_tokens=len(TOKENS), stop=stop)
    assert done.text == (TEXT.split("STOP")[0] if stop else TEXT)
    if not stop:
        assert done.token_ids == TOKENS and done.finish_reason is FinishReason.LENGTH
        assert done.usage == Usage(num_prompt_tokens=1, num_output_tokens=len(TOKENS))
    seeds = {request.sampling.seed for request in breaking.requests}
    assert len(seeds) == 1, "every attempt has the same seed"


def test_the_async_client_and_chats_resume_too(breaking):
    async def main() -> None:
        async with AsyncClient(breaking.target, resumes=3) as client:
            breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE), (7, grpc.StatusCode.UNAVAILABLE)]
            chunks = [chunk async for chunk in client.chat([{"role": "user", "content": "p"}], max_tokens=12)]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == TOKENS[:12]

    asyncio.run(main())


def test_a_request_with_an_adapter_goes_on_with_the_same_one(breaking):
    breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE), (7, grpc.StatusCode.UNAVAILABLE)]
    with Client(breaking.target, resumes=3) as client:
        assert client.complete("p", max_tokens=12, adapter="law").token_ids == TOKENS[:12]
    asked = [(request.adapter, request.adapter_digest) for request in breaking.requests]
    assert asked == [("law", ""), ("law", "digest of law"), ("law", "digest of law")]


def test_a_replica_that_lacks_the_adapter_is_not_the_last_one_asked(breaking):
    """A stream that has begun has all attempts, others few: the name may be mistyped. Without one, it is an error."""
    unknown = grpc.StatusCode.NOT_FOUND
    with Client(breaking.target, resumes=7) as client:
        breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE), *[(4, unknown)] * 6]
        assert client.complete("p", max_tokens=12, adapter="law").token_ids == TOKENS[:12]
        assert len(breaking.requests) == 8
        breaking.breaks = [(0, unknown)] * 2
        assert client.complete("p", max_tokens=12, adapter="law").token_ids == TOKENS[:12]
        for adapter, num_attempts in (("law", 5), ("", 1)):
            breaking.requests.clear()
            breaking.breaks = [(0, unknown)] * 8
            with pytest.raises(CallError) as caught:
                client.complete("p", max_tokens=12, adapter=adapter)
            assert caught.value.code is unknown and len(breaking.requests) == num_attempts


@pytest.mark.parametrize("adapters", [FakeCatalog("other"), FakeCatalog("law")])
def test_a_replica_without_the_same_adapter_does_not_go_on(adapters):
    request = resume._Run(pb.GenerateRequest(adapter="law", token_ids=pb.TokenIds(token_ids=[1])), [1], 0)
    request.take(pb.GenerateResponse(token_ids=[2], adapter_digest="of other files"))
    with running(adapters=adapters) as server, grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(pb_grpc.InferenceServiceStub(channel).Generate(request.next_request(), timeout=WAIT_SECONDS))
    has_it = adapters.list()[0].name == "law"
    assert caught.value.code() is (grpc.StatusCode.FAILED_PRECONDITION if has_it else grpc.StatusCode.NOT_FOUND)


def test_the_servers_default_of_max_tokens_holds_over_all_attempts(breaking):
    breaking.default_sampling.max_tokens = 10

    async def main() -> None:
        async with AsyncClient(breaking.target, resumes=3) as client:
            assert (await client.complete([1])).token_ids == TOKENS[:10]

    for _ in range(2):
        breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE), (7, grpc.StatusCode.UNAVAILABLE)]
        with Client(breaking.target, resumes=3) as client:
            assert client.complete("p").token_ids == TOKENS[:10]
    breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE)]
    asyncio.run(main())
    breaking.default_sampling = None
    with Client(breaking.target, resumes=3) as client:
        client.complete([1])
    assert not breaking.requests[-1].sampling.HasField("max_tokens")


def test_without_max_tokens_a_stream_resumes_to_the_end_of_the_context(breaking):
    breaking.max_context = 1 + len(TOKENS)
    breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE), (7, grpc.StatusCode.UNAVAILABLE)]
    with Client(breaking.target, resumes=3) as client:
        assert client.complete("p").token_ids == TOKENS
    assert len(breaking.requests) == 3
    assert not any(request.sampling.HasField("max_tokens") for request in breaking.requests)


@pytest.mark.parametrize("seed", range(12))
def test_an_end_that_is_lost_is_asked_for(breaking, seed, monkeypatch):
    """It brings text that was held back as the beginning of a stop string."""
    monkeypatch.setattr(resume, "_FIRST_DELAY_SECONDS", 0.001)
    draw = random.Random(seed)
    breaking.size, breaking.num_ends_lost = lambda: draw.randrange(1, 4), draw.randrange(1, 4)
    breaking.breaks = [(len(TOKENS) + 1, None)]
    breaking.breaks += [(len(TOKENS) - draw.randrange(2), grpc.StatusCode.UNAVAILABLE) for _ in range(seed % 3)]
    with Client(breaking.target, resumes=8) as client:
        chunks = list(client.generate("p", max_tokens=len(TOKENS), stop=["this one"]))
    assert "".join(chunk.text for chunk in chunks) == TEXT and not chunks[-2].text.endswith("this")
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(TOKENS)
    end = chunks[-1].finish
    assert end is not None and end.reason is FinishReason.LENGTH
    assert end.usage == Usage(num_prompt_tokens=1, num_output_tokens=len(TOKENS))


def test_an_end_that_is_always_lost_is_given_up(breaking):
    """The tokens that come with it again are no progress."""
    breaking.num_ends_lost = 100
    with Client(breaking.target, resumes=3) as client, pytest.raises(CallError, match="broken off before the end"):
        client.complete("p", max_tokens=len(TOKENS))
    assert len(breaking.requests) == 4


def test_an_output_that_fills_the_context_is_not_resumed_behind_it(breaking):
    """Only the end of the stream is missing, and a prompt that fills the context would be refused."""
    run = resume._Run(pb.GenerateRequest(), [1], max_context_tokens=5)
    for token_ids, sent in (([1, 2, 3], [1, 1, 2, 3]), ([4], [1, 1, 2, 3])):
        run.take(pb.GenerateResponse(token_ids=token_ids))
        assert run.next_request().token_ids.token_ids == sent


@pytest.mark.parametrize(("code", "resumes"), [(grpc.StatusCode.INVALID_ARGUMENT, 5), (grpc.StatusCode.UNAVAILABLE, 0)])
def test_what_is_not_resumed(breaking, code, resumes):
    breaking.breaks = [(4, code)]
    with Client(breaking.target, resumes=resumes) as client, pytest.raises(CallError) as caught:
        client.complete([1], max_tokens=12)
    assert caught.value.code is code


def test_it_gives_up_when_no_token_comes_in_between(breaking):
    breaking.breaks = [(4, grpc.StatusCode.UNAVAILABLE)] * 3
    with Client(breaking.target, resumes=2) as client, pytest.raises(CallError, match="broken off"):
        client.complete([1], max_tokens=12)
    assert len(breaking.requests) == 3


def test_it_waits_no_longer_than_the_call_may_take(monkeypatch):
    """The server's retry hint is 2.5 s."""
    delays: list[float] = []
    monkeypatch.setattr(resume.time, "sleep", delays.append)
    with running(is_full=True) as server, Client(server.target, resumes=2) as client, pytest.raises(CallError):
        client.complete([1], max_tokens=12, timeout_seconds=2.0)
    assert delays and max(delays) <= 2.0


class Replica:
    """A server that can be restarted at its port, with a drain time too short for its requests."""

    def __init__(self, port: int, is_held: Callable[[Job], bool]):
        self.port, self._is_held, self._context = port, is_held, contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        listen = Listen(port=self.port, drain_seconds=0.05, status_seconds=WAIT_SECONDS)
        self.server = self._context.enter_context(running(listen=listen, is_held=self._is_held))

    def stop(self) -> None:
        self.server.stop()
        self._context.close()

    @property
    def num_open(self) -> int:
        return len(self.server.engine.jobs)


def test_a_rolling_restart_fails_no_request():
    """Restarts the busier of two replicas four times under 240 requests, 60 at a time.

    Until then, requests are held after a few tokens, so that each restart affects at least 30 of them.
    """
    is_over = threading.Event()

    async def one(client: AsyncClient, gate: asyncio.Semaphore, start: int) -> None:
        async with gate:
            done = await client.complete([start], max_tokens=50, timeout_seconds=2 * WAIT_SECONDS)
        assert done.token_ids == tuple((start + 1 + i) % VOCAB_SIZE for i in range(50))
        assert done.text == "".join(f"{token_id} " for token_id in done.token_ids)
        assert done.usage == Usage(num_prompt_tokens=1, num_output_tokens=50)

    async def main() -> None:
        target = "ipv4:" + ",".join(f"127.0.0.1:{replica.port}" for replica in replicas)
        async with AsyncClient(target, resumes=200) as client:
            gate = asyncio.Semaphore(60)
            await asyncio.gather(*(one(client, gate, index % 100) for index in range(240)))

    def is_held(job: Job) -> bool:
        return job.num_output >= 5 and not is_over.is_set()

    with reserved_port() as one_port, reserved_port() as other_port, futures.ThreadPoolExecutor(1) as caller:
        replicas = [Replica(port, is_held) for port in (one_port, other_port)]
        calls = caller.submit(asyncio.run, main())
        try:
            for _ in range(4):
                wait_for(lambda: calls.done() or sum(replica.num_open for replica in replicas) == 60)
                busier = max(replicas, key=lambda replica: replica.num_open)
                assert not calls.done() and busier.num_open >= 30
                busier.stop()
                busier.start()
            is_over.set()
            calls.result(WAIT_SECONDS)
        finally:
            is_over.set()
            for replica in replicas:
                replica.stop()
