"""Connections on which calls only cost time are closed, and no others."""

import contextlib
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.client.client import Client
from meshserve.runtime.server import connection_guard, peer_sockets
from meshserve.runtime.server.connection_guard import ConnectionGuard
from meshserve.runtime.server.lifecycle import SERVER_OPTIONS
from meshserve.runtime.server.packet_filter import drop_packets
from meshserve.runtime.server.peer_sockets import network_of, peer_name
from meshserve.runtime.server.ports import address_of
from tests.hostile.connections import GENERATE, resets
from tests.runtime.loopback import running
from tests.runtime.server.test_auth import TOKENS
from tests.waiting import WAIT_SECONDS, wait_for

LOCAL = "127.0.0.1/32"


class Guarded:
    """A guard of a listening socket's connections, whose background task does not run by itself."""

    def __init__(self, listener: socket.socket):
        self.seconds, self.num_closed = 0.0, 0
        self.guard = ConnectionGuard(self.count, lambda: self.seconds)
        self.guard.port = listener.getsockname()[1]
        self.listener = listener

    def count(self, num_closed: int) -> None:
        self.num_closed += num_closed

    def connect(self, host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, str]:
        """Returns both ends of a new connection, and the name of the peer."""
        caller = socket.create_connection(self.listener.getsockname(), WAIT_SECONDS, source_address=(host, 0))
        accepted, address = self.listener.accept()
        return caller, accepted, peer_name(address)

    def close(self) -> None:
        """Closes what has been ordered."""
        self.guard.stop()
        self.guard.run()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Guarded(listener)


def is_closed(accepted: socket.socket) -> bool:
    accepted.setblocking(False)
    try:
        return accepted.recv(1) == b""
    except BlockingIOError:
        return False


@contextlib.contextmanager
def closing(*connections: tuple[socket.socket, socket.socket, str]) -> Iterator[None]:
    try:
        yield
    finally:
        for caller, accepted, _ in connections:
            caller.close()
            accepted.close()


def waste(guarded: Guarded, peer: str, num_calls: int) -> None:
    for _ in range(num_calls):
        guarded.guard.wasted(peer)


def test_a_connection_is_closed_once_more_calls_than_allowed_were_wasted(guarded: Guarded):
    first, second = guarded.connect(), guarded.connect()
    with closing(first, second):
        guarded.guard.proper("ipv4:127.0.0.1:1")
        waste(guarded, first[2], connection_guard._MAX_WASTED + 1)
        waste(guarded, second[2], 1)
        guarded.close()
        assert (is_closed(first[1]), is_closed(second[1]), guarded.num_closed) == (True, False, 1)


def test_the_allowance_is_one_of_a_time(guarded: Guarded):
    first = guarded.connect()
    with closing(first):
        for _ in range(3):
            waste(guarded, first[2], connection_guard._MAX_WASTED)
            guarded.seconds += connection_guard._WINDOW_SECONDS
        guarded.close()
        assert not is_closed(first[1])


def test_connections_of_an_address_share_an_allowance(guarded: Guarded):
    """With a proper call from the address, connections without wasted calls are left alone: they may be others'."""
    connections = [guarded.connect() for _ in range(5)]
    with closing(*connections):
        guarded.guard.proper(connections[0][2])
        for _, _, peer in connections[:4]:
            waste(guarded, peer, connection_guard._MAX_WASTED_OF_ADDRESS // 3 + 1)
        guarded.close()
        assert [is_closed(accepted) for _, accepted, _ in connections] == [False, True, True, True, False]


def test_an_address_without_a_proper_call_loses_all_connections(guarded: Guarded):
    first, second, other = guarded.connect("127.0.0.2"), guarded.connect("127.0.0.2"), guarded.connect()
    with closing(first, second, other):
        waste(guarded, first[2], connection_guard._MAX_WASTED + 1)
        guarded.close()
        assert [is_closed(accepted) for _, accepted, _ in (first, second, other)] == [True, True, False]


def can_connect(listener: socket.socket, host: str) -> bool:
    """Returns whether a caller from this address can connect. If not, the kernel drops its packets, and it waits."""
    with socket.socket(listener.family) as caller:
        caller.bind((host, 0))
        caller.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            caller.connect(listener.getsockname()[:2])
        return bool(select.select([], [caller], [], 0.2)[1])  # on loopback, a connection is made within the call


def test_an_address_without_a_proper_call_cannot_connect_for_a_while(guarded: Guarded):
    first, proper = guarded.connect("127.0.0.2"), guarded.connect()
    with closing(first, proper):
        guarded.guard.proper(proper[2])
        for _, _, peer in (first, proper):
            waste(guarded, peer, connection_guard._MAX_WASTED_AMONG_PROPER + 1)
        guarded.close()
        assert is_closed(first[1]) and is_closed(proper[1])
        assert not can_connect(guarded.listener, "127.0.0.2") and can_connect(guarded.listener, "127.0.0.1")
        guarded.seconds += connection_guard._BAN_SECONDS
        guarded.guard._end_bans()
        assert can_connect(guarded.listener, "127.0.0.2")


@pytest.mark.parametrize("host, source", [("127.0.0.1", "127.0.0.2"), ("::1", "::1"), ("::", "127.0.0.2")])
def test_packets_from_some_addresses_are_dropped(host: str, source: str):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    others = [f"10.0.0.{i}" for i in range(200)] + [f"2001:db8::{i}:0:0:0:1" for i in range(1, 56)]
    try:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with listener, socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET) as caller:
        networks = [network_of(peer_name((each, 1))) for each in others]
        drop_packets(listener, [*networks, network_of(peer_name((source, 1)))])
        caller.bind((source, 0))
        caller.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            caller.connect(("127.0.0.1" if host == "::" else host, listener.getsockname()[1]))
        assert not select.select([], [caller], [], 0.2)[1]
        drop_packets(listener, networks)
        assert select.select([], [caller], [], WAIT_SECONDS)[1]  # it sends its packet again after a second


def test_addresses_of_one_ipv6_network_are_one():
    assert network_of("ipv6:%5B2001:db8::1%5D:1") == network_of("ipv6:%5B2001:db8::2%5D:2")
    assert network_of("ipv4:10.0.0.1:1") != network_of("ipv4:10.0.0.2:1")
    assert network_of("unix:/tmp/a") is None and network_of("unix:") is None


def test_what_was_received_is_discarded(guarded: Guarded):
    """Otherwise gRPC would still read it, and make calls of it."""
    first = guarded.connect()
    with closing(first):
        first[0].sendall(b"x" * 100_000)
        waste(guarded, first[2], connection_guard._MAX_WASTED + 1)
        guarded.close()
        assert is_closed(first[1])


def test_connections_of_other_ports_are_left_alone(guarded: Guarded):
    first = guarded.connect()
    with closing(first):
        guarded.guard.port = 1
        waste(guarded, first[2], connection_guard._MAX_WASTED_OF_ADDRESS + 1)
        guarded.close()
        assert not is_closed(first[1])


def test_a_closed_connection_is_a_line_in_the_log(guarded: Guarded, caplog: pytest.LogCaptureFixture):
    first, second = guarded.connect(), guarded.connect()
    with closing(first, second):
        for _, _, peer in (first, second):
            waste(guarded, peer, connection_guard._MAX_WASTED + 1)
        guarded.close()
        assert [record.getMessage() for record in caplog.records if record.name == connection_guard.__name__] == [
            f"closed 2 connections, the last of {LOCAL}: calls on them were reset before their message came"
        ]


@pytest.mark.parametrize("host, address", [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_peers_are_named_as_grpc_names_them(host: str, address: str):
    """In the last case the server's socket is one of IPv6, and the peer has an address of IPv4."""
    seen: list[str] = []

    def note(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(context.peer())
        return b""

    server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    handler = grpc.unary_unary_rpc_method_handler(note)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Note": handler}),))
    try:
        port = server.add_insecure_port(address_of(host, 0))
    except RuntimeError:
        pytest.skip(f"this machine has no address {host}")
    server.start()
    try:
        with grpc.insecure_channel(address_of(address, port)) as channel:
            channel.unary_unary("/test/Note")(b"", timeout=WAIT_SECONDS)
            assert seen[0] in {peer for _, peer in peer_sockets.connections(port)}
    finally:
        server.stop(None).wait()


def flood(target: str, data: bytes) -> bool:
    """Sends bytes over a connection of its own, and returns whether the server closes it."""
    host, port = target.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        try:
            connection.sendall(data)
            while connection.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:  # a reset
            return True
        return True


@pytest.mark.parametrize(
    "path, is_full",
    [
        pytest.param(GENERATE, False, id="a stream"),
        pytest.param(GENERATE, True, id="a full queue"),
        pytest.param("/meshserve.v1.InferenceService/GetLoad", False, id="a single answer"),
        pytest.param("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", False, id="many requests"),
        pytest.param("/no.such.Service/Method", False, id="no such method"),
    ],
)
@pytest.mark.parametrize("token", ["operate", "unknown"])
def test_resets_end_the_connection_and_no_other(tmp_path: Path, path: str, is_full: bool, token: str):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    with running(tokens=tokens) as server, Client(server.target, token="write") as client:
        with ThreadPoolExecutor(1) as pool:
            with server.engine.holding(3):
                stream = pool.submit(lambda: list(client.generate([1, 2], max_tokens=3)))
                wait_for(lambda: server.edge.queues.num_open == 1)
                server.engine.is_full = is_full
                assert flood(server.target, resets(10_000, path, token))
            assert stream.result(WAIT_SECONDS)[-1].finish is not None
        assert server.counted("meshserve_closed_connections_total") == 1


@pytest.mark.parametrize("method, is_proper", [("/grpc.health.v1.Health/Check", False), (GENERATE, True)])
def test_what_anybody_may_call_spares_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, is_proper: bool
):
    tokens, proper = tmp_path / "tokens.toml", []
    tokens.write_text(TOKENS)
    monkeypatch.setattr(ConnectionGuard, "proper", lambda self, peer: proper.append(peer))
    with running(tokens=tokens) as server, grpc.insecure_channel(server.target) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1]), sampling=pb.SamplingParams(max_tokens=1))
        data = request.SerializeToString() if method == GENERATE else b""
        call = channel.unary_stream(method)(data, WAIT_SECONDS, (("authorization", "Bearer write"),))
        assert list(call)
        assert bool(proper) is is_proper


@pytest.mark.parametrize("method", ["GetServerInfo", "NoSuchMethod"])
@pytest.mark.parametrize("token", ["operate", "unknown"])
def test_calls_that_wait_for_their_answer_may_be_as_many_as_they_like(tmp_path: Path, method: str, token: str):
    """A caller whose token has expired, or who calls a method of a newer version, must see that."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    codes = {"GetServerInfo": grpc.StatusCode.OK, "NoSuchMethod": grpc.StatusCode.UNIMPLEMENTED}
    right = codes[method] if token == "operate" else grpc.StatusCode.UNAUTHENTICATED
    num_calls = 3 * connection_guard._MAX_WASTED
    with running(tokens=tokens) as server:
        with grpc.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(f"/meshserve.v1.InferenceService/{method}")
            metadata = (("authorization", f"Bearer {token}"),)
            answers = [call.future(b"", WAIT_SECONDS, metadata) for _ in range(num_calls)]
            assert {answer.code() for answer in answers} == {right}
        assert server.counted("meshserve_closed_connections_total") == 0
