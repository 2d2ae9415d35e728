"""The processes in which constraints are compiled and followed, so that a crash or an endless run stays there.

llguidance is native code that reads what callers send. The template (see `worker_template`) loads the vocabulary, and
forks share its memory. A worker writes token masks to memory that it shares with the server.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance

from ..api.constraint import Constraint
from .constraint_sources import source
from .constraint_vocabulary import ConstraintVocabulary
from .worker_protocol import HAS_FAILED, HEADER_BYTES, IS_COMPLETE, IS_REFUSED, MAY_END, MUST_END, PROGRESS
from .worker_template import run_template

_SLOW_ROW_SECONDS = 0.01  # constraints with a row that takes longer are named in the answer,
_SLOW_SUM_SECONDS = 0.02  # and those whose rows together take longer
_MESSAGE_SECONDS = 0.05  # after which the other rows of a message are left for the next one
_AHEAD_SECONDS = 0.003  # in a message, after which no further masks after draft tokens are computed
_NO_TOKEN_LEFT = "NoExtensionBias"  # as llguidance calls it


class Worker:
    """Follows the samples of some constraints.

    A message has `sources`, constraints by number; `rows`, each a row of the shared memory, the number of its
    constraint, whether it starts again, and the tokens to consume; and `free` and `drop`, the rows and the constraints
    that are no longer needed. `ahead` are the draft tokens of each row. The answer has a state and an error for each
    row, how much processor time they took, and for each slow constraint the index of one of its rows and its time. If
    the first rows take long, the others have none. Its `ahead` are the states of each row after its first draft tokens,
    as many as the grammar allows and as there was time for.
    """

    def __init__(self, vocabulary: ConstraintVocabulary, settings: dict[str, Any], memory: mmap.mmap):
        self._vocabulary = vocabulary
        self._limits = llguidance.LLParserLimits(**settings["limits"], verbose_errors=False)
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mask_bytes: int = settings["mask_bytes"]
        self._num_masks: int = 1 + settings["num_ahead"]
        self._eos_token_ids: Sequence[int] = settings["eos_token_ids"]
        self._end_bits = sum(1 << token_id for token_id in self._eos_token_ids)
        self._mask_seconds = 0.0  # that the last mask took
        self._sources: dict[int, Constraint] = {}
        self._starts: dict[int, llguidance.LLMatcher] = {}
        self._matchers: dict[int, llguidance.LLMatcher] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message asks for."""
        began = time.process_time()  # not affected by what else the machine does
        process = (os.getpid(), int(began * 1e9))
        for row in message.get("free", ()):
            self._matchers.pop(row, None)
        for number in message.get("drop", ()):
            self._starts.pop(number, None)
        for number, (kind, text, choices) in message.get("sources", {}).items():
            self._sources[int(number)] = Constraint(kind=kind, text=text, choices=tuple(choices))
        rows: list[tuple[int, str]] = []
        spent: dict[int, list[float]] = {}  # by constraint: index of its last row, longest time of a row, and the sum
        last = began
        for index, (row, number, is_new, token_ids) in enumerate(message["rows"]):
            PROGRESS.pack_into(self._memory, 0, row + 1, *process)
            rows.append(self._advance(row, number, is_new, token_ids))
            now = time.process_time()
            _, longest, total = spent.get(number, (0, 0.0, 0.0))
            spent[number] = [index, max(longest, now - last), total + now - last]
            last = now
            if now - began > _MESSAGE_SECONDS:
                break
        seconds = time.process_time() - began
        ahead = self._look_ahead(message, rows, process)
        PROGRESS.pack_into(self._memory, 0, 0, *process)
        slow = [
            [index, max(longest, total if total > _SLOW_SUM_SECONDS else 0.0)]
            for index, longest, total in spent.values()
            if longest > _SLOW_ROW_SECONDS or total > _SLOW_SUM_SECONDS
        ]
        return {"rows": rows, "slow": slow, "ahead": ahead, "seconds": seconds, "mask_seconds": self._mask_seconds}

    def _advance(self, row: int, number: int, is_new: bool, token_ids: list[int]) -> tuple[int, str]:
        """Consumes tokens and writes the mask of the next one. Returns the row's state and its error."""
        if is_new:
            try:
                self._matchers[row] = self._start(number).deep_copy()
            except MemoryError:
                os.abort()  # as llguidance does where it lacks memory, so that the server knows what the cause is
            except (ValueError, RecursionError) as error:
                return HAS_FAILED, str(error) or type(error).__name__
        matcher = self._matchers[row]
        if token_ids and not matcher.consume_tokens(token_ids):
            return IS_REFUSED | HAS_FAILED, matcher.get_error()
        began = time.process_time()
        found = self._write_mask(matcher, row, 0)
        self._mask_seconds = time.process_time() - began
        return found

    def _look_ahead(
        self, message: dict[str, Any], rows: Sequence[tuple[int, str]], process: tuple[int, int]
    ) -> list[list[int]]:
        """Writes the masks after the draft tokens of the answered rows, and returns the states there."""
        began = time.process_time()
        found: list[list[int]] = [[] for _ in rows]
        for index, drafts in enumerate(message.get("ahead", ())[: len(rows)]):
            if not drafts or rows[index][0] & ~MAY_END or time.process_time() - began > _AHEAD_SECONDS:
                continue
            row = message["rows"][index][0]
            PROGRESS.pack_into(self._memory, 0, row + 1, *process)
            matcher = self._matchers[row].deep_copy()
            for token_id in drafts[: self._num_masks - 1]:  # a row has no memory for more
                if not matcher.consume_tokens([token_id]):
                    break
                state, _ = self._write_mask(matcher, row, 1 + len(found[index]))
                if state & ~MAY_END or time.process_time() - began > _AHEAD_SECONDS:
                    break
                found[index].append(state)
        return found

    def _write_mask(self, matcher: llguidance.LLMatcher, row: int, index: int) -> tuple[int, str]:
        """Writes a mask of a row to the shared memory. Returns the matcher's state and its error."""
        offset = HEADER_BYTES + (row * self._num_masks + index) * self._mask_bytes
        matcher.unsafe_compute_mask_ptr(self._address + offset, self._mask_bytes)
        if matcher.is_error():
            error = matcher.get_error()
            return HAS_FAILED, "no token may follow that it allows" if error.startswith(_NO_TOKEN_LEFT) else error
        may_end = matcher.is_accepting()
        if matcher.is_stopped():
            return (MAY_END | IS_COMPLETE, "") if may_end else (HAS_FAILED, matcher.stop_reason())
        may_end = may_end or self._may_end_by_token(matcher, offset)
        state = MAY_END if may_end else 0
        mask = self._memory[offset : offset + self._mask_bytes]
        if len(mask) - mask.count(0) > self._end_bits.bit_count():
            return state, ""
        if int.from_bytes(mask, "little") & ~self._end_bits:
            return state, ""
        return (state | MUST_END, "") if may_end else (HAS_FAILED, "it has an end token before its end")

    def _may_end_by_token(self, matcher: llguidance.LLMatcher, offset: int) -> bool:
        """Returns whether a grammar that must go on has an end token as its last part.

        An end token is no part of an output but ends it. So those that something must follow are removed from the mask.
        """
        may_end = False
        for token_id in self._eos_token_ids:
            index, bit = offset + token_id // 8, 1 << token_id % 8
            if self._memory[index] & bit:
                after = matcher.deep_copy()
                if after.consume_token(token_id) and after.is_accepting():
                    may_end = True
                else:
                    self._memory[index] &= ~bit
        return may_end

    def _start(self, number: int) -> llguidance.LLMatcher:
        """Returns the start of a constraint, compiled when its first sample comes.

        Raises:
          ValueError: The constraint is malformed or cannot be enforced.
        """
        if number in self._sources:
            grammar = source(self._sources.pop(number), self._vocabulary.shown)
            self._starts[number] = llguidance.LLMatcher(
                self._vocabulary.tokens, grammar, log_level=0, limits=self._limits
            )
        start = self._starts[number]
        if start.is_error():
            raise ValueError(start.get_error())
        return start


def _load(settings: Mapping[str, Any]) -> ConstraintVocabulary:
    return ConstraintVocabulary(Path(settings["tokenizer_file"]), settings["vocab_size"], settings["eos_token_ids"])


def main(arguments: Sequence[str]) -> None:
    """Runs the template of the processes for constraints; see `run_template`."""
    run_template(arguments, _load, Worker)
