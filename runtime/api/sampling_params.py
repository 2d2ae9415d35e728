"""The sampling parameters of a request. Each is written once, here, with its range and how the device receives it.

Decoding of the public messages, the gateway, offline files, validation and packing all read this table. A new
parameter takes a field here, one in inference.proto and in the client's `SamplingFields`, and the code that applies it:
a module of `program/processors`, or `program/sampling.py`.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .constraint import Constraint
from .errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20  # alternatives to a token

_MAX_STOP_TOKENS = 64
_MAX_LISTED_TOKENS = 1_024  # in each of logit_bias, allowed_token_ids and bad_token_ids


class Stage(enum.Enum):
    """Where on the device a parameter takes effect."""

    SAMPLER = "sampler"  # in every step: packed with the step's own vector
    PENALTY = "penalty"  # a value that the logits processors read: packed with their vector
    PROCESSOR = "processor"  # needs the logits processors, which receive it in a form of their own
    LOGPROBS = "logprobs"  # needs the log-probabilities that the logits processors return


@dataclass(frozen=True, kw_only=True)
class Param:
    """Everything about one sampling parameter but its name, type and default.

    Attributes:
      least, most: bounds of a number, or of each number in a mapping.
      excludes_least: the value must be greater than `least`.
      special: what a special value means, for error messages.
      max_items: largest length of a list or mapping.
      max_chars: largest length of each string; strings must not be empty.
      lists_tokens: the items, or keys, are token ids, which must be in the vocabulary.
      stage: where on the device it takes effect; None for parameters that the host applies.
      gateway_name: its name in the messages of `vllm.grpc.engine`; empty if they call it the same.
      unset: a value that vLLM and Hugging Face write for "off" or "not set", which the default stands for here.
    """

    least: float = -math.inf
    most: float = math.inf
    excludes_least: bool = False
    special: str = ""
    max_items: int | None = None
    max_chars: int | None = None
    lists_tokens: bool = False
    stage: Stage | None = None
    gateway_name: str = ""
    unset: int | None = None

    def check(self, name: str, value: Any) -> None:
        """
        Raises:
          InvalidRequestError: the value is out of range; the message names the parameter and the range.
        """
        if isinstance(value, int | float):
            self._check_number(name, value, "")
        elif isinstance(value, Mapping | tuple):
            if self.max_items is not None and len(value) > self.max_items:
                raise _out_of_range(name, f"{len(value)} items", f"{self.max_items} or fewer")
            for item in value:
                if self.max_chars is not None and not 0 < len(item) <= self.max_chars:
                    raise _out_of_range(name, repr(item), f"1 to {self.max_chars} characters")
            for key, number in value.items() if isinstance(value, Mapping) else ():
                self._check_number(name, number, f" for token {key}")

    def _check_number(self, name: str, value: float, where: str) -> None:
        is_above = value > self.least if self.excludes_least else value >= self.least
        if not (is_above and value <= self.most) or math.isinf(value):  # NaN is not in any range
            raise _out_of_range(name, f"{value!r}{where}", self._range())

    def _range(self) -> str:
        if self.most == math.inf:
            text = f"{_shown(self.least)} or more"
        elif self.excludes_least:
            text = f"above {_shown(self.least)} and at most {_shown(self.most)}"
        else:
            text = f"{_shown(self.least)} to {_shown(self.most)}"
        return f"{text} ({self.special})" if self.special else text


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _out_of_range(name: str, got: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.{name}", f"got {got}; allowed is {allowed}.")


def _param(default: Any, **rest: Any) -> Any:
    metadata = {"param": Param(**rest)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class SamplingMode(enum.IntEnum):
    """How much of the sampler a request needs. Each mode also serves requests of the smaller ones."""

    GREEDY = 0
    RANDOM = 1  # temperature
    TOP_P = 2
    FILTERED = 3  # min-p, top-k, top-p, in this order


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Values are validated on construction.

    Applied in this order: bias and bans, penalties, temperature, min-p, top-k, and top-p of what is left.

    Raises:
      InvalidRequestError: a value is out of range; the message names the field and the range.
    """

    # Most tokens to generate; None generates until the context is full.
    max_tokens: int | None = _param(None, least=1)
    temperature: float = _param(1.0, least=0, most=100, special="0 is greedy", stage=Stage.SAMPLER)
    # Number of most likely tokens to sample from.
    top_k: int = _param(0, least=0, special="0 is off", unset=-1, stage=Stage.SAMPLER)
    # Probability that the tokens sampled from add up to.
    top_p: float = _param(1.0, least=0, most=1, excludes_least=True, special="1 is off", stage=Stage.SAMPLER)
    # Least probability of a token, as a fraction of the most likely token's.
    min_p: float = _param(0.0, least=0, most=1, special="0 is off", stage=Stage.SAMPLER)
    # Subtracted from a token's logit for each of its occurrences in the output.
    frequency_penalty: float = _param(0.0, least=-2, most=2, special="0 is off", stage=Stage.PENALTY)
    # Subtracted from the logit of each token that occurs in the output.
    presence_penalty: float = _param(0.0, least=-2, most=2, special="0 is off", stage=Stage.PENALTY)
    # Divides the positive logits of tokens in prompt or output, and multiplies negative ones.
    repetition_penalty: float = _param(1.0, least=0.01, most=100, special="1 is off", stage=Stage.PENALTY)
    # Added to the logits of these tokens.
    logit_bias: Mapping[int, float] = _param(
        {}, least=-100, most=100, max_items=_MAX_LISTED_TOKENS, lists_tokens=True, stage=Stage.PROCESSOR
    )
    # The only tokens that can be sampled; empty allows all.
    allowed_token_ids: tuple[int, ...] = _param(
        (), max_items=_MAX_LISTED_TOKENS, lists_tokens=True, stage=Stage.PROCESSOR
    )
    # Tokens that are never sampled.
    bad_token_ids: tuple[int, ...] = _param((), max_items=_MAX_LISTED_TOKENS, lists_tokens=True, stage=Stage.PROCESSOR)
    # Output tokens, resumed ones included, before which no end or stop token is sampled and no stop string matched.
    min_tokens: int = _param(0, least=0, stage=Stage.PROCESSOR)
    # Alternatives reported with each output token's log-probability; None reports nothing.
    logprobs: int | None = _param(None, least=0, most=MAX_LOGPROBS, stage=Stage.LOGPROBS)
    # The same for each prompt token but the first.
    prompt_logprobs: int | None = _param(None, least=0, most=MAX_LOGPROBS, stage=Stage.LOGPROBS)
    # Those of output tokens are of the distribution that is sampled from, instead of the model's own.
    processed_logprobs: bool = _param(False, stage=Stage.LOGPROBS)
    # Seed of the random draws; None lets the engine choose one.
    seed: int | None = _param(None, least=0, most=MAX_SEED, unset=-1)
    # Continue past end tokens to max_tokens; stop strings still end the request.
    ignore_eos: bool = _param(False)
    stop: tuple[str, ...] = _param((), max_items=MAX_STOP_STRINGS, max_chars=MAX_STOP_STRING_CHARS)
    # Keep the stop string at the end of the text.
    include_stop: bool = _param(False, gateway_name="include_stop_str_in_output")
    # Leave special tokens out of the text.
    skip_special_tokens: bool = _param(True)
    # Tokens that end the request as end tokens do, also with ignore_eos.
    stop_token_ids: tuple[int, ...] = _param((), max_items=_MAX_STOP_TOKENS, lists_tokens=True)
    # Tokens at the end of the prompt that are output which the caller has already received.
    num_resumed_tokens: int = _param(0, least=0)
    # Format that the whole output must have.
    constraint: Constraint | None = _param(None)

    def __post_init__(self) -> None:
        for name, param in params_table().items():
            param.check(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > (longest := self.max_tokens + self.num_resumed_tokens):
            raise _out_of_range("min_tokens", str(self.min_tokens), f"0 to max_tokens ({longest})")
        if self.allowed_token_ids and not set(self.allowed_token_ids) - set(self.bad_token_ids):
            raise _out_of_range("bad_token_ids", "all of allowed_token_ids", "to leave one of them")

    def total_tokens(self, num_prompt_tokens: int, max_context: int) -> int:
        """Returns the largest number of prompt and output tokens in a context of `max_context` tokens."""
        return min(num_prompt_tokens + (self.max_tokens or max_context), max_context)

    def changed_fields(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that do not have their default value."""
        return [name for name in names if getattr(self, name) != getattr(_DEFAULTS, name)]

    @property
    def mode(self) -> SamplingMode:
        if self.temperature == 0.0:
            return SamplingMode.GREEDY
        if self.top_k or self.min_p:
            return SamplingMode.FILTERED
        return SamplingMode.TOP_P if self.top_p < 1.0 else SamplingMode.RANDOM

    @cached_property
    def needs_processors(self) -> bool:
        """Whether the tokens are sampled by the logits processors' own program, after the step's."""
        return self.has_adjustments or self.logprobs is not None or self.constraint is not None

    @cached_property
    def has_adjustments(self) -> bool:
        """Whether logits are changed token by token before they are sampled from."""
        return bool(self.changed_fields(params_at(Stage.PENALTY, Stage.PROCESSOR)))


def params_table() -> Mapping[str, Param]:
    """Every sampling parameter by its name, in the order of `SamplingParams`."""
    return _TABLE


def without_unset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters as people write them without those that are None; -1 becomes the default where it is `unset`.

    Other names and values are returned as they are.
    """
    found = {}
    for name, value in given.items():
        param = _TABLE.get(name)
        if param is not None and param.unset is not None and type(value) is int and value == param.unset:
            value = getattr(_DEFAULTS, name)
        if value is not None:
            found[name] = value
    return found


def params_at(*stages: Stage) -> tuple[str, ...]:
    """Names of the parameters that take effect at one of `stages`."""
    return tuple(name for name, param in _TABLE.items() if param.stage in stages)


_TABLE: Mapping[str, Param] = {each.name: each.metadata["param"] for each in dataclasses.fields(SamplingParams)}
_DEFAULTS = SamplingParams()
