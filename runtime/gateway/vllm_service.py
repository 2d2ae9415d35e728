"""Implements `vllm.grpc.engine.VllmEngine` for gateways such as `smg`, which serve OpenAI's HTTP API on top of it.

The service has its own port, because these gateways use neither tokens nor TLS: bind it to loopback or to a network
that only the gateway can reach. The messages come from the package smg-grpc-proto (the extra `gateway`) and are not
part of meshserve's own API. Requests for unsupported features are refused; no field is ignored silently.
"""

import asyncio
import functools
import hashlib
import io
import time
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from meshserve.sharding.guarded_files import contained, read_guarded

from ..api import proto_codec
from ..api.constraint import CONSTRAINT_KINDS, Constraint
from ..api.errors import ConfigError, EngineStoppedError, InvalidRequestError, UnavailableFeatureError
from ..api.request import Output, RequestOptions, TokenLogprobs
from ..api.sampling_params import MAX_SEED, SamplingParams, params_table
from ..api.tasks import GENERATE
from ..api.tenants import LOCAL
from ..server.edge import Backend, CheckedRequest, Edge, checked_request_id, on_behalf_of
from ..server.grpc_status import abort
from ..server.output_queue import join
from ..server.retrieval_methods import RetrievalMethods
from .kv_event_stream import stream_events
from .vllm_native_service import add_native

_GENERATE_FIELDS = frozenset("request_id tokenized text sampling_params stream".split())
_NONE: Mapping[str, Any] = MappingProxyType({})
_CHUNK_BYTES = 65_536
_MAX_FILE_BYTES = 256 << 20
_METHOD, _EMBED_METHOD = "VllmEngine.Generate", "VllmEngine.Embed"  # in logs and metrics
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_FINISH_WORDS = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}


def add_gateway(edge: Edge, server: grpc.aio.Server) -> None:
    """Adds the service to `server`.

    Raises:
      ConfigError: The package smg-grpc-proto is not installed.
    """
    try:
        from smg_grpc_proto import vllm_engine_pb2 as pb
        from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
        from smg_grpc_proto.generated import common_pb2
    except ImportError as error:
        raise ConfigError(f"--gateway-port needs meshserve with the extra [gateway]: {error}.") from error
    add_native(edge, server)
    servicer = type("VllmEngine", (_VllmEngine, pb_grpc.VllmEngineServicer), {})
    pb_grpc.add_VllmEngineServicer_to_server(servicer(edge, pb, common_pb2), server)


def refuse_others(request: Any) -> None:
    """Refuses requests with fields that this server does not support, such as images.

    Raises:
      InvalidRequestError: An unsupported field is set.
    """
    for descriptor, value in request.ListFields():
        if descriptor.name not in _GENERATE_FIELDS and value:
            raise InvalidRequestError(descriptor.name, "this server has no such option; leave it out.")


def sampling_params(message: Any, defaults: Mapping[str, Any] = _NONE) -> SamplingParams:
    """Returns the sampling parameters, with `defaults` for fields that were not sent, or 0 except for the temperature.

    Raises:
      InvalidRequestError: A value is out of range or not supported.
    """
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequestError("truncate_prompt_tokens", "this server has no such option; leave it out.")
    fields: dict[str, Any] = {**defaults, "constraint": _constraint(message)}
    fields["skip_special_tokens"] = message.skip_special_tokens  # always sent: a false means that
    theirs = message.DESCRIPTOR.fields_by_name
    for name, param in params_table().items():
        field = theirs.get(param.gateway_name or name)
        if field is not None:
            value = getattr(message, field.name)
            if message.HasField(field.name) if field.has_presence else value:
                fields[name] = proto_codec.plain(value)
    if "seed" in fields:
        fields["seed"] %= MAX_SEED + 1  # the protocol allows negative seeds
    return SamplingParams(**fields)


def _constraint(message: Any) -> Constraint | None:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    if kind == "choice":
        return Constraint(kind=kind, choices=tuple(message.choice.choices))
    if kind not in CONSTRAINT_KINDS:
        raise InvalidRequestError(kind, f"this server has no such option; it has {', '.join(CONSTRAINT_KINDS)}.")
    return Constraint(kind=kind, text="" if kind == "json_object" else getattr(message, kind))


class _VllmEngine:
    """The methods of the service, without the generated base class, which exists only if the extra is installed."""

    def __init__(self, edge: Edge, pb: Any, common: Any):
        self.edge = edge
        self._retrieval = RetrievalMethods(edge)
        self.pb = pb
        self.common = common
        self.started = time.monotonic()

    async def backend(self, context: Any) -> Backend:
        if self.edge.backend is None:
            await abort(context, EngineStoppedError(f"the server is starting ({self.edge.progress})"))
        return self.edge.backend

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        try:
            self.edge.serving()
        except EngineStoppedError as error:
            return self.pb.HealthCheckResponse(healthy=False, message=str(error))
        return self.pb.HealthCheckResponse(healthy=self.edge.failure is None, message=self.edge.failure or "")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        backend = await self.backend(context)
        info = backend.info
        return self.pb.GetModelInfoResponse(
            model_path=info.name,  # not a directory, so the gateway asks for the tokenizer
            served_model_name=info.name,
            is_generation=info.task == GENERATE,
            max_context_length=info.max_context_tokens,
            max_req_input_len=info.max_context_tokens - 1,
            vocab_size=info.vocab_size,
            model_type="qwen3",
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info = (await self.backend(context)).info
        return self.pb.GetServerInfoResponse(
            active_requests=self.edge.queues.num_open,
            uptime_seconds=time.monotonic() - self.started,
            server_type="meshserve",
            data_parallel_size=1,
            block_size=info.page_size_tokens,
            model_dtype=info.dtype,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        backend = await self.backend(context)
        load, page_size = backend.engine.load(), backend.info.page_size_tokens
        num_used_pages = load.num_pages - load.num_free_pages
        row = self.pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=num_used_pages * page_size,
            max_total_num_tokens=load.num_pages * page_size,
            token_usage=num_used_pages / max(load.num_pages, 1),
        )
        now = datetime.now(UTC).isoformat()
        return self.pb.GetLoadsResponse(
            timestamp=now, version=backend.info.server_version, dp_rank_count=1, loads=[row]
        )

    async def FlushCache(self, request: Any, context: Any) -> Any:
        backend = await self.backend(context)
        num_pages = await asyncio.to_thread(backend.engine.flush_prefix_cache)
        return self.common.FlushCacheResponse(success=True, message=f"{num_pages} pages flushed")

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        try:
            directory = (await self.backend(context)).tokenizer.directory
        except UnavailableFeatureError as error:
            await abort(context, error)
        data, digest = await asyncio.to_thread(_tokenizer_zip, directory)
        for start in range(0, len(data), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(data)
            chunk = data[start : start + _CHUNK_BYTES]
            await context.write(self.common.GetTokenizerChunk(data=chunk, sha256=digest if is_last else ""))

    async def Abort(self, request: Any, context: Any) -> Any:
        try:
            self.edge.abort_requests(request.request_ids, LOCAL)
        except InvalidRequestError as error:
            await abort(context, error)
        return self.pb.AbortResponse()

    async def Generate(self, request: Any, context: Any) -> None:
        began = time.monotonic()
        try:
            request_id = checked_request_id(request.request_id or None)
            refuse_others(request)
            options = on_behalf_of(LOCAL, RequestOptions(n=request.sampling_params.n or 1))
            with self.edge.in_flight(_METHOD, request_id, LOCAL) as count_tokens:
                backend, intake = self.edge.serving()
                if request.WhichOneof("input") == "tokenized":
                    token_ids = intake.checked("tokenized", request.tokenized.input_ids)
                else:
                    token_ids = intake.checked("text", await intake.encode(request.text, LOCAL.name))
                params = sampling_params(request.sampling_params, backend.info.default_sampling)
                writer = _Writer(self.pb, request.stream, token_ids[0], context)
                asked = CheckedRequest(request_id, token_ids, params, options, began, LOCAL, count_tokens)
                await self.edge.stream(_METHOD, asked, writer.write, context)
        except Exception as error:
            await abort(context, error)

    async def Embed(self, request: Any, context: Any) -> Any:
        try:
            request_id, token_ids = checked_request_id(request.request_id or None), request.tokenized.input_ids
            embedding = (await self._retrieval.embed_tokens(_EMBED_METHOD, request_id, token_ids, context)).tolist()
            return self.pb.EmbedResponse(
                embedding=embedding, prompt_tokens=len(token_ids), embedding_dim=len(embedding)
            )
        except Exception as error:
            await abort(context, error)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        feed = (await self.backend(context)).kv_events
        if feed is not None:
            await stream_events(feed, request.start_sequence_number, self.common, context)
        else:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server was started without --kv-events")

    async def StartProfile(self, request: Any, context: Any) -> None:
        """Not supported, like the next one; gateways work without them."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server has no such method")

    StopProfile = StartProfile


class _Writer:
    """Writes the outputs of one call; outputs of different samples are interleaved as they arrive."""

    def __init__(self, pb: Any, is_streaming: bool, first_token_id: int, context: Any):
        self._pb = pb
        self._first_token_id = first_token_id  # first token of the prompt; it has no log-probability
        self._is_streaming = is_streaming
        self._context = context
        self._held: defaultdict[int, list[Output]] = defaultdict(list)  # outputs not yet sent, by sample

    async def write(self, output: Output) -> None:
        pb, index, num_new = self._pb, output.index, len(output.token_ids)
        self._held[index].append(output)
        if self._is_streaming and num_new:
            # The first message of a sample contains all log-probabilities of the prompt.
            held = self._take(index)
            chunk = pb.GenerateStreamChunk(
                token_ids=held.token_ids, completion_tokens=num_new, index=index, **self._logprobs(held)
            )
            await self._context.write(pb.GenerateResponse(chunk=chunk))
        if output.finish_reason is not None:
            held = self._take(index)
            complete = pb.GenerateComplete(
                output_ids=held.token_ids,
                **self._logprobs(held),
                finish_reason=_FINISH_WORDS[output.finish_reason.value],
                index=index,
                prompt_tokens=output.num_prompt_tokens,
                completion_tokens=output.num_output_tokens,
                cached_tokens=output.num_cached_tokens,
            )
            await self._context.write(pb.GenerateResponse(complete=complete))

    def _take(self, index: int) -> Output:
        held = self._held.pop(index, ())
        return join(held) if held else Output(request_id="")

    def _logprobs(self, output: Output) -> dict[str, Any]:
        pb, found = self._pb, {}
        if output.logprobs:
            found["output_logprobs"] = pb.OutputLogProbs(
                token_logprobs=[position.logprob for position in output.logprobs],
                token_ids=[position.token_id for position in output.logprobs],
                top_logprobs=list(map(self._top, output.logprobs)),
            )
        if positions := output.prompt_logprobs:
            values = (pb.InputTokenLogProb(value=position.logprob) for position in positions)
            found["input_logprobs"] = pb.InputLogProbs(
                token_logprobs=[pb.InputTokenLogProb(), *values],
                token_ids=[self._first_token_id, *(position.token_id for position in positions)],
                top_logprobs=[pb.TopLogProbs(), *map(self._top, positions)],
            )
        return found

    def _top(self, position: TokenLogprobs) -> Any:
        ids, values = zip(*position.top, strict=True) if position.top else ((), ())
        return self._pb.TopLogProbs(values=values, token_ids=ids)


@functools.lru_cache(maxsize=1)  # compressing takes a second of a core
def _tokenizer_zip(directory: Path) -> tuple[bytes, str]:
    """Returns the files of a tokenizer and their SHA-256 digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if (directory / name).is_file():
                archive.writestr(name, read_guarded(contained(directory, name), _MAX_FILE_BYTES).data)
    return buffer.getvalue(), hashlib.sha256(buffer.getbuffer()).hexdigest()
