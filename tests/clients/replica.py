"""Server processes for clients in other languages."""

import re
import socket
import subprocess
import sys

from meshserve.runtime.client.client import Client
from tests.waiting import WAIT_SECONDS


class Replica:
    """A server process on a fixed port, with a grace period too short for the requests that run when it stops."""

    def __init__(self, *flags: str):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.target = f"127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-m", "meshserve", "serve", "--model=demo", f"--port={self.target.split(':')[1]}"]
        command += ["--tp=1", "--cpu-devices=1", "--dtype=float32", "--page-size=16", "--max-running=8"]
        command += ["--max-step-tokens=8", "--num-pages=512", "--drain-seconds=0.2", "--cache-dir=", *flags]
        self._command = command
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        assert re.search("listens on", self._process.stdout.readline())

    def restart(self) -> None:
        self._process.terminate()
        assert self._process.wait(WAIT_SECONDS) == 0
        self.start()
        with Client(self.target) as client:
            client.wait_until_ready(WAIT_SECONDS)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
