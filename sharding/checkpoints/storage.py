"""Reads files at an offset, from the local disk or an object store (`gs://`, `s3://`)."""

import os
from pathlib import Path

import numpy as np
from etils import epath

from .parameters import CheckpointError

REMOTE_SCHEMES = ("gs://", "s3://")
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


class File:
    """An open file that several threads may read at once."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._descriptor = None if is_remote(path) else os.open(path, os.O_RDONLY)
        self.size = path.stat().length

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
