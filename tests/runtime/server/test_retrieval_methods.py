"""Tests Embed, Score and Rerank on a loopback port, with an engine whose results are easy to predict."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.adapters import AdapterCatalog, NoAdapters
from meshserve.runtime.api.errors import QueueFullError
from meshserve.runtime.api.request import FinishReason, Load, Output, RequestOptions
from meshserve.runtime.client.client import AsyncClient, CallError, Client, call_errors
from meshserve.runtime.retrieval.prompt_formats import DEFAULT_RERANK_INSTRUCTION
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.method_permissions import new_access
from meshserve.runtime.server.output_queue import OutputQueues
from tests.runtime.loopback import INFO, MAX_CONTEXT_TOKENS, Letters, Running, serving
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode
DIMENSIONS = 4
END = 127  # the token that the tokenizer adds to each text
EMBEDDER = dataclasses.replace(INFO, task="embed", embedding_dimensions=DIMENSIONS)
RERANKER = dataclasses.replace(INFO, task="rerank", max_context_tokens=1024)


class Ended(Letters):
    """A tokenizer with one token per character, which completes a text with END."""

    num_added_tokens = 1

    def encode(self, text: str, *, is_completed: bool = False) -> tuple[int, ...]:
        return (*super().encode(text), *((END,) if is_completed else ()))


def result_of(prompt: Sequence[int], task: str) -> np.ndarray:
    """The fake engine's result: some sums for an embedding model, the logits 0 and log(length) for a reranker."""
    if task == "rerank":
        return np.array([0.0, np.log(len(prompt))], np.float32)
    return np.array([sum(prompt), len(prompt), prompt[0], prompt[-1]], np.float32)


class PoolingEngine:
    """Answers each request at once, or when it is released."""

    def __init__(self, room: OutputQueues, task: str):
        self._deliver, self._task = room.deliver, task
        self._lock = threading.Lock()
        self.is_held = False
        self.num_places = 10_000  # in the queue
        self.failure: str | None = None
        self.open: dict[str, Sequence[tuple[int, ...]]] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.options: list[RequestOptions] = []
        self.cancels: list[tuple[str, FinishReason]] = []
        self.adapters: AdapterCatalog = NoAdapters()

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        if not self.num_places:
            raise QueueFullError("no place", 0.5)

    def hold(self, is_held: bool) -> bool:
        return False

    def submit_prompts(
        self, request_id: str, prompts: Sequence[tuple[int, ...]], params: Any, options: RequestOptions
    ) -> None:
        with self._lock:
            if sum(map(len, self.open.values())) + len(prompts) > self.num_places:
                raise QueueFullError("no place", 0.5)
            assert request_id not in self.open and params.max_tokens == 1
            self.open[request_id] = prompts
            self.prompts += prompts
            self.options.append(options)
        if not self.is_held:
            self.release(request_id)

    def release(self, request_id: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        with self._lock:
            prompts = self.open.pop(request_id, ())
        results = [result_of(prompt, self._task) if reason is FinishReason.LENGTH else None for prompt in prompts]
        self._deliver(
            [
                Output(
                    request_id=request_id, index=index, token_ids=(0,), finish_reason=reason, pooled=results[index],
                    num_prompt_tokens=len(prompt), num_output_tokens=1, num_cached_tokens=1, message="why",
                )
                for index, prompt in enumerate(prompts)
            ]
        )  # fmt: skip

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        self.cancels.append((request_id, reason))
        self.release(request_id, reason)

    def load(self) -> Load:
        return Load(num_running=len(self.open), num_waiting=0, num_pages=1, num_free_pages=1)

    def flush_prefix_cache(self) -> int:
        return 0

    def between_steps(self, action: Callable[[], None]) -> None:
        action()


@contextlib.contextmanager
def retrieving(info: Any, tokens: Path | None = None, listen: Listen | None = None) -> Iterator[Running]:
    room = OutputQueues()
    edge = Edge(room, access=new_access(tokens))
    edge.max_samples = 64
    edge.attach(Backend(PoolingEngine(room, info.task), Ended(), info))  # type: ignore[arg-type]
    with serving(edge, room, listen or Listen(drain_seconds=WAIT_SECONDS)) as server:
        yield server


def engine_of(server: Running) -> PoolingEngine:
    assert server.edge.backend is not None
    return server.edge.backend.engine  # type: ignore[return-value]


@pytest.fixture
def embedder() -> Iterator[Running]:
    with retrieving(EMBEDDER) as server:
        yield server


@pytest.fixture
def reranker() -> Iterator[Running]:
    with retrieving(RERANKER) as server:
        yield server


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def expected(text: str) -> np.ndarray:
    return result_of((*text.encode(), END), "embed")


def embed(target: str, **fields: Any) -> list[pb.Embedding]:
    """The embeddings of one call, in the order of their texts."""
    fields.setdefault("inputs", [pb.EmbedInput(text="abc")])
    with grpc.insecure_channel(target) as channel, call_errors():
        stream = pb_grpc.InferenceServiceStub(channel).Embed(pb.EmbedRequest(**fields), timeout=WAIT_SECONDS)
        found = [embedding for response in stream for embedding in response.embeddings]
    assert sorted(embedding.index for embedding in found) == list(range(len(fields["inputs"])))
    return sorted(found, key=lambda embedding: embedding.index)


def test_texts_are_completed_and_embeddings_have_length_1(embedder):
    with Client(embedder.target) as client:
        found = client.embed(["abc", "d" * 40])
    np.testing.assert_allclose(found, [unit(expected("abc")), unit(expected("d" * 40))], rtol=1e-6)
    assert found.dtype == np.float32
    [embedding] = embed(embedder.target)
    assert (embedding.num_prompt_tokens, embedding.num_cached_tokens) == (4, 1)
    assert embedder.counted("meshserve_pooled_texts_total") == 3
    assert embedder.counted("meshserve_requests_total", method="Embed", outcome="length") == 2


def test_dimensions_are_the_first_numbers_before_the_length_becomes_1(embedder):
    with Client(embedder.target) as client:
        np.testing.assert_allclose(client.embed(["abc"], dimensions=2)[0], unit(expected("abc")[:2]), rtol=1e-6)
        np.testing.assert_array_equal(client.embed(["abc"], dimensions=3, normalize=False)[0], expected("abc")[:3])
        for dimensions in (0, DIMENSIONS + 1):
            with pytest.raises(CallError, match=f"got {dimensions}; allowed is 1 to 4") as caught:
                client.embed(["abc"], dimensions=dimensions)
            assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "dimensions")


def test_every_format_has_the_same_numbers(embedder):
    exact = unit(expected("abc")).astype(np.float32)
    [floats] = embed(embedder.target)
    np.testing.assert_array_equal(np.array(floats.values, np.float32), exact)
    [raw] = embed(embedder.target, format=pb.EMBEDDING_FORMAT_FLOAT32)
    np.testing.assert_array_equal(np.frombuffer(raw.data, "<f4"), exact)
    [text] = embed(embedder.target, format=pb.EMBEDDING_FORMAT_BASE64)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text.base64), "<f4"), exact)
    [half] = embed(embedder.target, format=pb.EMBEDDING_FORMAT_BFLOAT16)
    np.testing.assert_array_equal(np.frombuffer(half.data, ml_dtypes.bfloat16), exact.astype(ml_dtypes.bfloat16))
    with pytest.raises(CallError, match="EMBEDDING_FORMAT_FLOATS") as caught:
        embed(embedder.target, format=9)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "format")


def test_an_instruction_makes_texts_queries(embedder):
    with Client(embedder.target) as client:
        client.embed(["why"], instruction="Find it")
        assert bytes(engine_of(embedder).prompts[-1]) == b"Instruct: Find it\nQuery:why\x7f"
        with pytest.raises(CallError, match="beside an instruction"):
            client.embed([[1, 2]], instruction="Find it")
        with pytest.raises(CallError, match="8193 characters"):
            client.embed(["why"], instruction="i" * 8193)
        np.testing.assert_array_equal(client.embed([[1, 2]], normalize=False)[0], [3, 2, 1, 2])


def test_texts_that_do_not_fit_are_refused_or_cut_before_their_end_token(embedder):
    room = MAX_CONTEXT_TOKENS - 1
    with Client(embedder.target) as client:
        with pytest.raises(CallError, match=f"has {room + 1} tokens") as caught:
            client.embed(["fits", "a" * room])
        assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "inputs[1]")
        client.embed(["fits", "a" * 100], truncate=True)
        assert engine_of(embedder).prompts[-1] == (ord("a"),) * (room - 1) + (END,)
        client.embed([range(100)], truncate=True)
        assert engine_of(embedder).prompts[-1] == tuple(range(room))
        with pytest.raises(CallError, match="got neither text nor token_ids"):
            embed(embedder.target, inputs=[pb.EmbedInput()])
        with pytest.raises(CallError, match="has 0 tokens"):
            client.embed([[]])
        with pytest.raises(CallError, match="token 0 is 128"):
            client.embed([[128]])
        with pytest.raises(CallError, match="got 0; allowed are 1 to 16384"):
            embed(embedder.target, inputs=[])


def test_a_large_batch_is_answered_in_groups_and_waits_for_places(embedder):
    """More texts than the queue has places for: its groups wait for each other, and none is lost or doubled."""
    engine_of(embedder).num_places = 100
    texts = [f"{number:03d}" for number in range(1000)]
    with Client(embedder.target) as client:
        found = client.embed(texts, normalize=False)
    np.testing.assert_array_equal(found, [expected(text) for text in texts])
    assert sorted(engine_of(embedder).prompts) == sorted((*text.encode(), END) for text in texts)


def test_a_full_queue_refuses_the_first_group(embedder):
    engine_of(embedder).num_places = 1
    with Client(embedder.target) as client, pytest.raises(CallError, match="no place") as caught:
        client.embed(["a", "b"])
    assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_seconds == 0.5
    assert embedder.edge.queues.num_open == 0


def test_several_calls_of_the_client_for_a_long_list(embedder):
    texts = [str(number) for number in range(4100)]
    with Client(embedder.target) as client:
        found = client.embed(texts, normalize=False)
        assert client.embed([]).shape == (0,)
    np.testing.assert_array_equal(found, [expected(text) for text in texts])
    assert embedder.counted("meshserve_pooled_texts_total") == 4100


def test_documents_are_scored_in_the_published_layout(reranker):
    with Client(reranker.target) as client:
        scores = client.score([("q", "document"), ("q", "d")], instruction="Match")
    prompts = [bytes(prompt).decode() for prompt in engine_of(reranker).prompts]
    assert [prompt.partition("<Instruct>")[2] for prompt in prompts] == [
        f": Match\n<Query>: q\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for document in ("document", "d")
    ]
    assert all(prompt.startswith("<|im_start|>system\nJudge whether the Document meets") for prompt in prompts)
    lengths = np.array([len(prompt) for prompt in prompts])
    np.testing.assert_allclose(scores, lengths / (1 + lengths), rtol=1e-6)  # sigmoid(log n - 0)


def test_rerank_orders_documents(reranker):
    documents = ["bb", "dddd", "a", "dddd"]
    with Client(reranker.target) as client:
        ranked = client.rerank("q", documents)
        assert [result.index for result in ranked] == [1, 3, 0, 2]
        assert [result.score for result in ranked] == sorted((result.score for result in ranked), reverse=True)
        assert client.rerank("q", documents, top_n=2) == ranked[:2]
        with pytest.raises(CallError, match="got 0; allowed is 1 or more"):
            client.rerank("q", documents, top_n=0)
    prompts = {bytes(prompt).decode() for prompt in engine_of(reranker).prompts}
    assert all(DEFAULT_RERANK_INSTRUCTION in prompt for prompt in prompts)


def test_long_documents_are_cut_before_the_question_ends(reranker):
    with Client(reranker.target) as client:
        with pytest.raises(CallError, match="has [0-9]+ tokens") as caught:
            client.rerank("q", ["fits", "d" * 1000])
        assert caught.value.field == "documents[1]"
        client.rerank("q", ["fits", "d" * 10_000], truncate=True)
    prompt = engine_of(reranker).prompts[-1]
    assert len(prompt) == RERANKER.max_context_tokens - 1
    assert bytes(prompt).decode().endswith("ddd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("info", [EMBEDDER, RERANKER, INFO], ids=lambda info: info.task)
def test_methods_of_another_task_are_unimplemented(info):
    with retrieving(info) as server, Client(server.target) as client:
        assert client.model_info().task == info.task
        assert client.model_info().embedding_dimensions == (DIMENSIONS if info is EMBEDDER else 0)
        calls = {
            "embed": lambda: client.embed(["a"]),
            "rerank": lambda: (client.rerank("a", ["b"]), client.score([("a", "b")])),
            "generate": lambda: client.complete("a"),
        }
        for task, call in calls.items():
            if task != info.task:
                with pytest.raises(CallError, match=f"started to {info.task} .* can {task}") as caught:
                    call()
                assert caught.value.code is Code.UNIMPLEMENTED
        if info is not INFO:
            with pytest.raises(CallError, match="started to") as caught:
                list(client.chat([{"role": "user", "content": "hi"}]))
            assert caught.value.code is Code.UNIMPLEMENTED


def test_mutated_requests_get_the_status_they_deserve(embedder, reranker):
    """Random bytes in valid requests: the call is answered or refused, and the server goes on."""
    source = random.Random(0)
    embed_request = pb.EmbedRequest(
        inputs=[pb.EmbedInput(text="abc"), pb.EmbedInput(token_ids=pb.TokenIds(token_ids=[1, 2]))], request_id="r",
        dimensions=3, normalize=False, format=pb.EMBEDDING_FORMAT_BASE64, truncate=True, priority=3, cache_salt="s",
    )  # fmt: skip
    score_request = pb.ScoreRequest(pairs=[pb.ScorePair(query="a", document="b")], instruction="i", request_id="r")
    rerank_request = pb.RerankRequest(query="a", documents=["b", "c"], top_n=1, truncate=True)
    allowed = {Code.OK, Code.INVALID_ARGUMENT}
    calls = (
        (embedder, "Embed", embed_request),
        (reranker, "Score", score_request),
        (reranker, "Rerank", rerank_request),
    )
    for server, method, request in calls:
        with grpc.insecure_channel(server.target) as channel:
            call = channel.unary_stream(f"/meshserve.v1.InferenceService/{method}")
            for _ in range(300):
                data = bytearray(request.SerializeToString())
                for _ in range(source.randint(1, 4)):
                    data[source.randrange(len(data))] = source.randrange(256)
                stream = call(bytes(data), timeout=WAIT_SECONDS)
                with contextlib.suppress(grpc.RpcError):
                    list(stream)
                assert stream.code() in allowed, (bytes(data), stream.details())
        assert server.edge.queues.num_open == 0


def test_a_cancelled_call_ends_all_of_its_groups(embedder):
    engine = engine_of(embedder)
    engine.is_held = True
    with grpc.insecure_channel(embedder.target) as channel:
        inputs = [pb.EmbedInput(text="a")] * 100
        call = pb_grpc.InferenceServiceStub(channel).Embed(pb.EmbedRequest(inputs=inputs, request_id="mine"))
        wait_for(lambda: set(engine.open) == {"mine", "/mine/1"})
        call.cancel()
        wait_for(lambda: not engine.open and embedder.edge.queues.num_open == 0)
    assert sorted(engine.cancels) == [("/mine/1", FinishReason.CANCELLED), ("mine", FinishReason.CANCELLED)]
    wait_for(lambda: embedder.counted("meshserve_requests_total", method="Embed", outcome="cancelled") == 2)


def test_an_aborted_call_ends_as_cancelled(embedder):
    engine = engine_of(embedder)
    engine.is_held = True
    errors: list[CallError] = []

    def call() -> None:
        try:
            embed(embedder.target, inputs=[pb.EmbedInput(text="a")] * 70, request_id="mine")
        except CallError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_for(lambda: len(engine.open) == 2)
    with Client(embedder.target) as client:
        assert client.abort(["mine"]) == 1
    thread.join(WAIT_SECONDS)
    assert [error.code for error in errors] == [Code.CANCELLED] and "was aborted" in str(errors[0])
    wait_for(lambda: not engine.open)


def test_a_deadline_ends_the_call(embedder):
    engine_of(embedder).is_held = True
    with Client(embedder.target) as client, pytest.raises(CallError) as caught:
        client.embed(["a"], timeout_seconds=0.2)
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    [options] = engine_of(embedder).options
    assert 0 < options.timeout_seconds <= 0.2
    wait_for(lambda: [reason for _, reason in engine_of(embedder).cancels] == [FinishReason.DEADLINE])


def test_a_deadline_that_the_engine_notices(embedder):
    engine = engine_of(embedder)
    engine.is_held = True
    caught: list[CallError] = []

    def call() -> None:
        try:
            embed(embedder.target, request_id="mine")
        except CallError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_for(lambda: bool(engine.open))
    engine.release("mine", FinishReason.DEADLINE)
    thread.join(WAIT_SECONDS)
    assert [error.code for error in caught] == [Code.DEADLINE_EXCEEDED]


def test_an_error_of_the_model_is_internal(embedder, monkeypatch):
    monkeypatch.setattr(engine_of(embedder), "release", lambda *_: None)
    with grpc.insecure_channel(embedder.target) as channel, call_errors(), pytest.raises(CallError) as caught:
        call = pb_grpc.InferenceServiceStub(channel).Embed(
            pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], request_id="mine"), timeout=WAIT_SECONDS
        )
        wait_for(lambda: bool(engine_of(embedder).open))
        monkeypatch.undo()
        engine_of(embedder).release("mine", FinishReason.ERROR)
        with call_errors():
            list(call)
    assert caught.value.code is Code.INTERNAL


TOKENS = """
[tenants.small]
tokens = [{ sha256 = "%s" }]
max_tokens = 100
max_requests = 1
"""


def test_quotas_and_salts_of_tenants(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS % hashlib.sha256(b"secret").hexdigest())
    with retrieving(EMBEDDER, path) as server:
        engine = engine_of(server)
        with Client(server.target, token="secret") as client:
            client.embed(["a"] * 40)  # 80 tokens
            assert {options.tenant for options in engine.options} == {"small"}
            assert engine.options[0].cache_salt  # the tenant's own
            with pytest.raises(CallError, match="tokens in flight would be 102") as caught:
                client.embed(["a"] * 51)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            engine.is_held = True
            thread = threading.Thread(target=client.embed, args=(["b"],))
            thread.start()
            wait_for(lambda: bool(engine.open))
            with pytest.raises(CallError, match="requests in flight would be 2"):
                client.embed(["c"])
            engine.release(*engine.open)
            thread.join(WAIT_SECONDS)
        with Client(server.target) as nobody, pytest.raises(CallError) as caught:
            nobody.embed(["a"])
        assert caught.value.code is Code.UNAUTHENTICATED


def test_the_queue_is_checked_before_a_request_is_read(embedder):
    engine_of(embedder).num_places = 0
    for method in ("Embed", "Score", "Rerank"):
        with grpc.insecure_channel(embedder.target) as channel, call_errors():
            call = channel.unary_stream(f"/meshserve.v1.InferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(b"\xff no message", timeout=WAIT_SECONDS))
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED


async def _of_asyncio(target: str) -> np.ndarray:
    async with AsyncClient(target) as client:
        return await client.embed(["abc"], normalize=False)


def test_the_asyncio_client(embedder, reranker):
    np.testing.assert_array_equal(asyncio.run(_of_asyncio(embedder.target)), [expected("abc")])

    async def rerank() -> tuple[list, np.ndarray]:
        async with AsyncClient(reranker.target) as client:
            return await client.rerank("q", ["a", "bb"], top_n=1), await client.score([("q", "bb")])

    ranked, scores = asyncio.run(rerank())
    assert [result.index for result in ranked] == [1]
    assert ranked[0].score == scores[0]
