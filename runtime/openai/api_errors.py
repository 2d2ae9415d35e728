"""Maps errors to HTTP statuses and to the forms in which APIs report errors."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
    MeshserveError,
    PermissionDeniedError,
    QueueFullError,
    QuotaExceededError,
    TextTooLongError,
    UnauthenticatedError,
    UnavailableFeatureError,
    UnfinishedError,
    UnknownAdapterError,
    UnsupportedModelError,
    WrongTaskError,
)
from ..server.output_queue import RequestIdInUseError, SlowReaderError

_log = logging.getLogger(__name__)


class HttpError(MeshserveError):
    """An error with a status of its own, such as 404 for a model that is not served."""

    def __init__(self, status: int, message: str, *, code: str | None = None, field: str | None = None):
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


# The first kind that fits decides: the status, and OpenAI's type of the error.
STATUS: Mapping[type[BaseException], tuple[int, str]] = MappingProxyType(
    {
        TextTooLongError: (413, "invalid_request_error"),
        InvalidRequestError: (400, "invalid_request_error"),
        UnauthenticatedError: (401, "authentication_error"),
        PermissionDeniedError: (403, "permission_error"),
        WrongTaskError: (404, "invalid_request_error"),
        RequestIdInUseError: (409, "invalid_request_error"),
        QuotaExceededError: (429, "rate_limit_error"),
        QueueFullError: (429, "rate_limit_error"),
        SlowReaderError: (429, "rate_limit_error"),
        UnsupportedModelError: (400, "invalid_request_error"),
        UnavailableFeatureError: (400, "invalid_request_error"),
        UnknownAdapterError: (404, "invalid_request_error"),
        InvalidAdapterError: (400, "invalid_request_error"),
        AdapterExistsError: (409, "invalid_request_error"),
        AdapterChangedError: (409, "invalid_request_error"),
        AdapterRoomError: (507, "server_error"),
        AdaptersOffError: (400, "invalid_request_error"),
        UnfinishedError: (422, "generation_error"),  # no 5xx: libraries would send it again, with the same result
        AbortedError: (499, "cancelled"),
        DeadlineError: (504, "timeout"),
        EngineStoppedError: (503, "server_error"),
        asyncio.TimeoutError: (408, "timeout"),
    }
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """An error as a client receives it, in whatever form."""

    status: int
    message: str
    kind: str  # OpenAI's type
    field: str | None = None
    code: str | None = None
    headers: dict[str, str]


ErrorForm = Callable[[ErrorAnswer], dict[str, Any]]  # returns the body of an error


def openai_error(answer: ErrorAnswer) -> dict[str, Any]:
    """Returns an error in OpenAI's form."""
    error = {"message": answer.message, "type": answer.kind, "param": answer.field, "code": answer.code}
    return {"error": error}


def error_answer(error: BaseException) -> ErrorAnswer:
    """Returns the answer to a request that has failed. An internal error is logged, and the caller learns its kind."""
    message, headers = str(error), {}
    field = getattr(error, "field", None)
    code: str | None = getattr(error, "code", None)
    if isinstance(error, HttpError):
        status, kind = error.status, _TYPES.get(error.status, "invalid_request_error")
    else:
        found = next((answer for known, answer in STATUS.items() if isinstance(error, known)), None)
        status, kind = found if found is not None else (500, "server_error")
    if status == 500:
        _log.error("a request failed", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    if isinstance(error, QueueFullError | QuotaExceededError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_seconds)))
        code = "rate_limit_exceeded"
    elif status == 503:
        headers["Retry-After"] = "1"
    elif status == 401:
        headers["WWW-Authenticate"], code = "Bearer", code or "invalid_api_key"
    shown = str(field).removeprefix("sampling.") if field else None
    return ErrorAnswer(status=status, message=message, kind=kind, field=shown, code=code, headers=headers)
