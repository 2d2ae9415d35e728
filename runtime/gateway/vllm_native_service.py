"""Implements `vllm.Inference` and `vllm.Control`, the gRPC API of vLLM's own server, at the gateway port.

Dynamo's sidecar and vllm-router drive engines by it. protos/vllm.proto has the part that is answered; other methods are
UNIMPLEMENTED, and requests that set unsupported fields are refused.
"""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import grpc

from meshserve.protos import vllm_pb2 as pb
from meshserve.protos import vllm_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.constraint import Constraint
from ..api.errors import EngineStoppedError, InvalidRequestError, UnfinishedError
from ..api.request import FinishReason, Output, RequestOptions
from ..api.sampling_params import MAX_SEED, SamplingParams
from ..api.tenants import LOCAL
from ..server.edge import Backend, CheckedRequest, Edge, checked_request_id, on_behalf_of
from ..server.grpc_status import abort

SERVICES = ("vllm.Inference", "vllm.Control")  # whose health is that of the server
_API_VERSION = "vllm"  # by which Dynamo recognises the API
_EVENTS_ENCODING, _EVENTS_SCHEMA = "msgpack", 1
_STREAM, _WHOLE = "vllm.GenerateStream", "vllm.Generate"  # in logs and metrics
_FINISH = {
    FinishReason.STOP: pb.FinishInfo.STOP,
    FinishReason.LENGTH: pb.FinishInfo.LENGTH,
    FinishReason.CANCELLED: pb.FinishInfo.ABORTED,
    FinishReason.DEADLINE: pb.FinishInfo.ABORTED,
}
_UNSUPPORTED = {  # by message; they are refused if they are set
    "": ("truncate_prompt_tokens", "media"),
    "response": ("prompt_logprobs", "prompt_candidates"),
    "kv": ("kv_transfer_params", "ec_transfer_params"),
}
# Fields of vLLM's messages and the parameters of the same meaning; 0 is vLLM's default.
_SAMPLING = {
    "sampling": {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "decoding": {
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "repetition_penalty": "repetition_penalty",
        "logit_bias": "logit_bias",
        "allowed_token_ids": "allowed_token_ids",
    },
    "stopping": {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "stop_token_ids": "stop_token_ids",
        "stop_strings": "stop",
        "include_stop_strings": "include_stop",
        "ignore_eos": "ignore_eos",
    },
}
_CONSTRAINTS: dict[str, Any] = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "json_object": "json_object",
}


def add_native(edge: Edge, server: grpc.aio.Server) -> None:
    """Adds both services to `server`."""
    pb_grpc.add_InferenceServicer_to_server(_Inference(edge), server)
    pb_grpc.add_ControlServicer_to_server(_Control(edge), server)


def refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Refuses requests with fields that this server does not support, such as media.

    Raises:
      InvalidRequestError: An unsupported field is set.
    """
    for part, names in _UNSUPPORTED.items():
        message = getattr(request, part) if part else request
        fields = {descriptor.name: value for descriptor, value in message.ListFields()}
        for name in names:
            if fields.get(name):
                path = f"{part}.{name}" if part else name
                raise InvalidRequestError(path, "this server has no such option; leave it out.")


def sampling_params(request: pb.GenerateRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters, with `defaults` for fields that were not sent or are 0.

    Raises:
      InvalidRequestError: A value is out of range or not supported.
    """
    fields: dict[str, Any] = dict(defaults)
    if request.HasField("temperature"):
        fields["temperature"] = request.temperature
    for part, names in _SAMPLING.items():
        message = getattr(request, part)
        for theirs, ours in names.items():
            if value := getattr(message, theirs):
                fields[ours] = proto_codec.plain(value)
    if request.sampling.HasField("seed"):
        fields["seed"] = request.sampling.seed % (MAX_SEED + 1)  # vLLM allows negative seeds
    response = request.response
    fields["skip_special_tokens"] = not response.HasField("skip_special_tokens") or response.skip_special_tokens
    fields["constraint"] = _constraint(request.decoding)
    if response.HasField("output_candidates"):
        if response.output_candidates.WhichOneof("select") != "top_n":
            raise InvalidRequestError("response.output_candidates", "this server has top_n only.")
        fields["logprobs"] = response.output_candidates.top_n
    elif response.output_logprobs:
        fields["logprobs"] = 0
    return SamplingParams(**fields)


def _constraint(decoding: pb.DecodingParameters) -> Constraint | None:
    kind = decoding.WhichOneof("structured_output")
    if kind is None or (kind == "json_object" and not decoding.json_object):
        return None
    if kind == "choice":
        return Constraint(kind=kind, choices=tuple(decoding.choice.choices))
    if kind not in _CONSTRAINTS:
        raise InvalidRequestError(f"decoding.{kind}", "this server has no such option; leave it out.")
    return Constraint(kind=_CONSTRAINTS[kind], text="" if kind == "json_object" else getattr(decoding, kind))


class _Inference(pb_grpc.InferenceServicer):
    """Generates text."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        await self._answer(_STREAM, request, context.write, context)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        if request.sampling.num_sequences > 1:
            message = f"got {request.sampling.num_sequences}; allowed is 1. Call GenerateStream for more."
            await abort(context, InvalidRequestError("sampling.num_sequences", message))
        whole = pb.GenerateResponse()

        async def add(response: pb.GenerateResponse) -> None:
            whole.outputs.text += response.outputs.text
            response.outputs.ClearField("text")
            num_tokens = whole.outputs.num_tokens + response.outputs.num_tokens
            whole.MergeFrom(response)  # appends to the lists
            whole.outputs.num_tokens = num_tokens

        await self._answer(_WHOLE, request, add, context)
        return whole

    async def _answer(self, method: str, request: pb.GenerateRequest, send: Any, context: Any) -> None:
        began = time.monotonic()
        try:
            request_id = checked_request_id(request.request_id or None)
            refuse_unsupported(request)
            salt = uuid.uuid4().hex if request.kv.bypass_prefix_cache else request.kv.cache_salt
            asked_options = RequestOptions(
                n=request.sampling.num_sequences or 1, cache_salt=salt, priority=request.priority,
                adapter=request.lora_name,
            )  # fmt: skip
            options = on_behalf_of(LOCAL, asked_options)
            with self._edge.in_flight(method, request_id, LOCAL) as count_tokens:
                backend, intake = self._edge.serving()
                if request.WhichOneof("prompt") == "token_ids":
                    token_ids = intake.checked("token_ids", request.token_ids.ids)
                else:
                    token_ids = intake.checked("text", await intake.encode(request.text, LOCAL.name))
                params = sampling_params(request, backend.info.default_sampling)
                writer = _Writer(request.response, token_ids, send)
                asked = CheckedRequest(request_id, token_ids, params, options, began, LOCAL, count_tokens)
                await self._edge.stream(method, asked, writer.write, context)
        except Exception as error:
            await abort(context, error)


class _Writer:
    """Converts the outputs of one call to responses."""

    def __init__(self, asked: pb.ResponseOptions, prompt_token_ids: tuple[int, ...], send: Any):
        self._asked = asked
        self._has_text = not asked.HasField("output_text") or asked.output_text
        self._prompt_token_ids = prompt_token_ids
        self._send = send
        self._is_first = True

    async def write(self, output: Output) -> None:
        asked = self._asked
        outputs = pb.SequenceOutput(
            index=output.index,
            text=output.text if self._has_text else "",
            num_tokens=len(output.token_ids),
            token_ids=output.token_ids if asked.output_token_ids else (),
        )
        for position in output.logprobs:
            top = [token_id for token_id, _ in position.top]
            outputs.logprobs.append(position.logprob)
            outputs.ranks.append(top.index(position.token_id) + 1 if position.token_id in top else 0)
            if asked.HasField("output_candidates"):
                tokens = [
                    pb.CandidateTokenInfo.TokenInfo(id=token_id, logprob=logprob, rank=rank)
                    for rank, (token_id, logprob) in enumerate(position.top, start=1)
                ]
                outputs.candidate_tokens.append(pb.CandidateTokenInfo(tokens=tokens))
        if output.finish_reason is not None:
            if output.finish_reason is FinishReason.ERROR:
                raise UnfinishedError(output.message)  # the protocol has no word for it
            reason = _FINISH[output.finish_reason]
            outputs.finish_info.CopyFrom(
                pb.FinishInfo(num_output_tokens=output.num_output_tokens, finish_reason=reason)
            )
        response = pb.GenerateResponse(outputs=outputs)
        if self._is_first:
            token_ids = self._prompt_token_ids
            response.prompt_info.num_prompt_tokens = len(token_ids)
            response.prompt_info.token_ids.extend(token_ids if asked.prompt_token_ids else ())
            self._is_first = False
        await self._send(response)


class _Control(pb_grpc.ControlServicer):
    """Describes the server and ends requests."""

    def __init__(self, edge: Edge):
        self._edge = edge
        self._instance_id = uuid.uuid4().hex

    async def _backend(self, context: Any) -> Backend:
        if self._edge.backend is None:
            await abort(context, EngineStoppedError(f"the server is starting ({self._edge.progress})"))
        return self._edge.backend

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        backend = await self._backend(context)
        info = backend.info
        parallelism = pb.ParallelismInfo(
            tensor_parallel_size=info.tp_size,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_size_local=1,
            decode_context_parallel_size=1,
            world_size=info.num_devices,
        )
        return pb.ServerInfo(
            engine_version=info.server_version,
            api_version=_API_VERSION,
            instance_id=self._instance_id,
            parallelism=parallelism,
            max_model_len=info.max_context_tokens,
            kv_block_size=info.page_size_tokens,
            effective_attention_block_size=info.page_size_tokens,
            total_kv_blocks=backend.engine.load().num_pages,
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        backend = await self._backend(context)
        info = backend.info
        return pb.ModelInfo(
            # A directory, so that a sidecar on the same machine finds the tokenizer, as with vLLM.
            model_id=str(backend.tokenizer.directory) if info.supports_text else info.name,
            served_model_name=info.name,
            supports_text_input=info.supports_text,
            supports_token_ids_input=True,
        )

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        try:
            self._edge.abort_requests(request.request_ids, LOCAL)
        except InvalidRequestError as error:
            await abort(context, error)
        return pb.AbortResponse()

    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, context: Any
    ) -> pb.GetKvEventSourcesResponse:
        feed = (await self._backend(context)).kv_events
        source = feed.source if feed is not None else None
        if source is None:
            return pb.GetKvEventSourcesResponse()
        found = pb.KvEventSource(
            transport="zmq",
            endpoint=source.endpoint,
            topic=source.topic,
            replay_endpoint=source.replay_endpoint,
            data_parallel_rank=0,
            encoding=_EVENTS_ENCODING,
            schema_version=_EVENTS_SCHEMA,
            hwm=source.max_queued,
        )
        return pb.GetKvEventSourcesResponse(sources=[found])
