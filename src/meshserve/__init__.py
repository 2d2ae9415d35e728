"""meshserve: a serving runtime for Qwen3 on JAX.

`LLM` completes prompts in this process, `meshserve.client` talks to a server, and the command `meshserve` starts one.
Each name is imported when it is first used, so that a client does not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshserve import client as client
    from meshserve.runtime.offline.llm import LLM as LLM
    from meshserve.runtime.offline.outputs import CompletionOutput as CompletionOutput
    from meshserve.runtime.offline.outputs import Logprob as Logprob
    from meshserve.runtime.offline.outputs import RequestOutput as RequestOutput
    from meshserve.runtime.offline.user_params import LLMSamplingParams as SamplingParams

    __version__: str

_MODULES = {  # where each name is defined, and what it is called there
    "LLM": ("runtime.offline.llm", "LLM"),
    "SamplingParams": ("runtime.offline.user_params", "LLMSamplingParams"),
    "RequestOutput": ("runtime.offline.outputs", "RequestOutput"),
    "CompletionOutput": ("runtime.offline.outputs", "CompletionOutput"),
    "Logprob": ("runtime.offline.outputs", "Logprob"),
}

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "__version__", "client"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from meshserve.runtime.api.versions import installed_version  # when it is used: longer than the client

        return installed_version()
    if name == "client":
        return importlib.import_module("meshserve.client")
    if name in _MODULES:
        module, defined = _MODULES[name]
        return getattr(importlib.import_module(f"meshserve.{module}"), defined)
    raise AttributeError(f"module 'meshserve' has no attribute {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
