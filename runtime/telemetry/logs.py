"""The log: lines for people, or one JSON object a line for machines."""

import json
import logging
import os
import sys
from datetime import UTC, datetime

_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, and whatever the call gave as `extra`."""

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
    """False for what grpc reports as an error of the server and is only a caller who went away before the answer."""
    return not (record.name == "grpc._cython.cygrpc" and "ExecuteBatchError" in record.getMessage())


def say(text: str) -> None:
    """A line to standard output. Its reader may have gone: no server ends for that."""
    try:
        print(text, flush=True)
    except OSError:
        drop_output()


def drop_output() -> None:
    """Whose reader has gone. Python would try again at its end, and exit with another status."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def configure_logs(log_format: str) -> None:
    """Logs to stderr from now on.

    Args:
      log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_PLAIN))
    handler.addFilter(is_worth_a_line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("jax", "absl", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # One line a request is for machines; on a terminal it would bury the rest.
    logging.getLogger("meshserve.request").setLevel(logging.INFO if log_format == "json" else logging.WARNING)
