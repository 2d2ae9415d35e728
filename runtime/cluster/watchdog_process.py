"""A process of its own that kills this one when it gives no sign of life: stopped, or stuck with Python's lock held.

No thread of a process can end it then; and while it exists, its callers wait. Run as `python guard.py SECONDS`, with
signs of life on stdin. Imports next to nothing, so that it costs a few megabytes.
"""

import os
import select
import signal
import subprocess
import sys


class Guard:
    """Kills this process once `beat` was not called for so many seconds. Begins with the first call."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def beat(self) -> None:
        """A sign of life."""
        if self._process is None:
            command = [sys.executable, "-I", "-S", __file__, str(self._seconds)]
            # A session of its own: Ctrl-C in a terminal ends this process, and the guard with it.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b".")
        except OSError:
            pass  # full, or the guard is gone: it is a second line, and no reason to fail


def watch_parent(seconds: float) -> None:
    """Returns when the parent is gone; kills it when nothing came from it for so long."""
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
