"""Runs the server process from start to end:

    bind, health NOT_SERVING -> prepare the backend -> SERVING -> SIGTERM or Drain: NOT_SERVING, refuse new requests
    -> running requests end, or the grace period passes and the rest get UNAVAILABLE -> stop

If the engine fails, every open request fails with its reason and `serve` raises: the process exits with a nonzero
status, so that its supervisor restarts it.
"""

import asyncio
import contextlib
import logging
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api.errors import ConfigError, EngineStoppedError
from ..api.loopback import is_loopback
from ..api.tenants import ANYBODY
from ..telemetry.health_service import HealthService
from ..telemetry.logs import say
from ..telemetry.metrics import ServerState
from ..telemetry.probe_server import HttpPort, Probe
from ..telemetry.profiler import Profiler
from .admin_service import Admin
from .auth import Access
from .connection_guard import ConnectionGuard
from .edge import Backend, Edge, failure_error
from .inference_service import MAX_MESSAGE_BYTES, InferenceService
from .interceptor import AdmissionInterceptor
from .method_permissions import ADMIN_SERVICE_NAME, SERVICE_NAME
from .ports import address_of, check_free
from .tls import RELOAD_SECONDS, Certificates, TlsFiles

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error instead of being shared silently
    # Gateways ping idle streams every 30 s, also during a long prefill; by default gRPC closes their connections.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Requests of callers that disappear without closing the connection are cancelled within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # What gRPC has read of a connection becomes calls even after it was closed. Large messages take no longer.
    ("grpc.experimental.tcp_max_read_chunk_size", 16_384),
    # Calls that Python has not seen yet, most of them reset. Beyond gRPC's 1,000 it cancels any caller's calls.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)
STOP_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_log = logging.getLogger(__name__)


class HttpFront(Protocol):
    """Another protocol on the same edge, over HTTP. `has_page` says whether browsers get a page at `/`."""

    has_page: bool

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Opens the port and returns its number; 0 takes a free one. Raises ConfigError if it cannot be bound."""

    async def stop(self) -> None:
        """Closes the port and all its connections."""


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Addresses to listen on, and limits for stopping.

    Port 0 takes a free one, and None opens none. `open_api` makes the front of OpenAI's API; `add_gateway` adds the
    services of the gateway port, of which the health of `gateway_services` can be asked. `allow_insecure` permits a
    host that other machines can reach without TLS or tokens. `allowed_hosts` are further names of the HTTP port, see
    `is_host_allowed`. A stopping server waits up to `status_seconds` for callers to read their final status.
    """

    host: str = "127.0.0.1"
    port: int = 0
    allow_insecure: bool = False
    tls: TlsFiles | None = None
    http_port: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    openai_port: int | None = None
    open_api: Callable[[Edge], HttpFront] | None = None
    gateway_port: int | None = None
    add_gateway: Callable[[Edge, grpc.aio.Server], None] | None = None
    gateway_services: tuple[str, ...] = ()
    max_connection_calls: int = 2_048
    drain_seconds: float = 30.0
    status_seconds: float = STOP_GRACE_SECONDS
    profiler: Profiler | None = None


class ServerHandle:
    """A running server and the ports it has bound. `request_stop` may be called from any thread."""

    def __init__(self, port: int):
        self.port = port
        self.http_port: int | None = None
        self.openai_port: int | None = None
        self.gateway_port: int | None = None
        self.grace_seconds: float | None = None  # requested by `Drain`
        self._loop = asyncio.get_running_loop()
        self._is_draining = False
        self._num_stops = 0

    @property
    def is_stopping(self) -> bool:
        return self._is_draining or self._num_stops > 0

    @property
    def is_forced(self) -> bool:
        """Whether the server was told to stop twice and must not wait for running requests."""
        return self._num_stops > 1

    def drain(self, grace_seconds: float | None) -> None:
        """Starts draining, on the event loop. Does not count as a SIGTERM: one that follows also only drains."""
        if not self.is_stopping:
            self.grace_seconds = grace_seconds
            self._is_draining = True

    def request_stop(self) -> None:
        """Does what SIGTERM does: drain, then stop. The second call stops without draining."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the server has stopped
            self._loop.call_soon_threadsafe(self._count_stop)

    def _count_stop(self) -> None:
        self._num_stops += 1


async def serve(
    edge: Edge,
    listen: Listen,
    *,
    prepare: Callable[[], Backend] | None = None,
    on_ready: Callable[[ServerHandle], None] | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT, `Drain` or `ServerHandle.request_stop`. Prints the address once it is bound.

    Args:
      prepare: Creates the backend, if the edge has none yet. Runs in a thread; until it returns the health is
        NOT_SERVING.
      on_ready: Called on the event loop once requests are accepted.

    Raises:
      ConfigError: `listen` is insecure without `allow_insecure`, or an address cannot be bound.
      EngineStoppedError: The engine failed. Every open stream has received its status by then.
    """
    is_local = is_loopback(listen.host)
    _check_safety(edge, listen, is_local)
    if not is_local:
        edge.access.tokenless = ANYBODY
    health_service = HealthService((SERVICE_NAME, *listen.gateway_services))
    server, guard = _server(edge, ("grpc.max_concurrent_streams", listen.max_connection_calls), access=edge.access)
    certificates = Certificates(listen.tls) if listen.tls is not None else None
    handle = ServerHandle(bind(server, listen, certificates))
    guard.port = handle.port
    # Reflection is only useful for manual exploration, and would describe the service to attackers.
    _add_services(server, edge, health_service, Admin(edge, handle.drain, listen.profiler), has_reflection=is_local)
    metrics = edge.observer.metrics
    metrics.read_state, metrics.read_task_failures = lambda: _state(edge), edge.supervisor.num_failures
    http = HttpPort(_probes(edge), metrics.registry, listen.allowed_hosts)
    handle.http_port = await http.start(listen.host, listen.http_port)
    edge.queues.bind(edge.cancel)
    fronts = await _open_api(edge, listen, handle, certificates)
    servers, guards = [server], [guard]
    if listen.gateway_port is not None:
        gateway, gateway_guard = _gateway(edge, listen, health_service)
        servers.append(gateway)
        guards.append(gateway_guard)
    await server.start()
    _tell_ports(listen, handle)
    with on_signals(handle.request_stop):
        _start_tasks(edge, certificates, guards)
        try:
            if await _prepared(edge, prepare, handle):
                edge.accept()
                health_service.set_serving(True)
                if listen.gateway_port is not None:
                    # Not earlier: a gateway that connects before there is a model keeps it as an unknown model.
                    handle.gateway_port = bind(servers[-1], replace(listen, port=listen.gateway_port))
                    guards[-1].port = handle.gateway_port
                    await servers[-1].start()
                    say(f"meshserve answers gateways on {address_of(listen.host, handle.gateway_port)}")
                if on_ready is not None:
                    on_ready(handle)
                await _watch(edge, handle, health_service)
        finally:
            health_service.set_serving(False)
            await _drain(edge, handle, listen.drain_seconds)
            await asyncio.gather(*(each.stop(listen.status_seconds) for each in servers))
            await asyncio.gather(http.stop(), *(each.stop() for each in fronts))
            for guard in guards:
                guard.stop()
            edge.supervisor.stop()
    if edge.failure is not None:
        raise failure_error(edge.failure)


def _tell_ports(listen: Listen, handle: ServerHandle) -> None:
    """Tells the ports that have been bound."""
    say(f"meshserve listens on {address_of(listen.host, handle.port)}")
    if listen.openai_port is None:  # now, because grpc tells nothing of such clients when they come
        _log.info("port %d speaks gRPC; HTTP clients need --openai-port, and read no HTTP answer here", handle.port)
    if handle.http_port is not None:
        say(f"meshserve answers probes on http://{address_of(listen.host, handle.http_port)}")


def run_server(
    edge: Edge,
    listen: Listen,
    *,
    prepare: Callable[[], Backend] | None = None,
    on_ready: Callable[[ServerHandle], None] | None = None,
) -> None:
    """Runs `serve` on a new event loop and blocks until it ends. Signals work in the main thread only."""
    run_until_done(serve(edge, listen, prepare=prepare, on_ready=on_ready))


def run_until_done(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on a new event loop, with uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


def _check_safety(edge: Edge, listen: Listen, is_local: bool) -> None:
    missing = []
    if listen.tls is None:
        missing.append("the connection is not encrypted (--tls-cert, --tls-key)")
    if listen.gateway_port is not None:
        missing.append("--gateway-port takes neither TLS nor tokens")
    if edge.access.path is None:
        missing.append("callers need no token (--tokens)")
    if missing and not is_local and not listen.allow_insecure:
        raise ConfigError(
            f"host is {listen.host!r}, which other machines can reach, and {' and '.join(missing)}. Set the missing "
            "options, bind a loopback address such as 127.0.0.1, or set --allow-insecure in a closed network."
        )


def _add_services(
    server: grpc.aio.Server, edge: Edge, health_service: HealthService, admin: Admin, *, has_reflection: bool
) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    pb_grpc.add_InferenceServiceServicer_to_server(InferenceService(edge), server)
    pb_grpc.add_AdminServiceServicer_to_server(admin, server)
    if has_reflection:
        names = (SERVICE_NAME, ADMIN_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def _probes(edge: Edge) -> dict[str, Probe]:
    def probe(is_well: bool) -> tuple[int, str]:
        detail = edge.progress or edge.unready_reason
        return 200 if is_well else 503, f"{pb.ServerState.Name(edge.state)} {detail}".rstrip() + "\n"

    return {"/livez": lambda: probe(edge.state != pb.SERVER_STATE_FAILED), "/readyz": lambda: probe(edge.is_ready)}


def _state(edge: Edge) -> ServerState:
    """Returns what a scrape reports. May be called from any thread."""
    backend = edge.backend
    return ServerState(
        info=backend.info if backend is not None else None,
        load=backend.engine.load() if backend is not None else None,
        num_open=edge.queues.num_open,
        is_ready=edge.is_ready,
    )


async def _open_api(
    edge: Edge, listen: Listen, handle: ServerHandle, certificates: Certificates | None
) -> list[HttpFront]:
    """Opens the port of OpenAI's API, if there is to be one, and returns what serves it."""
    if listen.open_api is None or listen.openai_port is None:
        return []
    api = listen.open_api(edge)
    context = certificates.http_context() if certificates is not None else None
    handle.openai_port = await api.start(listen.host, listen.openai_port, context)
    scheme = "http" if context is None else "https"
    url = f"{scheme}://{address_of(listen.host, handle.openai_port)}"
    say(f"meshserve answers OpenAI's API on {url}/v1" + (f" and browsers on {url}/" if api.has_page else ""))
    return [api]


def _start_tasks(edge: Edge, certificates: Certificates | None, guards: Sequence[ConnectionGuard]) -> None:
    """Starts the background tasks, which also run while the server starts or drains."""
    for guard in guards:
        edge.supervisor.forever("connection guard", guard.run, guard.is_stopping)
    if edge.access.path is not None:
        edge.supervisor.every(RELOAD_SECONDS, "tokens", edge.access.reload)
    if certificates is not None:
        edge.supervisor.every(RELOAD_SECONDS, "certificates", certificates.reload)


def _server(
    edge: Edge, *options: tuple[str, Any], access: Access | None = None
) -> tuple[grpc.aio.Server, ConnectionGuard]:
    """Returns a server without services and the guard of its connections; neither knows its port yet."""
    guard = ConnectionGuard(edge.observer.metrics.num_closed_connections.inc)
    interceptor = AdmissionInterceptor(edge.observer.metrics, edge.admit, access, guard)
    return grpc.aio.server(options=(*SERVER_OPTIONS, *options), interceptors=[interceptor]), guard


def _gateway(edge: Edge, listen: Listen, health_service: HealthService) -> tuple[grpc.aio.Server, ConnectionGuard]:
    """Returns the server of the gateway port, as `_server` does."""
    assert listen.add_gateway is not None, "a gateway port has services"
    gateway, guard = _server(edge)
    listen.add_gateway(edge, gateway)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, gateway)
    return gateway, guard


async def _watch(edge: Edge, handle: ServerHandle, health_service: HealthService) -> None:
    """Waits until the server must stop or the engine has failed.

    Meanwhile it measures the lag of the event loop, and the health is NOT_SERVING while a background task cannot run or
    the engine sleeps.
    """
    loop, lag, has_problem = asyncio.get_running_loop(), edge.observer.metrics.loop_lag_seconds, False
    while not handle.is_stopping and edge.failure is None:
        began = loop.time()
        await asyncio.sleep(_POLL_SECONDS)
        lag.observe(max(0.0, loop.time() - began - _POLL_SECONDS))
        problem = edge.unready_reason
        if bool(problem) != has_problem:
            has_problem = bool(problem)
            health_service.set_serving(not has_problem)
            _log.warning("the server is %s", f"not ready: {problem}" if problem else "ready again")


async def _prepared(edge: Edge, prepare: Callable[[], Backend] | None, handle: ServerHandle) -> bool:
    """Runs `prepare` and returns False if the server is told to stop meanwhile."""
    # In a daemon thread: a thread of the loop's pool would keep the process alive until it has compiled.
    if prepare is None:
        return True
    errors: list[BaseException] = []

    def run() -> None:
        try:
            edge.attach(prepare())
        except BaseException as error:  # `serve` raises it
            errors.append(error)

    task = edge.supervisor.once("prepare", run)
    while task.is_alive and not handle.is_stopping:
        await asyncio.sleep(_POLL_SECONDS)
    if errors:
        raise errors[0]
    return not handle.is_stopping


async def _drain(edge: Edge, handle: ServerHandle, drain_seconds: float) -> None:
    """Waits for the open requests to end; fails those that do not in time, or all if the engine has failed."""
    edge.refuse("the server is stopping; try another, or this one later")
    grace_seconds = drain_seconds if handle.grace_seconds is None else handle.grace_seconds
    _log.info("stopping; open requests: %d, grace period: %g s", edge.queues.num_open, grace_seconds)
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_seconds
    while edge.queues.num_open and edge.failure is None and not handle.is_forced and loop.time() < end:
        await asyncio.sleep(_POLL_SECONDS)
    if edge.failure is not None:
        edge.queues.fail_all(failure_error(edge.failure))
    else:
        edge.queues.fail_all(
            EngineStoppedError("the server was stopped before the request could end; try another, or this one later")
        )


def bind(server: grpc.aio.Server, listen: Listen, certificates: Certificates | None = None) -> int:
    """Binds the server to the address in `listen`, with TLS if there are certificates, and returns the port.

    Raises:
      ConfigError: The address cannot be bound.
    """
    address = address_of(listen.host, listen.port)
    check_free(listen.host, listen.port)
    try:
        if certificates is not None:
            return server.add_secure_port(address, certificates.credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot bind {address}: {error}. Free it, or choose another --port.") from error


@contextlib.contextmanager
def on_signals(request_stop: Callable[[], None], hang_up: Callable[[], None] | None = None) -> Iterator[None]:
    """Handles SIGTERM and SIGINT by `request_stop`, and SIGHUP by `hang_up` if given. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: request_stop, signal.SIGINT: request_stop}
    if hang_up is not None:
        handlers[signal.SIGHUP] = hang_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
