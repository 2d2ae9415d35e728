"""Message conversion of the client for embeddings and scores, which are numpy arrays."""

from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
import numpy as np

from meshserve.protos import inference_pb2 as pb

from .messages import CallError

# Longer lists are sent in several calls, each well below the largest message that servers accept.
_MAX_CALL_INPUTS = 4_096
_MAX_CALL_CHARS = 2**21


class RetrievalFields(TypedDict, total=False):
    """Fields that Embed, Score and Rerank share. An omitted field takes the server's default."""

    instruction: str
    truncate: bool
    priority: int
    cache_salt: str
    adapter: str


class EmbedFields(RetrievalFields, total=False):
    """Fields of EmbedRequest in inference.proto beside the texts."""

    dimensions: int
    normalize: bool


@dataclass(frozen=True)
class Ranked:
    """A document in the order of its relevance."""

    index: int  # in the list that was sent
    score: float  # probability that the document meets the query


def embed_calls(texts: Sequence[str | Sequence[int]], fields: EmbedFields) -> Iterator["RetrievalCall"]:
    """Yields the calls for texts, or their token ids, in order.

    Raises:
      TypeError: `texts` is a single string.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is the string {texts!r}; it takes a list of texts.")
    for part in _parts(texts, [len(text) for text in texts]):
        request = pb.EmbedRequest(inputs=map(_input, part), format=pb.EMBEDDING_FORMAT_FLOAT32, **fields)
        yield request, Embeddings(len(part))


def _input(text: str | Sequence[int]) -> pb.EmbedInput:
    return pb.EmbedInput(text=text) if isinstance(text, str) else pb.EmbedInput(token_ids=pb.TokenIds(token_ids=text))


def score_calls(pairs: Sequence[tuple[str, str]], fields: RetrievalFields) -> Iterator["RetrievalCall"]:
    """Yields the calls for pairs of a query and a document, in order."""
    for part in _parts(pairs, [len(query) + len(document) for query, document in pairs]):
        messages = [pb.ScorePair(query=query, document=document) for query, document in part]
        yield pb.ScoreRequest(pairs=messages, **fields), Scores(len(part))


def _parts(items: Sequence[Any], sizes: Sequence[int]) -> Iterator[Sequence[Any]]:
    """Yields consecutive parts of a list, each of limited size unless it has one item."""
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first >= _MAX_CALL_INPUTS or total + size > _MAX_CALL_CHARS):
            yield items[first:index]
            first, total = index, 0
        total += size
    if items:
        yield items[first:]


class Embeddings:
    """Collects the embeddings of a call."""

    def __init__(self, num_texts: int):
        self._rows: list[np.ndarray | None] = [None] * num_texts

    def add(self, response: pb.EmbedResponse) -> None:
        for embedding in response.embeddings:
            self._rows[embedding.index] = np.frombuffer(embedding.data, "<f4")

    def array(self) -> np.ndarray:
        """Returns the embeddings [texts, dimensions] float32."""
        rows = [row for row in self._rows if row is not None]
        _check_all(len(rows), len(self._rows))
        return np.stack(rows)


class Scores:
    """Collects the scores of a call."""

    def __init__(self, num_pairs: int):
        self._scores = np.full(num_pairs, np.nan, np.float32)

    def add(self, response: pb.ScoreResponse) -> None:
        for score in response.scores:
            self._scores[score.index] = score.score

    def array(self) -> np.ndarray:
        """Returns the scores [pairs] float32."""
        _check_all(int(np.isfinite(self._scores).sum()), len(self._scores))
        return self._scores


RetrievalCall = tuple[pb.EmbedRequest | pb.ScoreRequest, Embeddings | Scores]


def _check_all(num_found: int, num_wanted: int) -> None:
    if num_found != num_wanted:
        raise CallError(grpc.StatusCode.INTERNAL, f"the stream ended after {num_found} of {num_wanted} results")


def gathered(collected: Embeddings | Scores, responses: Iterable[Any]) -> np.ndarray:
    """Reads a stream to its end and returns the array."""
    for response in responses:
        collected.add(response)
    return collected.array()


async def gathered_async(collected: Embeddings | Scores, responses: AsyncIterable[Any]) -> np.ndarray:
    """Reads a stream to its end and returns the array."""
    async for response in responses:
        collected.add(response)
    return collected.array()


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the arrays of consecutive calls as one; without any call, an empty one."""
    return np.concatenate(parts) if parts else np.zeros((0,), np.float32)


def ranked(response: pb.RerankResponse) -> list[Ranked]:
    """Converts the answer of Rerank."""
    return [Ranked(result.index, result.score) for result in response.results]
