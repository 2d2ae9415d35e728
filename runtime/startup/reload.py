"""Rereads the config file at SIGHUP. Only the option `tp` takes effect without a restart."""

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from ..api.errors import MeshserveError
from ..options.serve_config import ServeConfig
from ..supervision.supervisor import Supervisor

_log = logging.getLogger(__name__)


def reload_on_hangup(
    config: ServeConfig,
    read: Callable[[], ServeConfig] | None,
    change_tp: Callable[[int], bool],
    supervisor: Supervisor,
) -> None:
    """Installs the signal handler, which logs what it has changed. Call it from the main thread, as Python requires.

    Args:
      config: The options with which the server started.
      read: Rereads the file and the flags; None if the server has no config file.
      change_tp: Changes the TP size of the server, and returns whether it had another one.
      supervisor: Of the thread that does this.
    """
    one_at_a_time = threading.Lock()
    next_in_line = threading.Lock()  # held by the thread that waits for its turn, which will read the latest config

    def reload() -> None:
        with one_at_a_time:
            next_in_line.release()
            if read is None:
                _log.warning(
                    "SIGHUP: nothing was read again, because the server was started without --config. Certificates and "
                    "tokens are read again whenever their files change."
                )
                return
            try:
                new = read()
                changed = changed_options(config, new)
                for name in changed:
                    _log.warning("option %s has changed; it takes effect at the next start", name)
                if change_tp(new.tp):
                    _log.info("SIGHUP: the config file was read again, and the TP size has changed")
                else:
                    rest = ", nor has any other option" if not changed else ""
                    _log.info("SIGHUP: the config file was read again; the TP size has not changed%s", rest)
            except (MeshserveError, MemoryError, ValueError) as error:
                _log.error("the TP size was not changed: %s", error)

    def on_signal(number: int, frame: Any) -> None:
        if not next_in_line.acquire(blocking=False):
            return
        # Not a daemon thread: a process that exits while XLA compiles in one of its threads is aborted.
        supervisor.once("reload", reload, is_daemon=False)

    signal.signal(signal.SIGHUP, on_signal)


def changed_options(old: ServeConfig, new: ServeConfig) -> list[str]:
    """Returns the names of the options that differ, except tp."""
    names = [field.name for field in dataclasses.fields(ServeConfig) if field.name != "tp"]
    return [name for name in names if getattr(old, name) != getattr(new, name)]
