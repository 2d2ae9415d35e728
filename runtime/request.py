"""The nouns of a request's life: what was asked, where it stands, what comes out.

Pure Python: the edge, the scheduler and the engine all speak in these types.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .constraint import Constraint
from .errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_SEED = 2**63 - 1
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


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Ranges are checked on construction.

    Raises:
      InvalidRequestError: a value is out of range; the message names the field and the range.
    """

    max_tokens: int = 128
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps the whole vocabulary
    top_p: float = 1.0  # 1 keeps the whole vocabulary
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
        seed_ok = self.seed is None or 0 <= self.seed <= MAX_SEED
        require(seed_ok, "seed", self.seed, f"0 to {MAX_SEED}")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings", f"{MAX_STOP_STRINGS} or fewer")
        for text in self.stop:
            require(0 < len(text) <= MAX_STOP_STRING_CHARS, "stop", text, f"1 to {MAX_STOP_STRING_CHARS} characters")
        num_stop_tokens = len(self.stop_token_ids)
        require(num_stop_tokens <= MAX_STOP_TOKENS, "stop_token_ids", num_stop_tokens, f"{MAX_STOP_TOKENS} or fewer")


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
    num_prefill_tokens: int = 0  # known when it got its row; tokens after these were sampled in the row
    pages: list[int] = field(default_factory=list)
    num_page_positions: int = 0  # that its pages have room for
    num_published_pages: int = 0  # the first of `pages`, which others may share
    publish_at_tokens: int = 0  # when so many tokens are known and computed, the next page is full
    row: int | None = None  # index into the device's table of last tokens, held while running
    num_cached_tokens: int = 0  # of the prompt, found in the cache when the request first ran
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    is_constrained: bool = False  # what it may sample depends on its last token, so that the host must know it
    token_mask: "np.ndarray | None" = None  # [W] uint32, a bit a token: what it may sample next. None: everything

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.prompt_token_ids)
        self.is_constrained = self.params.constraint is not None

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


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the engine is. Pages are counted for one device: every device holds the same number."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
