"""Checks each call before its handler runs. In: method and metadata. Out: the call proceeds or is refused.

Requests are also refused here, before they are read, while the queue is full: an overloaded server refuses often, so a
refusal must be cheap. Bytes that are not a valid message get INVALID_ARGUMENT; grpc itself would report INTERNAL.
Parsing 16 MiB holds Python's lock for a tenth of a second, so large messages are parsed one at a time, with pauses.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ..api.errors import InvalidRequestError, UnknownMethodError
from ..api.tenants import LOCAL, Tenant
from ..telemetry.metrics import Metrics
from ..text.work_pool import Paced, WorkPool
from .auth import Access
from .connection_guard import ConnectionGuard
from .grpc_status import abort, code_of
from .method_permissions import QUEUED_METHODS

_LARGE_BYTES = 2**20  # a message of this size takes up to 8 ms to parse
_LARGE_SHARE = 0.1  # the share of the time for parsing large messages


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without permission, and requests while the queue is full.

    Args:
      admit: Called for each request; raises if the queue has no room for another one of its tenant.
      access: The permissions of callers; None on a port without tokens.
      guard: Learns which calls were proper and which wasted.
    """

    def __init__(
        self,
        metrics: Metrics,
        admit: Callable[[Tenant], None],
        access: Access | None = None,
        guard: ConnectionGuard | None = None,
    ):
        self._metrics = metrics
        self._admit = admit
        self._access = access
        self._guard = guard if guard is not None else ConnectionGuard()
        self._handlers: dict[str, Any] = {}  # by method, made by `_checking_bytes` and `_counting`
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
            return self._refusal(error)
        if (known := self._handlers.get(details.method)) is not None:
            return known
        handler = await continuation(details)
        if handler is None:
            return self._refusal(UnknownMethodError("Method not found!"))
        if inspect.iscoroutinefunction(handler.unary_stream or handler.unary_unary):
            is_public = self._access is not None and self._access.is_public(details.method)
            handler = self._checking_bytes(handler, is_public)
        elif handler.stream_stream is not None:
            handler = self._counting(handler)
        self._handlers[details.method] = handler
        return handler

    def _checking_bytes(self, handler: Any, is_public: bool) -> Any:
        """Wraps the handler of a method with one request.

        Bytes that cannot be parsed get INVALID_ARGUMENT. To gRPC, the wrapper takes any number of requests, because
        otherwise it would not be called for a call that is reset before its message has come.
        """
        behavior = handler.unary_stream or handler.unary_unary

        async def check(_requests: Any, context: Any) -> Any:
            data = await self._message(context, is_public)
            try:
                return await behavior(await self._parsed(handler.request_deserializer, data, context), context)
            except grpc.aio.AbortError as error:  # gRPC keeps it, in a cycle: it must not also keep the request
                del data
                error.__context__ = None
                raise error.with_traceback(None) from None

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(check, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(check, None, handler.response_serializer)

    def _counting(self, handler: Any) -> Any:
        """Wraps a handler that generates answers to any number of requests. Wasted: a call reset before the first."""

        async def count(requests: Any, context: Any) -> None:
            peer, is_answered = context.peer(), False
            try:
                async for answer in handler.stream_stream(requests, context):
                    await context.write(answer)
                    is_answered = True
            except asyncio.CancelledError:
                if not is_answered:
                    self._guard.wasted(peer)
                raise

        return handler._replace(stream_stream=count)

    async def _message(self, context: Any, is_public: bool) -> bytes:
        """Returns the bytes of a call's message. Calls that need no token on a port with tokens prove nothing.

        Raises:
          CancelledError: The call was reset, or closed without a message.
        """
        peer = context.peer()  # unknown once the call has ended
        try:
            data = await context.read()
            if data is grpc.aio.EOF:
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            self._guard.wasted(peer)
            raise
        if not is_public:
            self._guard.proper(peer)
        return data

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

    def _refusal(self, error: Exception) -> Any:
        async def refuse(_requests: Any, context: Any) -> None:
            peer = context.peer()  # unknown once the call has ended
            try:
                await abort(context, error)
            except asyncio.CancelledError:  # the status could not be sent: the call had been reset
                self._guard.wasted(peer)
                raise

        # A stream in both directions fits every method and does not wait for a message first.
        return grpc.stream_stream_rpc_method_handler(refuse)
