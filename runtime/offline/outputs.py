"""What `LLM.generate` returns, in the shape that vLLM's users know."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..api.request import TokenLogprobs, WeightSpan
from ..text.tokenizer import Tokenizer
from .prompt_batch import AccumulatedOutput


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """The natural logarithm of a token's probability. `rank` is 1 for the most likely token; None: beyond the top."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
      finish_reason: "stop", "length", "cancelled" if `update_weights` ended it, or "error" with the reason in `error`.
      logprobs: For each output token, the log-probabilities of it and of the most likely tokens, by token id. None
        unless `logprobs` was requested.
      cumulative_logprob: The sum of the output tokens' log-probabilities. None unless `logprobs` was requested.
      weight_spans: Which version of the weights computed how many of the tokens, in their order.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its samples.

    Attributes:
      prompt: The text, rendered for a conversation; None if the prompt was given as token ids.
      prompt_logprobs: For each prompt token the log-probabilities; None at the first, which has none. None unless
        `prompt_logprobs` was requested.
      num_cached_tokens: Prompt tokens whose keys and values were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


def request_output(
    request_id: int,
    prompt: str | tuple[int, ...],
    token_ids: tuple[int, ...],
    samples: Sequence[AccumulatedOutput],
    tokenizer: Tokenizer,
) -> RequestOutput:
    """Returns the finished samples of one prompt as users see them."""
    first = samples[0]  # only the first sample computes the prompt's log-probabilities
    prompt_logprobs = [None, *(_by_token(each, tokenizer) for each in first.prompt_logprobs)]
    return RequestOutput(
        request_id=str(request_id),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=token_ids,
        outputs=[_output(index, sample, tokenizer) for index, sample in enumerate(samples)],
        prompt_logprobs=prompt_logprobs if first.prompt_logprobs else None,
        num_cached_tokens=first.num_cached_tokens,
    )


def _output(index: int, sample: AccumulatedOutput, tokenizer: Tokenizer) -> CompletionOutput:
    has_logprobs = bool(sample.logprobs)
    return CompletionOutput(
        index=index,
        text=sample.text,
        token_ids=tuple(sample.token_ids),
        finish_reason=sample.finish_reason or "error",
        logprobs=[_by_token(each, tokenizer) for each in sample.logprobs] if has_logprobs else None,
        cumulative_logprob=sum(each.logprob for each in sample.logprobs) if has_logprobs else None,
        weight_spans=sample.weight_spans,
        error=sample.error,
    )


def _by_token(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(position.top, start=1)}
    chosen = {position.token_id: ranked.get(position.token_id, (position.logprob, None))}
    return {
        token_id: Logprob(
            logprob=value, rank=rank, decoded_token=tokenizer.all_token_bytes(token_id).decode(errors="replace")
        )
        for token_id, (value, rank) in (chosen | ranked).items()
    }
