"""Guard process that kills its parent when heartbeats stop, because the parent is stopped or stuck with the GIL held.

In that state no thread of the parent can exit the process, and while it exists, its clients wait. Runs as `python
watchdog_process.py SECONDS` with heartbeats on stdin. Imports very little, so that it needs only a few megabytes.
"""

import os
import select
import signal
import subprocess
import sys


class Guard:
    """Starts, at the first `beat`, a guard process that kills this process after `seconds` without another."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def beat(self) -> None:
        """Sends a heartbeat."""
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__, str(self._seconds)]
            # In a separate session, Ctrl-C in a terminal does not reach the guard; it exits when this process does.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b".")
        except OSError:
            pass  # the pipe is full or the guard has exited; it is only a second line of defense


def watch_parent(seconds: float) -> None:
    """Kills the parent if it sends nothing for `seconds`. Returns when the parent has exited."""
    parent = os.getppid()
    while True:
        ready, _, _ = select.select([0], [], [], seconds)
        if ready and not os.read(0, 4096):
            return
        if not ready and os.getppid() == parent:
            print(f"process {parent} gave no sign of life for {seconds:g} s; it is killed", file=sys.stderr, flush=True)
            os.kill(parent, signal.SIGKILL)
            return


if __name__ == "__main__":
    watch_parent(float(sys.argv[1]))
