"""The HTTP port for probes and Prometheus: GET /livez, /readyz and /metrics, without encryption or tokens.

On a loopback address it answers only requests for localhost, so that no web page can read it from a browser.

/livez returns 200 while the process should be left running and 503 once the engine has failed; /readyz returns 200
while the server accepts requests. Probes are answered on the event loop's thread, so they fail if the loop hangs.
Metrics are rendered in another thread, because reading the engine's load may wait for a step and rendering takes
milliseconds. Scrapes that come meanwhile share a rendering, so that any number of them costs a tenth of that thread.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from ..api.errors import ConfigError
from ..api.loopback import is_host_allowed
from ..text.work_pool import Paced

if TYPE_CHECKING:
    from aiohttp import web

_MAX_LINE_BYTES = 4_096  # in the request line, and in each header
_MAX_HEADERS = 64
_TIMEOUT_SECONDS = 5.0  # for a connection to send its request and read the answer
_MAX_CONNECTIONS = 64
_RENDERING_SHARE = 0.1  # of the time of a thread, which holds Python's lock
_MAX_REST_SECONDS = 0.2
_TEXT = "text/plain; charset=utf-8"

# Returns the status and the text of a response.
Probe = Callable[[], tuple[int, str]]
Encode = Callable[[CollectorRegistry], bytes]
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class HttpPort:
    """Serves probes and metrics, one request per connection.

    Args:
      probes: The probes by path, for example "/livez".
      registry: The metrics.
      allowed_hosts: See `is_host_allowed`.
    """

    def __init__(self, probes: Mapping[str, Probe], registry: CollectorRegistry, allowed_hosts: Sequence[str] = ()):
        self._probes = probes
        self._allowed_hosts = allowed_hosts
        self._registry = registry
        self._renderer = ThreadPoolExecutor(1, "metrics")
        self._paced = Paced(_RENDERING_SHARE, max_rest_seconds=_MAX_REST_SECONDS)
        self._renderings: dict[str, asyncio.Future[bytes]] = {}  # those that have not begun, by their content type
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

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            response: web.StreamResponse
            if not all(is_host_allowed(each, host, self._allowed_hosts) for each in request.headers.getall("Host", ())):
                response = _response(403, b"this server is reached as localhost (--allowed-hosts)\n", _TEXT)
            else:
                try:
                    response = await handler(request)
                except web.HTTPException as error:  # there is no such path, or it has no such method
                    error.force_close()
                    raise
            response.force_close()
            return response

        application = web.Application(middlewares=[answer])
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
        return _response(status, text.encode(), _TEXT)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        try:
            encode, content_type = choose_encoder(",".join(request.headers.getall("Accept", ())))
        except (TypeError, ValueError):  # a version that is not a number
            encode, content_type = choose_encoder("")
        if content_type.startswith("application/openmetrics-text"):
            # By default the library writes the samples of `vllm:*` with "_" for ":" (prometheus_client issue 1177).
            encode = functools.partial(openmetrics, escaping=ALLOWUTF8)
        body = await asyncio.shield(self._rendering(content_type, encode))  # others may wait for it
        return _response(200, body, content_type)

    def _rendering(self, content_type: str, encode: Encode) -> "asyncio.Future[bytes]":
        """Returns the next rendering of all metrics, which begins after this call."""
        if (waiting := self._renderings.get(content_type)) is not None:
            return waiting
        loop = asyncio.get_running_loop()

        def render() -> bytes:
            loop.call_soon_threadsafe(self._renderings.pop, content_type, None)
            return encode(self._registry)

        rendering = loop.run_in_executor(self._renderer, self._paced, render)
        self._renderings[content_type] = rendering
        return rendering


def _abort(protocol: "web.RequestHandler") -> None:
    """Closes a connection without waiting for a client that does not read."""
    if protocol.transport is not None:
        protocol.transport.abort()


def _response(status: int, body: bytes, content_type: str) -> "web.Response":
    from aiohttp import web

    return web.Response(status=status, body=body, headers={"Content-Type": content_type})
