"""Runs a server with OpenAI's API for tests."""

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--openai-port=0", "--tp=2",
    "--cpu-devices=2", "--dtype=float32", "--page-size=16", "--max-running=8", "--max-step-tokens=32",
    "--num-pages=256", "--cache-dir=",
]  # fmt: skip


@dataclasses.dataclass
class Server:
    """A server and the addresses of its ports."""

    process: subprocess.Popen[str]
    url: str  # of OpenAI's API
    target: str  # of gRPC
    log: Path
    probes: str = ""  # URL of the port for probes and metrics, if it is open


@contextlib.contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    """Runs a server until the block ends. Later flags override earlier ones."""
    with log.open("w") as log_file:
        process = subprocess.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=log_file, text=True)
        try:
            assert process.stdout is not None
            said = {}
            for line in process.stdout:
                if found := re.search(r"(listens|answers OpenAI's API|answers probes) on (\S+)", line):
                    said[found[1]] = found[2]
                if line.startswith("meshserve is ready"):
                    break
            assert len(said) >= 2, log.read_text()[-3000:]
            probes = said.get("answers probes", "")
            yield Server(process, said["answers OpenAI's API"], said["listens"], log, probes)
        finally:
            process.kill()
            process.wait()
