"""The nouns of a request's life: what was asked, where it stands, what comes out.

Pure Python: the edge, the scheduler and the engine all speak in these types.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .constraint import Constraint
from .errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

    from ..scheduler.prompt_lookup import Drafter

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARS = 256
MAX_SAMPLES = 64
MAX_LOGPROBS = 20  # alternatives of a token
MAX_LISTED_TOKENS = 1_024  # of logit_bias, allowed_token_ids and bad_token_ids, each
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0


class FinishReason(enum.Enum):
    """Why a request ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"  # an end token, a stop token, a stop string, or the constraint lets nothing follow
    LENGTH = "length"  # max_tokens, or the context was full
    CANCELLED = "cancelled"  # the caller went away or asked for it
    DEADLINE = "deadline"  # the caller's deadline passed
    ERROR = "error"  # the engine failed; the output carries the reason


# Fields of SamplingParams that need the control programs (`processors`), which a server may do without.
PENALTY_FIELDS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_token_ids",
    "min_tokens",
)  # fmt: skip
LOGPROB_FIELDS = ("logprobs", "prompt_logprobs")


class SamplingMode(enum.IntEnum):
    """How much of the sampler a request needs. A mode serves requests of every smaller one, too."""

    GREEDY = 0
    RANDOM = 1  # temperature
    TOP_P = 2
    FILTERED = 3  # min-p, top-k, top-p, in this order


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Ranges are checked on construction.

    In this order: bias and bans, penalties, temperature, min-p, top-k, top-p of what is left.

    Raises:
      InvalidRequestError: a value is out of range; the message names the field and the range.
    """

    max_tokens: int = 128
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0  # 1 keeps the whole vocabulary
    min_p: float = 0.0  # at least so likely, as a share of the likeliest token's probability
    frequency_penalty: float = 0.0  # taken from a token's logit for each time it stands in the output
    presence_penalty: float = 0.0  # likewise, once
    repetition_penalty: float = 1.0  # divides the logit of tokens in prompt or output; multiplies it where negative
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] = ()  # no others; empty allows all
    bad_token_ids: tuple[int, ...] = ()  # never these
    min_tokens: int = 0  # before these, resumed ones included, no end or stop token is sampled, nor a stop string seen
    logprobs: int | None = None  # of each output token, and so many alternatives
    prompt_logprobs: int | None = None  # of each prompt token but the first, likewise
    seed: int | None = None  # None: the engine draws one
    ignore_eos: bool = False  # run to max_tokens; stop strings still end the request
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string stays at the end of the text
    stop_token_ids: tuple[int, ...] = ()  # end the request as end tokens do, whatever ignore_eos says
    num_resumed_tokens: int = 0  # so many tokens at the end of the prompt are output that the caller has already
    constraint: Constraint | None = None  # what the output is held to

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, got: object, allowed: str) -> None:
            if not ok:
                raise InvalidRequestError(f"sampling.{name}", f"got {got!r}; allowed is {allowed}.")

        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        finite = math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0
        require(finite, "temperature", self.temperature, "0 (greedy) to 100")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)")
        self._check_adjustments(require)
        seed_ok = self.seed is None or 0 <= self.seed <= MAX_SEED
        require(seed_ok, "seed", self.seed, f"0 to {MAX_SEED}")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"{MAX_STOP_STRINGS} or fewer")
        for text in self.stop:
            require(0 < len(text) <= MAX_STOP_STRING_CHARS, "stop", text, f"1 to {MAX_STOP_STRING_CHARS} characters")
        num_stop_tokens = len(self.stop_token_ids)
        require(num_stop_tokens <= MAX_STOP_TOKENS, "stop_token_ids", num_stop_tokens, f"{MAX_STOP_TOKENS} or fewer")

    def _check_adjustments(self, require: Callable[[bool, str, object, str], None]) -> None:
        require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 (off) to 1")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(abs(value) <= MAX_PENALTY, name, value, f"-{MAX_PENALTY} to {MAX_PENALTY}; 0 is off")
        repetition = self.repetition_penalty
        require(0.01 <= repetition <= 100.0, "repetition_penalty", repetition, "0.01 to 100; 1 is off")
        longest = self.max_tokens + self.num_resumed_tokens
        require(0 <= self.min_tokens <= longest, "min_tokens", self.min_tokens, f"0 to max_tokens ({longest})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}")
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids"):
            num_tokens = len(getattr(self, name))
            require(num_tokens <= MAX_LISTED_TOKENS, name, f"{num_tokens} tokens", f"{MAX_LISTED_TOKENS} or fewer")
        for token_id, bias in self.logit_bias.items():
            ok = abs(bias) <= MAX_LOGIT_BIAS
            require(ok, "logit_bias", f"{bias} for token {token_id}", f"-{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}")
        is_open = not self.allowed_token_ids or bool(set(self.allowed_token_ids) - set(self.bad_token_ids))
        require(is_open, "bad_token_ids", "all of allowed_token_ids", "to leave one of them")

    def set_fields(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that do not have their default."""
        default = SamplingParams()
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    @property
    def mode(self) -> SamplingMode:
        if self.temperature == 0.0:
            return SamplingMode.GREEDY
        if self.top_k or self.min_p:
            return SamplingMode.FILTERED
        return SamplingMode.TOP_P if self.top_p < 1.0 else SamplingMode.RANDOM

    @cached_property
    def needs_processors(self) -> bool:
        """Whether the tokens are sampled by a program of its own after the step (`processors`)."""
        return self.has_adjustments or self.logprobs is not None or self.constraint is not None

    @cached_property
    def has_adjustments(self) -> bool:
        """Whether logits are changed before they are sampled from, token by token."""
        return bool(self.set_fields(PENALTY_FIELDS))


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position: of the model's own distribution, at temperature 1, before
    bias, bans and penalties."""

    token_id: int  # that stands there
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and theirs, the likeliest first


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How a request is served, beside how its tokens are chosen. Ranges are checked on construction.

    Raises:
      InvalidRequestError: a value is out of range; the message names the field and the range.
    """

    priority: int = 0  # larger goes first
    timeout_seconds: float | None = None  # the request ends unfinished after this; None: never
    cache_salt: str = ""  # only requests with the same salt share pages
    n: int = 1  # samples of the one prompt; sample i draws as a request with seed + i would

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, got: object, allowed: str) -> None:
            if not ok:
                raise InvalidRequestError(name, f"got {got!r}; allowed is {allowed}.")

        require(abs(self.priority) <= MAX_PRIORITY, "priority", self.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
        require(len(self.cache_salt) <= MAX_CACHE_SALT_CHARS, "cache_salt", f"{len(self.cache_salt)} characters",
                f"{MAX_CACHE_SALT_CHARS} or fewer")  # fmt: skip
        is_unicode = not any("\ud800" <= char <= "\udfff" for char in self.cache_salt)
        require(is_unicode, "cache_salt", self.cache_salt, "text without lone surrogates")
        require(1 <= self.n <= MAX_SAMPLES, "n", self.n, f"1 to {MAX_SAMPLES}")


DEFAULT_OPTIONS = RequestOptions()


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """One sample of one prompt and where it stands. The scheduler owns every field below the line.

    Token positions count from 0 over prompt and output together. `num_computed_tokens` positions have their keys and
    values in the cache, or will have once the steps in flight end. `num_pending_tokens` tokens have been sampled by
    steps in flight, so the host does not know their ids yet.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved: params.seed, or drawn by the engine
    index: int = 0  # of the sample, where a request has several
    priority: int = 0  # larger goes first
    cache_salt: str = ""  # only requests with the same salt share pages
    arrival_seconds: float = 0.0  # these two by the clock that `plan` and `account` are given
    deadline_seconds: float = math.inf
    page_keys: list[bytes] = field(default_factory=list)  # see prefix.py; of the first full pages
    # ---
    rank: tuple[float, int] = (0.0, 0)  # the one order: smaller goes first
    max_total_tokens: int = 0  # prompt and longest output
    output_token_ids: list[int] = field(default_factory=list)
    num_known_tokens: int = 0  # whose ids the host knows: the prompt and the collected output
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_drafts: int = 0  # of these: guesses that may turn out wrong
    num_prefill_tokens: int = 0  # known when it got its row; tokens after these were sampled in the row
    pages: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0  # of the prompt's tokens, computed or in flight
    num_page_positions: int = 0  # that its pages have room for
    num_published_pages: int = 0  # the first of `pages`, which others may share
    publish_at_tokens: int = 0  # when so many tokens are known and computed, the next page is full
    slot: int | None = None  # index into the device's table of last tokens, held while running
    num_cached_tokens: int = 0  # of the prompt, found in the cache when the request first ran
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    is_constrained: bool = False  # what it may sample depends on its last token, so that the host must know it
    token_mask: "np.ndarray | None" = None  # [W] uint32, a bit a token: what it may sample next. None: everything
    drafter: "Drafter | None" = None  # guesses its next tokens

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.prompt_token_ids)
        self.is_constrained = self.params.constraint is not None

    @property
    def needs_processors(self) -> bool:
        """Whether its tokens are sampled by `processors`, one step a dispatch."""
        return self.params.needs_processors

    @property
    def num_prompt_logprobs_left(self) -> int:
        """Tokens of the prompt whose log-probabilities are wanted and not yet computed; the first sample's are."""
        if self.params.prompt_logprobs is None or self.index:
            return 0
        return len(self.prompt_token_ids) - 1 - self.num_prompt_logprobs

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """The ids at known positions start..stop-1."""
        num_prompt_tokens = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : max(stop - num_prompt_tokens, 0)]
        return [*prompt, *output]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one step brought for one sample. The last output of each sample, and only it, has a finish reason."""

    request_id: str
    index: int = 0  # of the sample
    token_ids: tuple[int, ...] = ()  # new tokens; an end token that stopped the request is not among them
    text: str = ""  # new text, never half a character; stop strings are cut off
    finish_reason: FinishReason | None = None
    message: str = ""  # the reason, where finish_reason is ERROR
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # since the request began
    num_cached_tokens: int = 0  # of the prompt, taken from the cache instead of computed
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each of `token_ids`, where they were asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens; they begin with the second one


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the engine is. Pages are counted for one device: every device holds the same number."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
