"""gRPC's health protocol, which load balancers and clients use without a token.

grpcio-health-checking's own servicer holds a lock while it writes to a watcher. One watcher that does not read then
delays all others, and the server could neither become ready nor stop, as both change the health.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_MAX_WATCHES = 100  # per connection; a client needs one, a proxy one for each of its clients
_Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers with the health of the process, the same for each of its services. Used on the event loop only.

    Args:
      services: Full names of the services; "" is always one of them.
    """

    def __init__(self, services: Iterable[str]):
        self._services = frozenset(("", *services))
        self._is_serving = False
        self._changed = asyncio.Event()  # replaced after each change
        self._num_watches: Counter[str] = Counter()  # by connection

    def set_serving(self, is_serving: bool) -> None:
        """Sets the health and tells all watchers. Waits for none of them."""
        self._is_serving = is_serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _Status(status=self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:  # its messages came with grpcio-health-checking 1.85
        statuses = {service: _Status(status=self._status(service)) for service in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        peer, last = context.peer(), None
        if self._num_watches[peer] >= _MAX_WATCHES:
            message = f"this connection has {_MAX_WATCHES} calls of Watch; no more are allowed. End some of them."
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._num_watches[peer] += 1
        try:
            while True:
                changed, status = self._changed, self._status(request.service)
                if status != last:
                    await context.write(_Status(status=status))
                last = status
                await changed.wait()
        finally:
            self._num_watches[peer] -= 1
            if not self._num_watches[peer]:
                del self._num_watches[peer]

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_serving else _Status.NOT_SERVING
