"""Runs the gateway `smg` as a child of the server: starts it, watches its health, restarts it, and stops it.

    openai client -> smg (HTTP, --openai-port) -> gateway port of this server (vLLM's gRPC protocol) -> engine

A thread of its own does all this, so that the server's event loop never waits for the child. The child's output becomes
lines of the server's log.
"""

import http.client
import importlib.util
import json
import logging
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..api.errors import ConfigError
from ..options.serve_config import ServeConfig
from ..server.ports import is_taken
from ..telemetry.logs import say
from . import gateway_guard

_POLL_SECONDS = 0.1
_HEALTH_TIMEOUT_SECONDS = 10.0
_MAX_UNHEALTHY = 3  # checks in a row, after which the child is restarted
_START_SECONDS = 60.0  # in which a new child must have found the model
_GRACE_SECONDS = 2  # to end after SIGTERM; the server has ended its requests before
_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 0.5, 30.0  # waiting times before restarts, doubled each time
_STABLE_SECONDS = 60.0  # a child that lived longer is restarted without a longer wait
_LINE = re.compile(r"^(?:\S+[T ]\S+\s+)?(TRACE|DEBUG|INFO|WARN|ERROR)\s+(.*)")
_SOURCE = re.compile(r": \S+\.rs:\d+(?=: )")  # where in its source a message comes from
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PICTURE = re.compile("[\u2800-\u28ff]")  # its banner, which repeats the address and the version
_LEVELS = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING,
           "ERROR": logging.ERROR}  # fmt: skip
_log = logging.getLogger(__name__)
_child_log = logging.getLogger("smg")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """What the child is started with.

    Attributes:
      program: The command of the gateway.
      host, port: The address for OpenAI clients.
      tls: PEM files of its certificate and key; None serves plain HTTP.
    """

    program: str
    host: str
    port: int
    tls: tuple[str, str] | None = None

    @property
    def url(self) -> str:
        """The base URL as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http{'s' if self.tls else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def command(self, worker_port: int, tokenizer: Path, metrics_port: int) -> list[str]:
        """Returns the command line.

        Args:
          worker_port: The gateway port of this server.
          tokenizer: The model directory with tokenizer.json and the chat template. Without it, the gateway would ask
            huggingface.co for a model of the served name, before it asks this server.
          metrics_port: A port for its own metrics.
        """
        worker_host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        command = [self.program, "launch", f"--host={self.host or '0.0.0.0'}", f"--port={self.port}"]
        command += [f"--worker-urls=grpc://{worker_host}:{worker_port}", f"--tokenizer-path={tokenizer}"]
        command += ["--reasoning-parser=qwen3", "--tool-call-parser=qwen"]
        command += [f"--prometheus-port={metrics_port}", "--prometheus-host=127.0.0.1"]
        # Its routes that change workers, caches and profiles would be open to every caller; nobody gets this key.
        command += [f"--control-plane-api-keys=meshserve:meshserve:admin:{secrets.token_hex(32)}"]
        command += ["--log-level=warn", f"--shutdown-grace-period-secs={_GRACE_SECONDS}"]
        return command + ([f"--tls-cert-path={self.tls[0]}", f"--tls-key-path={self.tls[1]}"] if self.tls else [])


def gateway_options(config: ServeConfig) -> GatewayOptions | None:
    """Returns the options of the gateway, or None if none is asked for.

    Raises:
      ConfigError: The gateway is not installed, or the port is in use.
    """
    if config.openai_port < 0:
        return None
    program = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    if program is None or importlib.util.find_spec("smg_grpc_proto") is None:
        raise ConfigError(
            "--openai-port needs the gateway smg, which is not installed. Install meshserve with the extra [gateway] "
            "(pip install 'meshserve[gateway]'), or leave the option out."
        )
    if config.openai_port and is_taken(config.host, config.openai_port):
        raise ConfigError(
            f"cannot serve OpenAI's API on port {config.openai_port} of {config.host}: it is in use. Free it, or "
            "choose another --openai-port."
        )
    tls = (config.tls_cert, config.tls_key) if config.tls_cert else None
    return GatewayOptions(program=program, host=config.host, port=config.openai_port or free_port(), tls=tls)


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class GatewayChild:
    """The child process, from `start` to `stop`. Both may be called from any thread, and `stop` at any time."""

    health_seconds = 5.0  # between two checks of the health

    def __init__(self, options: GatewayOptions):
        self.options = options
        self.num_restarts = 0
        self.is_healthy = threading.Event()  # whether it answered the last check and knows the model
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker_port: int, model: str, tokenizer: Path) -> None:
        """Starts the child once the gateway port is open. Does not wait for it.

        Args:
          worker_port: The gateway port of this server.
          model: The served name of the model.
          tokenizer: The model directory with tokenizer.json.
        """
        arguments = (worker_port, model, tokenizer)
        self._thread = threading.Thread(target=self._run, args=arguments, name="gateway", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the child and waits for it. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, worker_port: int, model: str, tokenizer: Path) -> None:
        wait_seconds = _FIRST_RESTART_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            reason = self._run_once(self.options.command(worker_port, tokenizer, free_port()), model)
            self.is_healthy.clear()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STABLE_SECONDS:
                wait_seconds = _FIRST_RESTART_SECONDS
            self.num_restarts += 1
            _log.error("the gateway for OpenAI's API %s; it is restarted in %g s", reason, wait_seconds)
            self._stopping.wait(wait_seconds)
            wait_seconds = min(2 * wait_seconds, _LAST_RESTART_SECONDS)

    def _run_once(self, command: list[str], model: str) -> str:
        """Runs one child until it ends, is unhealthy or is to stop. Returns why it does not run any more."""
        try:
            # In a session of its own, Ctrl-C in a terminal reaches the server only, which then drains its requests.
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", gateway_guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"could not be started ({error})"
        assert child.stdin is not None and child.stdout is not None
        reader = threading.Thread(target=_relay, args=(child.stdout,), name="gateway log", daemon=True)
        reader.start()
        try:
            return self._watch(child.poll, model)
        finally:
            child.stdin.close()  # the guard then ends the gateway
            child.wait()
            reader.join()
            child.stdout.close()

    def _watch(self, poll: Callable[[], int | None], model: str) -> str:
        started = checked = time.monotonic()
        num_failures = 0
        while not self._stopping.wait(_POLL_SECONDS):
            if (status := poll()) is not None:
                return f"ended with status {status}"
            now = time.monotonic()
            if self.is_healthy.is_set() and now - checked < self.health_seconds:
                continue
            checked = now
            if not (problem := self._problem(model)):
                num_failures = 0
                if not self.is_healthy.is_set():
                    self.is_healthy.set()
                    say(f"meshserve answers OpenAI's API on {self.options.url}/v1")
            elif self.is_healthy.is_set():
                num_failures += 1
                if num_failures == _MAX_UNHEALTHY:
                    return f"failed {num_failures} checks of its health ({problem})"
            elif now - started > _START_SECONDS:
                return f"was not ready within {_START_SECONDS:g} s ({problem})"
        return "was stopped"

    def _problem(self, model: str) -> str:
        """Returns why the gateway cannot serve the model; empty if it can. Costs the engine nothing."""
        body = json.dumps({"model": model, "prompt": "a"}).encode()
        request = urllib.request.Request(
            f"{self.options.url}/v1/tokenize", data=body, headers={"Content-Type": "application/json"}
        )
        context = None
        if self.options.tls:
            context = ssl._create_unverified_context()  # the certificate names the public host, not this address
        try:
            with urllib.request.urlopen(self._models, timeout=_HEALTH_TIMEOUT_SECONDS, context=context) as answer:
                if not json.load(answer)["data"]:
                    return "it has not found the model yet"
            with urllib.request.urlopen(request, timeout=_HEALTH_TIMEOUT_SECONDS, context=context):
                return ""
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__

    @property
    def _models(self) -> str:
        return f"{self.options.url}/v1/models"


def _relay(output: IO[bytes]) -> None:
    """Writes the child's output to the server's log, line by line, with its levels."""
    for raw in output:
        line = _COLOURS.sub("", raw.decode(errors="replace")).strip()
        if _PICTURE.search(line):
            continue
        found = _LINE.match(line)
        level, text = (_LEVELS[found[1]], _SOURCE.sub("", found[2])) if found else (logging.INFO, line)
        if line:
            _child_log.log(level, "%s", text)
