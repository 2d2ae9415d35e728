"""Step 2 of 10: from what a caller sent to the tokens of a prompt that this server can serve. In: text, messages or
token ids. Out: token ids.

Short texts are tokenised on the event loop, others and conversations in threads, so that no stream waits for them.
Short and long prompts have threads of their own, and so have Tokenize and Detokenize: a prompt waits for prompts of its
kind only. Constraints are compiled in other processes, each of which a thread waits for. Wherever work waits, the
tenants take turns.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from meshserve.protos import inference_pb2 as pb

from ..api.engine_api import ModelInfo
from ..api.errors import InvalidRequestError, TextTooLongError
from ..api.sampling_params import SamplingParams
from ..scheduler.limits import check_prompt_length
from ..text import chat_messages
from ..text.answers.answer_format import END_OF_THINK, THINK, AnswerFormat, answer_format
from ..text.grammar import Compiling, Grammar, Grammars, supporting
from ..text.tokenizer import Tokenizer
from ..text.work_pool import WorkPool

Result = TypeVar("Result")

_MAX_INLINE_CHARS = 2_000  # takes about 1 ms to tokenise; longer prompts would hold up every stream
_MAX_SHORT_SIZE = 16_384  # characters; takes about 5 ms
_PIECE_TOKENS = 8_192  # checked or copied at a time, as each piece holds Python's lock
_MAX_DETOKENIZE_TOKENS = 2**20
_MAX_ANSWER_BYTES = 2**22 - 2**10  # of Tokenize and Detokenize: gRPC's clients take messages of 4 MiB by default
_MAX_COMPILING = 24  # constraints; more than may take long, see `constraint_limits.SlowCompiles`


class RenderedChat(NamedTuple):
    """The prompt of a conversation, and what its answer will look like."""

    token_ids: tuple[int, ...]
    form: AnswerFormat


class Intake:
    """Checks and tokenises for one model."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, grammars: Grammars | None = None):
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._short_prompts = WorkPool("short prompts", num_threads=2, max_calls=4096, max_size=2**26)
        self._long_prompts = WorkPool("long prompts", num_threads=2, max_calls=2048, max_size=2**28)
        self._compilations = WorkPool("constraints", num_threads=_MAX_COMPILING, max_calls=1024, max_size=2**25)
        self._conversions = WorkPool("Tokenize and Detokenize", num_threads=1, max_calls=1024, max_size=2**26)
        self._info = info
        # No token is longer than this, so a longer text cannot fit: it need not be tokenised to be refused.
        self._max_chars = info.max_context_tokens * tokenizer.max_token_chars

    def check_chars(self, field: str, num_chars: int) -> None:
        """
        Raises:
          TextTooLongError: A text has more characters than the context can hold.
        """
        if num_chars > self._max_chars:
            raise TextTooLongError(
                field,
                f"has {num_chars} characters; allowed are {self._max_chars}, which is more than any "
                f"{self._info.max_context_tokens} tokens (max_context) can hold. Shorten it.",
            )

    def _prompts(self, size: int) -> WorkPool:
        return self._short_prompts if size <= _MAX_SHORT_SIZE else self._long_prompts

    async def encode(self, text: str, tenant: str) -> tuple[int, ...]:
        """Returns the tokens of a prompt; there may be more than the context holds.

        Raises:
          InvalidRequestError: The text is too long.
          QuotaExceededError, QueueFullError: Too many prompts are being tokenised.
        """
        self.check_chars("text", len(text))
        return await self.convert(tenant, len(text), self._tokenizer.encode, text)

    async def convert(self, tenant: str, size: int, convert: Callable[..., Result], *arguments: Any) -> Result:
        """Returns the result of a function that tokenises `size` characters: long ones in a thread.

        Raises:
          QuotaExceededError, QueueFullError: Too many prompts are being tokenised.
        """
        if size <= _MAX_INLINE_CHARS:
            return convert(*arguments)
        return await self._prompts(size).run(tenant, size, convert, *arguments)

    async def tokenize(self, request: pb.TokenizeRequest, tenant: str) -> pb.TokenizeResponse:
        """Answers Tokenize.

        Raises:
          InvalidRequestError: The input is missing or rejected by the chat template, or it or the answer is too long.
          UnsupportedModelError: The model has no chat template.
          QuotaExceededError, QueueFullError: Too many calls are in progress.
        """
        if request.WhichOneof("input") is None:
            raise InvalidRequestError("input", "got neither text nor conversation; send one of them.")
        self.check_chars("text", len(request.text))
        return await self._conversions.run(tenant, request.ByteSize(), self._tokenized, request)

    async def tokens_of_text(self, text: str, tenant: str, answer: Callable[[tuple[int, ...]], Result]) -> Result:
        """Returns what a function makes of the tokens of a text, in the thread for that.

        Raises:
          InvalidRequestError: The text is too long.
          QuotaExceededError, QueueFullError: Too many calls are in progress.
        """
        self.check_chars("text", len(text))
        return await self._conversions.run(tenant, len(text), lambda: answer(self._tokenizer.encode(text)))

    async def tokens_of_chat(
        self,
        asked: chat_messages.Messages,
        variables: Mapping[str, Any],
        tenant: str,
        answer: Callable[[tuple[int, ...]], Result],
    ) -> Result:
        """Returns what a function makes of the tokens of a conversation; see `rendered` and `tokens_of_text`."""
        size = asked.ByteSize()
        return await self._conversions.run(tenant, size, lambda: answer(self._render(asked, variables).token_ids))

    def _tokenized(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        is_text = request.HasField("text")
        token_ids = (
            self._tokenizer.encode(request.text) if is_text else self._render(request.conversation, {}).token_ids
        )
        response = pb.TokenizeResponse()
        for start in range(0, len(token_ids), _PIECE_TOKENS):
            response.token_ids.extend(token_ids[start : start + _PIECE_TOKENS])
        _check_answer("text" if is_text else "messages", f"has {len(token_ids)} tokens", response.ByteSize())
        return response

    async def detokenize(self, token_ids: Sequence[int], tenant: str) -> str:
        """Returns the text of tokens.

        Raises:
          InvalidRequestError: There are too many tokens, their text is too long, or one is outside the vocabulary.
          QuotaExceededError, QueueFullError: Too many calls are in progress.
        """
        if len(token_ids) > _MAX_DETOKENIZE_TOKENS:
            raise InvalidRequestError(
                "token_ids", f"got {len(token_ids)}; allowed are {_MAX_DETOKENIZE_TOKENS}. Call several times."
            )
        return await self._conversions.run(tenant, len(token_ids), self._detokenized, token_ids)

    def _detokenized(self, token_ids: Sequence[int]) -> str:
        self._check_vocabulary("token_ids", token_ids)
        text = self._tokenizer.decode(token_ids)
        _check_answer("token_ids", f"got {len(token_ids)} tokens with {len(text)} characters", len(text.encode()))
        return text

    async def rendered(
        self, asked: chat_messages.Messages, tenant: str, variables: Mapping[str, Any] | None = None
    ) -> RenderedChat:
        """Returns the tokens of a conversation, as the chat template renders it, and the form of its answer.

        `variables` are variables of the template beside those that the conversation sets.

        Raises:
          InvalidRequestError: A message is not valid, or the template rejects it.
          UnsupportedModelError: The model has no chat template.
          QuotaExceededError, QueueFullError: Too many prompts are being rendered.
        """
        size = asked.ByteSize()
        return await self._prompts(size).run(tenant, size, self._render, asked, variables or {})

    def _render(self, asked: chat_messages.Messages, variables: Mapping[str, Any]) -> RenderedChat:
        chat_messages.check_number(asked, self._info.max_context_tokens)
        self.check_chars("messages", sum(map(len, chat_messages.texts(asked))))
        messages, options = chat_messages.template_arguments(asked)
        prompt = self._tokenizer.render_chat(messages, **{**variables, **options})
        form = answer_format(self._tokenizer.chat_template, prompt, options.get("tools", ()))
        opening, closing = self._tokenizer.token_id(THINK), self._tokenizer.token_id(END_OF_THINK)
        form = dataclasses.replace(
            form,
            think_token_ids=None if opening is None or closing is None else (opening, closing),
            end_token_ids=self._info.eos_token_ids,
        )
        return RenderedChat(self._tokenizer.encode(prompt), form)

    def checked(self, field: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of a prompt that this server can serve.

        Raises:
          InvalidRequestError: there are none, too many, or one is outside the vocabulary.
        """
        check_prompt_length(field, len(token_ids), self._info.max_context_tokens)
        self._check_vocabulary(field, token_ids)
        return tuple(token_ids)

    async def grammar(
        self, params: SamplingParams, token_ids: Sequence[int], tenant: str, seconds: float | None
    ) -> Grammar | None:
        """Compiles the constraint of a request with this prompt; ends the work if the caller goes.

        Raises:
          QuotaExceededError, QueueFullError: Too many constraints are being compiled.
          Exception: As `Grammars.compile`.
        """
        if params.constraint is None:
            return None
        grammars = supporting(params.constraint, self._grammars)
        compiling, resumed = Compiling(), token_ids[len(token_ids) - params.num_resumed_tokens :]
        if not resumed and (cached := grammars.cached(params.constraint, tenant)) is not None:
            return cached
        compile_it = partial(grammars.compile, resumed=resumed, tenant=tenant, seconds=seconds, compiling=compiling)
        try:
            return await self._compilations.run(tenant, params.constraint.num_chars, compile_it, params.constraint)
        except asyncio.CancelledError:
            compiling.cancel()
            raise

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
        for start in range(0, len(token_ids), _PIECE_TOKENS):
            piece = token_ids[start : start + _PIECE_TOKENS]
            if max(piece) < vocab_size:
                continue
            index, bad = next((i, token_id) for i, token_id in enumerate(piece, start) if token_id >= vocab_size)
            raise InvalidRequestError(
                field,
                f"token {index} is {bad}; allowed is 0 to {vocab_size - 1}. Use the tokenizer of {self._info.name}.",
            )


def _check_answer(field: str, got: str, num_bytes: int) -> None:
    """
    Raises:
      InvalidRequestError: An answer is longer than clients take.
    """
    if num_bytes > _MAX_ANSWER_BYTES:
        raise InvalidRequestError(
            field,
            f"{got}, an answer of {num_bytes} bytes; allowed are {_MAX_ANSWER_BYTES}, because gRPC's clients take no "
            "longer messages by default. Call several times.",
        )
