"""`POST /v1/embeddings`, `/v1/score` and `/v1/rerank`: of embedding and reranking models."""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError
from ..api.shown import shown
from ..server.edge import Edge
from ..server.retrieval_methods import RetrievalMethods
from .fields import COMMON, Field, Kind, checked_body, honoured, refused, required, whole_numbers
from .generation import adapter_of
from .http_call import HttpCall
from .whole_answers import answered

if TYPE_CHECKING:
    from aiohttp import web

_SHARED: dict[str, Field] = {
    "priority": honoured(Kind.INTEGER),
    "cache_salt": honoured(Kind.TEXT),
    "instruction": honoured(Kind.TEXT, "of the model's prompt format"),
    "truncate": honoured(Kind.BOOLEAN, "cut texts that are too long, instead of refusing them"),
}
EMBEDDINGS: dict[str, Field] = COMMON | _SHARED | {
    "input": honoured(Kind.TEXT_OR_LIST, "text, token ids, or a list of either"),
    "encoding_format": honoured(Kind.TEXT, "float or base64"),
    "dimensions": honoured(Kind.INTEGER),
    "normalize": honoured(Kind.BOOLEAN),
    "input_type": refused("use instruction"),
}  # fmt: skip
SCORE: dict[str, Field] = COMMON | _SHARED | {
    "text_1": honoured(Kind.TEXT_OR_LIST, "one query, or as many as there are documents"),
    "text_2": honoured(Kind.TEXT_OR_LIST, "documents"),
}  # fmt: skip
RERANK: dict[str, Field] = COMMON | _SHARED | {
    "query": honoured(Kind.TEXT),
    "documents": honoured(Kind.LIST, "texts, or objects with a text"),
    "top_n": honoured(Kind.INTEGER),
    "return_documents": honoured(Kind.BOOLEAN),
}  # fmt: skip


class Collected(HttpCall):
    """A call whose messages are collected, as a gRPC context would send them."""

    def __init__(self, call: HttpCall):
        self.__dict__ |= call.__dict__
        self.messages: list[Any] = []

    async def write(self, message: Any) -> None:
        """Takes a message."""
        self.messages.append(message)


class Retrieval:
    """The routes of one edge."""

    def __init__(self, edge: Edge):
        self._edge, self._methods = edge, RetrievalMethods(edge)

    async def embeddings(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers `/v1/embeddings`."""
        fields, adapter = self._fields(body, EMBEDDINGS, call)
        form = fields.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise InvalidRequestError("encoding_format", f"got {shown(form, 40)}; allowed are float and base64.")
        asked = pb.EmbedRequest(
            request_id=call.request_id, inputs=await call.apart.run(_inputs, required(fields, "input")),
            format=pb.EMBEDDING_FORMAT_FLOAT32, adapter=adapter,
            **_given(fields, "instruction", "dimensions", "normalize", "truncate", "priority", "cache_salt"),
        )  # fmt: skip
        collected = Collected(call)
        await self._methods.embed(asked, collected)
        found = sorted((each for message in collected.messages for each in message.embeddings), key=_index)

        def whole() -> dict[str, Any]:
            vectors = [(each.index, _vector(each.data, form)) for each in found]
            data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in vectors]
            return {"object": "list", "data": data, "model": self._name(adapter), "usage": _usage(found)}

        return await answered(call, whole, is_long=True)

    async def score(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers `/v1/score`, as vLLM does."""
        from aiohttp import web

        fields, adapter = self._fields(body, SCORE, call)
        queries, documents = [
            await call.apart.run(_texts, name, required(fields, name)) for name in ("text_1", "text_2")
        ]
        queries = queries * len(documents) if len(queries) == 1 else queries
        if len(queries) != len(documents):
            message = f"has {len(queries)} texts and text_2 {len(documents)}; send one text, or as many."
            raise InvalidRequestError("text_1", message)
        pairs = [pb.ScorePair(query=query, document=text) for query, text in zip(queries, documents, strict=True)]
        asked = pb.ScoreRequest(
            request_id=call.request_id, pairs=pairs, adapter=adapter,
            **_given(fields, "instruction", "truncate", "priority", "cache_salt"),
        )  # fmt: skip
        collected = Collected(call)
        await self._methods.score(asked, collected)
        found = sorted((each for message in collected.messages for each in message.scores), key=_index)
        data = [{"index": each.index, "object": "score", "score": each.score} for each in found]
        answer = {"id": f"score-{call.request_id}", "object": "list", "model": self._name(adapter), "data": data}
        return web.json_response(answer | {"usage": _usage(found)})

    async def rerank(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers `/v1/rerank`, in the form of Jina and Cohere."""
        from aiohttp import web

        fields, adapter = self._fields(body, RERANK, call)
        documents = await call.apart.run(_texts, "documents", required(fields, "documents"))
        asked = pb.RerankRequest(
            request_id=call.request_id, query=required(fields, "query"), documents=documents, adapter=adapter,
            **_given(fields, "instruction", "top_n", "truncate", "priority", "cache_salt"),
        )  # fmt: skip
        answer = await self._methods.rerank(asked, Collected(call))
        results: list[dict[str, Any]] = [
            {"index": each.index, "relevance_score": each.score} for each in answer.results
        ]
        if fields.get("return_documents", True):
            results = [each | {"document": {"text": documents[each["index"]]}} for each in results]
        whole = {"id": f"rerank-{call.request_id}", "model": self._name(adapter), "results": results}
        return web.json_response(whole | {"usage": _usage(answer.results)})

    def _fields(self, body: Any, fields: Mapping[str, Field], call: HttpCall) -> tuple[dict[str, Any], str]:
        """Returns the fields that are set, and the adapter that the body's model names."""
        found = checked_body(body, fields)
        backend, _ = self._edge.serving()
        tenant = self._edge.access.tenant(call.invocation_metadata())
        return found, adapter_of(backend, tenant, found.get("model"))

    def _name(self, adapter: str) -> str:
        backend, _ = self._edge.serving()
        return adapter or backend.info.name


def _given(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        if type(fields.get(name)) is int and fields[name] < 0 and name != "priority":
            raise InvalidRequestError(name, f"got {fields[name]}; allowed is 1 or more.")
    return {name: fields[name] for name in names if name in fields}


def _index(each: Any) -> int:
    return int(each.index)


def _usage(found: Sequence[Any]) -> dict[str, Any]:
    num_tokens = sum(each.num_prompt_tokens for each in found)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _vector(data: bytes, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(data).decode()
    return np.frombuffer(data, "<f4").tolist()


def _inputs(value: Any) -> list[pb.EmbedInput]:
    """Returns the inputs of a body: one text, one list of tokens, or a list of either."""
    if isinstance(value, str) or (value and type(value[0]) is int):
        value = [value]
    found = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            found.append(pb.EmbedInput(text=item))
        elif isinstance(item, list):
            token_ids = whole_numbers(f"input[{index}]", item)
            if any(token_id > 2**31 for token_id in token_ids):
                raise InvalidRequestError(f"input[{index}]", "has a token id that is not in the vocabulary.")
            found.append(pb.EmbedInput(token_ids=pb.TokenIds(token_ids=token_ids)))
        else:
            raise InvalidRequestError(
                f"input[{index}]", f"got {shown(item, 40)}; allowed is text or a list of token ids."
            )
    return found


def _texts(name: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    texts: list[str] = []
    for index, item in enumerate(values):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}[{index}]", f"got {shown(text, 40)}; allowed is text.")
        texts.append(text)
    return texts
