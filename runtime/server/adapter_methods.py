"""Loads, unloads and lists adapters (LoRA) for operators, whatever protocol they use. In: names and paths of callers.

A caller with the permission "admin" may still not read any file of the server's disk: an adapter lies below one of the
directories that the server's own options name (--adapter-root), also after links are followed, and everything in its
directory is a regular file of that directory.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

from meshserve.sharding.guarded_files import GuardedFileError, check_regular_files

from ..api.adapters import MAX_NAME_CHARS, AdapterCatalog, AdapterInfo
from ..api.errors import AdaptersOffError, InvalidRequestError, UnavailableFeatureError
from ..api.shown import shown
from .edge import Edge

_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")
_MAX_PATH_CHARS = 4_096


class AdapterMethods:
    """The methods of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def load(
        self, name: str, path: str, *, replaces: bool, fields: tuple[str, str] = ("name", "path")
    ) -> AdapterInfo:
        """Loads an adapter; see `AdapterCatalog.load`, which it calls in a thread.

        Args:
          name: Its name.
          path: Its directory: absolute, or relative to one of the directories of --adapter-root.
          replaces: Whether an adapter of that name is replaced.
          fields: What the caller calls the name and the path, for errors.

        Raises:
          InvalidRequestError: The name or the path is not allowed.
          UnavailableFeatureError: The server was started without --adapter-root.
          AdapterError: See `AdapterCatalog.load`.
        """
        catalog = self._catalog()
        self._check_name(name, fields[0])
        roots = self._edge.adapter_roots
        if not roots:
            raise UnavailableFeatureError(
                "this server loads no adapters while it runs; restart it with --adapter-root DIRECTORY, below which "
                "they may lie."
            )
        directory = await asyncio.to_thread(allowed_directory, roots, path, fields[1])
        return await asyncio.to_thread(catalog.load, name, str(directory), replaces=replaces)

    async def unload(self, name: str) -> None:
        """Unloads an adapter; see `AdapterCatalog.unload`."""
        await asyncio.to_thread(self._catalog().unload, name)
        self._edge.observer.metrics.adapters.forget(name)

    def list(self) -> Sequence[AdapterInfo]:
        """Returns the loaded adapters, in the order of their names."""
        backend, _ = self._edge.serving()
        return backend.engine.adapters.list()

    def _catalog(self) -> AdapterCatalog:
        backend, _ = self._edge.serving()
        catalog = backend.engine.adapters
        if not catalog.is_enabled:
            raise AdaptersOffError(
                "this server serves no adapters; restart it with --adapter-root DIRECTORY or --adapter NAME=PATH."
            )
        return catalog

    def _check_name(self, name: str, field: str) -> None:
        if not _NAME.fullmatch(name):
            message = f"got {shown(name, 150)}; allowed are 1 to {MAX_NAME_CHARS} letters, digits, or any of _.:/-"
            raise InvalidRequestError(field, message)
        backend, _ = self._edge.serving()
        if name in backend.info.names:
            raise InvalidRequestError(field, f"got {name!r}, which is the served model. Choose another name.")


def allowed_directory(roots: Sequence[Path], path: str, field: str = "path") -> Path:
    """Returns the real path of a directory below one of `roots`.

    Raises:
      InvalidRequestError: There is none, or something in it is no regular file, or leads out of it. What is not below
        the roots has the same answer as what does not exist.
    """
    if not 1 <= len(path) <= _MAX_PATH_CHARS or not path.isprintable():
        message = f"got {shown(path, 100)}; allowed is the path of a directory, {_MAX_PATH_CHARS} characters or fewer."
        raise InvalidRequestError(field, message)
    for root in roots:
        real_root = Path(os.path.realpath(root))
        found = Path(os.path.realpath(root / path))  # an absolute path stays what it is
        if found.is_relative_to(real_root) and found.is_dir():
            try:
                check_regular_files(found)
            except OSError as error:
                reason = str(error) if isinstance(error, GuardedFileError) else f"it cannot be read ({error.strerror})"
                raise InvalidRequestError(field, f"got {shown(path, 200)}: {reason}.") from None
            return found
    raise InvalidRequestError(
        field, f"got {shown(path, 200)}, which is no directory below one of --adapter-root. Put the adapter there."
    )
