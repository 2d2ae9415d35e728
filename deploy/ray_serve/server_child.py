"""Runs `meshserve serve` as a child of a Ray actor, on loopback, and ends it with the actor, however that ends."""

import subprocess
import sys
import tempfile
import threading
from collections import deque
from typing import IO, Any

from meshserve.runtime.options.serve_config import ServeConfig

from . import server_guard

_LISTENS = "meshserve listens on "
_READY = "meshserve is ready"
_NUM_LOG_LINES = 40  # kept for the message of a failure


def flags(options: dict[str, Any]) -> list[str]:
    """Returns the flags of `meshserve serve` for options by their names in `ServeConfig`.

    Raises:
      ConfigError: The options contradict each other, or a value is out of range.
      TypeError: There is no such option.
    """
    ServeConfig(**options)
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        found.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return found


class ServerChild:
    """A server on a free loopback port. Blocks until it is ready."""

    def __init__(self, options: dict[str, Any]):
        """Starts the server and waits until it accepts requests.

        Raises:
          RuntimeError: It has ended; the message has the last lines of its log.
        """
        command = [sys.executable, "-m", "meshserve", "serve", *flags(options | {"host": "127.0.0.1", "port": 0})]
        self._log: deque[str] = deque(maxlen=_NUM_LOG_LINES)
        # The guard ends the server once this pipe closes, also when the actor is killed.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", server_guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tempfile.gettempdir(),  # not Ray's working directory, which may go away
        )
        assert self._process.stdout is not None
        self.target = ""
        for line in self._process.stdout:
            self._tell(line)
            if line.startswith(_LISTENS):
                self.target = line.removeprefix(_LISTENS).strip()
            if line.startswith(_READY):
                break
        else:
            self._process.wait()
            raise RuntimeError("meshserve serve ended before it was ready:\n" + "".join(self._log))
        threading.Thread(target=self._relay, args=(self._process.stdout,), daemon=True).start()

    @property
    def failure(self) -> str | None:
        """The end of its log if it has ended, else None."""
        return None if self._process.poll() is None else "".join(self._log)

    def stop(self) -> None:
        """Ends the server. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _relay(self, output: IO[str]) -> None:
        for line in output:
            self._tell(line)

    def _tell(self, line: str) -> None:
        self._log.append(line)
        print(line, end="", file=sys.stderr, flush=True)  # Ray keeps the stderr of its actors
