"""Starts the processes in which limited work runs, talks to them, and ends those that crash or exceed a limit.

The server's side of `worker_template`. All workers of a kind are forks of one template process, which holds what they
share, such as the vocabulary for constraints; a fork takes 3 ms and 5 MB.
"""

import array
import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .worker_protocol import (
    CONTROL,
    EXITED,
    FORK,
    HEADER_BYTES,
    PING,
    PONG,
    PROGRESS,
    READY,
    RENICE,
    SIGNAL,
    encoded,
    is_answer,
    receive,
)

MAX_ROWS = 256  # samples of a worker
# With the import path of this process, however it was set.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])["path"]
from {} import main
main(sys.argv[1:])
"""
_READ_SECONDS = 5.0  # for the rest of an answer that has begun
_EXIT_SECONDS = 10.0  # for the report of an end; on a busy machine it may be late
_START_SECONDS = 120.0
_ANSWER_SECONDS = 10.0  # for the template to answer, on a busy machine
_MAX_STARVATION = 6.0
_MAX_EXITS = 1_000  # exit statuses that are kept until they are asked for
_BEHIND_SECONDS = 0.01  # after which a template that is behind with its commands gets more of them
_MAX_UNSENT = 10_000  # commands that a template may leave unread, beside those in its socket
_NICENESS = 10  # for workers of expensive constraints: the engine goes first


_log = logging.getLogger(__name__)


class WorkerLostError(Exception):
    """A worker process has ended, by itself or because it was killed."""


class WorkerTemplate:
    """Forks workers. Thread-safe; the template process is started again if it is lost.

    Args:
      settings: As JSON, for the module. `mask_bytes` and `num_ahead` say how much memory a worker shares.
      memory_bytes: What each worker may allocate.
      module: The module of this package that the template runs.
      is_answer: Whether a message makes sense as an answer of a worker.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        memory_bytes: int,
        module: str = "constraint_worker",
        is_answer: Callable[[Any], bool] = is_answer,
    ):
        self.num_starts = 0
        self.is_answer = is_answer
        self._program = _PROGRAM.format(f"{__package__}.{module}")
        self._what = module.partition("_")[0]
        self._settings = settings
        self._memory_bytes = memory_bytes
        # Reentrant, because a worker is also killed when it is collected as garbage, at any point of any thread.
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = False
        self._started = 0.0
        self._asked: float | None = None  # when the template was asked for an answer that has not come
        # Commands that the socket had no room for, oldest first, with copies of the descriptors that go with them.
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self._is_sending = False
        self._exits: dict[int, int] = {}  # token of a worker -> exit status, negative for signals
        self._num_workers = 0
        self._num_lost = 0  # workers of templates that were lost, whose ends are not reported
        self._is_closed = False
        with self._lock:
            self._start()

    def check(self) -> None:
        """Starts the template again if it does not answer: it is suspended, or hangs. Called every second or so.

        While it does, no worker is started, and none that exceeds its time is ended.
        """
        self._read_pending_reports()
        now = time.monotonic()
        with self._lock:
            if self._is_closed or self._control is None:
                return
            self._send_waiting()
            since, seconds = (self._asked, _ANSWER_SECONDS) if self._is_ready else (self._started, _START_SECONDS)
            if since is not None and now - since > seconds:
                _log.error(
                    "the process of the kind %r does not answer for %.0f s; it is started again",
                    self._what,
                    now - since,
                )
                self._start(self._num_workers)
            elif self._is_ready and self._asked is None:
                self._asked = now
                self._send(PING, 0, 0)

    def fork(self) -> "WorkerProcess":
        """Returns a new worker. It may be sent messages at once.

        Raises:
          WorkerLostError: The template cannot be started, or has been closed.
        """
        try:
            return self._forked()
        except OSError as error:  # no memory or no descriptor is left
            raise WorkerLostError(f"no process could be started: {error}") from None

    def _forked(self) -> "WorkerProcess":
        self._read_pending_reports()
        ours, theirs = socket.socketpair()
        num_masks, mask_bytes = 1 + self._settings["num_ahead"], self._settings["mask_bytes"]
        row_bytes = num_masks * mask_bytes
        with theirs, contextlib.closing(_shared_memory(HEADER_BYTES + MAX_ROWS * row_bytes)) as file:
            memory = mmap.mmap(file.fileno(), 0)
            with self._lock:
                self._num_workers += 1
                token = self._num_workers
                for _ in range(2):
                    if self._send(FORK, token, self._memory_bytes, (theirs.fileno(), file.fileno())):
                        break
                    self._start(self._num_workers - 1)  # it has ended; the last worker is about to be forked
        return WorkerProcess(self, token, ours, memory, (MAX_ROWS, num_masks, mask_bytes // 4))

    def command(self, operation: bytes, token: int, operand: int) -> None:
        """Sends the template a command about a worker. Does nothing if either has ended."""
        with self._lock:
            self._send(operation, token, operand)

    def _send(self, operation: bytes, token: int, operand: int, descriptors: Sequence[int] = ()) -> bool:
        """Sends the template a command, or keeps it while the template does not read. The lock is held.

        Returns:
          False if the template has ended, and all its workers with it.
        """
        if len(self._unsent) >= _MAX_UNSENT and self._send_waiting() and len(self._unsent) >= _MAX_UNSENT:
            _log.error("the process of the kind %r reads no commands; it and its workers are ended", self._what)
            self._end_processes()
            return False
        self._unsent.append((CONTROL.pack(operation, token, operand), _copies(descriptors)))
        return self._send_waiting()

    def _send_waiting(self) -> bool:
        """Sends the commands that wait, as far as the template reads them. Returns False if it has ended."""
        if self._is_sending:  # a worker was collected as garbage meanwhile; its command follows
            return True
        self._is_sending = True
        try:
            while self._unsent:
                if self._control is None:
                    raise ConnectionError
                command, descriptors = self._unsent[0]
                # Sends all of it, or nothing. `socket.send_fds` ignores its flags, and would wait.
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                self._control.sendmsg([command], rights, socket.MSG_DONTWAIT)
                self._unsent.popleft()
                _close_all(descriptors)
            return True
        except ConnectionError:
            self._forget_unsent()
            return False
        except OSError:  # no room, or too many descriptors are on their way
            return True
        finally:
            self._is_sending = False

    def is_behind(self) -> bool:
        """Sends the commands that wait, as far as the template reads them. Returns whether some still do.

        Whoever waits for a worker or a report calls it again and again, or what is to be done first would wait, too.
        """
        if not self._unsent:
            return False
        self._read_pending_reports()  # or the template would wait for their reader, and read nothing
        with self._lock:
            self._send_waiting()
            return bool(self._unsent)

    def _forget_unsent(self) -> None:
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def wait_until_ready(self) -> None:
        """Waits until the template has loaded the vocabulary.

        Raises:
          WorkerLostError: It could not. Its standard error, which is the server's, says why.
        """
        self._read_reports(lambda: self._is_ready, _START_SECONDS)
        if not self._is_ready:
            raise WorkerLostError(f"the process of the kind {self._what!r} cannot start; see its error above")

    def exit_status(self, token: int) -> int | None:
        """Returns how a worker has ended, negative for signals; None if that is unknown."""
        self._read_reports(lambda: token in self._exits or token <= self._num_lost, _EXIT_SECONDS)
        return self._exits.pop(token, None)

    def close(self) -> None:
        """Ends the template and all workers."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _read_reports(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Reads what the template reports until `is_done`, but not for longer than `seconds`."""
        end = time.monotonic() + seconds
        with self._reading:
            while not is_done() and (left := end - time.monotonic()) > 0:
                is_behind = self.is_behind()
                if not self._read_report(min(left, _BEHIND_SECONDS) if is_behind else left) and not is_behind:
                    break

    def _read_pending_reports(self) -> None:
        """Reads the reports that have come. Otherwise they would fill the socket, and the template would block."""
        if self._reading.acquire(blocking=False):  # or another thread reads them
            try:
                while self._read_report(0.0):
                    pass
            finally:
                self._reading.release()

    def _read_report(self, seconds: float) -> bool:
        """Reads one report, if it comes within `seconds`. Returns whether it has."""
        try:
            control = self._control
            if control is None or not _is_readable(control, seconds):
                return False
            report = control.recv(CONTROL.size, socket.MSG_WAITALL)
        except (OSError, ValueError):  # closed meanwhile
            return False
        if len(report) < CONTROL.size:
            return False
        operation, token, operand = CONTROL.unpack(report)
        self._is_ready |= operation == READY
        if operation == PONG:
            self._asked = None
        if operation == EXITED:
            self._exits[token] = operand
            if len(self._exits) > _MAX_EXITS:  # most are never asked for
                self._exits.pop(next(iter(self._exits)), None)
        return True

    def _start(self, num_lost: int = 0) -> None:
        """Starts the template, again if it runs. The first `num_lost` workers are lost."""
        if self._is_closed:
            raise WorkerLostError("the server is stopping")
        self._stop()
        self._control, theirs = socket.socketpair()
        self._is_ready, self._started, self._asked = False, time.monotonic(), None
        self._num_lost = num_lost
        self.num_starts += 1
        with theirs:
            settings = json.dumps({**self._settings, "path": sys.path})
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", self._program, str(theirs.fileno()), settings],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the server; `_end_processes` needs the group
            )

    def _stop(self) -> None:
        self._forget_unsent()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._end_processes()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _end_processes(self) -> None:
        """Ends the template and its workers, also suspended ones, and those that are just being forked."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it if all have ended
                os.killpg(self._process.pid, signal.SIGKILL)


class WorkerProcess:
    """One worker. Used by one thread at a time, except for `kill`, `signal` and `renice`."""

    def __init__(
        self,
        template: WorkerTemplate,
        token: int,
        connection: socket.socket,
        memory: mmap.mmap,
        masks: tuple[int, int, int],
    ):
        # For each row, the mask of its next token, then those after each of its draft tokens.
        self.masks = np.frombuffer(memory, np.uint32, offset=HEADER_BYTES).reshape(masks)
        self.busy_since: float | None = None  # when the message was sent whose answer has not been read
        self.is_lost = False
        self.tenant = ""  # on whose behalf it follows samples
        self.free_rows = list(range(MAX_ROWS - 1, -1, -1))
        self.template = template
        self._token = token
        self._connection = connection
        self._connection.settimeout(_READ_SECONDS)
        self._memory = memory
        weakref.finalize(self, template.command, SIGNAL, token, signal.SIGKILL).atexit = False

    def fileno(self) -> int:
        """Returns the descriptor that is readable when an answer has come."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to an idle worker. If the worker is lost, `receive` tells."""
        assert self.busy_since is None, "the worker is busy"
        self.busy_since = time.monotonic()
        with contextlib.suppress(OSError):
            self._connection.sendall(encoded(message))

    def receive(self) -> dict[str, Any]:
        """Reads the answer, once `fileno` is readable.

        Raises:
          WorkerLostError: The worker has ended.
        """
        try:
            answer = receive(self._connection)
            if not self.template.is_answer(answer):
                raise EOFError("the answer makes no sense")
        except (EOFError, OSError) as error:
            self.kill()
            raise WorkerLostError(str(error)) from None
        self.busy_since = None
        return answer

    def wait(self, seconds: float) -> bool:
        """Waits for an answer. Returns whether it has come, or the worker has ended."""
        end = time.monotonic() + seconds
        while not self.is_lost and self.template.is_behind() and (left := end - time.monotonic()) > 0:
            if _is_readable(self._connection, min(left, _BEHIND_SECONDS)):
                return True
        return self.is_lost or _is_readable(self._connection, end - time.monotonic())

    @property
    def progress(self) -> int | None:
        """The row that the worker is busy with, or was when it ended."""
        row = PROGRESS.unpack_from(self._memory, 0)[0]
        return row - 1 if 0 < row <= MAX_ROWS else None

    def has_used(self, seconds: float, elapsed_seconds: float | None = None) -> bool:
        """Returns whether the worker has computed for so long since its message was sent.

        Processor time counts where it is known, so that a busy machine ends nothing that is not at fault; and elapsed
        time from `elapsed_seconds` on (None: several times as long), whatever the worker does.
        """
        if elapsed_seconds is None:
            elapsed_seconds = _MAX_STARVATION * seconds
        if self.busy_since is None or (elapsed := time.monotonic() - self.busy_since) < seconds:
            return False
        _, process_id, began = PROGRESS.unpack_from(self._memory, 0)
        used = _processor_seconds(process_id) if sys.platform == "linux" else elapsed + began * 1e-9
        return elapsed > elapsed_seconds or used - began * 1e-9 >= seconds

    @property
    def exit_status(self) -> int | None:
        """How the worker has ended, negative for signals; None if that is unknown."""
        return self.template.exit_status(self._token)

    def pause(self) -> None:
        """Suspends the worker until `resume`."""
        self.template.command(SIGNAL, self._token, signal.SIGSTOP)

    def resume(self) -> None:
        """Ends the effect of `pause`."""
        self.template.command(SIGNAL, self._token, signal.SIGCONT)

    def renice(self) -> None:
        """Lets other processes go first from now on."""
        self.template.command(RENICE, self._token, _NICENESS)

    def kill(self) -> None:
        """Ends the worker, whatever it does. Any thread may call it, more than once."""
        if not self.is_lost:
            self.is_lost = True
            self.template.command(SIGNAL, self._token, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits


def wait_for_any(workers: Sequence[WorkerProcess], seconds: float) -> list[WorkerProcess]:
    """Waits until one of the busy workers has answered or ended. Returns all that have."""
    for worker in workers:
        worker.template.is_behind()
    poller = select.poll()
    by_descriptor = {worker.fileno(): worker for worker in workers}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poller.poll(max(seconds, 0.0) * 1000)]


def _processor_seconds(process_id: int) -> float:
    """Returns the processor time that a process has used, 0.0 if it is gone."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii", errors="replace") as stat:
            ticks = stat.read().rpartition(")")[2].split()[11:13]  # user and system time
    except OSError:
        return 0.0
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _copies(descriptors: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poller = select.poll()  # unlike select, for any number of open descriptors
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(max(seconds, 0.0) * 1000))


def _shared_memory(num_bytes: int) -> Any:
    """Returns a file in memory, which processes can map."""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("meshserve-masks", os.MFD_CLOEXEC), "r+b")
    else:
        file = tempfile.TemporaryFile()
    file.truncate(num_bytes)
    return file
