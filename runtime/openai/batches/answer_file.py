"""The files of answers, which a later run continues."""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from ...api.errors import MeshserveError
from .batch_lines import key_of


class AnswerFile:
    """A file to which answers are appended as they come. Each is written at once, so a kill loses none of the others.

    Args:
      path: The file. An incomplete last line, which a kill may have left, is cut off.

    Raises:
      MeshserveError: It cannot be written, another process writes it, or it has lines that are no answers.
    """

    def __init__(self, path: Path):
        self._path = path
        self.answered: set[str | int] = set()  # the lines about which it has something: custom ids, numbers
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise MeshserveError(f"{path} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.close()
            raise MeshserveError(f"another process writes {path}. Wait for it, or choose another file.") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, line: bytes) -> None:
        """Appends a line.

        Raises:
          MeshserveError: It cannot be written. What could be written of it is cut off.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(size)
            raise MeshserveError(f"{self._path} cannot be written: {error.strerror}.") from None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read(self) -> None:
        with self._path.open("rb") as file:
            end = 0
            for number, data in enumerate(file, start=1):
                if not data.endswith(b"\n"):
                    break
                try:
                    key = key_of(json.loads(data))
                except (ValueError, RecursionError):
                    key = None
                if key is None:
                    raise MeshserveError(
                        f"{self._path}, line {number}: is no answer of a batch. Choose another file, or remove it."
                    )
                self.answered.add(key)
                end += len(data)
        self._file.truncate(end)
