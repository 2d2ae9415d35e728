"""Tests an unmodified OpenAI client that gets embeddings.

meshserve (VllmEngine)  <-  smg (HTTP)  <-  openai
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from meshserve.runtime.client.client import Client
from meshserve.runtime.commands.local_cluster import reserved_port
from tests import checkpoints

from .openai_server import serving
from .waiting import WAIT_SECONDS

openai = pytest.importorskip("openai", reason="needs the extra gateway-test")
pytest.importorskip("smg_grpc_proto", reason="needs the extra gateway")
SMG = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
pytestmark = pytest.mark.skipif(SMG is None, reason="smg comes with the extra gateway")
TEXTS = ["The sea", "a longer text, " * 4, "x"]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """The URL of OpenAI's API, the server's own address, and the one that the gateway calls."""
    root = tmp_path_factory.mktemp("gateway")
    model = checkpoints.save_embedding_checkpoint(root / "embedder")
    with reserved_port() as port:
        flags = (f"--model={model}", f"--port={port}", "--max-step-tokens=64")
        with serving(root / "log", *flags) as server:
            yield server.url, f"127.0.0.1:{port}", server.target


@pytest.fixture
def vectors(addresses: tuple[str, str, str]) -> np.ndarray:
    """The embeddings that the server's own client gets."""
    with Client(addresses[1]) as client:
        return client.embed(TEXTS)


@pytest.mark.parametrize("format", ["float", "base64"])
def test_embeddings_of_an_openai_client(addresses, vectors, format):
    with openai.OpenAI(base_url=addresses[0], api_key="none", max_retries=0) as client:
        for text, vector in zip(TEXTS, vectors, strict=True):
            done = client.embeddings.create(model="embedder", input=text, encoding_format=format)
            assert done.usage.prompt_tokens in (len(text), len(text) + 1)  # with or without the end token
            found = done.data[0].embedding
            np.testing.assert_allclose(found, vector, rtol=0, atol=1e-6)


def test_generation_is_refused(addresses):
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

    with grpc.insecure_channel(addresses[2]) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        assert not stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_SECONDS).is_generation
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="a"), timeout=WAIT_SECONDS))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_tokens_with_and_without_the_end_token(addresses, vectors):
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

    with Client(addresses[1]) as client, grpc.insecure_channel(addresses[2]) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        ids = list(range(5))
        expected = client.embed([[*ids, 256]])[0]
        for tokens in (ids, [*ids, 256]):
            request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=tokens))
            answer = stub.Embed(request, timeout=WAIT_SECONDS)
            np.testing.assert_allclose(answer.embedding, expected, rtol=0, atol=1e-6)
            assert answer.embedding_dim == len(expected)
