"""Reads files at an offset, from the local disk or an object store (`gs://`, `s3://`), and numbers in their headers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from ..guarded_files import check_contained, check_name, open_guarded, read_guarded
from .parameters import CheckpointError

REMOTE_SCHEMES = ("gs://", "s3://")
_MAX_TEXT_BYTES = 64 << 20  # the index of 480 billion parameters has 5 MB
_MAX_DIGITS = 18  # of a whole number in a file
_MAX_DIMENSIONS = 8
_MAX_LENGTH = 2**40
_MAX_READ_BYTES = 1 << 30  # a single read system call is limited to just under 2 GiB


def is_remote(path: epath.PathLike) -> bool:
    return os.fspath(path).startswith(REMOTE_SCHEMES)


def as_path(path: epath.PathLike) -> epath.Path:
    """Returns the path, made absolute if it is local.

    Raises:
      CheckpointError: the scheme is unknown, or the path is remote and its store cannot be reached or the package that
        reads it is not installed.
    """
    text = os.fspath(path)
    if not is_remote(text):
        if "://" in text:
            raise CheckpointError(
                f"{text}: unknown scheme; paths are local or begin with {' or '.join(REMOTE_SCHEMES)}."
            )
        return epath.Path(Path(text).absolute())
    remote = epath.Path(text)
    try:
        remote.exists()
    except ImportError as error:
        raise CheckpointError(
            f"{text} is remote and the package that reads it is not installed ({error}). Install meshserve[remote], or "
            "copy the directory to a local disk."
        ) from None
    except Exception as error:  # each store raises its own types: no credentials, no such bucket, no network
        raise CheckpointError(f"{text} cannot be reached: {type(error).__name__}: {error}.") from None
    return remote


def file_bytes(path: epath.Path) -> int:
    """Returns the size of a file.

    For a local file, `epath` would also look up the owner's name, and fail if the system does not know the owner.
    """
    return path.stat().length if is_remote(path) else os.stat(path).st_size


class File:
    """An open file that several threads may read at once."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._descriptor = None if is_remote(path) else open_guarded(path)
        self.size = file_bytes(path) if self._descriptor is None else os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fills `target`, an array of contiguous bytes, with the file's bytes from `offset`.

        Raises:
          CheckpointError: the file is too short or cannot be read.
        """
        try:
            num_bytes = self._read_remote(offset, target) if self._descriptor is None else self._read(offset, target)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}.") from None
        if num_bytes != target.size:
            raise CheckpointError(f"{self._path} is cut short at byte {offset + num_bytes}. Download it again.")

    def _read(self, offset: int, target: np.ndarray) -> int:
        done, memory = 0, target.data
        while done < target.size:
            count = os.preadv(self._descriptor, [memory[done : done + _MAX_READ_BYTES]], offset + done)  # type: ignore[arg-type]
            if count == 0:
                break
            done += count
        return done

    def _read_remote(self, offset: int, target: np.ndarray) -> int:
        """Reads through a new handle, because a handle has a single position and several threads read at once."""
        with self._path.open("rb") as handle:
            handle.seek(offset)
            data = handle.read(target.size)
        target[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


def open_file(path: epath.Path, hint: str) -> File:
    """Opens a file.

    Args:
      path: the file.
      hint: sentence added to the error message if the file does not exist.

    Raises:
      CheckpointError: the file does not exist or cannot be read.
    """
    try:
        return File(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. {hint}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def file_within(directory: epath.Path, name: object, where: str) -> epath.Path:
    """Returns the path of a file of a model, by its name in the model's directory.

    Args:
      directory: the directory.
      name: a name that may come from a file that anyone has written.
      where: what names it, for the message.

    Raises:
      CheckpointError: the name or a link leads out of the directory.
    """
    try:
        path = directory / check_name(name)
        if not is_remote(path):
            check_contained(directory, path)
    except OSError as error:
        raise CheckpointError(f"{where}: {error.filename} is not read: {error}.") from None
    return path


def parse_header(text: str | bytes) -> Any:
    """Parses JSON that describes tensors.

    Raises:
      ValueError, RecursionError: it is no JSON, a number in it is not finite or has more digits than any size, or it is
        nested too deep.
    """
    return json.loads(text, parse_int=_parsed_int, parse_constant=_refused)


def _parsed_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _refused(text: str) -> None:
    raise ValueError(f"a number is {text}")


def sizes(values: object, *, low: int = 0, most: int = _MAX_DIMENSIONS, high: int = _MAX_LENGTH) -> tuple[int, ...]:
    """Returns a list of whole numbers in a header, such as a shape.

    Args:
      values: what stands there.
      low: the lowest that is allowed.
      most: how many numbers are allowed.
      high: the highest that is allowed.

    Raises:
      ValueError, TypeError: it is something else.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) > most:
        raise ValueError(f"it has something other than a list of at most {most} sizes")
    for value in values:
        if type(value) is not int or not low <= value <= high:
            shown = value if type(value) in (int, float, bool) else type(value).__name__
            raise ValueError(f"a size is {shown}; allowed are whole numbers, {low} to {high}")
    return tuple(values)


def read_text(path: epath.PathLike) -> str:
    """Returns the text of a small file, such as an index or a config.json.

    Raises:
      OSError: it does not exist, cannot be read, or is no regular file.
      ValueError: it is not UTF-8.
    """
    if is_remote(path):
        return epath.Path(path).read_text()
    return read_guarded(path, _MAX_TEXT_BYTES).data.decode("utf-8")
