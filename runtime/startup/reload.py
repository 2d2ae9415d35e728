"""SIGHUP: a running server reads its config file again. The one option that changes without a restart is `tp`."""

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from ..api.config import ServeConfig
from ..api.errors import MeshserveError

_log = logging.getLogger(__name__)


def reload_on_hangup(config: ServeConfig, read: Callable[[], ServeConfig], change_tp: Callable[[int], None]) -> None:
    """Installs the handler. Python allows that in the main thread only.

    Args:
      config: what the server started with.
      read: reads the file and the flags again.
      change_tp: serves at the degree that the config names now; does nothing if it is the present one.
    """
    one_at_a_time = threading.Lock()

    def reload() -> None:
        with one_at_a_time:
            try:
                new = read()
                for name in changed_options(config, new):
                    _log.warning("%s has changed in the config; it takes effect at the next start", name)
                change_tp(new.tp)
            except (MeshserveError, MemoryError, ValueError) as error:
                _log.error("the config was read again, but tp stays as it was: %s", error)
            except Exception:
                _log.exception("the change of tp failed")

    def on_signal(number: int, frame: Any) -> None:
        # No daemon: a process that ends while XLA compiles in one of its threads is aborted.
        threading.Thread(target=reload, name="reload").start()

    signal.signal(signal.SIGHUP, on_signal)


def changed_options(old: ServeConfig, new: ServeConfig) -> list[str]:
    """The options other than tp that differ."""
    names = [field.name for field in dataclasses.fields(ServeConfig) if field.name != "tp"]
    return [name for name in names if getattr(old, name) != getattr(new, name)]
