"""The contract of adapters (LoRA): what the interfaces load, list and unload, and how a request names one.

A request names an adapter by `RequestOptions.adapter`. The engine resolves the name when it accepts the request, which
then keeps that content to its end, even if another one is loaded under the name or the adapter is unloaded meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import AdapterChangedError, AdaptersOffError

MAX_NAME_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter."""

    name: str  # by which requests name it
    path: str  # the directory from which it was read
    digest: str  # SHA-256 of its config and tensors, 64 hexadecimal digits; equal for equal contents
    rank: int  # the largest of its matrices
    targets: tuple[str, ...]  # the projections that it changes, such as "q_proj", sorted
    num_bytes: int  # host memory that it takes
    is_on_device: bool  # whether it has a slot on the devices now


class AdapterCatalog(Protocol):
    """The adapters of an engine. Methods may be called from any thread. `load` reads files, which may take seconds."""

    @property
    def is_enabled(self) -> bool:
        """Whether adapters can be loaded. The other methods of a catalog without adapters raise AdaptersOffError."""

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        """Reads a PEFT checkpoint into host memory, and offers it to requests under a name.

        Args:
          name: 1 to MAX_NAME_CHARS characters.
          path: Its directory, with adapter_config.json and adapter_model.safetensors.
          replaces: Whether an adapter of that name is replaced. Requests that run with the old one end with it. Loading
            the same content again under its name changes nothing, with or without.

        Raises:
          InvalidAdapterError: The name is not allowed, the files are damaged, or the adapter is not for the served
            model or needs something that is not implemented. Nothing has changed.
          AdapterExistsError: There is an adapter of that name with another content, and `replaces` is not set.
          AdapterRoomError: The host memory for adapters is full.
          AdaptersOffError: The server was started without adapters.
        """

    def unload(self, name: str) -> None:
        """Withdraws an adapter: new requests cannot name it. Requests accepted before end with it.

        Raises:
          UnknownAdapterError: There is none of that name; the message names those that there are.
          AdaptersOffError: The server was started without adapters.
        """

    def find(self, name: str) -> AdapterInfo:
        """Returns the adapter of a name. Raises as `unload`."""

    def list(self) -> Sequence[AdapterInfo]:
        """Returns the loaded adapters, ordered by name; none for a catalog without adapters."""


class NoAdapters:
    """The catalog of an engine without adapters. Implements `AdapterCatalog`."""

    is_enabled = False

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        """See `AdapterCatalog`."""
        raise AdaptersOffError(_off(name))

    def unload(self, name: str) -> None:
        """See `AdapterCatalog`."""
        raise AdaptersOffError(_off(name))

    def find(self, name: str) -> AdapterInfo:
        """See `AdapterCatalog`."""
        raise AdaptersOffError(_off(name))

    def list(self) -> Sequence[AdapterInfo]:
        """See `AdapterCatalog`."""
        return ()


def named_adapter(catalog: AdapterCatalog, name: str, digest: str) -> AdapterInfo | None:
    """Returns the adapter that a request names; None if it names none. An empty `digest` is any.

    Raises:
      UnknownAdapterError, AdaptersOffError: It is not loaded.
      AdapterChangedError: The request asks for another digest.
    """
    if not name:
        return None
    found = catalog.find(name)
    if digest not in ("", found.digest):
        raise AdapterChangedError(
            f"adapter_digest: the adapter {name!r} has the digest {found.digest} here, and the request asks for "
            f"{digest[:64]!r}: it was replaced, or another replica has other files. Begin again "
            "without a digest, or load the same files on every replica."
        )
    return found


def _off(name: str) -> str:
    return f"adapter {name[:MAX_NAME_CHARS]!r}: this server serves no adapters. Omit the adapter, or ask its operator."
