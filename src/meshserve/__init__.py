"""meshserve: a serving runtime for Qwen3 on JAX."""

import importlib.metadata
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":  # read when it is used, as it takes longer than importing the client
        return importlib.metadata.version("meshserve")
    raise AttributeError(f"module 'meshserve' has no attribute {name!r}.")
