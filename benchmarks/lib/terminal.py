"""Runs a program in a pseudoterminal and types into it, as a person does."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

COLUMNS, LINES = 110, 30  # a terminal's size, unless stated otherwise
_CURSOR_QUERY = b"\x1b[6n"
Locate = Callable[[bytes], tuple[int, int]]  # returns the line and the column of the cursor, from 1, after some output
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][B0]?|\r")


class Terminal:
    """A program, and all that it has shown.

    Attributes:
      shown: The bytes that the program has written, escape sequences included.
    """

    def __init__(self, process: subprocess.Popen[bytes], controller: int, locate: Locate):
        self.process, self.shown = process, b""
        self._controller, self._num_seen, self._locate = controller, 0, locate

    @property
    def text(self) -> str:
        """What the program has written, without escape sequences."""
        return _CONTROL.sub(b"", self.shown).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def wait_for(self, pattern: str, seconds: float) -> None:
        """Reads until the text behind the last pattern that was waited for has this one.

        Raises:
          TimeoutError: It did not appear in time, or the program ended before.
        """
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text[self._num_seen :])) is None:
            if time.monotonic() > end or not self._read(end):
                shown = self.text[self._num_seen :]
                raise TimeoutError(f"{pattern!r} was not shown within {seconds:g} s, but:\n{shown}")
        self._num_seen += found.end()

    def read_until_end(self, seconds: float) -> int:
        """Reads until the program ends, and returns its exit status.

        Raises:
          subprocess.TimeoutExpired: It did not end in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._read(end):
            pass
        return self.process.wait(max(0.1, end - time.monotonic()))

    def _read(self, end: float) -> bool:
        """Reads what is there by the time `end`. Returns whether the program may write more."""
        if not select.select([self._controller], [], [], max(0.0, end - time.monotonic()))[0]:
            return True
        try:
            new = os.read(self._controller, 65536)
        except OSError:  # on Linux, the end
            return False
        self.shown += new
        if _CURSOR_QUERY in new:
            line, column = self._locate(self.shown)
            self.type(f"\x1b[{line};{column}R")
        return bool(new)


@contextlib.contextmanager
def terminal(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    lines: int = LINES,
    locate: Locate = lambda shown: (1, 1),
) -> Iterator[Terminal]:
    """Runs a command in a terminal until the block ends. If it asks where the cursor is, `locate` says so."""
    controller, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, COLUMNS, 0, 0))
    variables = {**(os.environ if environment is None else environment), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    try:
        yield Terminal(process, controller, locate)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
