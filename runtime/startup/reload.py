"""Rereads the config file at SIGHUP. Only the option `tp` takes effect without a restart."""

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from ..api.errors import MeshserveError
from ..options.serve_config import ServeConfig

_log = logging.getLogger(__name__)


def reload_on_hangup(config: ServeConfig, read: Callable[[], ServeConfig], change_tp: Callable[[int], None]) -> None:
    """Installs the signal handler. Call it from the main thread, as Python requires.

    Args:
      config: The options with which the server started.
      read: Rereads the file and the flags.
      change_tp: Changes the TP size of the server; does nothing if it already has this size.
    """
    one_at_a_time = threading.Lock()
    next_in_line = threading.Lock()  # held by the thread that waits for its turn, which will read the latest config

    def reload() -> None:
        with one_at_a_time:
            next_in_line.release()
            try:
                new = read()
                for name in changed_options(config, new):
                    _log.warning("option %s has changed; it takes effect at the next start", name)
                change_tp(new.tp)
            except (MeshserveError, MemoryError, ValueError) as error:
                _log.error("the TP size was not changed: %s", error)
            except Exception:
                _log.exception("changing the TP size failed")

    def on_signal(number: int, frame: Any) -> None:
        if not next_in_line.acquire(blocking=False):
            return
        # Not a daemon thread: a process that exits while XLA compiles in one of its threads is aborted.
        threading.Thread(target=reload, name="reload").start()

    signal.signal(signal.SIGHUP, on_signal)


def changed_options(old: ServeConfig, new: ServeConfig) -> list[str]:
    """Returns the names of the options that differ, except tp."""
    names = [field.name for field in dataclasses.fields(ServeConfig) if field.name != "tp"]
    return [name for name in names if getattr(old, name) != getattr(new, name)]
