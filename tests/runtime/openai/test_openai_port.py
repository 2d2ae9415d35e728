"""The port over a fake engine: callers that leave, full queues, tokens and quotas, and errors in each API's form."""

import dataclasses
import hashlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.api.tenants import LOCAL
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.lifecycle import Listen
from tests.runtime.loopback import Running, running
from tests.waiting import WAIT_SECONDS, wait_for

LISTEN = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
[tenants.reader]
permissions = ["info"]
tokens = [{{ sha256 = "{digest("read")}" }}]

[tenants.writer]
max_requests = 1
tokens = [{{ sha256 = "{digest("write")}" }}]
"""


@pytest.fixture
def server() -> Iterator[Running]:
    with running(listen=LISTEN) as server:
        yield server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Running]:
    """A server whose callers need tokens."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    with running(listen=LISTEN, tokens=tokens) as server:
        yield server


def asked(
    server: Running, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    """Sends a request and returns the answer, of which the body has not been read."""
    assert server.handle.openai_port is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.handle.openai_port, timeout=WAIT_SECONDS)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
    return connection.getresponse()


def answered(server: Running, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    answer = asked(server, path, BODIES[path], headers)
    return answer.status, json.load(answer)


def error_of(path: str, body: Any) -> Any:
    """Returns the error of a body in the form of the path's API."""
    if path == "/v1/messages":
        assert body["type"] == "error"
    else:
        assert {"message", "type", "param", "code"} == body["error"].keys()
    return body["error"]


@pytest.mark.parametrize("path", BODIES)
def test_every_route_generates_with_the_same_engine(server, path):
    status, _ = answered(server, path)
    assert status == 200 and len(server.engine.ends) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_caller_who_leaves_ends_the_request(server, path):
    with server.engine.holding(max_tokens=3):
        answer = asked(server, path, BODIES[path] | {"stream": True})
        assert answer.status == 200 and answer.readline(), "the first token is there"
        assert len(server.engine.jobs) == 1
        answer.close()
        wait_for(lambda: server.engine.cancels)
        assert not server.engine.jobs


@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_says_when_to_come_back(server, path):
    server.engine.is_full = True
    answer = asked(server, path, BODIES[path])
    assert (answer.status, answer.getheader("Retry-After")) == (429, "3")
    error = error_of(path, json.load(answer))
    assert error["type"] == "rate_limit_error" and "max_waiting" in error["message"]
    server.engine.is_full = False
    assert answered(server, path)[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_callers_need_tokens_and_permissions(guarded, path):
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"Authorization": "Bearer wrong"}, 401, "authentication_error"),
        ({"Authorization": "Bearer read"}, 403, "permission_error"),
        ({"X-Api-Key": "read"}, 403, "permission_error"),
    ):
        found, body = answered(guarded, path, headers)
        assert (found, error_of(path, body)["type"]) == (status, kind)
    for headers in ({"Authorization": "Bearer write"}, {"X-Api-Key": "write"}):
        assert answered(guarded, path, headers)[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_tenant_has_a_quota(guarded, path):
    headers = {"Authorization": "Bearer write"}
    with guarded.engine.holding(max_tokens=3):
        first = asked(guarded, path, BODIES[path] | {"stream": True}, headers)
        assert first.readline()
        second = asked(guarded, path, BODIES[path], headers)
        assert second.status == 429 and int(second.getheader("Retry-After") or 0) >= 1
        assert "max_requests" in error_of(path, json.load(second))["message"]
    first.read()
    wait_for(lambda: answered(guarded, path, headers)[0] == 200)


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", "error"), ("/v1/completions", "error"), ("/v1/messages", "error"),
        ("/v1/responses", "response.failed"),
    ],
)  # fmt: skip
def test_an_error_in_mid_stream_is_an_event(server, path, event):
    with server.engine.holding(max_tokens=3):
        answer = asked(server, path, BODIES[path] | {"stream": True})
        assert answer.readline()
        assert server.edge.abort_requests([answer.getheader("X-Request-Id") or ""], LOCAL) == 1
        text = answer.read().decode()
    assert f"event: {event}\n" in text and "aborted" in text


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_cannot_be_finished_says_why(server, path):
    """Not as an internal error, which libraries would retry. gRPC ends it with FINISH_REASON_ERROR and the reason."""
    with server.engine.holding(max_tokens=3):
        with ThreadPoolExecutor() as threads:
            answering = threads.submit(answered, server, path)
            wait_for(lambda: server.engine.jobs)
            server.engine.end(FinishReason.ERROR, "no token was left")
            status, body = answering.result(WAIT_SECONDS)
        assert status == 422 and error_of(path, body)["message"] == "no token was left"
    with server.engine.holding(max_tokens=3):
        answer = asked(server, path, BODIES[path] | {"stream": True})
        assert answer.status == 200 and answer.readline()
        server.engine.end(FinishReason.ERROR, "no token was left")
        text = answer.read().decode()
    assert "event: error\n" in text or "event: response.failed\n" in text
    assert "no token was left" in text and "internal error" not in text


@pytest.mark.parametrize(
    ("headers", "is_served"),
    [
        ({}, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://{host}"}, True),
        ({"Origin": "http://{host}"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://chat.example"}, True),  # in --allowed-hosts
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://site.example"}, False),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
    ],
)
def test_pages_of_other_sites_make_nobody_work(headers, is_served):
    """As a page sends it without asking first: the body is JSON, and its type is plain text."""
    listen = dataclasses.replace(LISTEN, open_api=partial(OpenAIPort, allowed_hosts=("chat.example",)))
    with running(listen=listen) as server:
        host = f"127.0.0.1:{server.handle.openai_port}"
        sent = {"Content-Type": "text/plain"} | {name: value.format(host=host) for name, value in headers.items()}
        status, body = answered(server, "/v1/chat/completions", sent)
        assert status == (200 if is_served else 403) and len(server.engine.ends) == is_served
        assert is_served or "--allowed-hosts" in body["error"]["message"]


def test_pages_of_other_sites_may_use_a_token(guarded):
    headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://site.example"}
    assert answered(guarded, "/v1/messages", headers)[0] == 401
    assert answered(guarded, "/v1/messages", headers | {"X-Api-Key": "write"})[0] == 200
