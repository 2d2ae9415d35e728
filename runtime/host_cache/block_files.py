"""Keeps the blocks of a host tier in files between two runs of a server.

A file holds one block: the keys of its pages, and each device's part of their keys and values. Its name tells the keys,
so that a block that is in a file already is not written again. A file is complete or does not exist, and ends with a
SHA-256 digest of everything before it. Files that fail it, or that were written for another model, layout or page size
(the identity), are not used. The files hold what users' prompts were computed to, so the directory is private.
"""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..api.errors import ConfigError

_log = logging.getLogger(__name__)

_MAGIC = b"meshserve KV 1\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_SUFFIX = ".kv"
_UNFINISHED = ".unfinished"


class StoredBlock(NamedTuple):
    """A block as it is in a file."""

    keys: tuple[bytes, ...]  # of its pages, one a row
    parts: tuple[bytes, ...]  # the bytes of each local device's part


class BlockFiles:
    """The files of one process in a directory, which is created if needed.

    Args:
      directory: The directory. No other server may use it at the same time.

    Raises:
      ConfigError: The directory cannot be used, or others may write to it.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = directory.stat().st_mode
        except OSError as error:
            raise ConfigError(f"host_cache_dir {directory} cannot be used: {error}. Name another directory.") from None
        if mode & (stat.S_IWGRP | stat.S_IWOTH) or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"host_cache_dir {directory} has mode {mode & 0o777:o}; it must be writable for this user and for no "
                f"other, since what is in it is served. Run chmod 700 {directory}."
            )

    def newest_first(self) -> list[Path]:
        """Returns the files, those that were used last first."""
        return sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def path_of(self, identity: str, keys: Sequence[bytes]) -> Path:
        """Returns the path of the file for a block with these keys."""
        name = hashlib.sha256(b"".join([identity.encode(), *keys])).hexdigest()
        return self._directory / f"{name}{_SUFFIX}"

    def write(self, identity: str, block: StoredBlock) -> None:
        """Writes a block to its file.

        Raises:
          OSError: It could not be written, for example because the disk is full. There is no file then.
        """
        path = self.path_of(identity, block.keys)
        fields = {
            "identity": identity,
            "keys": [key.hex() for key in block.keys],
            "part_bytes": [len(part) for part in block.parts],
        }
        header = json.dumps(fields).encode()
        pieces = (_MAGIC, len(header).to_bytes(_LENGTH_BYTES, "big"), header, *block.parts)
        digest = hashlib.sha256()
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in pieces:
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, identity: str, path: Path) -> StoredBlock | None:
        """Reads a block; None, with a warning, if the file is damaged or was written for another identity."""
        try:
            content = memoryview(path.read_bytes())
            if len(content) < len(_MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES or content[: len(_MAGIC)] != _MAGIC:
                raise ValueError("it is no file of a host tier, or cut off")
            body = content[:-_DIGEST_BYTES]
            if hashlib.sha256(body).digest() != content[-_DIGEST_BYTES:]:
                raise ValueError("its digest does not match its content")
            start = len(_MAGIC) + _LENGTH_BYTES
            end = start + int.from_bytes(body[len(_MAGIC) : start], "big")
            fields = json.loads(bytes(body[start:end]))
            if fields["identity"] != identity:
                raise ValueError("it was written for another model, layout, page size or version")
            parts = []
            for num_bytes in fields["part_bytes"]:
                parts.append(bytes(body[end : end + num_bytes]))
                end += num_bytes
            return StoredBlock(tuple(map(bytes.fromhex, fields["keys"])), tuple(parts))
        except (OSError, ValueError, KeyError) as error:
            _log.warning("%s is not used: %s", path, error)
            return None

    def keep_only(self, paths: Iterable[Path]) -> None:
        """Removes all files but these, which get increasing times of use in this order."""
        kept = list(paths)
        for path in set(self._directory.glob("*")) - set(kept):
            if path.suffix in (_SUFFIX, _UNFINISHED):
                path.unlink(missing_ok=True)
        now = max((path.stat().st_mtime_ns for path in kept if path.exists()), default=0)
        for index, path in enumerate(kept):
            if path.exists():
                os.utime(path, ns=(now + index, now + index))
