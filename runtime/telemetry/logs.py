"""Configures the log: readable lines for people, or one JSON object per line for machines.

The log of a server is written by a thread of its own. If nothing reads stderr, its pipe fills, and writes to it block;
without that thread, requests would hang in their log lines, and SIGTERM would not end the server.
"""

import contextlib
import io
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
from datetime import UTC, datetime

from ..supervision.supervisor import Supervisor

_MAX_QUEUED_LINES = 10_000
_FLUSH_SECONDS = 1.0
_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: `time`, `level`, `logger`, `message`, and the fields passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Returns False for records that report a client's behaviour as an error of the server.

    These are grpc's report of a caller that disconnected before the answer, and aiohttp's report of bytes that are not
    an HTTP request.
    """
    if record.name == "grpc._cython.cygrpc":
        return "ExecuteBatchError" not in record.getMessage()
    kind = record.exc_info[0] if record.name == "aiohttp.server" and record.exc_info else None
    return kind is None or kind.__module__ != "aiohttp.http_exceptions"


def say(text: str) -> None:
    """Prints a line to standard output. If its reader is gone, the server goes on without output."""
    try:
        print(f"{text}\n", end="", flush=True)  # in one piece: another thread may flush, and the log write, in between
    except OSError:
        drop_output()


def drop_output() -> None:
    """Redirects standard output to nowhere, so that Python's flush at exit does not fail and change the status."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _StderrHandler(logging.Handler):
    """Writes to the file of stderr, past Python's buffer: at exit, Python waits for the lock of a buffer in use.

    Only one thread uses it, hence it has no lock that another could wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr

    def createLock(self) -> None:
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError):  # it is closed, or nothing can read it any more
            try:
                descriptor = self._stream.fileno()
            except io.UnsupportedOperation:  # a stand-in for stderr, without a file
                self._stream.write(text)
                return
            line = memoryview(text.encode(errors="backslashreplace"))
            while line:
                line = line[os.write(descriptor, line) :]


class QueuedHandler(logging.handlers.QueueHandler):
    """Hands lines to a thread that writes them to stderr, and drops them while too many wait.

    Attributes:
      num_dropped: How many lines were dropped.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_MAX_QUEUED_LINES)
        super().__init__(self._lines)
        self.num_dropped = self._num_reported = 0
        self._writer = _StderrHandler()
        self._is_closed = threading.Event()
        # A daemon thread, which ends with the process: `close` must not wait for a blocked write.
        supervisor.forever("log", self._write, self._is_closed)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Adds a formatted record. Called with the lock of the handler held."""
        try:
            if num_new := self.num_dropped - self._num_reported:
                text = f"{num_new} lines of the log were dropped, because stderr was not read fast enough"
                self._lines.put_nowait(
                    self.prepare(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))
                )
                self._num_reported = self.num_dropped
            self._lines.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def add_line(self, text: str) -> None:
        """Adds a line as it stands."""
        self.acquire()
        try:
            self.enqueue(logging.makeLogRecord({"msg": text}))
        finally:
            self.release()

    def flush(self) -> None:
        """Waits until all lines are written, but not for a reader that does not read."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def close(self) -> None:
        self._is_closed.set()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        super().close()

    def _write(self) -> None:
        while not self._is_closed.is_set() or not self._lines.empty():
            record = self._lines.get()
            try:
                if record is not None:
                    self._writer.handle(record)
            finally:
                self._lines.task_done()


def _queued() -> QueuedHandler | None:
    handlers = logging.getLogger().handlers
    return next((handler for handler in handlers if isinstance(handler, QueuedHandler)), None)


def flush_logs() -> None:
    """Waits until the log is written, for a second at most. Must be called before `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def num_dropped_lines() -> int:
    """Returns how many lines of the log were dropped because nothing read them."""
    handler = _queued()
    return handler.num_dropped if handler is not None else 0


def complain(text: str) -> None:
    """Prints an error for the user to stderr, after the lines of the log."""
    if (handler := _queued()) is None:
        print(f"meshserve: {text}", file=sys.stderr, flush=True)
    else:
        handler.add_line(f"meshserve: {text}")
        handler.flush()


def configure_logs(log_format: str, supervisor: Supervisor | None = None) -> None:
    """Sends all logs to stderr.

    Args:
      log_format: "text" or "json".
      supervisor: Of the thread that writes the lines, which drops those that are not read. None: they are written where
        they are logged.
    """
    handler = QueuedHandler(supervisor) if supervisor is not None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_PLAIN))
    handler.addFilter(is_worth_a_line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("jax", "absl", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
