"""What a step, a request and the queue may hold: the bounds that the scheduler (step 4 of 10) keeps."""

from bisect import bisect_left
from dataclasses import dataclass

from ..api.errors import InvalidRequestError
from ..api.request import Request

# Of a step that the fused decode kernels serve. With more, cuBLAS's products and the attention of steps with prompts
# take less time (docs/log).
MAX_FUSED_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The knobs of the scheduler; docs/scheduling.md says what each of them buys."""

    page_size: int  # tokens a page
    max_running: int  # requests that hold a row
    max_step_tokens: int  # decodes and prefill chunks of one step together; at least max_running
    max_waiting: int  # requests in the queue; more are refused
    max_context: int  # tokens of prompt and output of one request
    max_prefill_tokens: int = 0  # in a step that also decodes; 0: all that max_step_tokens leaves
    max_decode_steps: int = 1  # in one dispatch, when nothing waits; at most page_size
    priority_seconds: float = 30.0  # one step of priority goes before this much longer a wait
    has_prefix_cache: bool = True
    draft_tokens: int = 0  # of a request in one step, at most; below page_size
    # Tokens that larger steps are padded to, ascending. Below the first of them padding takes no time; without any,
    # nowhere.
    step_sizes: tuple[int, ...] = ()
    draft_min_match: int = 3  # tokens that must stand in a text twice for a guess at what follows

    def __post_init__(self) -> None:
        assert min(self.page_size, self.max_waiting) >= 1 and self.max_context >= 2, self
        assert self.max_step_tokens >= self.max_running >= 1, self  # or decodes would wait for each other
        assert 1 <= self.max_decode_steps and self.max_prefill_tokens >= 0 <= self.priority_seconds, self
        # A request then begins at most one page a window, which the bucket has room for.
        assert self.max_decode_steps <= max(self.page_size, 1), self
        assert 0 <= self.draft_tokens < self.page_size and self.draft_min_match >= 1, self

    def sizes_around(self, num_tokens: int) -> tuple[int, int]:
        """The largest step size below so many tokens, or 0, and the smallest that holds them."""
        index = bisect_left(self.step_sizes, num_tokens)
        below = self.step_sizes[index - 1] if index else 0
        return below, self.step_sizes[index] if index < len(self.step_sizes) else self.max_step_tokens

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_needed_pages(self, request: Request) -> int:
        """The most pages that an accepted request comes to hold."""
        return self.num_pages_for(request.max_total_tokens - 1)  # keys and values of the last token are never needed

    def max_total_tokens(self, request: Request, num_pages: int) -> int:
        """The most tokens, prompt and output together, the request may come to have.

        Raises:
          InvalidRequestError: the context, or a cache of `num_pages`, is too small for it.
        """
        max_context = self.max_context
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "has no tokens; at least 1 is needed. Send a text that is not empty.")
        if num_prompt_tokens >= max_context:
            raise InvalidRequestError(
                "prompt",
                f"has {num_prompt_tokens} tokens; this server accepts {max_context - 1} (max_context less one token of "
                "output). Shorten it or restart with a larger --max-context.",
            )
        max_total_tokens = min(num_prompt_tokens + request.params.max_tokens, max_context)
        num_needed = self.num_pages_for(max_total_tokens - 1)  # keys and values of the last token are never needed
        if num_needed > num_pages:
            num_spare_tokens = num_pages * self.page_size + 1 - num_prompt_tokens
            fits = num_spare_tokens > 0
            remedy = f"Ask for {num_spare_tokens} or fewer" if fits else "Shorten the prompt"
            raise InvalidRequestError(
                "sampling.max_tokens" if fits else "prompt",
                f"{num_prompt_tokens} prompt tokens and up to {max_total_tokens - num_prompt_tokens} of output need "
                f"{num_needed} pages of {self.page_size} tokens; the whole cache has {num_pages}. {remedy}, or "
                "restart with a larger cache (--num-pages, --memory-fraction).",
            )
        return max_total_tokens
