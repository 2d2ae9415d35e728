"""Divides the outputs of one sample of an answer, whatever protocol they leave by."""

from collections.abc import Sequence

from .answer_format import AnswerFormat
from .answer_parser import AnswerParser
from .answer_parts import AnswerPart, ArgumentsPart, CallPart


class AnswerReader:
    """Reads one answer, with the tokens that it is made of.

    Args:
      form: What to expect.
      is_parallel: Whether to return all tool calls; otherwise only the first.
    """

    def __init__(self, form: AnswerFormat, *, is_parallel: bool = True):
        self._parser, self._is_parallel = AnswerParser(form), is_parallel
        self._end_of_thought = form.think_token_ids[1] if form.think_token_ids is not None else None
        self._num_tokens = 0
        self._num_until_end: int | None = None  # of thought

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens so far are reasoning, the tags included."""
        if not self._parser.has_thought:
            return 0
        if self._parser.is_thinking or self._num_until_end is None:
            return self._num_tokens
        return self._num_until_end

    def push(self, text: str, token_ids: Sequence[int], *, is_end: bool) -> list[AnswerPart]:
        """Takes more of the answer, and returns the parts that are certain now; at the end all that are left."""
        end = self._end_of_thought
        if self._num_until_end is None and end is not None and end in token_ids:
            self._num_until_end = self._num_tokens + token_ids.index(end) + 1
        self._num_tokens += len(token_ids)
        parts = self._parser.push(text)
        if is_end:
            parts += self._parser.finish()
        if self._parser.has_thought and not self._parser.is_thinking and self._num_until_end is None:
            self._num_until_end = self._num_tokens  # the end is no token
        if self._is_parallel:
            return parts
        return [part for part in parts if not isinstance(part, CallPart | ArgumentsPart) or part.index == 0]
