"""Tests that Embed takes from the model's files what a call leaves open, with an engine that is easy to predict."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from meshserve.runtime.client.client import Client
from meshserve.runtime.retrieval.embedding_defaults import EmbeddingDefaults
from tests.runtime.loopback import Running

from .test_retrieval_methods import EMBEDDER, END, engine_of, result_of, retrieving


@pytest.fixture
def embedder() -> Iterator[Running]:
    with retrieving(EMBEDDER) as server:
        yield server


def test_what_a_call_leaves_open_is_as_the_models_files_say(embedder: Running):
    edge, engine = embedder.edge, engine_of(embedder)
    defaults = EmbeddingDefaults(prompt="Q: ", dimensions=2, is_normalized=True)
    edge.attach(dataclasses.replace(edge.backend, embedding=defaults))
    whole = result_of((*b"Q: ab", END), "embed")
    plain, instructed = result_of((*b"ab", END), "embed"), result_of((*b"Instruct: I\nQuery:ab", END), "embed")

    def embedded(text: str | tuple[int, ...] = "ab", **fields: Any) -> np.ndarray:
        with Client(embedder.target) as client:
            return client.embed([text], **fields)[0]

    def unit(vector: np.ndarray) -> np.ndarray:
        return vector / np.linalg.norm(vector)

    for found, expected in (
        (embedded(), unit(whole)[:2]),  # shortened behind the module Normalize
        (embedded(dimensions=3), unit(whole[:3])),
        (embedded(normalize=True), unit(whole[:2])),
        (embedded(normalize=False), whole[:2]),
        (embedded(instruction=""), unit(plain)[:2]),
        (embedded(instruction="I"), unit(instructed)[:2]),
        (embedded((*b"ab", END)), unit(plain)[:2]),  # token ids are as they are
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    edge.attach(dataclasses.replace(edge.backend, embedding=EmbeddingDefaults(is_normalized=False)))
    np.testing.assert_allclose(embedded(), plain, rtol=1e-6)
    np.testing.assert_allclose(embedded(dimensions=2), plain[:2], rtol=1e-6)
    np.testing.assert_allclose(embedded(normalize=True), unit(plain), rtol=1e-6)
    assert len(engine.prompts) == 10
