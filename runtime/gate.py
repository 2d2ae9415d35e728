"""Asks `access` before each call, whatever its service. In: method and metadata. Out: the call goes on or ends."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from .access import Access
from .metrics import Metrics
from .status import abort, code_of


class Gate(grpc.aio.ServerInterceptor):
    """The interceptor of a server."""

    def __init__(self, access: Access, metrics: Metrics):
        self._access = access
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        try:
            self._access.check(details.method, details.invocation_metadata)
        except Exception as error:
            refusal = error
        else:
            return await continuation(details)
        self._metrics.num_refused_calls[code_of(refusal).name.lower()] += 1

        async def refuse(requests: Any, context: Any) -> None:
            await abort(context, refusal)

        # A stream on both sides fits every method, and does not wait for a message first.
        return grpc.stream_stream_rpc_method_handler(refuse)
