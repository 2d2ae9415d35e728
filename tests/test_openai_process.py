"""Tests what a client of OpenAI's API and an operator see when a server starts and when it is stopped."""

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .openai_server import Server, serving
from .waiting import WAIT_SECONDS

openai = pytest.importorskip("openai", reason="comes with the test extra")

PROMPT = "The quick brown fox"
ENDLESS = {"model": "thinker", "max_tokens": 3900, "temperature": 0, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def recording_proxy() -> Iterator[tuple[str, list[bytes]]]:
    """Yields the URL of a proxy that connects to nothing, and the first bytes of every connection to it."""
    found: list[bytes] = []

    def record() -> None:
        with contextlib.suppress(OSError):  # the listener has been closed
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    found.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=record, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", found
        listener.shutdown(socket.SHUT_RDWR)


def client_of(server: Server, **options: Any) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="none", timeout=WAIT_SECONDS, **options)


def flags_of(model: Path) -> list[str]:
    return [f"--model={model}", "--served-name=thinker", "--tp=1", "--drain-seconds=0.1", "--num-pages=1024"]


def test_a_healthy_start_and_a_first_answer_are_quiet_and_ask_no_other_host(tmp_path, second_model, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with recording_proxy() as (proxy, connections):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
            monkeypatch.setenv(name.lower(), proxy)
        with serving(tmp_path / "log", *flags_of(second_model)) as server:
            with openai.DefaultHttpxClient(trust_env=False) as direct, client_of(server, http_client=direct) as client:
                assert client.models.list().data[0].id == "thinker"
                answer = client.chat.completions.create(
                    model="thinker", messages=[{"role": "user", "content": PROMPT}], max_tokens=4
                )
                assert answer.usage.completion_tokens >= 1
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(WAIT_SECONDS) == 0
        assert connections == []
    log = (tmp_path / "log").read_text()
    assert "INFO" in log
    assert re.findall(r"(?m)^.*(?:WARNING|ERROR|CRITICAL|Traceback|request failed).*$", log) == []


def test_requests_that_a_stopping_server_ends_are_told_so(tmp_path, second_model):
    """A stream keeps what it has; an answer that is not streamed is a 503, to be asked for again elsewhere."""
    whole: list[Any] = []

    def ask_whole(client: Any) -> None:
        try:
            whole.append(client.completions.create(prompt=PROMPT, **ENDLESS))
        except openai.APIError as error:
            whole.append(error)

    with serving(tmp_path / "log", *flags_of(second_model)) as server, client_of(server, max_retries=0) as client:
        asking = threading.Thread(target=ask_whole, args=[client])
        asking.start()
        stream = client.completions.create(prompt=PROMPT, stream=True, **ENDLESS)
        chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], stream=True, **ENDLESS)
        num_chunks = [sum(1 for _ in zip(range(3), each, strict=False)) for each in (stream, chat)]
        assert num_chunks == [3, 3]
        server.process.send_signal(signal.SIGTERM)
        for each in (stream, chat):
            chunks, stopped = [], None
            try:
                chunks.extend(each)
            except openai.APIError as error:
                stopped = error
            assert stopped is not None and "the server was stopped" in stopped.message, (chunks[-1:], stopped)
            assert stopped.body["type"] == "server_error"
            assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
        asking.join(WAIT_SECONDS)
        [error] = whole
        assert isinstance(error, openai.InternalServerError) and error.status_code == 503, error
        assert "the server was stopped" in error.message and error.response.headers["Retry-After"] == "1"
        assert server.process.wait(WAIT_SECONDS) == 0
    assert re.findall(r"(?m)^.*(?:ERROR|CRITICAL|Traceback).*$", (tmp_path / "log").read_text()) == []
