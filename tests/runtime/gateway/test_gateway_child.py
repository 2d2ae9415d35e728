"""Tests how the server runs the gateway, with a stand-in for smg."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.gateway import gateway_child, gateway_guard
from meshserve.runtime.gateway.gateway_child import GatewayChild, GatewayOptions, free_port, gateway_options
from meshserve.runtime.options.serve_config import ServeConfig
from tests.waiting import WAIT_SECONDS, wait_for

# Serves /v1/models and /v1/tokenize at the port that it is given, and /die, /ill and /pid.
STAND_IN = """
    import http.server, json, os, sys
    port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
    colours = "\\x1b[2m2026-11-24 12:00:00\\x1b[0m \\x1b[33m WARN\\x1b[0m "
    print(colours + "smg::server: " + " ".join(sys.argv[1:]), flush=True)
    print("a plain line\\n\u28ff a picture", flush=True)
    state = {"data": [{"id": "demo"}]}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/die":
                os._exit(3)
            if self.path == "/ill":
                state["data"] = []
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(state | {"pid": os.getpid()}).encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def options(tmp_path: Path) -> GatewayOptions:
    program = tmp_path / "smg"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(STAND_IN)}")
    program.chmod(0o755)
    return GatewayOptions(program=str(program), host="127.0.0.1", port=free_port())


@pytest.fixture
def child(options: GatewayOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayChild]:
    monkeypatch.setattr(GatewayChild, "health_seconds", 0.05)
    monkeypatch.setattr(gateway_child, "_FIRST_RESTART_SECONDS", 0.01)
    child = GatewayChild(options)
    yield child
    child.stop()


def ask(options: GatewayOptions, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{options.url}/{path}", timeout=WAIT_SECONDS) as answer:
        return json.load(answer)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if sys.platform == "linux" else True


def test_it_is_started_announced_logged_and_stopped(
    child: GatewayChild, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, logger="smg"):
        child.start(50052, "demo", Path("/models/demo"))
        assert child.is_healthy.wait(WAIT_SECONDS)
        pid = ask(child.options, "pid")["pid"]
        assert is_alive(pid)
        child.stop()
    wait_for(lambda: not is_alive(pid))
    assert capsys.readouterr().out == f"meshserve answers OpenAI's API on {child.options.url}/v1\n"
    first, second = ((record.levelname, record.getMessage()) for record in caplog.records if record.name == "smg")
    assert first[0] == "WARNING" and first[1].startswith("smg::server: launch --host=127.0.0.1 --port=")
    for flag in ("--worker-urls=grpc://127.0.0.1:50052", "--tool-call-parser=qwen", "--tokenizer-path=/models/demo"):
        assert flag in first[1]
    assert second == ("INFO", "a plain line")
    child.stop()


@pytest.mark.parametrize(("path", "reason"), [("die", "ended with status 3"), ("ill", "failed 3 checks of its health")])
def test_it_is_restarted_when_it_ends_or_is_not_healthy(
    child: GatewayChild, caplog: pytest.LogCaptureFixture, path: str, reason: str
):
    child.start(50052, "demo", Path("/models/demo"))
    assert child.is_healthy.wait(WAIT_SECONDS)
    before = ask(child.options, "pid")["pid"]
    try:
        ask(child.options, path)
    except OSError:
        assert path == "die"
    wait_for(lambda: child.num_restarts >= 1, lambda: caplog.text)
    wait_for(child.is_healthy.is_set)
    assert ask(child.options, "pid")["pid"] != before
    assert reason in caplog.text


def test_a_gateway_that_cannot_start_is_tried_again_until_the_server_stops(
    options: GatewayOptions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gateway_child, "_FIRST_RESTART_SECONDS", 0.01)
    child = GatewayChild(dataclasses.replace(options, program="/no/such/program"))
    child.start(50052, "demo", Path("/models/demo"))
    wait_for(lambda: child.num_restarts >= 2)
    child.stop()
    assert "the gateway for OpenAI's API ended with status 1; it is restarted in 0.02 s" in caplog.text


def test_it_ends_with_a_server_that_is_killed(options: GatewayOptions):
    command = [sys.executable, "-I", "-S", gateway_guard.__file__, options.program, f"--port={options.port}"]
    code = (
        "import subprocess, time\n"
        f"child = subprocess.Popen({command!r}, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\ntime.sleep(3600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        guard = int(server.stdout.readline())
        found: list[int] = []

        def answers() -> bool:
            try:
                found.append(ask(options, "pid")["pid"])
            except OSError:
                return False
            return True

        wait_for(answers)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    wait_for(lambda: not is_alive(found[0]) and not is_alive(guard))


def test_what_it_is_started_with():
    options = GatewayOptions(program="smg", host="0.0.0.0", port=8000, tls=("a.crt", "a.key"))
    assert options.url == "https://127.0.0.1:8000"
    command = options.command(50052, Path("m"), 9)
    assert {"--host=0.0.0.0", "--worker-urls=grpc://127.0.0.1:50052", "--tls-cert-path=a.crt"} <= set(command)


def test_without_it_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch):
    assert gateway_options(ServeConfig()) is None
    monkeypatch.setattr(gateway_child.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"pip install 'meshserve\[gateway\]'"):
        gateway_options(ServeConfig(openai_port=0))


def test_a_port_in_use_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gateway_child.shutil, "which", lambda *_, **__: "/bin/smg")
    monkeypatch.setattr(gateway_child.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(gateway_child, "is_taken", lambda host, port: True)
    with pytest.raises(ConfigError, match="port 8000 of 127.0.0.1: it is in use"):
        gateway_options(ServeConfig(openai_port=8000))
