"""The HTTP port for probes and Prometheus: GET /livez, /readyz and /metrics, without encryption or tokens.

/livez returns 200 while the process should be left running and 503 once the engine has failed; /readyz returns 200
while the server accepts requests. Probes are answered on the event loop's thread, so they fail if the loop hangs.
Metrics are rendered in another thread, because reading the engine's load may wait for a step and rendering takes
milliseconds.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from ..api.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

_MAX_LINE_BYTES = 4_096  # of the request line, and of each header
_MAX_HEADERS = 64
_TIMEOUT_SECONDS = 5.0  # for a connection to send its request and read the answer
_MAX_CONNECTIONS = 64

# Returns the status and the text of a response.
Probe = Callable[[], tuple[int, str]]


class HttpPort:
    """Serves probes and metrics, one request per connection.

    Args:
      probes: The probes by path, for example "/livez".
      registry: The metrics.
    """

    def __init__(self, probes: Mapping[str, Probe], registry: CollectorRegistry):
        self._probes = probes
        self._registry = registry
        self._renderer = ThreadPoolExecutor(1, "metrics")
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int | None) -> int | None:
        """Opens the port and returns its number. Port 0 takes a free one, and None opens none.

        Raises:
          ConfigError: The address cannot be bound.
        """
        if port is None:
            return None
        from aiohttp import web  # not at module level: it takes 0.1 s, also in processes that open no port

        application = web.Application()
        application.add_routes(
            [web.get("/metrics", self._metrics), *(web.get(path, self._probe) for path in self._probes)]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            lingering_time=0.0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            shutdown_timeout=_TIMEOUT_SECONDS,
        )
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._accept, host, port)
        except OSError as error:
            await self.stop()
            raise ConfigError(f"cannot bind {host}:{port} for HTTP: {error}. Choose another --http-port.") from error
        return self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port and all its connections."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            self._close_oldest(0)
            await self._runner.cleanup()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection. The oldest connection beyond the limit is closed."""
        self._close_oldest(_MAX_CONNECTIONS - 1)
        assert self._runner is not None and self._runner.server is not None
        protocol = self._runner.server()
        asyncio.get_running_loop().call_later(_TIMEOUT_SECONDS, _abort, protocol)
        return protocol

    def _close_oldest(self, num_left: int) -> None:
        """Closes all connections but the newest `num_left`."""
        assert self._runner is not None and self._runner.server is not None
        protocols = [each for each in self._runner.server.connections if each.transport is not None]
        for protocol in protocols[: max(0, len(protocols) - num_left)]:
            _abort(protocol)

    async def _probe(self, request: "web.Request") -> "web.Response":
        status, text = self._probes[request.path]()
        return _response(status, text.encode(), "text/plain; charset=utf-8")

    async def _metrics(self, request: "web.Request") -> "web.Response":
        accepted = ",".join(request.headers.getall("Accept", ()))
        body, content_type = await asyncio.get_running_loop().run_in_executor(self._renderer, self._render, accepted)
        return _response(200, body, content_type)

    def _render(self, accepted: str) -> tuple[bytes, str]:
        """Returns all metrics in the format that an Accept header asks for, and its content type."""
        try:
            encode, content_type = choose_encoder(accepted)
        except (TypeError, ValueError):  # a version that is not a number
            encode, content_type = choose_encoder("")
        if content_type.startswith("application/openmetrics-text"):
            # By default the library writes the samples of `vllm:*` with "_" for ":" (prometheus_client issue 1177).
            return openmetrics(self._registry, escaping=ALLOWUTF8), content_type
        return encode(self._registry), content_type


def _abort(protocol: "web.RequestHandler") -> None:
    """Closes a connection without waiting for a client that does not read."""
    if protocol.transport is not None:
        protocol.transport.abort()


def _response(status: int, body: bytes, content_type: str) -> "web.Response":
    from aiohttp import web

    response = web.Response(status=status, body=body, headers={"Content-Type": content_type})
    response.force_close()
    return response
