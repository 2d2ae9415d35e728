"""Embed, Score and Rerank with adapters, with an engine whose results are easy to predict."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from meshserve.runtime.client.client import CallError, Client
from tests.runtime.fake_adapters import FakeCatalog, write_adapter
from tests.runtime.loopback import Running

from .test_retrieval_methods import EMBEDDER, RERANKER, engine_of, retrieving

Code = grpc.StatusCode


@pytest.fixture
def embedder() -> Iterator[Running]:
    with retrieving(EMBEDDER) as server:
        yield server


@pytest.fixture
def reranker() -> Iterator[Running]:
    with retrieving(RERANKER) as server:
        yield server


def test_every_method_takes_an_adapter(embedder, reranker):
    for server in (embedder, reranker):
        engine_of(server).adapters = FakeCatalog("law")
    with Client(embedder.target) as client:
        client.embed(["a", "b"], adapter="law")
        client.embed(["a"])
        with pytest.raises(CallError, match="there are law") as caught:
            client.embed(["a"], adapter="other")
    assert caught.value.code is Code.NOT_FOUND
    assert [options.adapter for options in engine_of(embedder).options] == ["law", ""]
    with Client(reranker.target) as client:
        client.score([("q", "d")], adapter="law")
        client.rerank("q", ["d"], adapter="law")
    assert [options.adapter for options in engine_of(reranker).options] == ["law", "law"]


def test_all_results_of_a_call_are_of_one_adapter(embedder, tmp_path):
    engine, catalog = engine_of(embedder), FakeCatalog("law")
    engine.adapters, submit = catalog, engine.submit_prompts
    directory = write_adapter(tmp_path / "new")

    def submit_and_replace(*arguments: Any) -> None:
        submit(*arguments)
        catalog.load("law", str(directory), replaces=True)

    engine.submit_prompts = submit_and_replace  # type: ignore[method-assign]
    with Client(embedder.target) as client:
        client.embed(["a"] * 64, adapter="law")  # one group
        engine.adapters = catalog = FakeCatalog("law")
        with pytest.raises(CallError, match="it was replaced") as caught:
            client.embed(["a"] * 640, adapter="law")
    assert caught.value.code is Code.FAILED_PRECONDITION
