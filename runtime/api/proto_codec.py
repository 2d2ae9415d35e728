"""Converts between the messages of inference.proto and our own data types, for the server and the client.

The dataclasses have the field names of the messages, so most fields are copied by name. A test compares the names.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from meshserve.protos import inference_pb2 as pb

from .adapters import AdapterInfo
from .constraint import CONSTRAINT_KINDS, Constraint
from .engine_api import ModelInfo
from .errors import InvalidRequestError
from .request import FinishReason, Load, Output, RequestOptions, TokenLogprobs
from .sampling_params import SamplingParams, params_table

_FINISH_REASONS: Mapping[FinishReason, pb.FinishReason] = MappingProxyType(
    {
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
        FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
        FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    }
)

_OPERATORS_FIELDS = ("path", "num_bytes", "is_on_device")  # of an adapter: where it lies, and who used it last

AnswerMessage = pb.GenerateResponse | pb.ChatResponse  # both have the fields that an output has
Kind = TypeVar("Kind", pb.GenerateResponse, pb.ChatResponse)


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
    """Converts sampling parameters. Fields that were not sent have the value in `defaults`, or else their default.

    Raises:
      InvalidRequestError: A value is out of range.
    """
    sent: dict[str, Any] = {}
    for field, value in message.ListFields():  # sent zeros included
        param = params_table().get(field.name)
        if param is not None and param.max_items is not None and len(value) > param.max_items:
            # Before millions of items are copied, which would hold the event loop for a quarter of a second.
            raise InvalidRequestError(
                f"sampling.{field.name}", f"got {len(value)} items; allowed is {param.max_items} or fewer."
            )
        sent[field.name] = plain(value)
    if "constraint" in sent:
        sent["constraint"] = constraint(sent["constraint"])
    return SamplingParams(**{**defaults, **sent})


def plain(value: Any) -> Any:
    """Returns the value of a field, with repeated fields as tuples and maps as dictionaries."""
    if isinstance(value, Mapping):
        return dict(value)
    is_repeated = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_repeated else value


def constraint(message: pb.Constraint) -> Constraint:
    """Converts a constraint.

    Raises:
      InvalidRequestError: The constraint is empty or too large.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError("sampling.constraint", f"is empty; set one of {', '.join(CONSTRAINT_KINDS)}.")
    if kind == "choice":
        return Constraint(kind=kind, choices=tuple(message.choice.texts))
    if kind == "json_object":
        if not message.json_object:
            raise InvalidRequestError(
                "sampling.constraint.json_object", "got false; set it to true, or omit the constraint."
            )
        return Constraint(kind=kind)
    return Constraint(kind=kind, text=getattr(message, kind))


def request_options(message: pb.GenerateRequest | pb.ChatRequest, timeout_seconds: float | None) -> RequestOptions:
    """Converts the options of a request. Fields that were not sent have their defaults.

    Raises:
      InvalidRequestError: A value is out of range.
    """
    names: tuple[Any, ...] = ("priority", "cache_salt", "n", "adapter", "adapter_digest")
    sent = {name: getattr(message, name) for name in names if message.HasField(name)}
    return RequestOptions(timeout_seconds=timeout_seconds, **sent)


def pooling_options(message: pb.EmbedRequest | pb.ScoreRequest | pb.RerankRequest) -> RequestOptions:
    """Converts the options of a request for embeddings or scores. Raises as `request_options`."""
    names: tuple[Any, ...] = ("priority", "cache_salt", "adapter")
    return RequestOptions(**{name: getattr(message, name) for name in names if message.HasField(name)})


def conversation(request: pb.ChatRequest) -> pb.Conversation:
    """Returns the fields of a request that are passed to the chat template."""
    names = {field.name for field in pb.Conversation.DESCRIPTOR.fields}
    return pb.Conversation(**{field.name: value for field, value in request.ListFields() if field.name in names})


def answer(kind: type[Kind], output: Output) -> Kind:
    """Converts an output to a message of the response stream."""
    response = kind(text=output.text, token_ids=output.token_ids, index=output.index)
    response.logprobs.extend(map(_token_logprobs, output.logprobs))
    response.prompt_logprobs.extend(map(_token_logprobs, output.prompt_logprobs))
    if output.finish_reason is not None:
        names = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
        usage = pb.Usage(**{name: getattr(output, name) for name in names})
        reason = _FINISH_REASONS[output.finish_reason]
        spans = [pb.WeightSpan(version=span.version, num_tokens=span.num_tokens) for span in output.weight_spans]
        response.finish.CopyFrom(pb.Finish(reason=reason, message=output.message, usage=usage, weight_spans=spans))
    return response


def _token_logprobs(found: TokenLogprobs) -> pb.TokenLogprobs:
    ids, values = zip(*found.top, strict=True) if found.top else ((), ())
    return pb.TokenLogprobs(token_id=found.token_id, logprob=found.logprob, top_token_ids=ids, top_logprobs=values)


def token_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Converts the log-probabilities of a message."""
    return tuple(
        TokenLogprobs(
            message.token_id,
            message.logprob,
            tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)),
        )
        for message in messages
    )


def finish_reason(value: int) -> FinishReason:
    """Converts the reason of a Finish message. Unknown reasons, which a newer server may send, become ERROR."""
    return next((reason for reason, number in _FINISH_REASONS.items() if number == value), FinishReason.ERROR)


def model_info_response(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Converts the description of a model. Of its adapters, it leaves out what only operators may know."""
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    public = [adapter_message(each, info.name) for each in info.adapters]
    for each in public:
        for name in _OPERATORS_FIELDS:
            each.ClearField(name)
    return pb.GetModelInfoResponse(**values | {"adapters": public})


def model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """Converts the answer of a server."""
    values = {field.name: getattr(response, field.name) for field in dataclasses.fields(ModelInfo)}
    default_sampling = {field.name: value for field, value in response.default_sampling.ListFields()}
    adapters = tuple(map(adapter_info, response.adapters))
    return ModelInfo(
        **values
        | {"eos_token_ids": tuple(response.eos_token_ids), "default_sampling": default_sampling, "adapters": adapters}
    )


def adapter_message(info: AdapterInfo, parent: str) -> pb.Adapter:
    """Converts the description of an adapter of the model `parent`, with what only operators may know."""
    return pb.Adapter(
        parent=parent, **{field.name: getattr(info, field.name) for field in dataclasses.fields(AdapterInfo)}
    )


def adapter_info(message: pb.Adapter) -> AdapterInfo:
    """Converts a description of an adapter."""
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(AdapterInfo)}
    return AdapterInfo(**values | {"targets": tuple(message.targets)})


def load_response(load: Load) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(**dataclasses.asdict(load))


def load(response: pb.GetLoadResponse) -> Load:
    return Load(**{field.name: getattr(response, field.name) for field in dataclasses.fields(Load)})
