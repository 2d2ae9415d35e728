"""Unmodified OpenAI clients that get embeddings, and callers of the routes beside them."""

import base64
import http.client
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshserve.runtime.client.client import Client
from tests import checkpoints

from .openai_server import Server, serving
from .waiting import WAIT_SECONDS, wait_for

openai = pytest.importorskip("openai", reason="comes with the test extra")
TEXTS = ["The sea", "a longer text, " * 4, "x"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("embeddings")
    model = checkpoints.save_embedding_checkpoint(root / "embedder")
    with serving(root / "log", f"--model={model}", "--max-step-tokens=64") as server:
        yield server


@pytest.fixture
def vectors(server: Server) -> np.ndarray:
    """The embeddings that the server's own client gets."""
    with Client(server.target) as client:
        return client.embed(TEXTS)


def vector(embedding: Any) -> np.ndarray:
    """Returns an embedding as numbers; the client decodes base64 only if it asked for it on its own."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding)


@pytest.mark.parametrize("format", ["float", "base64"])
def test_embeddings_of_an_openai_client(server: Server, vectors, format):
    """A list of texts gives a list of vectors, in its order."""
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        done = client.embeddings.create(model="embedder", input=TEXTS, encoding_format=format)
        assert [each.index for each in done.data] == [0, 1, 2]
        np.testing.assert_allclose([vector(each.embedding) for each in done.data], vectors, rtol=0, atol=1e-6)
        one = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format=format)
        np.testing.assert_allclose(vector(one.data[0].embedding), vectors[0], rtol=0, atol=1e-6)
        assert one.usage.prompt_tokens == one.usage.total_tokens > 0
        short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8)
        np.testing.assert_allclose(short.data[0].embedding, vectors[0][:8] / np.linalg.norm(vectors[0][:8]), atol=1e-5)


def test_tokens_are_embedded_as_they_are(server: Server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client, Client(server.target) as ours:
        expected = ours.embed([[1, 2, 3, 256], [4, 256]])
        done = client.embeddings.create(model="embedder", input=[[1, 2, 3, 256], [4, 256]])
        np.testing.assert_allclose([each.embedding for each in done.data], expected, rtol=0, atol=1e-6)


def test_an_embedding_model_does_not_chat(server: Server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="started to embed"):
            client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="embedder", input="a", dimensions=-1)


def leave(server: Server, path: str, body: dict[str, Any]) -> None:
    """Asks, and leaves before the answer."""
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    connection.close()


def test_callers_who_leave_leave_nothing(server: Server, vectors):
    for _ in range(20):
        leave(server, "/v1/embeddings", {"input": ["a longer text, " * 6] * 400})
    with Client(server.target) as client:
        wait_for(lambda: client.server_info().num_open_requests == 0 and client.load().num_running == 0)
        load = client.load()
        assert (load.num_waiting, load.num_free_pages) == (0, load.num_pages)
        np.testing.assert_allclose(client.embed(TEXTS), vectors, rtol=0, atol=1e-6)
    assert "ERROR" not in server.log.read_text()


def test_documents_are_scored_and_ranked(tmp_path: Path):
    model = checkpoints.save_reranker_checkpoint(tmp_path / "reranker")
    documents = ["the sea", "a king", "x"]
    with serving(tmp_path / "log", f"--model={model}", "--task=rerank", "--max-step-tokens=64") as server:

        def post(path: str, body: dict[str, Any]) -> Any:
            request = urllib.request.Request(server.url + path, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return json.load(answer)

        with Client(server.target) as client:
            scores = client.score([("sea", document) for document in documents])
        found = post("/score", {"text_1": "sea", "text_2": documents})
        assert [each["score"] for each in found["data"]] == pytest.approx(list(scores), abs=1e-6)
        ranked = post("/rerank", {"query": "sea", "documents": documents, "top_n": 2})["results"]
        best = sorted(range(3), key=lambda index: -scores[index])[:2]
        assert [each["index"] for each in ranked] == best and ranked[0]["document"]["text"] == documents[best[0]]
