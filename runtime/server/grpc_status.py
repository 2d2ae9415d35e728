"""Maps exceptions to the gRPC status of a call, with machine-readable details where they help."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from ..api.errors import (
    AbortedError,
    AdapterChangedError,
    AdapterExistsError,
    AdapterRoomError,
    AdaptersOffError,
    DeadlineError,
    EngineStoppedError,
    InvalidAdapterError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    QuotaExceededError,
    UnauthenticatedError,
    UnavailableFeatureError,
    UnfinishedError,
    UnknownAdapterError,
    UnknownMethodError,
    UnsupportedModelError,
    WrongTaskError,
)
from .output_queue import RequestIdInUseError, SlowReaderError

Result = TypeVar("Result")

# The only table from errors to status codes. Any other exception is a bug of ours: INTERNAL.
GRPC_STATUS: Mapping[type[Exception], grpc.StatusCode] = MappingProxyType(
    {
        InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
        UnsupportedModelError: grpc.StatusCode.FAILED_PRECONDITION,
        UnavailableFeatureError: grpc.StatusCode.FAILED_PRECONDITION,
        RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
        UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
        PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
        QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        UnfinishedError: grpc.StatusCode.INTERNAL,  # of methods without FINISH_REASON_ERROR
        AbortedError: grpc.StatusCode.CANCELLED,
        WrongTaskError: grpc.StatusCode.UNIMPLEMENTED,
        UnknownMethodError: grpc.StatusCode.UNIMPLEMENTED,
        DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
        EngineStoppedError: grpc.StatusCode.UNAVAILABLE,
        UnknownAdapterError: grpc.StatusCode.NOT_FOUND,
        InvalidAdapterError: grpc.StatusCode.INVALID_ARGUMENT,
        AdapterExistsError: grpc.StatusCode.ALREADY_EXISTS,
        AdapterRoomError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        AdaptersOffError: grpc.StatusCode.FAILED_PRECONDITION,
        AdapterChangedError: grpc.StatusCode.FAILED_PRECONDITION,
    }
)

_MAX_STATUS_BYTES = 1_024  # all metadata of a call shares 8 KiB, and percent-encoding triples the message

_PUSHBACK = "grpc-retry-pushback-ms"

_log = logging.getLogger(__name__)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Returns the status code of an error; CANCELLED if the caller is gone, which a write may notice first."""
    if isinstance(error, (asyncio.CancelledError, grpc.aio.InternalError)):
        return grpc.StatusCode.CANCELLED
    return next((code for kind, code in GRPC_STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def abort(context: Any, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`. Never returns."""
    if isinstance(error, grpc.aio.InternalError):
        # A write noticed that the caller is gone before grpc cancelled this task. There is no caller to answer.
        raise asyncio.CancelledError from error
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the call already has its status
    code, message = code_of(error), str(error)
    if code is grpc.StatusCode.INTERNAL:
        _log.error("a request failed", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    message = message.encode()[:_MAX_STATUS_BYTES].decode(errors="ignore")
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, message):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers: tuple[tuple[str, str | bytes], ...] = (("grpc-status-details-bin", status.SerializeToString()),)
    if isinstance(error, QueueFullError | QuotaExceededError):
        # RetryInfo once more, in the form that the retry policies of gRPC's libraries obey.
        trailers += ((_PUSHBACK, str(round(error.retry_seconds * 1000))),)
    try:
        await context.abort(code, message, trailers)
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone  # as above
    raise AssertionError("context.abort raises")


async def answered(answer: Awaitable[Result], context: Any) -> Result:
    """Awaits an answer; an error ends the call with its status."""
    try:
        return await answer
    except Exception as error:  # CancelledError, of a cancelled call, is not an Exception
        await abort(context, error)


def _details(error: Exception, message: str) -> list[Any]:
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    details: list[Any] = []
    if isinstance(error, QuotaExceededError):
        excess = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[excess]))
    if isinstance(error, QueueFullError | QuotaExceededError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
