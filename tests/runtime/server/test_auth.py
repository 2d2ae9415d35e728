"""Which callers may call what: methods, credentials and binds combined; certificates and tokens that change."""

import datetime
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.errors import ConfigError, UnauthenticatedError
from meshserve.runtime.api.tenants import ANYBODY, LOCAL, Permission, Tenant, new_token, read_tokens
from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.commands.cli import main
from meshserve.runtime.server.auth import Access
from meshserve.runtime.server.edge import Edge, scoped
from meshserve.runtime.server.lifecycle import Listen, run_server
from meshserve.runtime.server.method_permissions import METHOD_PERMISSIONS, SERVICE_NAME, new_access
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.server.tls import TlsFiles
from tests.certificates import certificate
from tests.runtime.loopback import Running, running
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode
SERVICES = pb.DESCRIPTOR.services_by_name
METHODS = [method for service in SERVICES.values() for method in service.methods]


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
[tenants.reader]
permissions = ["info"]
tokens = [{{ sha256 = "{digest("read")}" }}]

[tenants.writer]
max_requests = 2
max_tokens = 60
weight = 2.5
tokens = [
  {{ sha256 = "{digest("write")}" }},
  {{ sha256 = "{digest("old")}", expires = 2020-01-01T00:00:00Z }},
  {{ sha256 = "{digest("new")}", expires = 2999-01-01T00:00:00Z }},
]

[tenants.operator]
permissions = ["admin", "info", "inference"]
tokens = [{{ sha256 = "{digest("operate")}" }}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("access") / "tokens.toml"
    path.write_text(TOKENS)
    with running(tokens=path) as server:
        yield server


# What each credential may do; None is a call without one.
CREDENTIALS: dict[str, tuple[list[str], set[Permission] | Code]] = {
    "none": ([], Code.UNAUTHENTICATED),
    "wrong": (["Bearer wrong"], Code.UNAUTHENTICATED),
    "empty": (["Bearer "], Code.UNAUTHENTICATED),
    "other scheme": (["Basic write"], Code.UNAUTHENTICATED),
    "two": (["Bearer write", "Bearer operate"], Code.UNAUTHENTICATED),
    "huge": (["Bearer " + "x" * 600], Code.UNAUTHENTICATED),
    "expired": (["Bearer old"], Code.UNAUTHENTICATED),
    "reader": (["Bearer read"], {Permission.INFO}),
    "writer": (["Bearer write"], {Permission.INFO, Permission.INFERENCE}),
    "writer, in time": (["bearer new"], {Permission.INFO, Permission.INFERENCE}),
    "operator": (["Bearer operate"], set(Permission)),
}


def outcome(channel: grpc.Channel, path: str, request: Any, metadata: list[tuple[str, str]]) -> Code:
    """How a call with this request ends, whatever it answers."""
    call = channel.unary_stream(path, request_serializer=lambda message: message.SerializeToString())
    try:
        list(call(request, metadata=metadata, timeout=WAIT_SECONDS))
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("credential", CREDENTIALS)
def test_every_method_with_every_credential(server, method, credential):
    """Requests that pass the gate change nothing: they are invalid, or cannot be served."""
    values, allowed = CREDENTIALS[credential]
    path = f"/{method.containing_service.full_name}/{method.name}"
    request = message_factory.GetMessageClass(method.input_type)()
    if method.name == "Drain":
        request.grace_seconds = -1.0
    with grpc.insecure_channel(server.target) as channel:
        code = outcome(channel, path, request, [("authorization", value) for value in values])
    if isinstance(allowed, Code):
        assert code is allowed
    elif METHOD_PERMISSIONS[path] in allowed:
        assert code in (Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)
    else:
        assert code is Code.PERMISSION_DENIED


def test_every_method_is_in_the_table():
    ours = {f"/{method.containing_service.full_name}/{method.name}" for method in METHODS}
    assert ours <= set(METHOD_PERMISSIONS)


def test_health_needs_no_token_and_what_is_unknown_needs_admin(server):
    with grpc.insecure_channel(server.target) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        empty = health_pb2.HealthCheckRequest()
        assert outcome(channel, "/other.Service/Method", empty, []) is Code.UNAUTHENTICATED
        metadata = [("authorization", "Bearer write")]
        assert outcome(channel, "/other.Service/Method", empty, metadata) is Code.PERMISSION_DENIED
        metadata = [("authorization", "Bearer operate")]
        assert outcome(channel, "/other.Service/Method", empty, metadata) is Code.UNIMPLEMENTED


def test_a_client_that_asks_for_the_newer_reflection_may_go_on_to_the_older(server):
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    with grpc.insecure_channel(server.target) as channel:
        empty = health_pb2.HealthCheckRequest()
        assert outcome(channel, path, empty, [("authorization", "Bearer read")]) is Code.UNIMPLEMENTED


@pytest.mark.parametrize("days", ["-1", "36501", "99999999999"])
def test_the_command_refuses_days_that_no_token_has(days, capsys):
    assert main(["token", "somebody", "--days", days]) == 2
    assert f"--days is {days}; allowed is 0 (never) to 36500." in capsys.readouterr().err


def test_strangers_do_not_learn_that_the_queue_is_full(server, monkeypatch):
    monkeypatch.setattr(server.engine, "is_full", True)
    with grpc.insecure_channel(server.target) as channel:
        assert outcome(channel, f"/{SERVICE_NAME}/Generate", pb.GenerateRequest(), []) is Code.UNAUTHENTICATED
        metadata = [("authorization", "Bearer write")]
        assert outcome(channel, f"/{SERVICE_NAME}/Generate", pb.GenerateRequest(), metadata) is Code.RESOURCE_EXHAUSTED


def test_quotas_of_requests_and_tokens(server):
    num_refused = server.counted("meshserve_refused_calls_total", code="resource_exhausted")
    with Client(server.target, token="write") as client, Client(server.target, token="operate") as other:
        first, second = (client.generate("a" * 9, max_tokens=20) for _ in range(2))
        next(first), next(second)
        list(first), list(second)
        open_streams = [client.generate("a", max_tokens=19), client.generate("a", max_tokens=19)]
        with server.engine.holding(19):
            for stream in open_streams:
                next(stream)
            with pytest.raises(CallError, match="requests in flight would be 3; this tenant may have 2") as caught:
                client.complete("a")
            assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_seconds == 1.0
            assert server.counted("meshserve_refused_calls_total", code="resource_exhausted") > num_refused
            assert other.complete("a", max_tokens=1).token_ids == (98,)  # another tenant does not notice
            open_streams[0].close()
            wait_for(lambda: "tokens in flight would be 84; this tenant may have 60" in refusal(client))
            status = status_pb2.Status.FromString(quota_details(server.target))
            failure = error_details_pb2.QuotaFailure()
            assert any(detail.Unpack(failure) for detail in status.details)
            assert failure.violations[0].subject == "tenant:writer"
            open_streams[1].close()


def test_without_max_tokens_the_output_is_what_the_quota_holds(server):
    """The context has 64 tokens, and this tenant 60 in flight."""
    with Client(server.target, token="write") as client, Client(server.target, token="operate") as other:
        assert other.complete("abcd").usage.num_output_tokens == 60
        assert client.complete("abcd").usage.num_output_tokens == 56
        samples = client.complete_samples("abcd", 2)
        assert [sample.usage.num_output_tokens for sample in samples] == [26, 26]
        with pytest.raises(CallError, match="tokens in flight would be 64; this tenant may have 60"):
            client.complete("abcd", max_tokens=60)


def test_what_is_being_tokenised_counts_against_the_quota(server):
    """Prompts of Generate and texts of Tokenize alike, before a thread takes them."""
    tokenizer, opened, num_started = server.edge.backend.tokenizer, threading.Event(), 0
    encode = tokenizer.encode

    def slow_encode(text: str) -> tuple[int, ...]:
        nonlocal num_started
        num_started += 1
        assert opened.wait(WAIT_SECONDS)
        return encode(text)

    tokenizer.encode = slow_encode
    try:
        with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(2) as pool:
            long = pb.GenerateRequest(text="b" * 3000)

            def ask(method: str, request: Any) -> Code:
                return outcome(channel, f"/{SERVICE_NAME}/{method}", request, [("authorization", "Bearer write")])

            requests = {"Tokenize": pb.TokenizeRequest(text="a"), "Generate": long}
            calls = [pool.submit(ask, *request) for request in requests.items()]
            wait_for(lambda: num_started == 2)
            for request in (*requests.items(), ("Detokenize", pb.DetokenizeRequest(token_ids=[97]))):
                assert ask(*request) is Code.RESOURCE_EXHAUSTED
            opened.set()
            assert [call.result() for call in calls] == [Code.OK, Code.INVALID_ARGUMENT]
            assert ask("Tokenize", requests["Tokenize"]) is Code.OK
    finally:
        opened.set()
        del tokenizer.encode


@pytest.mark.parametrize(
    ("fields", "limit"),
    [("", 0), ("permissions = ['admin', 'inference']", 100), ("max_priority = 7", 7), ("max_priority = -1", -1)],
)
def test_each_tenant_has_its_limit_of_priority(tmp_path: Path, fields: str, limit: int):
    path = tmp_path / "tokens.toml"
    path.write_text(f"[tenants.a]\n{fields}\ntokens = [{{ sha256 = '{digest('a')}' }}]\n")
    with running(tokens=path) as server, Client(server.target, token="a") as client:
        for priority in (limit, -100):
            assert client.complete("a", max_tokens=1, priority=priority).token_ids == (98,)
        for priority in {limit + 1, 100} - {101} if limit < 100 else ():
            with pytest.raises(CallError, match=f"this tenant may use -100 to {limit} .max_priority") as caught:
                client.complete("a", max_tokens=1, priority=priority)
            assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "priority")
        assert [options.priority for options in server.engine.options] == [limit, -100]


def test_priorities_without_tokens_are_for_this_machine_only():
    assert (LOCAL.priority_limit, ANYBODY.priority_limit) == (100, 0)
    with running() as server, Client(server.target) as client:
        client.complete("a", max_tokens=1, priority=100)


def test_the_engine_learns_whose_request_it_is(server):
    server.engine.options.clear()
    for token in ("write", "operate"):
        with Client(server.target, token=token) as client:
            client.complete("a", max_tokens=1)
    assert [(options.tenant, options.weight) for options in server.engine.options] == [
        ("writer", 2.5), ("operator", 1.0),
    ]  # fmt: skip


def refusal(client: Client) -> str:
    """What a caller is told that asks for all that a context holds."""
    with pytest.raises(CallError) as caught:
        client.complete("a", max_tokens=100_000)
    return str(caught.value)


def quota_details(target: str) -> bytes:
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_stream(
            "/meshserve.v1.InferenceService/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )
        request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=100_000))
        with pytest.raises(grpc.RpcError) as caught:
            list(call(request, metadata=[("authorization", "Bearer write")]))
        return dict(caught.value.trailing_metadata())["grpc-status-details-bin"]


def test_tenants_neither_meet_nor_abort_each_other(server):
    with Client(server.target, token="write") as writer, Client(server.target, token="operate") as operator:
        streams = [client.generate("a", max_tokens=25, request_id="same") for client in (writer, operator)]
        with server.engine.holding(25):
            for stream in streams:
                next(stream)
            assert writer.abort(["same"]) == 1
            assert list(streams[0])[-1].finish.reason.value == "cancelled"
        assert list(streams[1])[-1].finish.reason.value == "length"


def test_tenants_share_no_cached_prompts(server):
    """Nor can one name the salt of another: what reaches the engine is a digest of tenant and salt."""
    server.engine.salts.clear()
    for token, salt in (("write", "a"), ("new", "a"), ("write", "b"), ("write", ""), ("operate", "a"), ("operate", "")):
        with Client(server.target, token=token) as client:
            client.complete("a", max_tokens=1, cache_salt=salt)
    first, same, *others = server.engine.salts
    assert first == same and len({first, *others}) == 5
    with Client(server.target, token="operate") as operator:
        operator.complete("a", max_tokens=1, cache_salt=first)
    assert server.engine.salts[-1] not in (first, *others)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token"),
        (f"[tenants.a]\ntokens = [{{sha256 = '{digest('a')}'}}, {{sha256 = '{digest('a')}'}}]", "is listed twice"),
        ("[tenant.a]", "unknown keys tenant; known are tenants"),
        ("[tenants.a]\nmax_request = 1", "unknown keys max_request"),
        ("[tenants.a]\nmax_requests = 0", "max_requests is 0"),
        ("[tenants.a]\nmax_priority = 101", "max_priority is 101"),
        ("[tenants.a]\nmax_priority = 1.0", "max_priority is 1.0"),
        ("[tenants.a]\nweight = 0", "weight is 0; allowed is a number, 0.01 to 100"),
        ("[tenants.a]\nweight = nan", "weight is nan"),
        ("[tenants.a]\nweight = true", "weight is True"),
        ("[tenants.'a b']", "a name has 1 to 64"),
        ("[tenants.a]\npermissions = ['root']", "'root' is not a valid Permission"),
        ("[tenants.a]\ntokens = [{sha256 = 'ab'}]", "allowed are 64"),
        (f"[tenants.a]\ntokens = [{{sha256 = '{digest('a')}', expires = 2020-01-01}}]", "a time with a zone"),
        ("[[", "Invalid initial character"),
    ],
)
def test_a_tokens_file_that_means_nothing(tmp_path, text, words):
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_tokens(path)


def test_expiry_follows_the_clock(tmp_path):
    path, now = tmp_path / "tokens.toml", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    token, lines = new_token("a.b", expires=now + datetime.timedelta(hours=1))
    path.write_text(lines)
    access = Access(path, METHOD_PERMISSIONS, frozenset(), now=lambda: now)
    metadata = [("authorization", f"Bearer {token}")]
    assert access.tenant(metadata).name == "a.b"
    access.now = lambda: now + datetime.timedelta(hours=1)
    with pytest.raises(UnauthenticatedError, match="expired"):
        access.tenant(metadata)


def test_nobody_reaches_a_tenants_requests():
    names = [
        scoped(Tenant(name=tenant), request_id) for tenant in ("", "a") for request_id in ("b", "a/b", "/a/b", "/b")
    ]
    assert len(set(names)) == len(names)


def test_a_constraint_counts_against_the_quota_while_it_is_compiled(tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[tenants.a]\nmax_requests = 1\ntokens = [{{ sha256 = "{digest("input")}" }}]\n')
    with running(tokens=tokens) as server, Client(server.target, token="input") as client:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(client.complete, "a", constraint={"regex": ".*" * 8_000}, max_tokens=1)
            usage = server.edge.access._usage
            wait_for(lambda: "a" in usage and usage["a"].num_requests == 1)
            with pytest.raises(CallError, match="max_requests") as caught:
                client.complete("a", max_tokens=1)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            with pytest.raises(CallError):
                slow.result(WAIT_SECONDS)
        assert client.complete("a", max_tokens=1).finish_reason
        assert usage["a"].num_requests == 0


def test_binds_that_are_refused(tmp_path):
    """Bind x TLS x tokens: what strangers can reach needs both, or a word that it is meant."""
    path = tmp_path / "tokens.toml"
    path.write_text(new_token("a")[1])
    files = certificate(tmp_path, "server")
    for tls in (None, files):
        for tokens in (None, path):
            for host in ("0.0.0.0", "::", "10.1.2.3", "example.com", ""):
                if tls is None or tokens is None:
                    edge = Edge(OutputQueues(), access=new_access(tokens))
                    with pytest.raises(ConfigError, match="--allow-insecure") as caught:
                        run_server(edge, Listen(host=host, tls=tls))
                    assert ("not encrypted" in str(caught.value)) == (tls is None)
                    assert ("need no token" in str(caught.value)) == (tokens is None)
    with pytest.raises(ConfigError, match="no.key"):
        run_server(Edge(OutputQueues()), Listen(tls=TlsFiles(certificate=files.certificate, key=tmp_path / "no.key")))
