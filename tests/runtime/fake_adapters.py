"""A catalog of adapters without an engine: it keeps what was loaded, and takes a digest from the files' contents."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from meshserve.runtime.api.adapters import AdapterInfo
from meshserve.runtime.api.errors import AdapterExistsError, InvalidAdapterError, UnknownAdapterError

CONFIG = "adapter_config.json"


class FakeCatalog:
    """Implements `AdapterCatalog`."""

    is_enabled = True

    def __init__(self, *names: str):
        self._infos = {name: info(name) for name in names}

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        try:
            content = (Path(path) / CONFIG).read_bytes()
        except OSError:
            raise InvalidAdapterError(f"{path} has no {CONFIG}.") from None
        new = info(name, path, content)
        if name in self._infos and self._infos[name].digest != new.digest and not replaces:
            raise AdapterExistsError(f"there is an adapter {name!r} already; set replaces.")
        self._infos[name] = new
        return new

    def unload(self, name: str) -> None:
        self.find(name)
        del self._infos[name]

    def find(self, name: str) -> AdapterInfo:
        if name not in self._infos:
            raise UnknownAdapterError(f"there is no adapter {name!r}; there are {', '.join(self._infos)}.")
        return self._infos[name]

    def list(self) -> Sequence[AdapterInfo]:
        return [self._infos[name] for name in sorted(self._infos)]


def info(name: str, path: str = "/srv/adapters", content: bytes = b"") -> AdapterInfo:
    """Returns the description of an adapter."""
    return AdapterInfo(
        name=name, path=path, digest=hashlib.sha256(name.encode() if not content else content).hexdigest(), rank=8,
        targets=("q_proj", "v_proj"), num_bytes=4_096, is_on_device=name == "fast",
    )  # fmt: skip


def write_adapter(directory: Path, content: str = "{}") -> Path:
    """Writes what the catalog takes for an adapter, and returns its directory."""
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(content)
    return directory
