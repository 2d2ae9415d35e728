"""The loop of `meshserve top`: reads a server again and again, and draws the screen."""

import collections
import ssl
import time
from collections.abc import Callable

from rich.console import Console
from rich.layout import Layout
from rich.live import Live

from meshserve.protos import inference_pb2 as pb

from ...api.engine_api import ModelInfo
from ...api.loopback import open_url
from ..client import CallError, Client
from .readings import Reading, with_metrics
from .screen import SCREEN_LINES, screen

_DEFAULT_METRICS_PORT = 9090
_TIMEOUT_SECONDS = 5.0
_MAX_READINGS = 600
_HINT = "Ctrl-C ends."
_NO_METRICS = (
    "Throughput and times need the server's metrics: start it with --http-port 9090, or say where they are with "
    "--metrics HOST:PORT. Ctrl-C ends."
)


class Reader:
    """Reads one server.

    Args:
      client: A client of the server.
      metrics: HOST:PORT or the URL of its /metrics; empty tries port 9090 of the target's host.
    """

    def __init__(self, client: Client, target: str, metrics: str = ""):
        self._client = client
        self.target = target
        host = target.rpartition(":")[0] or "127.0.0.1"
        address = metrics or f"{host}:{_DEFAULT_METRICS_PORT}"
        self._url = address if "://" in address else f"http://{address}/metrics"
        self.info: ModelInfo | None = None
        self.has_metrics = False

    def read(self) -> Reading:
        """Reads the server once. Whatever it does not tell stays empty."""
        reading = Reading(seconds=time.monotonic(), state=self._state())
        if reading.state == "READY":
            try:
                self.info = self.info or self._client.model_info(timeout_seconds=_TIMEOUT_SECONDS)
                load = self._client.load(timeout_seconds=_TIMEOUT_SECONDS)
                reading = Reading(seconds=reading.seconds, state=reading.state, load=load)
            except CallError:
                pass  # it stops just now
        text = self._metrics()
        self.has_metrics = bool(text)
        return with_metrics(reading, text) if text else reading

    def _state(self) -> str:
        try:
            info = self._client.server_info(timeout_seconds=_TIMEOUT_SECONDS)
        except CallError as error:
            return f"no answer: {error}"
        return f"{pb.ServerState.Name(info.state).removeprefix('SERVER_STATE_')} {info.progress}".strip()

    def _metrics(self) -> str:
        context = ssl._create_unverified_context() if self._url.startswith("https") else None
        try:
            with open_url(self._url, timeout_seconds=_TIMEOUT_SECONDS, context=context) as answer:
                text = answer.read().decode()
        except (OSError, ValueError):
            return ""
        return text if "meshserve_" in text else ""


def show_top(
    reader: Reader,
    *,
    interval_seconds: float,
    num_screens: int | None = None,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Draws the server until Ctrl-C, or `num_screens` times.

    Args:
      reader: Reads the server.
      interval_seconds: Time between two readings.
      num_screens: None draws until Ctrl-C. Otherwise the last screen is printed, and stays.
      console: Where to draw; None is the terminal.
      sleep: Waits between two readings.
    """
    console = console or Console()
    readings: collections.deque[Reading] = collections.deque([reader.read()], maxlen=_MAX_READINGS)

    def current() -> Layout:
        return screen(reader.target, reader.info, readings, _HINT if reader.has_metrics else _NO_METRICS)

    if num_screens is not None:
        for _ in range(num_screens - 1):
            sleep(interval_seconds)
            readings.append(reader.read())
        console.print(current(), height=SCREEN_LINES)
        return 0
    try:
        with Live(current(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                sleep(interval_seconds)
                readings.append(reader.read())
                live.update(current(), refresh=True)
    except KeyboardInterrupt:
        return 0
