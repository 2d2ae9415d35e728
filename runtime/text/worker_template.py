"""The processes in which work runs that may crash or not end: a template, and the workers that are forked from it.

The server starts a template by `main` of a module such as `constraint_worker`. It loads what all its workers need,
once, and forks one whenever `worker_processes.WorkerTemplate` asks for it; forks share its memory. A worker answers
messages on its socket (length, then JSON), in limited memory; the server ends it if it takes too long. Imports neither
numpy nor jax: a fork should be small and have one thread.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from .worker_protocol import (
    CONTROL,
    EXITED,
    FORK,
    PING,
    PONG,
    READY,
    RENICE,
    SIGNAL,
    encoded,
    receive,
)

_PR_SET_PDEATHSIG = 1


class Answering(Protocol):
    """What a worker runs."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message asks for."""


Load = Callable[[Mapping[str, Any]], Any]  # settings -> what the workers of a template share
# What the workers share, the settings, and the memory shared with the server -> what a worker runs.
Make = Callable[[Any, dict[str, Any], mmap.mmap], Answering]


def _serve(connection: socket.socket, shared: int, memory_bytes: int, template: "_Template") -> NoReturn:
    """Runs a worker until the server closes its socket. Called in the fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the template
        if os.getppid() != template.process_id:  # which has ended before
            os._exit(0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where memory runs out, this process goes first
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # crashes print stack traces
    _limit_resources(memory_bytes, template.settings["stack_bytes"])
    memory = mmap.mmap(shared, 0)
    os.close(shared)
    worker = template.make(memory)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.sendall(encoded(worker.answer(receive(connection))))
    os._exit(0)


def _limit_resources(memory_bytes: int, stack_bytes: int) -> None:
    """Limits the memory that this process may allocate from now on, and its stack; a crash leaves no core file."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: stack_bytes}
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii") as status:
            [used_kib] = [int(line.split()[1]) for line in status if line.startswith("VmData:")]
        limits[resource.RLIMIT_DATA] = (used_kib << 10) + memory_bytes
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class _Template:
    """The process that all workers are forked from."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], load: Load, make: Make):
        self.settings = settings
        self.process_id = os.getpid()
        loaded = load(settings)
        self.make: Callable[[mmap.mmap], Answering] = lambda memory: make(loaded, settings, memory)
        self._control = control
        self._workers: dict[int, int] = {}  # process id -> token
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def run(self) -> None:
        """Serves the control socket until the server closes it."""
        signal.set_wakeup_fd(self._waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when its workers end
            signal.signal(number, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the pages of everything loaded before
        self._control.sendall(CONTROL.pack(READY, 0, 0))
        poller = select.poll()
        for descriptor in (self._control.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._wake in ready:
                os.read(self._wake, 4096)
                for token, status in self._ended():
                    self._control.sendall(CONTROL.pack(EXITED, token, status))
            if self._control.fileno() in ready and not self._obey():
                return

    def end_workers(self) -> None:
        """Ends all workers, also those that are suspended."""
        for process_id in self._workers:
            os.kill(process_id, signal.SIGKILL)

    def _obey(self) -> bool:
        """Follows one command. Returns False if the server is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, CONTROL.size, 2)
        while data and len(data) < CONTROL.size:
            data += self._control.recv(CONTROL.size - len(data))
        if not data:
            return False
        operation, token, operand = CONTROL.unpack(data)
        if operation == PING:
            self._control.sendall(CONTROL.pack(PONG, token, operand))
            return True
        if operation == FORK:
            connection, shared = socket.socket(fileno=descriptors[0]), descriptors[1]
            process_id = os.fork()
            if not process_id:
                self._leave()
                _serve(connection, shared, operand, self)
            connection.close()
            os.close(shared)
            self._workers[process_id] = token
            return True
        for process_id in [each for each, its_token in self._workers.items() if its_token == token]:
            if operation == SIGNAL:
                os.kill(process_id, operand)
            elif operation == RENICE:
                now = os.getpriority(os.PRIO_PROCESS, process_id)
                os.setpriority(os.PRIO_PROCESS, process_id, max(now, operand))  # less is not permitted
        return True

    def _leave(self) -> None:
        """Gives up, in a fork, what belongs to the template."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._workers.clear()
        self._control.close()
        for descriptor in (self._wake, self._waker):
            os.close(descriptor)

    def _ended(self) -> Iterator[tuple[int, int]]:
        """Yields the workers that have ended: their tokens and exit statuses, negative for signals."""
        while self._workers:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                return
            if (token := self._workers.pop(process_id, None)) is not None:
                yield token, os.waitstatus_to_exitcode(status)


def run_template(arguments: Sequence[str], load: Load, make: Make) -> None:
    """Runs the template. `arguments` are the descriptor of the control socket, and the settings as JSON."""
    control = socket.socket(fileno=int(arguments[0]))
    template = _Template(control, json.loads(arguments[1]), load, make)
    try:
        with contextlib.suppress(ConnectionError, EOFError):
            template.run()
    finally:
        template.end_workers()
