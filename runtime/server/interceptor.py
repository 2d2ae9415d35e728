"""Checks each call before its handler runs. In: method and metadata. Out: the call proceeds or is refused.

Requests are also refused here, before they are read, while the queue is full: an overloaded server refuses often, so a
refusal must be cheap. Bytes that are not a valid message get INVALID_ARGUMENT; grpc itself would report INTERNAL.
Parsing 16 MiB holds Python's lock for a tenth of a second, so large messages are parsed one at a time, with pauses.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..api.errors import InvalidRequestError
from ..api.tenants import LOCAL, Tenant
from ..telemetry.metrics import Metrics
from ..text.work_pool import Paced, WorkPool
from .auth import Access
from .grpc_status import abort, code_of
from .method_permissions import QUEUED_METHODS

_LARGE_BYTES = 2**20  # of a message; takes up to 8 ms to parse
_LARGE_SHARE = 0.1  # of the time may go to parsing large messages


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without permission, and requests while the queue is full.

    Args:
      admit: Called for each request; raises if the queue has no room for another one of its tenant.
      access: The permissions of callers; None on a port without tokens.
    """

    def __init__(self, metrics: Metrics, admit: Callable[[Tenant], None], access: Access | None = None):
        self._metrics = metrics
        self._admit = admit
        self._access = access
        self._handlers: dict[str, Any] = {}  # by method, made by `_checking_bytes`
        self._large = WorkPool("large messages", num_threads=1, max_calls=256, max_size=2**29)
        self._parse_large = Paced(_LARGE_SHARE)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        try:
            tenant = LOCAL if self._access is None else self._access.check(details.method, details.invocation_metadata)
            if details.method in QUEUED_METHODS:
                self._admit(tenant)
        except Exception as error:
            self._metrics.count_refusal(code_of(error).name.lower())
            return _refusal(error)
        if (known := self._handlers.get(details.method)) is not None:
            return known
        handler = await continuation(details)
        if handler is None or not inspect.iscoroutinefunction(handler.unary_stream or handler.unary_unary):
            return handler
        checking = self._handlers[details.method] = self._checking_bytes(handler)
        return checking

    def _checking_bytes(self, handler: Any) -> Any:
        """Wraps the handler of a method with one request, so that bytes that cannot be parsed get INVALID_ARGUMENT."""

        def checked(behavior: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
            async def check(data: bytes, context: Any) -> Any:
                try:
                    return await behavior(await self._parsed(handler.request_deserializer, data, context), context)
                except grpc.aio.AbortError as error:  # gRPC keeps it, in a cycle: it must not keep the request, too
                    del data
                    error.__context__ = None
                    raise error.with_traceback(None) from None

            return check

        name = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(request_deserializer=None, **{name: checked(getattr(handler, name))})

    async def _parsed(self, parse: Callable[[bytes], Any], data: bytes, context: Any) -> Any:
        """Returns the message of a call, or ends the call."""
        try:
            if len(data) <= _LARGE_BYTES:
                return parse(data)
            tenant = LOCAL if self._access is None else self._access.tenant(context.invocation_metadata())
            return await self._large.run(tenant.name, len(data), self._parse_large, parse, data)
        except DecodeError:
            await abort(context, InvalidRequestError("request", "the bytes are not a message of this method."))
        except Exception as error:
            await abort(context, error)


def _refusal(error: Exception) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        await abort(context, error)

    # A stream in both directions fits every method and does not wait for a message first.
    return grpc.stream_stream_rpc_method_handler(refuse)
