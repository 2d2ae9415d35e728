"""The adapters that a server has in host memory, by the names under which requests ask for them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp

from ..api.adapters import MAX_NAME_CHARS, AdapterInfo
from ..api.errors import AdapterExistsError, AdapterRoomError, InvalidAdapterError, UnknownAdapterError
from ..model_files.model_config import ModelConfig
from .peft_files import HostAdapter, read_adapter

_MAX_NAMED = 10  # in an error
_log = logging.getLogger(__name__)


class HostCatalog:
    """Implements `api.adapters.AdapterCatalog`.

    Requests keep what they were accepted with, so that nothing here waits for them.

    Args:
      model: The served model.
      rank: The largest rank that the devices have room for.
      dtype: The type in which the devices compute.
      max_bytes: Host memory for all adapters together.
      is_on_device: Tells whether the devices hold an adapter, by its digest.
    """

    is_enabled = True

    def __init__(
        self,
        model: ModelConfig,
        *,
        rank: int,
        dtype: jnp.dtype,
        max_bytes: int,
        is_on_device: Callable[[str], bool] = lambda digest: False,
    ):
        self._model, self._rank, self._dtype, self._max_bytes = model, rank, dtype, max_bytes
        self._is_on_device = is_on_device
        self._adapters: dict[str, HostAdapter] = {}  # replaced as a whole, so that readers need no lock
        self._changing = threading.Lock()

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        """See `AdapterCatalog`."""
        _check_name(name)
        with self._changing:  # one after another, which bounds the memory that reading takes
            old = self._adapters.get(name)
            new = read_adapter(name, path, self._model, rank=self._rank, dtype=self._dtype)
            if old is not None and old.digest == new.digest:
                return self.find(name)
            if old is not None and not replaces:
                raise AdapterExistsError(
                    f"adapter {name!r} is loaded from {old.path}, with another content. Unload it first, or ask to "
                    "replace it."
                )
            same = next((each for each in self._adapters.values() if each.digest == new.digest), None)
            if same is not None:  # under another name: its matrices are shared
                new = replace(new, matrices=same.matrices)
            adapters = {**self._adapters, name: new}
            self._check_room(name, adapters)
            self._adapters = adapters
        _log.info("adapter %s: rank %d on %s, %d bytes, from %s", name, new.rank, ", ".join(new.targets),
                  new.num_bytes, path)  # fmt: skip
        return self.find(name)

    def load_all(self, paths: Mapping[str, str]) -> None:
        """Loads the adapters of the options. Raises as `load`."""
        for name, path in paths.items():
            self.load(name, path)

    def unload(self, name: str) -> None:
        """See `AdapterCatalog`."""
        with self._changing:
            self.find(name)
            self._adapters = {other: adapter for other, adapter in self._adapters.items() if other != name}
        _log.info("adapter %s is unloaded", name)

    def find(self, name: str) -> AdapterInfo:
        """See `AdapterCatalog`."""
        adapters = self._adapters
        if (found := adapters.get(name)) is None:
            known = [repr(each) for each in sorted(adapters)]
            more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
            raise UnknownAdapterError(
                f"there is no adapter {name[:MAX_NAME_CHARS]!r}; loaded are "
                f"{', '.join(known[:_MAX_NAMED]) or 'none'}{more}. Load it first, or name one of these."
            )
        return replace(found, is_on_device=self._is_on_device(found.digest))

    def list(self) -> Sequence[AdapterInfo]:
        """See `AdapterCatalog`."""
        adapters = self._adapters
        return [
            replace(adapters[name], is_on_device=self._is_on_device(adapters[name].digest)) for name in sorted(adapters)
        ]

    def _check_room(self, name: str, adapters: Mapping[str, HostAdapter]) -> None:
        by_content = {adapter.digest: adapter.num_bytes for adapter in adapters.values()}
        if (total := sum(by_content.values())) > self._max_bytes:
            raise AdapterRoomError(
                f"adapter {name!r}: all adapters together would take {total / (1 << 30):.2f} GiB of host memory; this "
                f"server has {self._max_bytes / (1 << 30):.2f} (--adapter-host-gib). Unload others first."
            )


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise InvalidAdapterError(
            f"adapter: the name {name[:MAX_NAME_CHARS]!r} is not allowed; use 1 to {MAX_NAME_CHARS} printable "
            "characters, without space around them."
        )
