"""The nouns of a request's life: what was asked, where it stands, what comes out.

Pure Python: the edge, the scheduler and the engine all speak in these types.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .errors import InvalidRequestError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from ..scheduler.prompt_lookup import Drafter

MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARS = 256
MAX_SAMPLES = 64


class FinishReason(enum.Enum):
    """Why a request ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"  # an end token, a stop token, a stop string, or the constraint lets nothing follow
    LENGTH = "length"  # max_tokens, or the context was full
    CANCELLED = "cancelled"  # the caller went away or asked for it
    DEADLINE = "deadline"  # the caller's deadline passed
    ERROR = "error"  # the engine failed; the output carries the reason


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
    tenant: str = ""  # whose share of slots and pages it takes; set by the server
    weight: float = 1.0  # of that tenant

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
    tenant: str = ""  # tenants with unfinished requests share slots and pages
    weight: float = 1.0  # of the tenant
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
