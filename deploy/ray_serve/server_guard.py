"""Guard process that runs a command and ends it when the process that started the guard has ended, however it ended.

Runs as `python server_guard.py COMMAND...` with a pipe of the starting process as stdin, whose end means that this
process is gone. Without the guard, a server that is killed would leave a server behind that holds its devices. Imports
very little, so that it needs only a few megabytes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

END_SECONDS = 5.0  # for the command to end after SIGTERM


def run_guarded(command: list[str]) -> int:
    """Runs `command` until it ends, or until stdin ends or SIGTERM arrives. Returns its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end(*_: object) -> None:
        threading.Thread(target=_end, args=(child,), daemon=True).start()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=_wait_for_end_of_input, args=(end,), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wait_for_end_of_input(end: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    end()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_SECONDS)
        return
    child.kill()


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:]))
