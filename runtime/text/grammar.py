"""Structured output: computes which tokens may come next when an output must match a schema or grammar.

Accompanies steps 3 and 8 of 10. In: a `Constraint`. Out: a `Grammar`, compiled once and shared, which creates a
`Matcher` per sample. The matcher follows the sample's tokens and holds the bitmask of allowed next tokens. Parsing is
done by llguidance, which walks a trie of the vocabulary with an Earley parser, so that no grammar states are computed
ahead of time.
"""

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from ..api.constraint import Constraint
from ..api.errors import InvalidRequestError
from .tokenizer import tokenizer_within

_MAX_CACHED_GRAMMARS = 32
_MAX_LEXER_STATES = 20_000  # about 2 kB each, kept as long as the grammar
_MAX_ROW_ITEMS = 500  # parser items; ambiguous grammars cost their square: 40 ms per mask, 2 s at llguidance's 2,000
_MAX_LEXER_FUEL = 100_000  # per mask, half of the default: hostile expressions delay all requests
_CHEAP_SECONDS = 0.05
_MAX_MESSAGE_CHARS = 500
_MAX_EXACT_INT = 2**53
# Whitespace allowed between JSON tokens: none, a space, or a newline and indentation. With more freedom, some models
# never stop producing whitespace.
_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))?",
    "item_separator": ",",  # a schema must not override these (`x-guidance`): the output would not be JSON
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}

# A rule attribute in llguidance's Lark dialect that llguidance does not enforce: it leaves the temperature to the
# sampler.
_GUIDING_ATTRIBUTE = re.compile(r"^[?!]?\w+\s*\[[^\]]*?\b(temperature)\s*=", re.MULTILINE)


class Grammar:
    """A compiled constraint. Created by `Grammars.compile` and shared by all requests with the same constraint.

    The lexer is shared too. Its set of states only grows, whichever request needs them; see `Matcher.begin_anew`.
    """

    def __init__(self, grammars: "Grammars", start: llguidance.LLMatcher, first_mask: np.ndarray, seconds: float):
        self.grammars = grammars
        self.is_cheap = seconds <= _CHEAP_SECONDS  # whether it may be compiled again on the engine's thread
        self._start = start
        self._first_mask = first_mask

    def matcher(self, token_ids: Sequence[int] = ()) -> "Matcher":
        """Creates a matcher that has consumed these tokens.

        Raises:
          InvalidRequestError: The constraint does not allow the tokens.
        """
        matcher = Matcher(self, self._start.deep_copy(), self._first_mask)
        if token_ids:
            if not matcher.advance(token_ids):
                raise InvalidRequestError(
                    "sampling.num_resumed_tokens",
                    "the tokens at the end of the prompt break the constraint; send output generated under it.",
                )
            self.grammars.renew_masks([matcher])
        return matcher

    def matchers(self, num: int, token_ids: Sequence[int] = ()) -> list["Matcher"]:
        """Like `matcher`, but creates `num` matchers, one per sample. The tokens are parsed once."""
        first = self.matcher(token_ids)
        return [first, *(Matcher(self, first.inner.deep_copy(), first.mask) for _ in range(num - 1))]


class Matcher:
    """Position of one sample in its grammar. Not safe for concurrent use."""

    def __init__(self, grammar: Grammar, inner: llguidance.LLMatcher, mask: np.ndarray):
        self.grammar = grammar
        self.inner = inner
        self.mask = mask  # [W] uint32; bit i % 32 of word i // 32: whether token i is allowed next; see `renew_masks`

    def allows(self, token_id: int) -> bool:
        """Returns whether the mask allows a token."""
        word, bit = divmod(token_id, self.mask.itemsize * 8)
        return bool(self.mask[word] >> np.uint32(bit) & 1)

    def begin_anew(self, constraint: Constraint, token_ids: Sequence[int]) -> bool:
        """Recompiles the constraint and replays the tokens, because other requests may have filled the shared lexer.

        Returns:
          False if the new grammar fails as well, or compiling it would take too long.
        """
        grammars, is_cheap = self.grammar.grammars, self.grammar.is_cheap
        grammars.forget(self.grammar)
        for compiled_again in (grammars.compile, grammars.compile_alone) if is_cheap else ():
            try:
                fresh = compiled_again(constraint).matcher(token_ids)
            except InvalidRequestError:
                continue
            if fresh.failure is None:
                self.grammar, self.inner, self.mask = fresh.grammar, fresh.inner, fresh.mask
                return True
        return False

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Consumes the next tokens. Returns False if they are not allowed; the matcher is then unusable."""
        return self.inner.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether no further token is allowed."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the output may end here."""
        return self.inner.is_accepting()

    @property
    def failure(self) -> str | None:
        """Why the matcher is unusable, or None."""
        return _one_line(self.inner.get_error()) if self.inner.is_error() else None


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe.

    Args:
      tokenizer_file: The model's tokenizer.json.
      vocab_size: Vocabulary size of the model, including padding. A mask has one bit per token.
      eos_token_ids: End tokens, allowed wherever the output may end. Known to the tokenizer.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Collection[int]):
        eos = sorted(eos_token_ids)
        tokenizer = tokenizer_within(tokenizer_file, vocab_size)
        self._vocabulary = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos or None)
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            step_lexer_fuel=_MAX_LEXER_FUEL,
            verbose_errors=False,
        )
        self._executor = llguidance.LLExecutor()
        self.eos_mask = _mask_of(eos, -(-vocab_size // 32))  # [W] uint32, like `Matcher.mask`
        self._cached: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # guards the cache

    def compile(self, constraint: Constraint) -> Grammar:
        """Returns the grammar of a constraint, compiled or cached.

        Compiling takes about 1 ms for most constraints and 0.5 s for the largest.

        Raises:
          InvalidRequestError: The constraint is malformed, cannot be satisfied, or uses unsupported features. The
            message names them.
        """
        with self._lock:
            if (found := self._cached.get(constraint)) is not None:
                self._cached.move_to_end(constraint)
                return found
        grammar = self.compile_alone(constraint)
        with self._lock:
            self._cached[constraint] = grammar
            if len(self._cached) > _MAX_CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        return grammar

    def compile_alone(self, constraint: Constraint) -> Grammar:
        """Like `compile`, but bypasses the cache: the grammar is not shared."""
        started = time.perf_counter()
        start = self._start(constraint)
        [first_mask] = self._masks([start])
        if start.is_error():  # a grammar that exceeds the limits fails at the first mask
            raise _refusal(constraint, start.get_error())
        if not (first_mask & ~self.eos_mask).any():
            raise _refusal(constraint, "only the empty text satisfies it")
        first_mask.flags.writeable = False
        return Grammar(self, start, first_mask, time.perf_counter() - started)

    def renew_masks(self, matchers: Sequence[Matcher]) -> None:
        """Updates the masks of matchers that have advanced.

        Takes 20 to 200 microseconds per matcher, without the GIL and on several cores. A matcher whose grammar turns
        out to be too complex has a `failure` afterwards.
        """
        masks = self._masks([matcher.inner for matcher in matchers])
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.mask = mask

    def forget(self, grammar: Grammar) -> None:
        """Removes a grammar whose lexer has grown too large from the cache, so that the next request compiles a new
        one."""
        with self._lock:
            for constraint in [key for key, cached in self._cached.items() if cached is grammar]:
                del self._cached[constraint]

    def _masks(self, matchers: Sequence[llguidance.LLMatcher]) -> np.ndarray:
        """Computes the allowed next tokens of each matcher: [n, W] uint32."""
        masks = np.zeros((len(matchers), len(self.eos_mask)), np.uint32)
        rows = [(matcher, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * 4, len(rows))
        return masks

    def _start(self, constraint: Constraint) -> llguidance.LLMatcher:
        try:
            source = _source(constraint)
        except (ValueError, RecursionError) as error:
            raise _refusal(constraint, str(error)) from error
        start = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=self._limits)
        if start.is_error():
            raise _refusal(constraint, start.get_error())
        return start


def compiled(constraint: Constraint | None, grammars: Grammars | None) -> Grammar | None:
    """Returns the grammar of a constraint, or None without a constraint.

    Args:
      constraint: Constraint of a request, if any.
      grammars: None if the server does not support constraints.

    Raises:
      InvalidRequestError: See `Grammars.compile`; or the server does not support constraints.
    """
    if constraint is None:
        return None
    if grammars is None:
        message = "this server runs without --logits-processors, or its model has no tokenizer.json; omit it."
        raise InvalidRequestError(constraint.field, message)
    return grammars.compile(constraint)


def _mask_of(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    """Returns the bitmask in which exactly these tokens are set."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _source(constraint: Constraint) -> str:
    """Returns the grammar source that llguidance compiles.

    Raises:
      ValueError: The constraint is malformed.
    """
    if constraint.kind in ("json_schema", "json_object"):
        schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
        with contextlib.suppress(json.JSONDecodeError):  # llguidance reports the error
            _check_numbers(json.loads(schema), is_written=False)
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if constraint.kind == "choice":  # as a regex they form one lexeme; as grammar alternatives, one parser item each
        return llguidance.grammar_from("regex", "|".join(map(re.escape, constraint.choices)))
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", constraint.text)
    if (found := _GUIDING_ATTRIBUTE.search(constraint.text)) is not None:
        raise ValueError(f"the rule attribute {found[1]} is not supported")
    return llguidance.grammar_from("grammar", constraint.text)


def _check_numbers(schema: Any, *, is_written: bool) -> None:
    """Checks that float64, which llguidance uses for numbers, represents the integers of `const` and `enum` exactly.

    Raises:
      ValueError: An integer is not represented exactly. The message names it.
    """
    if isinstance(schema, dict):
        for key, value in schema.items():
            _check_numbers(value, is_written=is_written or key in ("const", "enum"))
    elif isinstance(schema, list):
        for value in schema:
            _check_numbers(value, is_written=is_written)
    elif is_written and isinstance(schema, int) and abs(schema) > _MAX_EXACT_INT:
        raise ValueError(f"{schema} in const or enum is beyond 2^53, where integers are not represented exactly")


def _refusal(constraint: Constraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        constraint.field, f"this server cannot enforce it: {_one_line(reason)}. Change or omit it."
    )


def _one_line(message: str) -> str:
    message = message.partition("<backtrace>")[0]  # appended when llguidance panics
    line = " ".join(message.split()).removesuffix(" <non-verbose/>").rstrip(".")
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[:_MAX_MESSAGE_CHARS] + "..."
