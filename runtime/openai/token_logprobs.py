"""Log-probabilities in the forms of OpenAI's routes."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..api.request import TokenLogprobs
from ..text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token as text. Bytes that are no characters of their own become U+FFFD."""
    return tokenizer.all_token_bytes(token_id).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, found: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Returns the `logprobs` of a choice of a chat."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.all_token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        item(each.token_id, each.logprob) | {"top_logprobs": [item(token_id, value) for token_id, value in each.top]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, found: Sequence[TokenLogprobs], offset: int, first: int | None = None
) -> dict[str, Any]:
    """Returns the `logprobs` of a choice of a completion.

    Args:
      tokenizer: Converts tokens to text.
      found: The log-probabilities.
      offset: Where their text begins in the choice's.
      first: A token before them that has none: the first one of a prompt.
    """
    texts = [] if first is None else [token_text(tokenizer, first)]
    texts += [token_text(tokenizer, each.token_id) for each in found]
    nothing: list[None] = [] if first is None else [None]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{token_text(tokenizer, token_id): value for token_id, value in _with_own(each)} for each in found]
    return {
        "tokens": texts,
        "token_logprobs": [*nothing, *(each.logprob for each in found)],
        "top_logprobs": [*nothing, *tops],
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: a mapping for each token of the prompt, None for the first."""

    def position(each: TokenLogprobs) -> dict[str, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(each.top, 1)}
        return {
            str(token_id): {
                "logprob": value, "rank": ranks.get(token_id), "decoded_token": token_text(tokenizer, token_id),
            }
            for token_id, value in _with_own(each)
        }  # fmt: skip

    return [None, *map(position, found)]


def _with_own(each: TokenLogprobs) -> list[tuple[int, float]]:
    """Returns the most likely tokens and the one that stands there."""
    own = (each.token_id, each.logprob)
    return list(each.top) if own in each.top or each.token_id in dict(each.top) else [*each.top, own]
