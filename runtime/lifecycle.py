"""The life of the server process:

    bind, health NOT_SERVING -> prepare the engine -> SERVING -> SIGTERM: NOT_SERVING, refuse new requests
    -> running requests end, or drain_seconds pass -> stop

Wiring:

    mailroom = Mailroom()
    engine = Engine(..., deliver=mailroom.deliver)
    edge = Edge(engine, tokenizer, info, mailroom)
    run_server(edge, host="127.0.0.1", port=50051, drain_seconds=30.0, prepare=engine.start)
"""

import asyncio
import contextlib
import ipaddress
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from meshserve.protos import inference_pb2_grpc as pb_grpc

from .errors import ConfigError, EngineStoppedError
from .server import SERVICE_NAME, Edge, failure_error

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 2**20),  # a prompt of a million tokens takes 3 MB
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared in silence
    # Gateways ping idle streams every 30 s, also during a long prefill; gRPC's default is to hang up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Callers that vanish without closing the connection are noticed, and their requests cancelled, within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_STOP_GRACE_SECONDS = 1.0  # for statuses already decided to reach their callers
_POLL_SECONDS = 0.05


class ServerHandle:
    """A running server. `port` is the one bound; `request_stop` works from any thread."""

    def __init__(self, port: int):
        self.port = port
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0

    @property
    def is_stopping(self) -> bool:
        return self._num_requests > 0

    @property
    def is_forced(self) -> bool:
        """Asked to stop twice: do not wait for running requests."""
        return self._num_requests > 1

    def request_stop(self) -> None:
        """As SIGTERM: drain, then stop. Asking twice stops without draining."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
            self._loop.call_soon_threadsafe(self._count_request)

    def _count_request(self) -> None:
        self._num_requests += 1


async def serve(
    edge: Edge,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    allow_insecure: bool = False,
    prepare: Callable[[], None] | None = None,
    on_ready: Callable[[ServerHandle], None] | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or `ServerHandle.request_stop`.

    Args:
      port: 0 takes a free one. The address is printed once it is bound.
      drain_seconds: how long running requests may go on after the signal. A second signal stops at once.
      allow_insecure: permits a `host` that other machines can reach, although there is no TLS.
      prepare: makes the engine ready. Runs in a thread; until it returns the health is NOT_SERVING.
      on_ready: called on the event loop when requests are taken.

    Raises:
      ConfigError: `host` needs `allow_insecure`, or the address cannot be bound.
      EngineStoppedError: the engine failed. Every open stream has got its status by then.
    """
    is_local = _is_loopback(host)
    if not is_local and not allow_insecure:
        raise ConfigError(
            f"host is {host!r}, which other machines can reach, and the connection is not encrypted. Allowed is a "
            "loopback address such as 127.0.0.1. Put a gateway before it, or set --allow-insecure in a closed network."
        )
    health_servicer = health.aio.HealthServicer()
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
    # Reflection tells strangers what there is to attack, and serves only those who explore by hand.
    server = _new_server(edge, health_servicer, has_reflection=is_local)
    handle = ServerHandle(_bind(server, host, port))
    edge.mailroom.bind(edge.engine.cancel)
    await server.start()
    print(f"meshserve listens on {_address(host, handle.port)}", flush=True)
    with _signals(handle):
        try:
            if await _prepared(prepare, handle):
                edge.accept()
                await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
                if on_ready is not None:
                    on_ready(handle)
                while not handle.is_stopping and edge.engine.failure is None:
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            await health_servicer.enter_graceful_shutdown()
            await _drain(edge, handle, drain_seconds)
            await server.stop(_STOP_GRACE_SECONDS)
    if edge.engine.failure is not None:
        raise failure_error(edge.engine)


def run_server(
    edge: Edge,
    *,
    host: str,
    port: int,
    drain_seconds: float,
    allow_insecure: bool = False,
    prepare: Callable[[], None] | None = None,
    on_ready: Callable[[ServerHandle], None] | None = None,
) -> None:
    """`serve`, blocking, on a loop of its own: uvloop's where it is installed. Signals work in the main thread only."""
    serving = serve(
        edge,
        host=host,
        port=port,
        drain_seconds=drain_seconds,
        allow_insecure=allow_insecure,
        prepare=prepare,
        on_ready=on_ready,
    )
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


def _new_server(edge: Edge, health_servicer: Any, *, has_reflection: bool) -> grpc.aio.Server:
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    pb_grpc.add_InferenceServiceServicer_to_server(edge, server)
    if has_reflection:
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


async def _set_health(servicer: Any, status: int) -> None:
    for name in ("", SERVICE_NAME):
        await servicer.set(name, status)


async def _prepared(prepare: Callable[[], None] | None, handle: ServerHandle) -> bool:
    """Runs `prepare`. False if the server is told to stop meanwhile.

    In a daemon thread: a thread of the loop's pool would keep the process alive until the last kernel is compiled."""
    if prepare is None:
        return True
    errors: list[BaseException] = []

    def run() -> None:
        try:
            prepare()
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
    """Lets the open requests end; fails those that do not in time, and all if the engine has failed."""
    edge.refuse("the server is stopping; try another, or this one later")
    loop = asyncio.get_running_loop()
    end = loop.time() + drain_seconds
    while edge.mailroom.num_open and edge.engine.failure is None and not handle.is_forced and loop.time() < end:
        await asyncio.sleep(_POLL_SECONDS)
    if edge.engine.failure is not None:
        edge.mailroom.fail_all(failure_error(edge.engine))
    else:
        edge.mailroom.fail_all(EngineStoppedError("the server stopped before the request could end; try another"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return server.add_insecure_port(_address(host, port))
    except RuntimeError as error:
        raise ConfigError(f"cannot bind {_address(host, port)}: {error}. Free it, or choose another --port.") from error


@contextlib.contextmanager
def _signals(handle: ServerHandle) -> Iterator[None]:
    """SIGTERM and SIGINT ask to stop. Python allows handlers in the main thread only; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle.request_stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
