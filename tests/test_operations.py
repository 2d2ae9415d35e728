"""Runs a real server in an operator's setup: tokens, probes, metrics, profiles, a JSON log, reloads.

Draining under load is in tests/hostile/test_signals.py."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.tenants import new_token
from meshserve.runtime.client.client import Client

from .waiting import WAIT_SECONDS, wait_for

SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--cpu-devices=2",
    "--dtype=float32", "--page-size=16", "--max-running=4", "--max-step-tokens=4", "--num-pages=512",
    f"--drain-seconds={WAIT_SECONDS:g}", "--cache-dir=",
]  # fmt: skip


@dataclass
class Server:
    process: subprocess.Popen
    target: str
    http: str
    token: str
    log: Path
    profiles: Path
    config: Path
    said: str  # what it printed when it was ready


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Server]:
    """Yields a ready server with its files in `folder`, and kills it at the end."""
    log, tokens, profiles = folder / "log", folder / "tokens.toml", folder / "profiles"
    token, lines = new_token("operator")
    tokens.write_text(lines.replace("]\n", ']\npermissions = ["admin", "info", "inference"]\n', 1))
    config = folder / "serve.toml"
    config.write_text("tp = 2\n")
    command = [
        *SERVE, f"--config={config}", f"--tokens={tokens}", f"--profile-dir={profiles}", "--http-port=0",
        "--log-format=json",
    ]  # fmt: skip
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"listens on (\S+)\n.*probes on (\S+)", said)
        assert found is not None, said + log.read_text()
        with urllib.request.urlopen(f"{found[2]}/livez", timeout=WAIT_SECONDS) as answer:
            assert answer.status == 200  # live from the start, ready later
        with Client(found[1]) as client:
            client.wait_until_ready(WAIT_SECONDS)
        said = process.stdout.readline() + process.stdout.readline()
        yield Server(process, found[1], found[2], token, log, profiles, config, said)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server shared by tests, each of which must leave it serving, since their order may vary."""
    with _serving(tmp_path_factory.mktemp("operations")) as server:
        yield server


BODIES = {
    "Generate": {"text": "JULIET:\n", "sampling": {"maxTokens": 3, "temperature": 0}},
    "Chat": {"messages": [{"role": "user", "content": "Who art thou?"}], "sampling": {"maxTokens": 3}},
    "Tokenize": {"conversation": {"messages": [{"role": "user", "content": "hi"}]}},
    "Detokenize": {"tokenIds": [300, 301]},
    "Abort": {"requestIds": ["none"]},
    "Drain": {"graceSeconds": -1},  # refused, because the server is still needed
}
# Methods that are refused without an option, and the option.
NEEDS = {"LoadAdapter": "--adapter-root", "UnloadAdapter": "--adapter-root", "UpdateWeights": "--weights-below"}


def test_buf_curl_calls_every_method(server):
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf is not None, "buf comes with the test extra (buf-bin)"
    header = f"authorization: Bearer {server.token}"
    curl = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-H", header, "--reflect-header", header]
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            url = f"http://{server.target}/{service.full_name}/{method.name}"
            body = json.dumps(BODIES.get(method.name, {}))
            done = subprocess.run([*curl, "-d", body, url], capture_output=True, text=True, timeout=WAIT_SECONDS)
            if method.name == "Drain":
                assert "invalid_argument" in done.stderr and "grace_seconds" in done.stderr
            elif method.name in ("Embed", "Score", "Rerank"):
                assert "unimplemented" in done.stderr and "--task" in done.stderr, "the demo model generates"
            elif method.name in NEEDS:
                assert "failed_precondition" in done.stderr and NEEDS[method.name] in done.stderr
            else:
                assert done.returncode == 0, (method.name, done.stderr)
    assert list(server.profiles.rglob("*.xplane.pb")), "StartProfile and StopProfile left a profile"
    refused = subprocess.run([*curl[:5], "-d", "{}", url], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert refused.returncode != 0, "without a token not even the schema is to be had"


def test_a_ready_server_says_so_and_what_to_try(server):
    first, second = server.said.splitlines()
    assert first == f"meshserve is ready: demo on 2 x cpu, tp 2, 8,192 tokens of KV cache, at {server.target}"
    assert second == f"Try: meshserve chat --target {server.target} --token-file FILE"
    messages = [json.loads(line)["message"] for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert any(message.startswith("devices: 2 of 2 x cpu; tp 2") for message in messages)


def test_metrics_and_the_log_tell_of_a_request(server):
    with Client(server.target, token=server.token) as client:
        client.complete("JULIET:\n", max_tokens=4, request_id="to be found")
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=WAIT_SECONDS) as answer:
        text = answer.read().decode()
    assert re.search(r'meshserve_info{.*model="demo"', text) and 'vllm:num_requests_running{model_name="demo"}' in text
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    [found] = [line for line in lines if line.get("request_id") == "to be found"]
    assert (found["tenant"], found["outcome"], found["num_output_tokens"]) == ("operator", "length", 4)


def test_sighup_changes_the_tp_size_under_streams(server):
    """Consecutive streams have the same tokens while the mesh changes between and during them."""
    with Client(server.target, token=server.token) as client:

        def complete() -> tuple[int, ...]:
            return client.complete("IAGO:\n", max_tokens=200, temperature=0.8, seed=3, ignore_eos=True).token_ids

        def reload(config: str, words: str) -> None:
            """Reloads the config and waits until the log contains the words."""
            server.config.write_text(config)
            server.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + WAIT_SECONDS
            while words not in (log := server.log.read_text()):
                assert time.monotonic() < end, log
                assert complete() == expected

        expected = complete()
        reload("tp = 3\n", "the TP size was not changed: tp is 3 but cpu_devices only 2")
        assert client.model_info().tp_size == 2
        reload("tp = 1\nmax_waiting = 7\n", "the TP size is now 1")
        assert "option max_waiting has changed" in server.log.read_text()
        assert complete() == expected
        wait_for(lambda: client.model_info().tp_size == 1)  # shortly after the log line


@contextlib.contextmanager
def _stopped_while_it_compiles(stderr: int) -> Iterator[None]:
    """Sends SIGTERM to a server during compilation, if that can be observed, and checks that it ends."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        assert process.stdout is not None
        target = process.stdout.readline().split()[-1]
        with Client(target) as client:
            while (info := client.server_info(timeout_seconds=WAIT_SECONDS)).state == pb.SERVER_STATE_STARTING:
                if "compiling" in info.progress:
                    break
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        yield
    finally:
        process.kill()
        process.wait()


def test_sigterm_while_it_starts(tmp_path):
    with (tmp_path / "log").open("w+") as log, _stopped_while_it_compiles(log.fileno()):
        log.seek(0)
        assert log.read().count("INFO meshserve.runtime.server.lifecycle: stopping; open requests: 0") == 1


def test_sigterm_although_nothing_reads_the_log():
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"-" * 4096)
        os.set_blocking(write, True)
        with _stopped_while_it_compiles(write):
            pass
    finally:
        os.close(read)
        os.close(write)


def test_a_start_that_fails_says_why(tmp_path):
    done = subprocess.run([*SERVE, "--max-context=99999"], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 2 and "max_context is 99999" in done.stderr and "Traceback" not in done.stderr
