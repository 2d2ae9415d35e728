"""Routes about the server and its model: models, health, version, and the conversion between text and tokens."""

import time
from typing import TYPE_CHECKING, Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import UnavailableFeatureError
from ..api.versions import installed_version
from ..server.adapter_choice import usable_adapters
from ..server.edge import Edge
from ..text.tokenizer import NEEDS_TOKENIZER
from .chat_call import conversation_of
from .fields import COMMON, Field, Kind, checked_body, honoured, neutral, required, whole_numbers
from .generation import adapter_of
from .http_call import HttpCall
from .json_text import in_pieces
from .token_logprobs import token_text

if TYPE_CHECKING:
    from aiohttp import web

TOKENIZE: dict[str, Field] = {
    **COMMON,
    "prompt": honoured(Kind.TEXT),
    "messages": honoured(Kind.LIST),
    "tools": honoured(Kind.LIST),
    "add_generation_prompt": honoured(Kind.BOOLEAN),
    "continue_final_message": honoured(Kind.BOOLEAN),
    "chat_template_kwargs": honoured(Kind.OBJECT),
    "enable_thinking": honoured(Kind.BOOLEAN),
    "return_token_strs": honoured(Kind.BOOLEAN),
    "add_special_tokens": neutral("Qwen3's tokenizers add none"),
}
DETOKENIZE: dict[str, Field] = {**COMMON, "tokens": honoured(Kind.LIST)}


class Information:
    """The routes of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge
        self._created = int(time.time())

    async def models(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /v1/models`: the served model, and the adapters that the caller may use."""
        from aiohttp import web

        backend, _ = self._edge.serving()
        info = backend.info
        tenant = self._edge.access.tenant(call.invocation_metadata())
        model = {
            "id": info.name, "object": "model", "created": self._created, "owned_by": "meshserve", "root": info.name,
            "parent": None, "max_model_len": info.max_context_tokens,
        }  # fmt: skip
        adapters = [
            {**model, "id": each.name, "parent": info.name} for each in usable_adapters(backend.engine.adapters, tenant)
        ]
        return web.json_response({"object": "list", "data": [model, *adapters]})

    async def health(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /health`: 200 while requests are accepted."""
        from aiohttp import web

        is_ready = self._edge.state == pb.SERVER_STATE_READY
        return web.json_response({"status": pb.ServerState.Name(self._edge.state)}, status=200 if is_ready else 503)

    async def version(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /version`: the version of meshserve."""
        from aiohttp import web

        return web.json_response({"version": installed_version()})

    async def tokenizer_info(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`GET /tokenizer_info`: what harnesses need of the tokenizer beside `/tokenize` and `/detokenize`."""
        from aiohttp import web

        backend, _ = self._edge.serving()
        tokenizer = backend.tokenizer
        if not tokenizer.has_text:
            raise UnavailableFeatureError(f"tokenizer_info {NEEDS_TOKENIZER}")
        own = [token_id for token_id, files in tokenizer.eos_files.items() if "tokenizer_config.json" in files]
        ends = own or sorted(tokenizer.eos_token_ids)
        info = {
            "eos_token": token_text(tokenizer, ends[0]) if ends else None, "bos_token": None, "pad_token": None,
            "chat_template": tokenizer.chat_template or None, "model_max_length": backend.info.max_context_tokens,
        }  # fmt: skip
        return web.json_response(info)

    async def tokenize(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /tokenize`: the tokens of a text or a conversation."""
        from aiohttp import web

        fields = checked_body(body, TOKENIZE)
        backend, intake = self._edge.serving()
        tenant = self._edge.access.tenant(call.invocation_metadata())
        adapter_of(backend, tenant, fields.get("model"))  # adapters have the tokenizer of their model

        def written(token_ids: tuple[int, ...]) -> str:
            answer = {"count": len(token_ids), "max_model_len": backend.info.max_context_tokens, "tokens": token_ids}
            if fields.get("return_token_strs"):
                answer["token_strs"] = [token_text(backend.tokenizer, token_id) for token_id in token_ids]
            return in_pieces(answer)

        with self._edge.in_flight("/tokenize", call.request_id, tenant):
            if "messages" in fields:
                conversation, variables = await call.apart.run(conversation_of, fields)
                text = await intake.tokens_of_chat(conversation, variables, tenant.name, written)
            else:
                text = await intake.tokens_of_text(required(fields, "prompt"), tenant.name, written)
        return web.Response(text=text, content_type="application/json")

    async def detokenize(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /detokenize`: the text of tokens."""
        from aiohttp import web

        fields = checked_body(body, DETOKENIZE)
        backend, intake = self._edge.serving()
        tenant = self._edge.access.tenant(call.invocation_metadata())
        adapter_of(backend, tenant, fields.get("model"))  # adapters have the tokenizer of their model
        token_ids = await call.apart.run(whole_numbers, "tokens", required(fields, "tokens"))
        with self._edge.in_flight("/detokenize", call.request_id, tenant):
            return web.json_response({"prompt": await intake.detokenize(token_ids, tenant.name)})
