"""Data types of requests: their options, their progress and their outputs.

The server, the scheduler and the engine share these types. Pure Python.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .adapters import AdapterInfo
from .errors import InvalidRequestError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from ..scheduler.drafts.drafter import Drafter

MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARS = 256
MAX_SAMPLES = 64
NO_TOKEN = -1  # sampled instead of a token if a logit is NaN or infinite
NOT_FINITE = "the model computed logits that are NaN or infinite; its weights may be damaged, or a device may be faulty"


class FinishReason(enum.Enum):
    """Why a request ended. Every accepted request ends for exactly one of these reasons."""

    STOP = "stop"  # an end token, a stop token, a stop string, or a complete constraint
    LENGTH = "length"  # max_tokens was reached, or the context was full
    CANCELLED = "cancelled"  # the caller disconnected or cancelled it
    DEADLINE = "deadline"  # the caller's deadline passed
    ERROR = "error"  # an error occurred; the output contains the message


class WeightSpan(NamedTuple):
    """Consecutive output tokens of a sample that were computed with one version of the weights."""

    version: str
    num_tokens: int


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position.

    They refer to the model's own distribution, at temperature 1, before bias, bans and penalties, unless
    `SamplingParams.processed_logprobs` asks for those of the distribution that is sampled from.
    """

    token_id: int  # the token at this position
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens and their log-probabilities, in descending order


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of a request other than its sampling parameters. Values are validated on construction.

    Raises:
      InvalidRequestError: A value is out of range. The message names the field and the range.
    """

    priority: int = 0  # larger goes first
    timeout_seconds: float | None = None  # time after which the request ends unfinished; None: no limit
    cache_salt: str = ""  # only requests with the same salt share pages
    n: int = 1  # number of samples of the prompt; sample i is drawn like a request with seed + i
    tenant: str = ""  # whose share of slots and pages it takes; set by the server
    weight: float = 1.0  # the tenant's weight
    adapter: str = ""  # name of a loaded adapter (LoRA); empty is the model itself
    adapter_digest: str = ""  # that the adapter must have; empty: any

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
class SchedulingState:
    """The progress of a request. Only the scheduler package writes these fields; tests/test_layout.py checks this."""

    page_keys: list[bytes] = field(default_factory=list)  # keys of the first full pages; see `page_keys.py`
    rank: tuple[float, int] = (0.0, 0)  # position in the order of all requests; smaller goes first
    max_total_tokens: int = 0  # maximum number of prompt and output tokens
    output_token_ids: list[int] = field(default_factory=list)
    num_known_tokens: int = 0  # tokens whose ids the host knows: the prompt and the collected output
    num_computed_tokens: int = 0  # positions whose keys and values are in the cache, or will be after steps in flight
    num_pending_tokens: int = 0  # tokens sampled by steps in flight, whose ids the host does not know yet
    num_drafts: int = 0  # pending tokens that are draft tokens
    num_prefill_tokens: int = 0  # known tokens when it was admitted to its slot; later ones were sampled in the slot
    pages: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities are computed or in flight
    num_page_positions: int = 0  # positions for which its pages have room
    num_published_pages: int = 0  # the first of `pages`, which other requests may share
    publish_at_tokens: int = 0  # number of known and computed tokens at which the next page is full
    slot: int | None = None  # index into the device's tables; None unless the request is running
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when the request first ran
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    is_blocked: bool = False  # its next token mask has not been computed, so it is in no plan
    is_fetching: bool = False  # pages of it are being copied from host memory, so it is in no plan
    is_held: bool = False  # it arrived while earlier requests are to end first, so it is in no plan
    weights_key: bytes = b""  # what `page_keys` begin with; see `Scheduler.begin_weights`
    adapter_slot: int | None = None  # of its adapter on the devices; None unless it runs with one
    is_admitted: bool = False  # a plan has admitted it to its slot and computes its first tokens there
    drafter: "Drafter | None" = None  # proposes draft tokens


@dataclass(eq=False, kw_only=True, slots=True)
class Request(SchedulingState):
    """One sample of one prompt, and its progress.

    Token positions count prompt and output together.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # params.seed, or drawn by the engine
    index: int = 0  # index of the sample, if the request has several
    priority: int = 0  # larger goes first
    cache_salt: str = ""  # only requests with the same salt share pages
    tenant: str = ""  # tenants with unfinished requests share slots and pages
    weight: float = 1.0  # the tenant's weight
    adapter: str = ""  # name of its adapter; empty: none
    adapter_digest: str = ""  # the content that the name had when the request was accepted; see `AdapterInfo.digest`
    adapter_info: AdapterInfo | None = None  # that content, which it keeps in host memory until it ends
    arrival_seconds: float = 0.0  # this and the deadline by the clock whose time the scheduler is given
    deadline_seconds: float = math.inf

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.prompt_token_ids)

    @property
    def is_constrained(self) -> bool:
        """Whether the allowed tokens depend on the previous token, so that the host must know it before sampling."""
        return self.params.constraint is not None

    @property
    def needs_processors(self) -> bool:
        """Whether logits processors sample its tokens, which requires one dispatch per step."""
        return self.params.needs_processors

    @property
    def num_prompt_logprobs_left(self) -> int:
        """Prompt tokens whose log-probabilities are still to be computed; only the first sample computes them."""
        if self.params.prompt_logprobs is None or self.index:
            return 0
        return len(self.prompt_token_ids) - 1 - self.num_prompt_logprobs

    @property
    def num_tokens(self) -> int:
        """The number of known and pending tokens."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the token ids at the known positions start..stop-1."""
        num_prompt_tokens = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : max(stop - num_prompt_tokens, 0)]
        return [*prompt, *output]


@dataclass(kw_only=True, slots=True)
class Output:
    """The output of one step for one sample. Only the last output of each sample has a finish reason.

    Never changed. It is not frozen, because that makes each take four times as long, which all tokens of a step pay.
    """

    request_id: str
    index: int = 0  # index of the sample
    token_ids: tuple[int, ...] = ()  # new tokens, without the end token that ended the request
    text: str = ""  # new text in whole characters; stop strings are removed
    finish_reason: FinishReason | None = None
    message: str = ""  # the error message, if finish_reason is ERROR
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # total since the request began
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache instead of computed
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the next prompt tokens, beginning with the second one
    weight_spans: tuple[WeightSpan, ...] = ()  # of all tokens since the request began, in the last output
    pooled: "np.ndarray | None" = None  # float32, of a model with `ModelConfig.pooling`


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of the engine. Pages are counted per device; every device holds the same number."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
