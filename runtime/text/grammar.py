"""Structured output: which tokens may come next, for outputs that are held to a schema or a grammar.

Beside steps 3 and 8 of 10. In: a `Constraint`. Out: a `Grammar`, compiled once and shared; of it a `Matcher` for each
sample, which follows its tokens and has bitmasks of what it allows. The parsing is llguidance's, which walks a trie of
the vocabulary with an Earley parser: nothing is computed ahead for every state of a grammar.
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

_MAX_CACHED_GRAMMARS = 32
_MAX_LEXER_STATES = 20_000  # about 2 kB each, kept for as long as the grammar is
_MAX_ROW_ITEMS = 500  # of the parser; an ambiguous grammar costs their square, 40 ms a mask (2 s at llguidance's 2,000)
_MAX_LEXER_FUEL = 100_000  # of one mask, half of the default: a hostile expression spends everybody's time
_CHEAP_SECONDS = 0.05
_MAX_MESSAGE_CHARS = 500
_MAX_EXACT_INT = 2**53
# Between the parts of a JSON text: nothing, a space, or a new line and its indent. Given more, some models do not stop.
_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))?",
    "item_separator": ",",  # a schema may not change these (`x-guidance`): the output would be no JSON
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}

# Of rules in llguidance's Lark; it is a wish to whoever samples, which llguidance leaves to others.
_GUIDING_ATTRIBUTE = re.compile(r"^[?!]?\w+\s*\[[^\]]*?\b(temperature)\s*=", re.MULTILINE)


class Grammar:
    """A compiled constraint. Made by `Grammars.compile`; shared by all who ask for the same.

    So is its lexer, whose states only become more, whoever needs them: see `Matcher.begin_anew`.
    """

    def __init__(self, grammars: "Grammars", start: llguidance.LLMatcher, first_mask: np.ndarray, seconds: float):
        self.grammars = grammars
        self.is_cheap = seconds <= _CHEAP_SECONDS  # to compile again, on the engine's thread
        self._start = start
        self._first_mask = first_mask

    def matcher(self, token_ids: Sequence[int] = ()) -> "Matcher":
        """A new one, that has seen these tokens.

        Raises:
          InvalidRequestError: they are not allowed.
        """
        matcher = Matcher(self, self._start.deep_copy(), self._first_mask)
        if token_ids:
            if not matcher.advance(token_ids):
                raise InvalidRequestError(
                    "sampling.num_resumed_tokens",
                    "the tokens at the end of the prompt break the constraint; send those that came under it.",
                )
            self.grammars.renew_masks([matcher])
        return matcher

    def matchers(self, num: int, token_ids: Sequence[int] = ()) -> list["Matcher"]:
        """As `matcher`, one for each of so many samples; the tokens are looked at once."""
        first = self.matcher(token_ids)
        return [first, *(Matcher(self, first.inner.deep_copy(), first.mask) for _ in range(num - 1))]


class Matcher:
    """How far one sample has come in its grammar. For one thread at a time."""

    def __init__(self, grammar: Grammar, inner: llguidance.LLMatcher, mask: np.ndarray):
        self.grammar = grammar
        self.inner = inner
        self.mask = mask  # [W] uint32, bit i % 32 of word i // 32: whether token i may come next; see `renew_masks`

    def allows(self, token_id: int) -> bool:
        """Whether the mask has a token."""
        word, bit = divmod(token_id, self.mask.itemsize * 8)
        return bool(self.mask[word] >> np.uint32(bit) & 1)

    def begin_anew(self, constraint: Constraint, token_ids: Sequence[int]) -> bool:
        """Goes on in another grammar of the constraint, with the tokens so far: others may have filled this one. False
        if that is of no use either, or would take too long."""
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
        """Takes the next tokens. False if they are not allowed; the matcher is then of no more use."""
        return self.inner.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the output may end here."""
        return self.inner.is_accepting()

    @property
    def failure(self) -> str | None:
        """Why it is of no more use."""
        return _one_line(self.inner.get_error()) if self.inner.is_error() else None


class Grammars:
    """Compiles constraints for one vocabulary. Safe to use from several threads.

    Args:
      tokenizer_file: the model's tokenizer.json.
      vocab_size: of the model, padding included: a mask has a bit for each of these tokens.
      eos_token_ids: allowed where the output may end; the tokenizer knows them.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Collection[int]):
        eos = sorted(eos_token_ids)
        self._vocabulary = llguidance.LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=eos or None)
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            step_lexer_fuel=_MAX_LEXER_FUEL,
            verbose_errors=False,
        )
        self._executor = llguidance.LLExecutor()
        self.eos_mask = _mask_of(eos, -(-vocab_size // 32))  # [W] uint32, as those of `masks`
        self._cached: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # of the cache

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint. Takes a millisecond for most, half a second for the largest.

        Raises:
          InvalidRequestError: it is malformed, cannot be satisfied, or uses what is not supported, which is named.
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
        """As `compile`, shared with nobody."""
        started = time.perf_counter()
        start = self._start(constraint)
        [first_mask] = self._masks([start])
        if start.is_error():  # a grammar too large to be followed shows at the first step
            raise _refusal(constraint, start.get_error())
        if not (first_mask & ~self.eos_mask).any():
            raise _refusal(constraint, "no text but the empty one satisfies it")
        first_mask.flags.writeable = False
        return Grammar(self, start, first_mask, time.perf_counter() - started)

    def renew_masks(self, matchers: Sequence[Matcher]) -> None:
        """Sets the masks of matchers that have advanced.

        Takes 20 to 200 microseconds a matcher, without the interpreter's lock and on several cores. One whose grammar
        turns out to be too complex has a `failure` afterwards.
        """
        masks = self._masks([matcher.inner for matcher in matchers])
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.mask = mask

    def forget(self, grammar: Grammar) -> None:
        """Drops a grammar that has grown too large in use; the next to ask for it gets a fresh one."""
        with self._lock:
            for constraint in [key for key, cached in self._cached.items() if cached is grammar]:
                del self._cached[constraint]

    def _masks(self, matchers: Sequence[llguidance.LLMatcher]) -> np.ndarray:
        """What each allows next: [n, W] uint32."""
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
    """The grammar of a constraint, if there is one. `grammars` is None where none are taken.

    Raises:
      InvalidRequestError: as `Grammars.compile`, or none are taken.
    """
    if constraint is None:
        return None
    if grammars is None:
        raise InvalidRequestError(constraint.field, "this server runs without --logits-processors; leave it out.")
    return grammars.compile(constraint)


def _mask_of(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    """Bits of these tokens alone."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _source(constraint: Constraint) -> str:
    """What llguidance compiles.

    Raises:
      ValueError: the constraint is malformed.
    """
    if constraint.kind in ("json_schema", "json_object"):
        schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
        with contextlib.suppress(json.JSONDecodeError):  # llguidance says what is wrong with it
            _check_numbers(json.loads(schema), is_written=False)
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if constraint.kind == "choice":  # one lexeme: as alternatives of a grammar they are as many items of the parser
        return llguidance.grammar_from("regex", "|".join(map(re.escape, constraint.choices)))
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", constraint.text)
    if (found := _GUIDING_ATTRIBUTE.search(constraint.text)) is not None:
        raise ValueError(f"the attribute {found[1]} of a rule is not supported")
    return llguidance.grammar_from("grammar", constraint.text)


def _check_numbers(schema: Any, *, is_written: bool) -> None:
    """llguidance has numbers as float64: what `const` and `enum` write would be another number.

    Raises:
      ValueError: names one that it would not write as it is.
    """
    if isinstance(schema, dict):
        for key, value in schema.items():
            _check_numbers(value, is_written=is_written or key in ("const", "enum"))
    elif isinstance(schema, list):
        for value in schema:
            _check_numbers(value, is_written=is_written)
    elif is_written and isinstance(schema, int) and abs(schema) > _MAX_EXACT_INT:
        raise ValueError(f"{schema} in const or enum is beyond 2^53, where whole numbers are not exact")


def _refusal(constraint: Constraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        constraint.field, f"this server cannot hold an output to it: {_one_line(reason)}. Change it or leave it out."
    )


def _one_line(message: str) -> str:
    message = message.partition("<backtrace>")[0]  # of a panic
    line = " ".join(message.split()).removesuffix(" <non-verbose/>").rstrip(".")
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[:_MAX_MESSAGE_CHARS] + "..."
