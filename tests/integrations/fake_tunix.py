"""What `meshserve.integrations.tunix` needs of google-tunix 0.1.7, which is no dependency of the tests.

The contract of a rollout worker, its data, and the adapter of tokenizers. `make test-tunix` takes the package itself.
"""

import abc
import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False


class BaseRollout(abc.ABC):
    @abc.abstractmethod
    def __init__(self, **kwargs): ...

    @abc.abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abc.abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


class TokenizerAdapter:
    """Of objects with `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def dedup_bos_ids(self, ids: Sequence[int]) -> Sequence[int]:
        first = 0
        while first < len(ids) - 1 and ids[first] == ids[first + 1] == self.bos_id():
            first += 1
        return ids[first:]


def modules() -> dict[str, types.ModuleType]:
    """Returns the modules by their names, for `sys.modules`."""
    names = ("tunix", "tunix.generate", "tunix.generate.tokenizer_adapter", "tunix.rl", "tunix.rl.rollout")
    made = {name: types.ModuleType(name) for name in (*names, "tunix.rl.rollout.base_rollout")}
    this = sys.modules[__name__]
    for name in ("RolloutOutput", "RolloutConfig", "BaseRollout"):
        setattr(made["tunix.rl.rollout.base_rollout"], name, getattr(this, name))
    made["tunix.generate.tokenizer_adapter"].TokenizerAdapter = TokenizerAdapter  # type: ignore[attr-defined]
    return made
