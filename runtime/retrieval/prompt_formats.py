"""The prompts of Qwen3-Embedding and Qwen3-Reranker, in the layouts that the models were published with.

Step 2 of 10 for these models. In: texts and instructions. Out: token ids.
"""

import functools
from dataclasses import dataclass

from ..api.errors import InvalidRequestError
from ..text.tokenizer import Tokenizer

MAX_INSTRUCTION_CHARS = 8_192
DEFAULT_RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_RERANK_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANK_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def checked_instruction(instruction: str) -> str:
    """
    Raises:
      InvalidRequestError: The instruction is too long.
    """
    if len(instruction) > MAX_INSTRUCTION_CHARS:
        raise InvalidRequestError(
            "instruction", f"has {len(instruction)} characters; allowed are {MAX_INSTRUCTION_CHARS}. Shorten it."
        )
    return instruction


@dataclass(frozen=True)
class PromptFormat:
    """How texts become prompts.

    Args:
      tokenizer: The model's tokenizer.
      instruction: For the texts or pairs; empty for none, or for the model's default.
      prompt: Before each text to embed, if there is no instruction.
      max_tokens: Longer texts are cut at their end to this many tokens, added tokens included; None: they are not cut.
    """

    tokenizer: Tokenizer
    instruction: str = ""
    max_tokens: int | None = None
    prompt: str = ""

    def embedded(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text to embed; with an instruction, as a query."""
        text = f"Instruct: {self.instruction}\nQuery:{text}" if self.instruction else self.prompt + text
        token_ids = self.tokenizer.encode(self._shortened(text), is_completed=True)
        num_added = self.tokenizer.num_added_tokens
        return self._cut(token_ids[: len(token_ids) - num_added], token_ids[len(token_ids) - num_added :])

    def reranked(self, query: str, document: str) -> tuple[int, ...]:
        """Returns the tokens of the question whether a document meets a query.

        The three parts are tokenised apart, as by the model's authors. All documents of a query and an instruction have
        the same tokens before the document.
        """
        instruction = self.instruction or DEFAULT_RERANK_INSTRUCTION
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {self._shortened(document)}"
        prefix, suffix = _rerank_frame(self.tokenizer)
        return self._cut(prefix + self.tokenizer.encode(text), suffix)

    def _shortened(self, text: str) -> str:
        """Returns as much of a text as could be needed, so that no more is tokenised."""
        return text if self.max_tokens is None else text[: self.max_tokens * self.tokenizer.max_token_chars]

    def _cut(self, token_ids: tuple[int, ...], suffix: tuple[int, ...]) -> tuple[int, ...]:
        if self.max_tokens is not None:
            token_ids = token_ids[: max(0, self.max_tokens - len(suffix))]
        return token_ids + suffix


def completed(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens of a text with those that the tokenizer adds at its end, unless they are there already."""
    suffix = tokenizer.encode("", is_completed=True)
    return token_ids if not suffix or token_ids[-len(suffix) :] == suffix else token_ids + suffix


@functools.lru_cache(maxsize=4)
def _rerank_frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens before and after what depends on query and document."""
    return tokenizer.encode(_RERANK_PREFIX), tokenizer.encode(_RERANK_SUFFIX)
