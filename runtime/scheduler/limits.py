"""Limits on a step, a request and the queue, enforced by the scheduler (step 4 of 10)."""

from bisect import bisect_left
from dataclasses import dataclass

from ..api.errors import InvalidRequestError
from ..api.request import Request

_DECODES_TO_ONE_NEW, _FEW_NEW = 8, 3  # see `SchedulerLimits.has_few_new`


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's options; docs/scheduling.md explains the trade-off of each."""

    page_size: int  # tokens per page
    max_running: int  # requests that hold a slot at the same time
    max_step_tokens: int  # token budget of a step, decodes and prefill together; at least max_running
    max_waiting: int  # length of the queue; further requests are refused
    max_context: int  # prompt and output tokens of one request
    max_prefill_tokens: int = 0  # prefill tokens in a step that also decodes; 0: the rest of max_step_tokens
    low_load_prefill_tokens: int = 0  # the same at low load (`Running.is_load_low`); 0: off
    max_decode_steps: int = 1  # decode steps per dispatch while no request waits; at most page_size
    multi_step_requests: int = 0  # the most decodes in a dispatch of several steps; 0: any number
    priority_seconds: float = 30.0  # waiting time that one level of priority is worth
    has_prefix_cache: bool = True
    draft_tokens: int = 0  # maximum draft tokens of a request in one step; less than page_size
    has_draft_model: bool = False  # which proposes them, instead of prompt lookup
    # Bucket sizes in tokens, ascending, for which padding costs time. Padding up to the first of them is free. Empty:
    # prefill chunks are never cut to avoid padding.
    step_sizes: tuple[int, ...] = ()
    draft_sizes: tuple[int, ...] = ()  # bucket sizes in tokens of steps with drafts, ascending
    draft_min_match: int = 3  # tokens that must recur in a text before draft tokens are proposed

    def __post_init__(self) -> None:
        assert min(self.page_size, self.max_waiting, self.max_decode_steps) >= 1 and self.max_context >= 2, self
        assert self.max_step_tokens >= self.max_running >= 1, self  # otherwise decodes would wait for each other
        assert 0 <= self.low_load_prefill_tokens <= self.max_prefill_tokens and self.priority_seconds >= 0, self
        # A request then begins at most one page per dispatch; the bucket has room for that.
        assert self.max_decode_steps <= max(self.page_size, 1), self
        assert 0 <= self.draft_tokens < self.page_size and self.draft_min_match >= 1, self

    def sizes_around(self, num_tokens: int) -> tuple[int, int]:
        """Returns the largest step size below `num_tokens` (or 0) and the smallest one that holds `num_tokens`."""
        index = bisect_left(self.step_sizes, num_tokens)
        below = self.step_sizes[index - 1] if index else 0
        return below, self.step_sizes[index] if index < len(self.step_sizes) else self.max_step_tokens

    def num_beside(self, num_decodes: int, is_load_low: bool) -> int:
        """Returns how many prefill tokens a step with `num_decodes` decodes may hold: the limit for this load, or
        slightly fewer where the decodes would otherwise pad the step to a much larger size."""
        most = self.low_load_prefill_tokens if is_load_low else self.max_prefill_tokens
        num_tokens = num_decodes + most
        below, above = self.sizes_around(num_tokens)
        is_cut = num_decodes < below and num_tokens - below < above - num_tokens
        return below - num_decodes if is_cut else most

    def has_few_new(self, num_new: int, num_decodes: int) -> bool:
        """Returns whether `num_new` requests with prompt tokens left may be computed in short steps.

        Short steps serve the requests that decode. While more than an eighth as many are new, and more than arrive
        together by chance, long steps serve more of them (docs/decisions/071).
        """
        return bool(self.low_load_prefill_tokens) and num_new <= max(_FEW_NEW, num_decodes // _DECODES_TO_ONE_NEW)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_needed_pages(self, request: Request) -> int:
        """Returns the maximum number of pages that an accepted request can need."""
        return self.num_pages_for(request.max_total_tokens - 1)  # the last token's keys and values are never needed

    def max_total_tokens(self, request: Request, num_pages: int) -> int:
        """Returns the maximum number of prompt and output tokens that the request may have in a cache of `num_pages`.

        Raises:
          InvalidRequestError: The request does not fit in the context or the cache.
        """
        max_context = self.max_context
        num_prompt_tokens = len(request.prompt_token_ids)
        check_prompt_length("prompt", num_prompt_tokens, max_context)
        if request.params.max_tokens is None:
            max_context = min(max_context, max(num_pages * self.page_size, num_prompt_tokens) + 1)
        max_total_tokens = request.params.total_tokens(num_prompt_tokens, max_context)
        num_needed = self.num_pages_for(max_total_tokens - 1)  # the last token's keys and values are never needed
        if num_needed > num_pages:
            num_spare_tokens = num_pages * self.page_size + 1 - num_prompt_tokens
            fits = num_spare_tokens > 0
            remedy = f"Ask for {num_spare_tokens} or fewer" if fits else "Shorten the prompt"
            raise InvalidRequestError(
                "sampling.max_tokens" if fits else "prompt",
                f"{num_prompt_tokens} prompt tokens and up to {max_total_tokens - num_prompt_tokens} output tokens "
                f"need {num_needed} pages of {self.page_size} tokens; the whole cache has {num_pages}. {remedy}, or "
                "restart with a larger cache (--num-pages, --memory-fraction).",
            )
        return max_total_tokens


def check_prompt_length(field: str, num_tokens: int, max_context: int) -> None:
    """
    Raises:
      InvalidRequestError: A prompt of `num_tokens` is empty or too long. The error names the request's `field`.
    """
    if num_tokens == 0:
        raise InvalidRequestError(field, "has 0 tokens; at least 1 is required. Send a non-empty prompt.")
    if num_tokens >= max_context:
        raise InvalidRequestError(
            field,
            f"has {num_tokens} tokens; this server accepts {max_context - 1} (max_context minus one output token). "
            "Shorten it or restart with a larger --max-context.",
        )
