"""Message conversion of the client: builds requests from arguments, and chunks and `CallError` from responses."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import MeshserveError
from ..api.request import FinishReason, TokenLogprobs, WeightSpan
from ..api.sampling_params import without_unset
from ..options.nearest import nearest
from ..text.answers.answer_parts import AnswerPart
from ..text.answers.part_messages import answer_part
from ..text.openai_messages import chat_messages


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
    processed_logprobs: bool
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
    adapter: str
    adapter_digest: str


class AnswerFields(TypedDict, total=False):
    """Fields of AnswerOptions in inference.proto. Of `any_tool` and `tool`, one may be set."""

    thinking_token_budget: int
    any_tool: bool
    tool: str
    parallel_tool_calls: bool


class ChatFields(RequestFields, total=False):
    """RequestFields and the fields of a conversation. Each of `tools` is a dict or JSON text.

    With `answer`, which may be empty, chunks have `parts` instead of `text`.
    """

    enable_thinking: bool
    tools: Sequence[Mapping[str, Any] | str]
    add_generation_prompt: bool
    continue_last_message: bool
    answer: AnswerFields


_SAMPLING_NAMES = tuple(pb.SamplingParams.DESCRIPTOR.fields_by_name)
_OPTIONS = ("priority", "cache_salt", "n", "adapter", "adapter_digest")
_CHAT_OPTIONS = ("enable_thinking", "add_generation_prompt", "continue_last_message")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one sample."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  # of an answer that is divided


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a sample ended."""

    reason: FinishReason
    usage: Usage
    weight_spans: tuple[WeightSpan, ...] = ()  # which version of the weights computed how many tokens, in order


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """An increment of the output of one sample. Only the last chunk of each sample has `finish` set."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    index: int = 0  # index of the sample
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per entry of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the next prompt tokens, starting with the second token
    parts: tuple[AnswerPart, ...] = ()  # of an answer that is divided


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole output of one sample."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per entry of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the prompt's tokens except the first


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
    """Builds the request for a conversation.

    Raises:
      InvalidRequestError: A message has a form that cannot be sent. The error names the message and its key.
      TypeError, ValueError: A field does not exist or has a value that cannot be sent.
    """
    rest: Any = dict(fields)
    options = {name: rest.pop(name) for name in _CHAT_OPTIONS if name in rest}
    if (answer := rest.pop("answer", None)) is not None:
        options["answer"] = pb.AnswerOptions(**answer)
    tools = [_json_text(tool) for tool in rest.pop("tools", None) or ()]
    return pb.ChatRequest(
        request_id=request_id,
        messages=chat_messages(messages),
        tools=tools,
        **options,
        **_request_fields(rest),
    )


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
    """Splits the fields into the `sampling` message and the fields outside it. A field that is None is not sent.

    Raises:
      TypeError, ValueError: A field does not exist or has a value that cannot be sent. The message names it.
    """
    sampling = without_unset(fields)
    if isinstance(sampling.get("stop"), str):
        raise TypeError(f"stop is the string {sampling['stop']!r}; it takes a list of strings.")
    if "constraint" in sampling:
        sampling["constraint"] = constraint_message(sampling["constraint"])
    beside: dict[str, Any] = {name: sampling.pop(name) for name in _OPTIONS if name in sampling}
    try:
        message = pb.SamplingParams(**sampling)
    except (TypeError, ValueError):
        raise _named_error(sampling) from None
    return {"sampling": message, **beside}


def _named_error(sampling: Mapping[str, Any]) -> TypeError | ValueError:
    """Returns the error for sampling fields of which one cannot be sent: protobuf's own does not name it."""
    for name, value in sampling.items():
        if name not in _SAMPLING_NAMES:
            near = nearest(name, _SAMPLING_NAMES)
            hint = f"Did you mean {near}?" if near else f"Allowed are {', '.join(_SAMPLING_NAMES)}."
            return ValueError(f"there is no sampling field {name!r}. {hint}")
        try:
            pb.SamplingParams(**{name: value})
        except (TypeError, ValueError) as error:
            return type(error)(f"{name} is {value!r:.200}: {str(error).rstrip('.')}.")
    raise AssertionError("every field can be sent")


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
                num_reasoning_tokens=usage.num_reasoning_tokens,
            ),
            weight_spans=tuple(WeightSpan(span.version, span.num_tokens) for span in response.finish.weight_spans),
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
        parts=() if isinstance(response, pb.GenerateResponse) else _parts(response.parts),
    )


def _parts(messages: Iterable[pb.AnswerPart]) -> tuple[AnswerPart, ...]:
    return tuple(part for message in messages if (part := answer_part(message)) is not None)


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
