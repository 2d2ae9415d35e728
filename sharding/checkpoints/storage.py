"""Files at an offset, local or in an object store (`gs://`, `s3://`), and paths that say which."""

import os
from pathlib import Path

import numpy as np
from etils import epath

from .parameters import CheckpointError

REMOTE_SCHEMES = ("gs://", "s3://")
_MAX_READ_BYTES = 1 << 30  # one call of the kernel reads less than 2 GiB


def is_remote(path: epath.PathLike) -> bool:
    return os.fspath(path).startswith(REMOTE_SCHEMES)


def as_path(path: epath.PathLike) -> epath.Path:
    """A path, absolute if it is local.

    Raises:
      CheckpointError: it is remote and what reads its store is not installed, or it is of another scheme.
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
            f"{text} is remote and what reads it is not installed ({error}). Install meshserve[remote], or copy the "
            "directory to a local disk."
        ) from None
    except Exception as error:  # each store has its own: no credentials, no such bucket, no network
        raise CheckpointError(f"{text} cannot be reached: {type(error).__name__}: {error}.") from None
    return remote


class File:
    """An open file. Reads may come from several threads at once."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._descriptor = None if is_remote(path) else os.open(path, os.O_RDONLY)
        self.size = path.stat().length

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fills `target`, contiguous bytes, from the file's bytes at `offset`.

        Raises:
          CheckpointError: the file ends before, or cannot be read.
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
        """A handle of its own for each read: they come from several threads, and a handle has one position."""
        with self._path.open("rb") as handle:
            handle.seek(offset)
            data = handle.read(target.size)
        target[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


def open_file(path: epath.Path, hint: str) -> File:
    """Opens a file.

    Raises:
      CheckpointError: there is none, and `hint` says what belongs there; or it cannot be read.
    """
    try:
        return File(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. {hint}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
