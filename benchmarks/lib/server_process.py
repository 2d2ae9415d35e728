"""Runs `meshserve serve` as a process with its options in a config file, which may change while it serves."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from meshserve.runtime.client.client import AsyncClient

_READY_SECONDS = 900.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2


class ServerProcess:
    """A server on a free port of this host. Use it as a context manager, or call `stop`.

    Args:
      settings: Options of `ServeConfig`; all others have their defaults.
      log: The file for the server's log; None writes it to this process's stderr.
      environment: Additional environment variables.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, log: Path | None = None, environment: Mapping[str, str] | None = None
    ):
        port = free_port()
        self.target = f"127.0.0.1:{port}"
        self._settings = {**settings, "port": port}
        self._config = Path(tempfile.mkdtemp(prefix="meshserve-served-")) / "serve.toml"
        self._config.write_text(toml(self._settings))
        command = [sys.executable, "-m", "meshserve", "serve", "--config", str(self._config)]
        with contextlib.ExitStack() as stack:
            stderr = None if log is None else stack.enter_context(log.open("w"))
            self.process = subprocess.Popen(command, stderr=stderr, env={**os.environ, **(environment or {})})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def connect(self) -> AsyncClient:
        """Waits until the server is ready and returns a client.

        Raises:
          SystemExit: The server ended before it was ready.
        """
        client = AsyncClient(self.target)
        ready = asyncio.create_task(client.wait_until_ready(_READY_SECONDS))
        while not ready.done():
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with exit status {self.process.returncode} before it was ready")
            await asyncio.wait([ready], timeout=_POLL_SECONDS)
        ready.result()
        return client

    def reload(self, changes: Mapping[str, Any]) -> None:
        """Changes options in the config file and tells the server to read it again."""
        self._settings |= changes
        self._config.write_text(toml(self._settings))
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def toml(settings: Mapping[str, Any]) -> str:
    """Formats options as the config file of a server; JSON's strings, numbers and booleans are also TOML's."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def free_port() -> int:
    """Returns the number of a port of this host that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]
