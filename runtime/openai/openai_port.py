"""Opens the HTTP port: checks each request, has the module of its route answer it, and maps errors.

A request is refused by its size before it is read, and by its caller's token and the queue before its body is parsed.
"""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..api.loopback import is_host_allowed
from ..api.tenants import LOCAL
from ..server.edge import Edge
from ..server.grpc_status import code_of
from ..server.method_permissions import SERVICE_NAME
from .api_errors import ErrorForm, HttpError, error_answer, openai_error
from .batches.batch_routes import BatchRoutes
from .batches.file_routes import BatchLimits
from .bodies import Bodies, ask_for
from .http_call import REQUEST_ID, HttpCall, metadata
from .http_connections import HEADER_SECONDS, KEEPALIVE_SECONDS, HttpConnections
from .routes import Route, routes
from .web_origins import is_own_or_no_page

if TYPE_CHECKING:
    from aiohttp import web

_MAX_LINE_BYTES = 8_192
_RECORD = re.compile(r"^(/v1/(?:files|batches))/[^/]+")  # paths with an id
_log = logging.getLogger(__name__)


class OpenAIPort:
    """OpenAI's API for one edge, and a page for people beside it.

    Args:
      edge: The edge.
      allowed_hosts: Further names by which it is addressed; see `is_host_allowed`.
      has_page: Whether browsers get a page at `/`.
      batches: Where files and batches are kept; None serves neither.
    """

    def __init__(
        self,
        edge: Edge,
        *,
        allowed_hosts: Sequence[str] = (),
        has_page: bool = True,
        batches: BatchLimits | None = None,
    ):
        self._edge, self._allowed_hosts = edge, allowed_hosts
        self.has_page = has_page
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._host = ""
        self._bodies = Bodies()
        self._connections: HttpConnections | None = None
        self._batches: BatchRoutes | None = None
        self._batch_limits = batches
        self._routes = dict(routes(edge, has_page=has_page))

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Opens the port and returns its number; 0 takes a free one.

        Raises:
          ConfigError: The address cannot be bound.
        """
        from aiohttp import web  # not at module level: it takes 0.1 s, also in processes that open no port

        if self._batch_limits is not None:
            self._batches = BatchRoutes(self._edge, self._batch_limits)
            self._routes |= self._batches.routes()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle, expect_handler=_expect)
        self._host = host
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,  # a client that leaves ends its request
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=0.0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = HttpConnections(self._runner.server)
        handshake_seconds = None if tls is None else HEADER_SECONDS
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(
                self._connections.accept, host, port, ssl=tls, ssl_handshake_timeout=handshake_seconds
            )
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"cannot serve OpenAI's API on port {port} of {host}: {error}. Free it, or choose another "
                "--openai-port."
            ) from error
        if self._batches is not None:
            self._batches.start()
        self._connections.start()
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and all its connections."""
        if self._listener is not None:
            self._listener.close()
        if self._connections is not None:
            self._connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._batches is not None:
            await self._batches.stop()

    async def _handle(self, request: "web.Request") -> "web.StreamResponse":
        """Answers any request."""
        from aiohttp import web

        began, headers = time.monotonic(), {}
        error_form: ErrorForm = openai_error
        assert self._connections is not None
        self._connections.begin(request.protocol)
        try:
            call = HttpCall(request.headers)
            headers[REQUEST_ID] = call.request_id
            route = self._route(request)
            error_form = route.error_form
            body = await self._checked_body(request, route, call)
            self._connections.serve(request.protocol)
            response = await route.answer(request, body, call)
            if not response.prepared:
                response.headers.update(headers)
            return response
        except ConnectionError as gone:
            raise asyncio.CancelledError from gone  # there is no caller to answer
        except Exception as error:
            # No other variable may hold it: they would be a cycle with all that the call had in memory.
            answer = error_answer(error)
        finally:
            self._connections.end(request.protocol)
        _log.debug("%s %s: %d after %.3f s", request.method, request.path, answer.status, time.monotonic() - began)
        response = web.json_response(error_form(answer), status=answer.status, headers={**headers, **answer.headers})
        if answer.status in (404, 405, 408, 413) or not request.content.is_eof():
            response.force_close()  # the rest of the body is not read
        return response

    def _route(self, request: "web.Request") -> Route:
        """Returns the route of a request.

        Raises:
          HttpError: There is none, or a web page of another host has made a browser send the request.
        """
        self._check_host(request)
        path = request.path.rstrip("/") or "/"
        known = _RECORD.sub(r"\1/ID", path)
        found = self._routes.get(f"{request.method} {known}") or self._routes.get(known)
        if found is None:
            if path.startswith(("/v1/files", "/v1/batches")) and self._batches is None:
                raise HttpError(404, "files and batches are served with --batch-dir only.")
            raise HttpError(404, f"there is no {path[:200]}; there are {', '.join(self._routes)}.")
        if request.method != found.method:
            raise HttpError(405, f"{path} takes {found.method}, not {request.method[:20]}.")
        if found.like is not None:
            self._check_origin(request)
        return found

    def _check_host(self, request: "web.Request") -> None:
        for header in request.headers.getall("Host", ()):
            if not is_host_allowed(header, self._host, self._allowed_hosts):
                message = f"the header Host is {header[:200]!r}; this server is reached as localhost (--allowed-hosts)."
                raise HttpError(403, message)

    def _check_origin(self, request: "web.Request") -> None:
        """Pages know no tokens, so they need to be told apart only where none are needed."""
        if self._edge.access.path is None and not is_own_or_no_page(request.headers, self._allowed_hosts):
            origin = request.headers.get("Origin", "another site")
            message = f"a web page of {origin[:200]!r} sent the request; only the own one may (--allowed-hosts)."
            raise HttpError(403, message)

    async def _checked_body(self, request: "web.Request", route: Route, call: HttpCall) -> Any:
        """Returns the parsed body of a request whose caller may make it; None if the route takes none.

        Sets what runs functions that read it, in the call.
        """
        edge, tenant = self._edge, LOCAL
        try:
            if route.like is not None:
                method = route.like if "/" in route.like else f"{SERVICE_NAME}/{route.like}"
                tenant = edge.access.check(f"/{method}", tuple(metadata(request.headers)))
            if route.is_queued:
                edge.serving()
                edge.admit(tenant)
        except Exception as error:
            edge.observer.metrics.count_refusal(code_of(error).name.lower())
            raise
        if route.method != "POST":
            return None
        if route.reads_body:
            await ask_for(request)
            return None
        max_context = 0 if edge.backend is None else edge.backend.info.max_context_tokens
        body, call.apart = await self._bodies.parsed(request, tenant.name, max_context)
        return body


async def _expect(request: "web.Request") -> None:
    """Leaves it to `Bodies` to say that a body may be sent, which the library would say of any."""
