"""Runs real replicas of `meshserve serve` with the demo model, and the gateway smg in front of them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.fleet import audited_replica
from tests.listening import free_port
from tests.waiting import WAIT_SECONDS, wait_for

MODEL = DEMO_DIRECTORY
SMG = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
PAGE_SIZE = 16
_OPTIONS = (
    f"--model={MODEL}", "--served-name=demo", "--port=0", "--http-port=0", "--gateway-port=0", "--tp=1",
    "--cpu-devices=1", "--dtype=float32", f"--page-size={PAGE_SIZE}", "--max-running=16", "--max-step-tokens=128",
    "--max-waiting=512", "--kv-events", "--drain-seconds=120", "--no-logits-processors", "--compile-threads=1",
)  # fmt: skip


@dataclass
class Replica:
    """A process of `meshserve serve`."""

    process: subprocess.Popen[str]
    folder: Path
    said: dict[str, str] = field(default_factory=dict)  # address by what it says that it serves there

    @property
    def events(self) -> tuple[str, str]:
        """The endpoints of its KV cache events and of their replays."""
        return f"ipc://{self.folder}/events", f"ipc://{self.folder}/replays"

    @property
    def worker_url(self) -> str:
        return f"grpc://{self.said['answers gateways on']}"

    def wait(self) -> None:
        """Waits until it serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"(listens on|answers probes on|answers gateways on) (?:http://)?(\S+)", line):
                self.said[found[1]] = found[2]
            if line.startswith("Try:"):
                return
        raise AssertionError((self.folder / "log").read_text()[-3000:])

    def audited(self) -> set[int]:
        """Makes it audit its scheduler, and returns the hashes of its cached pages."""
        answer = self.folder / "audit.json"
        answer.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: answer.exists() or self.process.poll() is not None, (self.folder / "log").read_text)
        return set(json.loads(answer.read_text()))

    def metric(self, name: str) -> float:
        """Returns the value of a metric without labels."""
        with urllib.request.urlopen(f"http://{self.said['answers probes on']}/metrics", timeout=WAIT_SECONDS) as answer:
            [value] = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(value)

    def stop(self) -> int:
        """Lets it drain, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS)


def start(folder: Path, *options: str) -> Replica:
    """Starts a replica with its files in a new folder; `Replica.wait` waits for it."""
    folder.mkdir(parents=True)
    replica = Replica(None, folder)  # type: ignore[arg-type]
    events = [f"--kv-events-endpoint={replica.events[0]}", f"--kv-events-replay-endpoint={replica.events[1]}"]
    command = [sys.executable, audited_replica.__file__, str(folder / "audit.json"), "serve"]
    log = (folder / "log").open("w")
    replica.process = subprocess.Popen(
        [*command, *_OPTIONS, *events, *options],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
    )
    log.close()
    return replica


@contextlib.contextmanager
def replicas(folder: Path, num_replicas: int, *options: str) -> Iterator[list[Replica]]:
    """Runs replicas until the block ends. Those appended to the list meanwhile are also ended."""
    running: list[Replica] = []
    try:
        for number in range(num_replicas):  # one after another: the first fills the cache of compiled programs
            running.append(start(folder / f"replica{number}", *options))
            running[-1].wait()
        yield running
    finally:
        for replica in running:
            replica.process.kill()
            replica.process.wait()


@dataclass
class Gateway:
    """A process of smg."""

    url: str
    metrics_url: str
    log: Path

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the values of a metric by their labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=WAIT_SECONDS) as answer:
            rows = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return {labels: float(value) for labels, value in rows}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls its control plane."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.loads(answer.read() or b"null")

    def workers(self) -> list[dict[str, Any]]:
        return self.call("GET", "/workers")["workers"]

    def healthy(self) -> set[str]:
        return {worker["url"] for worker in self.workers() if worker["is_healthy"]}

    def replace(self, old: Replica, new: Replica) -> None:
        """Adds a worker and waits until it is healthy; then removes another one, which may still have streams."""
        self.call("POST", "/workers", {"url": new.worker_url})
        wait_for(lambda: new.worker_url in self.healthy(), self.workers)
        self.remove(old)

    def remove(self, replica: Replica) -> None:
        """Removes a worker."""
        [worker] = [worker for worker in self.workers() if worker["url"] == replica.worker_url]
        self.call("DELETE", f"/workers/{worker['id']}")
        wait_for(lambda: replica.worker_url not in {worker["url"] for worker in self.workers()}, self.workers)


@contextlib.contextmanager
def gateway(log: Path, workers: Sequence[Replica], *options: str) -> Iterator[Gateway]:
    """Runs smg before these replicas until the block ends."""
    port, metrics_port = free_port(), free_port()
    command = [SMG, "launch", "--host=127.0.0.1", f"--port={port}", f"--tokenizer-path={MODEL}"]
    command += [f"--prometheus-port={metrics_port}", "--prometheus-host=127.0.0.1", f"--block-size={PAGE_SIZE}"]
    command += ["--log-level=info", "--health-check-interval-secs=1", *options, "--worker-urls"]
    command += [worker.worker_url for worker in workers]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # type: ignore[arg-type]
    found = Gateway(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", log)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            is_known = found.healthy() >= {worker.worker_url for worker in workers}
            return is_known and bool(found.call("POST", "/v1/tokenize", {"model": "demo", "prompt": "a"}))
        except (OSError, KeyError):
            return False

    try:
        wait_for(is_ready, lambda: log.read_text()[-3000:])
        yield found
    finally:
        process.kill()
        process.wait()
