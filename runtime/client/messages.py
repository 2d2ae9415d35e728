"""Message conversion of the client: builds requests from arguments, and chunks and `CallError` from responses."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import MeshserveError
from ..api.request import FinishReason, TokenLogprobs


class ConstraintField(TypedDict, total=False):
    """A constraint on the output: exactly one of these keys. A JSON schema is given as a dict or as JSON text."""

    json_schema: Mapping[str, Any] | str
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]


class SamplingFields(TypedDict, total=False):
    """Fields of SamplingParams in inference.proto. An omitted field takes the server's default."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    seed: int
    ignore_eos: bool
    stop: Sequence[str]
    include_stop: bool
    skip_special_tokens: bool
    stop_token_ids: Sequence[int]
    constraint: ConstraintField
    num_resumed_tokens: int


class RequestFields(SamplingFields, total=False):
    """SamplingFields and the other fields of a request. With `n` above 1, chunks of all samples are interleaved."""

    priority: int
    cache_salt: str
    n: int


class ChatFields(RequestFields, total=False):
    """RequestFields and the fields of a conversation. Each of `tools` is a dict or JSON text."""

    enable_thinking: bool
    tools: Sequence[Mapping[str, Any] | str]
    add_generation_prompt: bool
    continue_last_message: bool


_CHAT_OPTIONS = ("enable_thinking", "add_generation_prompt", "continue_last_message")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one sample."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a sample ended."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """An increment of the output of one sample. Only the last chunk of each sample has `finish` set."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    index: int = 0  # index of the sample
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per entry of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens, starting with the second token


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole output of one sample."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per entry of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens except the first


class CallError(MeshserveError):
    """Raised when a call fails.

    `field` is the request field at fault, if the server named one; `retry_seconds` is the server's hint when to retry.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, *, field: str | None = None, retry_seconds: float | None = None
    ):
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_seconds = retry_seconds


def generate_request(prompt: str | Sequence[int], request_id: str | None, fields: RequestFields) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id, **_request_fields(fields))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(token_ids=prompt))
    return request


def chat_request(messages: Sequence[Mapping[str, Any]], request_id: str | None, fields: ChatFields) -> pb.ChatRequest:
    rest: Any = dict(fields)
    options = {name: rest.pop(name) for name in _CHAT_OPTIONS if name in rest}
    tools = [_json_text(tool) for tool in rest.pop("tools", ())]
    return pb.ChatRequest(
        request_id=request_id,
        messages=[_chat_message(message) for message in messages],
        tools=tools,
        **options,
        **_request_fields(rest),
    )


def _chat_message(message: Mapping[str, Any]) -> pb.ChatMessage:
    calls = [
        pb.ToolCall(name=call["name"], arguments=_json_text(call["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return pb.ChatMessage(**{**message, "tool_calls": calls})


def constraint_message(field: ConstraintField) -> pb.Constraint:
    """Builds the constraint message of a request.

    Raises:
      ValueError: `field` does not have exactly one kind.
      TypeError: The value has the wrong type for its kind.
    """
    if len(field) != 1:
        raise ValueError(f"constraint has the kinds {', '.join(field) or 'none'}; it takes exactly one.")
    fields: dict[str, Any] = dict(field)
    if "json_schema" in fields:
        fields["json_schema"] = _json_text(fields["json_schema"])
    if "choice" in fields:
        if isinstance(fields["choice"], str):
            raise TypeError(f"choice is the string {fields['choice']!r}; it takes a list of strings.")
        fields["choice"] = pb.Choice(texts=fields["choice"])
    return pb.Constraint(**fields)


def _json_text(value: Mapping[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _request_fields(fields: RequestFields) -> dict[str, Any]:
    """Splits the fields into the `sampling` message and the fields outside it."""
    sampling: dict[str, Any] = dict(fields)
    if isinstance(sampling.get("stop"), str):
        raise TypeError(f"stop is the string {sampling['stop']!r}; it takes a list of strings.")
    if "constraint" in sampling:
        sampling["constraint"] = constraint_message(sampling["constraint"])
    beside: dict[str, Any] = {name: sampling.pop(name) for name in ("priority", "cache_salt", "n") if name in sampling}
    return {"sampling": pb.SamplingParams(**sampling), **beside}


def chunk(response: pb.GenerateResponse | pb.ChatResponse) -> Chunk:
    finish = None
    if response.HasField("finish"):
        usage = response.finish.usage
        finish = Finish(
            reason=proto_codec.finish_reason(response.finish.reason),
            usage=Usage(
                num_prompt_tokens=usage.num_prompt_tokens,
                num_output_tokens=usage.num_output_tokens,
                num_cached_tokens=usage.num_cached_tokens,
            ),
        )
        if finish.reason is FinishReason.ERROR:
            raise CallError(grpc.StatusCode.INTERNAL, response.finish.message)
    return Chunk(
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish=finish,
        index=response.index,
        logprobs=proto_codec.token_logprobs(response.logprobs),
        prompt_logprobs=proto_codec.token_logprobs(response.prompt_logprobs),
    )


def completion(chunks: Sequence[Chunk]) -> Completion:
    finish = chunks[-1].finish if chunks else None
    if finish is None:
        raise CallError(grpc.StatusCode.INTERNAL, "the stream ended before its last message")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=finish.reason,
        usage=finish.usage,
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        prompt_logprobs=tuple(logprob for chunk in chunks for logprob in chunk.prompt_logprobs),
    )


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the call metadata that carries a token; empty without a token."""
    return (("authorization", f"Bearer {token}"),) if token is not None else ()


def samples(chunks: Sequence[Chunk], n: int) -> list[Completion]:
    """Groups the chunks of a request with `n` samples into one completion per sample."""
    return [completion([chunk for chunk in chunks if chunk.index == index]) for index in range(n)]


@contextlib.contextmanager
def call_errors() -> Iterator[None]:
    """Turns gRPC errors into `CallError`, whose traceback does not repeat them. For callers that use the stub."""
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(error) from None


def call_error(error: Any) -> CallError:
    """Converts a gRPC error, synchronous or asyncio, to a `CallError` with the details that the server attached."""
    field, retry_seconds = None, None
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata.get("grpc-status-details-bin", b""))
    for detail in status.details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry_info):
            retry_seconds = retry_info.retry_delay.ToNanoseconds() / 1e9
    return CallError(error.code(), error.details() or "", field=field, retry_seconds=retry_seconds)
