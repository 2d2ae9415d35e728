"""Starts a cluster of `meshserve serve` processes on this machine, for the demo, tests and benchmarks."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..api.errors import MeshserveError
from ..client.client import CallError, Client

_POLL_SECONDS = 1.0
_NONE: Mapping[int, Sequence[str]] = MappingProxyType({})
_SAYS_ADDRESS = re.compile(r"(?:listens on|health at) (\S+)")


class LocalCluster:
    """Server processes 0 to `num_processes` - 1. The constructor returns once all listen; they may still be loading.

    Args:
      flags: Flags of `meshserve serve` for all processes.
      folder: Directory for the log of each process, named by its index.
      own_flags: Additional flags per process index. They override `flags`.
      prefixes: Words to put before a process's command, per process index.
      host: Address of process 0 for the other processes.

    Raises:
      MeshserveError: A process ended before it listened. The message contains its log.
    """

    def __init__(
        self,
        num_processes: int,
        flags: Sequence[str],
        folder: Path,
        *,
        own_flags: Mapping[int, Sequence[str]] = _NONE,
        prefixes: Mapping[int, Sequence[str]] = _NONE,
        host: str = "127.0.0.1",
    ):
        self._folder = folder
        self._ports = contextlib.ExitStack()
        coordinator_port, step_port = (self._ports.enter_context(reserved_port()) for _ in range(2))
        common = [
            f"--coordinator={host}:{coordinator_port}", f"--num-processes={num_processes}", f"--step-port={step_port}",
            "--port=0",
        ]  # fmt: skip
        self.processes: list[subprocess.Popen[str]] = []
        self.commands: list[list[str]] = []
        try:
            for index in range(num_processes):
                command = [
                    *prefixes.get(index, ()), sys.executable, "-m", "meshserve", "serve", *flags,
                    *common, f"--process-id={index}", *own_flags.get(index, ()),
                ]  # fmt: skip
                self.commands.append(command)
                with self.log(index).open("w") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
                self.processes.append(process)
            self.targets = [self._address(index) for index in range(num_processes)]
        except BaseException:
            self.kill()
            raise

    @property
    def target(self) -> str:
        """Address of the process that accepts requests."""
        return self.targets[0]

    def log(self, index: int) -> Path:
        return self._folder / f"{index}.log"

    def wait_until_ready(self, client: Client, timeout_seconds: float) -> None:
        """Waits until the cluster accepts requests.

        Raises:
          MeshserveError: A process ended, or the time ran out. The message contains its log.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            try:
                return client.wait_until_ready(_POLL_SECONDS)
            except CallError as error:
                for index, process in enumerate(self.processes):
                    if process.poll() is not None or time.monotonic() > end:
                        raise MeshserveError(f"process {index}: {error}\n{self.log(index).read_text()}") from None

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes:
            process.wait()
        self._ports.close()

    def stop(self, timeout_seconds: float = 60.0) -> list[int]:
        """Stops all processes in order and returns their exit statuses."""
        self.processes[0].terminate()
        return self.wait(timeout_seconds)

    def wait(self, timeout_seconds: float) -> list[int]:
        """Waits until every process has ended and returns their exit statuses.

        Raises:
          TimeoutError: Some processes are still running. The message lists them.
        """
        end = time.monotonic() + timeout_seconds
        while left := [index for index, process in enumerate(self.processes) if process.poll() is None]:
            if time.monotonic() > end:
                raise TimeoutError(f"processes {left} are still running after {timeout_seconds:g} s")
            time.sleep(0.02)
        return [process.returncode for process in self.processes]

    def _address(self, index: int) -> str:
        while True:
            text = self.log(index).read_text()
            if found := _SAYS_ADDRESS.search(text):
                return found[1]
            if self.processes[index].poll() is not None:
                raise MeshserveError(f"process {index} ended before it listened:\n{self.log(index).read_text()}")
            time.sleep(0.02)


@contextlib.contextmanager
def local_cluster(num_processes: int, flags: Sequence[str], folder: Path, **options: Any) -> Iterator[LocalCluster]:
    """Runs a `LocalCluster` and kills it on exit."""
    cluster = LocalCluster(num_processes, flags, folder, **options)
    try:
        yield cluster
    finally:
        cluster.kill()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a port of this machine for a server that starts later.

    On Linux, the port stays bound but without a listener, so that no other process is given it, while a server that
    sets SO_REUSEADDR, as gRPC servers do, can still bind it. On other systems, the port is only known to be free when
    this returns.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
