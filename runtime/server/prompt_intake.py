"""Step 2 of 10: from what a caller sent to the tokens of a prompt that this server can serve. In: text, messages or
token ids. Out: token ids.

Short texts are tokenised on the event loop, long ones and conversations in a thread, so that no stream waits for them.
So are constraints compiled, few at a time: a large one keeps a core busy for half a second.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..api.constraint import Constraint
from ..api.engine_api import ModelInfo
from ..api.errors import InvalidRequestError
from ..api.sampling_params import SamplingParams
from ..scheduler.limits import check_prompt_length
from ..text import chat_messages
from ..text.grammar import Grammar, Grammars, compiled
from ..text.tokenizer import Tokenizer

_MAX_INLINE_CHARS = 2_000  # takes about 1 ms to tokenise; longer prompts would hold up every stream
_MAX_INLINE_TOKENS = 2_000
_MAX_DETOKENIZE_TOKENS = 2**20
_MAX_COMPILING = 2  # constraints


class Intake:
    """Checks and tokenises for one model."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, grammars: Grammars | None = None):
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._compilers = ThreadPoolExecutor(_MAX_COMPILING, "compile")  # its own: callers may go, compiling goes on
        self._info = info
        # No token is longer than this, so a longer text cannot fit: it need not be tokenised to be refused.
        self._max_chars = info.max_context_tokens * tokenizer.max_token_chars

    def _check_chars(self, field: str, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise InvalidRequestError(
                field,
                f"has {num_chars} characters; allowed are {self._max_chars}, which is more than any "
                f"{self._info.max_context_tokens} tokens (max_context) can hold. Shorten it.",
            )

    async def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text; there may be more than the context holds.

        Raises:
          InvalidRequestError: it is far too long.
        """
        self._check_chars("text", len(text))
        if len(text) <= _MAX_INLINE_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens.

        Raises:
          InvalidRequestError: there are too many, or one is outside the vocabulary.
        """
        if len(token_ids) > _MAX_DETOKENIZE_TOKENS:
            raise InvalidRequestError(
                "token_ids", f"got {len(token_ids)}; allowed are {_MAX_DETOKENIZE_TOKENS}. Call several times."
            )
        self._check_vocabulary("token_ids", token_ids)
        if len(token_ids) <= _MAX_INLINE_TOKENS:
            return self._tokenizer.decode(token_ids)
        return await asyncio.to_thread(self._tokenizer.decode, token_ids)

    async def render(self, asked: chat_messages.Messages) -> tuple[int, ...]:
        """The tokens of a conversation, as the model's chat template writes it.

        Raises:
          InvalidRequestError: a message or the template's opinion of it.
          UnsupportedModelError: the model has no template.
        """
        return await asyncio.to_thread(self._render, asked)

    def _render(self, asked: chat_messages.Messages) -> tuple[int, ...]:
        chat_messages.check_number(asked, self._info.max_context_tokens)
        self._check_chars("messages", sum(map(len, chat_messages.texts(asked))))
        messages, options = chat_messages.template_arguments(asked)
        return self._tokenizer.encode(self._tokenizer.render_chat(messages, **options))

    def checked(self, field: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens of a prompt that this server can serve.

        Raises:
          InvalidRequestError: there are none, too many, or one is outside the vocabulary.
        """
        check_prompt_length(field, len(token_ids), self._info.max_context_tokens)
        self._check_vocabulary(field, token_ids)
        return token_ids

    async def grammar(self, constraint: Constraint | None) -> Grammar | None:
        """A constraint, compiled.

        Raises:
          InvalidRequestError: it cannot be honoured.
        """
        if constraint is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compilers, compiled, constraint, self._grammars)

    def check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """What depends on the prompt and on the vocabulary.

        Raises:
          InvalidRequestError: the output to go on from is not in the prompt, or a token does not exist.
        """
        if not 0 <= params.num_resumed_tokens < num_prompt_tokens:
            raise InvalidRequestError(
                "sampling.num_resumed_tokens",
                f"got {params.num_resumed_tokens}; allowed is less than the prompt's {num_prompt_tokens} tokens.",
            )
        self._info.check(params)

    def _check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._info.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            index, bad = next((i, token_id) for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
            raise InvalidRequestError(
                field,
                f"token {index} is {bad}; allowed is 0 to {vocab_size - 1}. Use the tokenizer of {self._info.name}.",
            )
