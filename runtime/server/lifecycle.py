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
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api.errors import ConfigError, EngineStoppedError
from ..api.tenants import ANYBODY, is_loopback
from ..telemetry.health_service import HealthService
from ..telemetry.logs import say
from ..telemetry.metrics import ServerState
from ..telemetry.probe_server import HttpPort, Probe
from ..telemetry.profiler import Profiler
from .admin_service import Admin
from .inference_service import MAX_MESSAGE_BYTES, Backend, Edge, failure_error
from .interceptor import AdmissionInterceptor
from .method_permissions import ADMIN_SERVICE_NAME, SERVICE_NAME
from .ports import address_of, check_free
from .tls import TlsFiles, server_credentials

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error instead of being shared silently
    # Gateways ping idle streams every 30 s, also during a long prefill; by default gRPC closes their connections.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Requests of callers that disappear without closing the connection are cancelled within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Calls that Python has not seen yet, most of them reset by callers. Beyond gRPC's 1,000 it cancels anybody's calls.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)
STOP_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_RELOAD_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Addresses to listen on, and limits for stopping.

    Port 0 takes a free one, and None opens none; `add_gateway` adds the services of the gateway port, of which the
    health of `gateway_services` can be asked. `allow_insecure` permits a host that other machines can reach without TLS
    or tokens. A stopping server waits up to `status_seconds` for callers to read their final status.
    """

    host: str = "127.0.0.1"
    port: int = 0
    allow_insecure: bool = False
    tls: TlsFiles | None = None
    http_port: int | None = None
    gateway_port: int | None = None
    add_gateway: Callable[[Edge, grpc.aio.Server], None] | None = None
    gateway_services: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    status_seconds: float = STOP_GRACE_SECONDS
    profiler: Profiler | None = None


class ServerHandle:
    """A running server and the ports it has bound. `request_stop` may be called from any thread."""

    def __init__(self, port: int):
        self.port = port
        self.http_port: int | None = None
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
        """Starts draining, on the event loop. Does not count as a SIGTERM: one that follows only drains, too."""
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
    # Reflection is only useful for manual exploration, and would describe the service to attackers.
    interceptor = AdmissionInterceptor(edge.observer.metrics, edge.admit, edge.access)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[interceptor])
    handle = ServerHandle(bind(server, listen))
    _add_services(server, edge, health_service, Admin(edge, handle.drain, listen.profiler), has_reflection=is_local)
    edge.observer.metrics.read_state = lambda: _state(edge)
    http = HttpPort(_probes(edge), edge.observer.metrics.registry)
    handle.http_port = await http.start(listen.host, listen.http_port)
    edge.queues.bind(edge.cancel)
    servers = [server]
    if listen.gateway_port is not None:
        servers.append(_gateway(edge, listen, health_service))
    await server.start()
    say(f"meshserve listens on {address_of(listen.host, handle.port)}")
    if handle.http_port is not None:
        say(f"meshserve answers probes on http://{address_of(listen.host, handle.http_port)}")
    with on_signals(handle.request_stop):
        reloading = asyncio.create_task(_reload_tokens(edge))
        try:
            if await _prepared(edge, prepare, handle):
                edge.accept()
                health_service.set_serving(True)
                if listen.gateway_port is not None:
                    # Not earlier: a gateway that connects before there is a model keeps it as an unknown model.
                    handle.gateway_port = bind(servers[-1], replace(listen, port=listen.gateway_port, tls=None))
                    await servers[-1].start()
                    say(f"meshserve answers gateways on {address_of(listen.host, handle.gateway_port)}")
                if on_ready is not None:
                    on_ready(handle)
                await _watch(edge, handle)
        finally:
            health_service.set_serving(False)
            await _drain(edge, handle, listen.drain_seconds)
            await asyncio.gather(*(each.stop(listen.status_seconds) for each in servers))
            await http.stop()
            reloading.cancel()
    if edge.failure is not None:
        raise failure_error(edge.failure)


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
    pb_grpc.add_InferenceServiceServicer_to_server(edge, server)
    pb_grpc.add_AdminServiceServicer_to_server(admin, server)
    if has_reflection:
        names = (SERVICE_NAME, ADMIN_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def _probes(edge: Edge) -> dict[str, Probe]:
    def probe(is_well: bool) -> tuple[int, str]:
        return 200 if is_well else 503, f"{pb.ServerState.Name(edge.state)} {edge.progress}".rstrip() + "\n"

    return {
        "/livez": lambda: probe(edge.state != pb.SERVER_STATE_FAILED),
        "/readyz": lambda: probe(edge.state == pb.SERVER_STATE_READY),
    }


def _state(edge: Edge) -> ServerState:
    """Returns what a scrape reports. May be called from any thread."""
    backend = edge.backend
    return ServerState(
        info=backend.info if backend is not None else None,
        load=backend.engine.load() if backend is not None else None,
        num_open=edge.queues.num_open,
        is_ready=edge.state == pb.SERVER_STATE_READY,
    )


def _gateway(edge: Edge, listen: Listen, health_service: HealthService) -> grpc.aio.Server:
    """Returns the server of the gateway port, which is not bound yet."""
    assert listen.add_gateway is not None, "a gateway port has services"
    interceptor = AdmissionInterceptor(edge.observer.metrics, edge.admit)
    gateway = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[interceptor])
    listen.add_gateway(edge, gateway)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, gateway)
    return gateway


async def _watch(edge: Edge, handle: ServerHandle) -> None:
    """Waits until the server must stop or the engine has failed, and measures the lag of the event loop."""
    loop, lag = asyncio.get_running_loop(), edge.observer.metrics.loop_lag_seconds
    while not handle.is_stopping and edge.failure is None:
        began = loop.time()
        await asyncio.sleep(_POLL_SECONDS)
        lag.observe(max(0.0, loop.time() - began - _POLL_SECONDS))


async def _reload_tokens(edge: Edge) -> None:
    """Reloads the tokens file whenever it changes, also while the server starts or drains."""
    while True:
        await asyncio.sleep(_RELOAD_SECONDS)
        edge.access.reload()


async def _prepared(edge: Edge, prepare: Callable[[], Backend] | None, handle: ServerHandle) -> bool:
    """Runs `prepare` and returns False if the server is told to stop meanwhile."""
    # In a daemon thread: a thread of the loop's pool would keep the process alive until it has compiled.
    if prepare is None:
        return True
    errors: list[BaseException] = []

    def run() -> None:
        try:
            edge.attach(prepare())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="prepare", daemon=True)
    thread.start()
    while thread.is_alive() and not handle.is_stopping:
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
        edge.queues.fail_all(EngineStoppedError("the server stopped before the request could end; try another"))


def bind(server: grpc.aio.Server, listen: Listen) -> int:
    """Binds the server to the address in `listen` and returns the port.

    Raises:
      ConfigError: The address cannot be bound, or the certificates cannot be used.
    """
    address = address_of(listen.host, listen.port)
    check_free(listen.host, listen.port)
    try:
        if listen.tls is not None:
            return server.add_secure_port(address, server_credentials(listen.tls))
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot bind {address}: {error}. Free it, or choose another port.") from error


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
