"""Keeps the blocks of a host tier in files between two runs of a server.

A file holds one block: the keys of its pages, and each device's part of their keys and values. Its name tells the keys,
so that a block that is in a file already is not written again. A file is complete or does not exist, and ends with an
HMAC-SHA-256 of everything before it, by a key of the server's own (`file_key`). Files that fail it, or that were
written for another model, layout or page size (the identity), are not used.

What is in the files is served, and they hold what users' prompts were computed to. So the directory and the files must
belong to the server's user, no other user may write to them, and no link is followed (decision 083).
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshserve.sharding.guarded_files import read_guarded

from ..api.errors import ConfigError

_log = logging.getLogger(__name__)

_MAGIC = b"meshserve KV 2\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_SUFFIX = ".kv"
_UNFINISHED = ".unfinished"
_MAX_HEADER_BYTES = 1 << 20


class StoredBlock(NamedTuple):
    """A block as it is in a file."""

    keys: tuple[bytes, ...]  # keys of its pages, one per row
    parts: tuple[bytes, ...]  # the bytes of each local device's part


def expanded(host_cache_dir: str) -> Path:
    """Returns the directory that the option names.

    Raises:
      ConfigError: The home of `~` is not known.
    """
    try:
        return Path(host_cache_dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"host_cache_dir is {host_cache_dir}: {error} Give an absolute path.") from None


def open_directory(directory: Path) -> int:
    """Returns a descriptor of the directory for the files, which is created if needed.

    Raises:
      ConfigError: The directory cannot be used, belongs to another user, or others may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"host_cache_dir {directory} cannot be used: {error}. Name another directory.") from None
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(
            f"host_cache_dir {directory} belongs to user {found.st_uid}, and this server runs as user {os.geteuid()}; "
            "what is in it is served. Name a directory of this user, or one that does not exist yet."
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) or mode & stat.S_IRWXU != stat.S_IRWXU:
        os.close(descriptor)
        raise ConfigError(
            f"host_cache_dir {directory} has mode {mode:o}; it must be writable for this user and for no other, since "
            f"what is in it is served. Run chmod 700 {directory}."
        )
    return descriptor


class BlockFiles:
    """The files of one process in a directory.

    Args:
      directory: The directory. No other server may use it at the same time.
      key: What the digests are made with; see `file_key`.
      max_part_bytes: The largest size of all parts of a block together.

    Raises:
      ConfigError: See `open_directory`.
    """

    def __init__(self, directory: Path, key: bytes, max_part_bytes: int):
        self._key, self._max_bytes = key, max_part_bytes + _MAX_HEADER_BYTES
        self._path = directory
        self._directory = open_directory(directory)  # all files are reached by it, whatever the path leads to later
        weakref.finalize(self, os.close, self._directory)

    def newest_first(self) -> list[str]:
        """Returns the names of the files, those that were used last first. Anything else is skipped with a warning."""
        times: dict[str, int] = {}
        for name, found in self._entries(_SUFFIX):
            if stat.S_ISREG(found.st_mode):
                times[name] = found.st_mtime_ns
            else:
                _log.warning("%s is skipped: it is no regular file; remove it", self._path / name)
        return sorted(times, key=times.__getitem__, reverse=True)

    def name_of(self, identity: str, keys: Sequence[bytes]) -> str:
        """Returns the name of the file for a block with these keys."""
        return hashlib.sha256(b"".join([identity.encode(), *keys])).hexdigest() + _SUFFIX

    def has(self, name: str) -> bool:
        """Returns whether there is a file of this name."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def write(self, identity: str, block: StoredBlock) -> bool:
        """Writes a block to its file. Returns whether it could; if not, a directory has its name.

        Raises:
          OSError: It could not be written, for example because the disk is full. There is no file then.
        """
        name = self.name_of(identity, block.keys)
        fields = {
            "identity": identity,
            "keys": [key.hex() for key in block.keys],
            "part_bytes": [len(part) for part in block.parts],
        }
        header = json.dumps(fields).encode()
        pieces = (_MAGIC, len(header).to_bytes(_LENGTH_BYTES, "big"), header, *block.parts)
        digest = hmac.new(self._key, digestmod="sha256")
        unfinished = f"{name}.{secrets.token_hex(8)}{_UNFINISHED}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=self._directory), "wb") as file:
                for piece in pieces:
                    digest.update(piece)
                    file.write(piece)
                file.write(digest.digest())
            os.replace(unfinished, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except IsADirectoryError as error:
            _log.warning("%s cannot be written: %s", self._path / name, error.strerror)
            self.remove(unfinished)
            return False
        except OSError:
            self.remove(unfinished)
            raise
        return True

    def read(self, identity: str, name: str) -> StoredBlock | None:
        """Reads a block; None, with a warning, if the file is not this server's, is damaged, or of another identity."""
        try:
            data = read_guarded(
                name, self._max_bytes, is_trusted=True, follows_links=False, directory=self._directory
            ).data
            return self._parsed(identity, memoryview(data))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s is not used: %s", self._path / name, error)
            return None

    def _parsed(self, identity: str, content: memoryview) -> StoredBlock:
        """
        Raises:
          ValueError, KeyError, TypeError, RecursionError: The content is not that of a file for this identity.
        """
        if len(content) < len(_MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES or content[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no file of a host tier, of another version, or cut off")
        body = content[:-_DIGEST_BYTES]
        if not hmac.compare_digest(hmac.new(self._key, body, "sha256").digest(), content[-_DIGEST_BYTES:]):
            raise ValueError("its digest is not that of its content: it is damaged, or another server has written it")
        start = len(_MAGIC) + _LENGTH_BYTES
        end = start + int.from_bytes(body[len(_MAGIC) : start], "big")
        fields: dict[str, Any] = json.loads(bytes(body[start:end]))
        if fields["identity"] != identity:
            raise ValueError("it was written for another model, layout, page size or version")
        parts = []
        for num_bytes in fields["part_bytes"]:
            parts.append(bytes(body[end : end + num_bytes]))
            end += num_bytes
        return StoredBlock(tuple(map(bytes.fromhex, fields["keys"])), tuple(parts))

    def remove(self, name: str) -> None:
        """Removes a file or link. What cannot be removed stays, with a warning."""
        try:
            os.unlink(name, dir_fd=self._directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self._path / name, error.strerror)

    def keep_only(self, names: Iterable[str]) -> None:
        """Removes all files but these, which get increasing times of use in this order."""
        kept = {name: found.st_mtime_ns for name in names if (found := self._found(name)) is not None}
        for name, found in list(self._entries(_SUFFIX, _UNFINISHED)):
            if name not in kept and not stat.S_ISDIR(found.st_mode):
                self.remove(name)
        now = max(kept.values(), default=0)
        for index, name in enumerate(kept):
            os.utime(name, ns=(now + index, now + index), dir_fd=self._directory, follow_symlinks=False)

    def _found(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            return None

    def _entries(self, *suffixes: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yields what is in the directory under a name that ends like this; links themselves, not what they lead to."""
        for name in os.listdir(self._directory):
            if name.endswith(suffixes) and (found := self._found(name)) is not None:
                yield name, found
