"""Reads the key with which a server signs the files of its host tier, and makes it at the first start.

It lies apart from the files, in the directory of compiled programs: whoever can write to the files, now or before their
directory got its present owner, still cannot make one that the server takes for its own.
"""

import contextlib
import os
import secrets
from pathlib import Path

from meshserve.sharding.guarded_files import read_guarded

from ..api.errors import ConfigError

_NAME = "host_cache.key"
_NUM_BYTES = 32


def file_key(folder: Path) -> bytes:
    """Returns the key in a folder, made now if there is none. Servers that share the folder share the key.

    Raises:
      ConfigError: It cannot be read or made, or it is not this server's own.
    """
    path = folder / _NAME
    try:
        if not path.exists():
            _make(folder, path)
        key = read_guarded(path, _NUM_BYTES, is_trusted=True, follows_links=False).data
    except OSError as error:
        raise ConfigError(f"the key {path} for the files of host_cache_dir cannot be used: {error}.") from None
    if len(key) != _NUM_BYTES:
        raise ConfigError(f"the key {path} has {len(key)} bytes instead of {_NUM_BYTES}. Remove it.")
    return key


def _make(folder: Path, path: Path) -> None:
    """Makes the key under another name first, so that servers that start at the same time end with the same one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = folder / f"{_NAME}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
        try:
            os.link(unfinished, path)
        except FileExistsError:
            pass  # another server was faster
        except OSError:  # a file system without hard links
            os.replace(unfinished, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
