"""Divides an answer into reasoning, content and tool calls while it is generated.

The parts do not depend on how the text is divided into pieces. What looks like a tool call and is none stays content,
tags included. A call whose arguments have begun and are cut off, by the limit of tokens, has the arguments so far.
"""

from collections.abc import Iterator

from .answer_format import END_OF_THINK, THINK, AnswerFormat, CallForm, Thinking
from .answer_parts import AnswerPart, ArgumentsPart, CallPart, CallReader, ContentPart, ReasoningPart, held_back
from .json_calls import CLOSE, JsonCall
from .xml_calls import XmlCall

_OPEN_CALL = "<tool_call>"


class AnswerParser:
    """Reads one answer.

    Args:
      form: What to expect.
    """

    def __init__(self, form: AnswerFormat):
        self._form = form
        self._text = ""  # taken and not yet passed on
        self._call: CallReader | None = None  # that is being read
        self._call_text = ""  # of the call, while its name is not known
        self._is_announced = False  # the name of the call has been passed on
        self.is_thinking = self.has_thought = form.thinking is Thinking.OPEN
        self._may_think = form.thinking is Thinking.POSSIBLE  # nothing but white space has come yet
        self._trims = self.is_thinking  # white space at the beginning of the next part is left out
        self.num_calls = 0

    def push(self, text: str) -> list[AnswerPart]:
        """Takes more of the answer, and returns the parts that are certain now."""
        self._text += text
        return _joined(self._parts(is_end=False))

    def finish(self) -> list[AnswerPart]:
        """Ends the answer, and returns the parts that have been held back."""
        return _joined(self._parts(is_end=True))

    def _parts(self, *, is_end: bool) -> Iterator[AnswerPart]:
        while True:
            before = (len(self._text), self.is_thinking, self._may_think, self._call is None)
            if self._call is not None:
                yield from self._read_call(is_end=is_end)
            elif self._may_think:
                self._begin(is_end=is_end)
            elif self.is_thinking:
                yield from self._read_reasoning(is_end=is_end)
            else:
                yield from self._read_content(is_end=is_end)
            if before == (len(self._text), self.is_thinking, self._may_think, self._call is None):
                return

    def _begin(self, *, is_end: bool) -> None:
        """Decides whether the answer begins with reasoning."""
        start = self._text.lstrip()
        if start.startswith(THINK):
            self._text = start[len(THINK) :]
            self._may_think, self._trims = False, True
            self.is_thinking = self.has_thought = True
        elif is_end or not THINK.startswith(start):
            self._may_think = False

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text

    def _read_reasoning(self, *, is_end: bool) -> Iterator[AnswerPart]:
        text, is_closed, rest = self._text.partition(END_OF_THINK)
        if is_closed:
            self._text, self.is_thinking = rest, False
            text = self._trimmed(text).rstrip("\n")
            self._trims = True
        else:
            # White space before the closing tag is left out, so it is held back as the tag is.
            size = len(text) if is_end else len(text) - held_back(text, END_OF_THINK)
            size = size if is_end else len(text[:size].rstrip("\n"))
            text, self._text = self._trimmed(text[:size]), text[size:]
        if text:
            yield ReasoningPart(text)

    def _read_content(self, *, is_end: bool) -> Iterator[AnswerPart]:
        if self._form.calls is None:
            visible, self._text = self._text, ""
        else:
            text, is_opened, rest = self._text.partition(_OPEN_CALL)
            if is_opened:
                visible, self._text = text.rstrip(), rest
                self._call, self._call_text = self._new_call(), text[len(visible) :] + _OPEN_CALL
                self._is_announced = False
            else:
                # White space before a call is left out, so it is held back as the tag is.
                visible = text if is_end else text[: len(text) - held_back(text, _OPEN_CALL)].rstrip()
                self._text = text[len(visible) :]
                if is_end and self.num_calls and not visible.strip():
                    visible = ""
        if visible := self._trimmed(visible):
            yield ContentPart(visible)

    def _new_call(self) -> CallReader:
        return XmlCall(self._form.parameters) if self._form.calls is CallForm.XML else JsonCall()

    def _read_call(self, *, is_end: bool) -> Iterator[AnswerPart]:
        call, taken, self._text = self._call, self._text, ""
        assert call is not None
        arguments = call.push(taken)
        if not self._is_announced:
            self._call_text += taken
            if call.is_malformed or (is_end and call.name is None):
                yield from self._no_call()
                return
            if call.name is not None:
                yield CallPart(self.num_calls, call.name)
                self.num_calls += 1
                self._is_announced = True
        if arguments:
            yield ArgumentsPart(self.num_calls - 1, arguments)
        if call.is_ended:
            self._call, self._text, self._trims = None, call.rest, True

    def _no_call(self) -> Iterator[AnswerPart]:
        """Passes on as content what has turned out to be no call."""
        end = self._call_text.find(CLOSE)
        end = len(self._call_text) if end < 0 else end + len(CLOSE)
        self._call, self._text = None, self._call_text[end:]
        yield ContentPart(self._trimmed(self._call_text[:end]))


def _joined(parts: Iterator[AnswerPart]) -> list[AnswerPart]:
    """Joins neighbours of one kind."""
    joined: list[AnswerPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            joined[-1] = ReasoningPart(last.text + part.text)
        elif isinstance(part, ContentPart) and isinstance(last, ContentPart):
            joined[-1] = ContentPart(last.text + part.text)
        elif isinstance(part, ArgumentsPart) and isinstance(last, ArgumentsPart) and last.index == part.index:
            joined[-1] = ArgumentsPart(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
