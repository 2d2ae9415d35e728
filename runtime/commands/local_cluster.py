"""Several `meshserve serve` processes on this machine: what a demo, a test or a benchmark of a cluster begins with."""

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
    """Processes 0 to `num_processes` - 1. They are running when this returns, and may still be loading.

    Args:
      flags: of `meshserve serve`, the same for all.
      folder: gets a log for each process, named by its number.
      own_flags: of a process alone, by its number; they beat the others.
      prefixes: what to put before a process's command, by its number.
      host: of process 0, for the others.

    Raises:
      MeshserveError: a process ended before it listened; the message has its log.
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
        """Of the process that takes requests."""
        return self.targets[0]

    def log(self, index: int) -> Path:
        return self._folder / f"{index}.log"

    def wait_until_ready(self, client: Client, timeout_seconds: float) -> None:
        """Until the cluster takes requests.

        Raises:
          MeshserveError: a process has ended, or the time is over; the message has its log.
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
        """Ends all in order; returns their exit statuses."""
        self.processes[0].terminate()
        return self.wait(timeout_seconds)

    def wait(self, timeout_seconds: float) -> list[int]:
        """Until every process has ended; returns their exit statuses.

        Raises:
          TimeoutError: names those that have not.
        """
        end = time.monotonic() + timeout_seconds
        while left := [index for index, process in enumerate(self.processes) if process.poll() is None]:
            if time.monotonic() > end:
                raise TimeoutError(f"processes {left} still run after {timeout_seconds:g} s")
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
    """A `LocalCluster` that is gone afterwards."""
    cluster = LocalCluster(num_processes, flags, folder, **options)
    try:
        yield cluster
    finally:
        cluster.kill()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine for a server to come.

    Linux gives it to nobody else who asks for any port: it is bound, though nobody listens at it, and a server that
    sets SO_REUSEADDR, as gRPC's do, can bind it as well. Elsewhere it is only free when this returns.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
