"""Configures the log: readable lines for people, or one JSON object per line for machines."""

import json
import logging
import os
import sys
from datetime import UTC, datetime

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
        print(text, flush=True)
    except OSError:
        drop_output()


def drop_output() -> None:
    """Redirects standard output to nowhere, so that Python's flush at exit does not fail and change the status."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def configure_logs(log_format: str) -> None:
    """Sends all logs to stderr.

    Args:
      log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_PLAIN))
    handler.addFilter(is_worth_a_line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("jax", "absl", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
