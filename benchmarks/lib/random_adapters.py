"""Random adapters (LoRA) on all projections of a model, for benchmarks that need their size and not their contents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshserve.runtime.adapters.adapter_targets import targets_of
from meshserve.runtime.adapters.peft_files import DOWN, UP, HostAdapter
from meshserve.runtime.api.adapters import AdapterInfo
from meshserve.runtime.api.errors import AdaptersOffError, UnknownAdapterError
from meshserve.runtime.resolve.resolved_server import ResolvedServer

_SCALE = 0.01
_PERIOD = 65_521  # numbers that are drawn, and repeated: drawing all would take minutes


@dataclass(frozen=True)
class RandomCatalog:
    """Implements `AdapterCatalog` with adapters that share their matrices, and differ in their digests."""

    adapters: Sequence[HostAdapter]

    is_enabled = True

    @classmethod
    def of(cls, server: ResolvedServer, num_adapters: int) -> "RandomCatalog":
        """Returns adapters "0", "1" and so on, of the largest rank that a server has room for."""
        assert server.adapters is not None, "the server has no room for adapters"
        model, rank, draw = server.model, server.adapters.rank, np.random.default_rng(0)
        numbers = (draw.normal(size=_PERIOD) * _SCALE).astype(server.dtype)
        shapes: dict[tuple[str, str], tuple[int, int, int]] = {}
        for name, target in targets_of(model).items():
            shapes[name, DOWN] = (model.num_layers, rank, target.columns)
            shapes[name, UP] = (model.num_layers, target.rows, rank)
        matrices = {key: np.resize(numbers, shape) for key, shape in shapes.items()}
        return cls([
            HostAdapter(
                name=str(index), path="", digest=f"{index + 1:064x}", rank=rank, targets=tuple(targets_of(model)),
                num_bytes=sum(each.nbytes for each in matrices.values()), is_on_device=False, matrices=matrices,
            )
            for index in range(num_adapters)
        ])  # fmt: skip

    def load(self, name: str, path: str, *, replaces: bool = False) -> AdapterInfo:
        raise AdaptersOffError("a benchmark has the adapters that it has made.")

    def unload(self, name: str) -> None:
        raise AdaptersOffError("a benchmark has the adapters that it has made.")

    def find(self, name: str) -> AdapterInfo:
        for adapter in self.adapters:
            if adapter.name == name:
                return adapter
        raise UnknownAdapterError(f"there is no adapter {name!r}.")

    def list(self) -> Sequence[AdapterInfo]:
        return self.adapters
