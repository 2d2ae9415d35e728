"""The nouns of a request's life: what was asked, where it stands, what comes out.

Pure Python: the edge, the scheduler and the engine all speak in these types.
"""

import enum
import math
from dataclasses import dataclass, field

from .errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_SEED = 2**63 - 1


class FinishReason(enum.Enum):
    """Why a request ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"  # an end token of the model, or a stop string
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
    num_resumed_tokens: int = 0  # so many tokens at the end of the prompt are output that the caller has already

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


@dataclass(eq=False, kw_only=True)
class Request:
    """One request and where it stands. The scheduler owns every field below the line.

    Token positions count from 0 over prompt and output together. `num_computed_tokens` positions have their keys and
    values in the cache, or will have once the steps in flight end. `num_pending_tokens` tokens have been sampled by
    steps in flight, so the host does not know their ids yet.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved: params.seed, or drawn by the engine
    # ---
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    row: int | None = None  # index into the device's table of last tokens, held while running
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host knows: the prompt and the collected output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def token_at(self, position: int) -> int:
        """The id at a known position."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if position < num_prompt_tokens:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - num_prompt_tokens]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The ids at known positions start..stop-1."""
        num_prompt_tokens = len(self.prompt_token_ids)
        prompt = self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : max(stop - num_prompt_tokens, 0)]
        return [*prompt, *output]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one step brought for one request. The last output of a request, and only it, has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new tokens; an end token that stopped the request is not among them
    text: str = ""  # new text, never half a character; stop strings are cut off
    finish_reason: FinishReason | None = None
    message: str = ""  # the reason, where finish_reason is ERROR
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # since the request began


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the engine is. Pages are counted for one device: every device holds the same number."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
