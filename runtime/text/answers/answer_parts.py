"""The parts of an answer, in the order in which a parser finds them, and the contract of what reads tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """More of what the model tells the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """The beginning of a tool call. Its arguments follow."""

    index: int  # counts the calls of an answer from 0
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPart:
    """More of the arguments of a tool call: together, its parts are a JSON object."""

    index: int
    text: str


AnswerPart = ReasoningPart | ContentPart | CallPart | ArgumentsPart


def size_of(part: AnswerPart) -> int:
    """Returns how much a part adds to an answer: its characters, or 1 for the beginning of a call."""
    return 1 if isinstance(part, CallPart) else len(part.text)


def behind(parts: Sequence[AnswerPart], size: int) -> tuple[AnswerPart, ...]:
    """Returns what comes behind the first `size` of the parts, as `size_of` counts it."""
    left: list[AnswerPart] = []
    for part in parts:
        skipped = min(size, size_of(part))
        size -= skipped
        if skipped < size_of(part):
            left.append(part if isinstance(part, CallPart) else replace(part, text=part.text[skipped:]))
    return tuple(left)


class CallReader(Protocol):
    """Reads one tool call, from behind the tag that opens it."""

    name: str | None  # of the function, once it is known
    is_ended: bool  # nothing more belongs to the call
    is_malformed: bool  # it is no call; only before the name is known

    def push(self, text: str) -> str:
        """Takes more text, and returns more of the arguments.

        After the end of the call, `rest` is the text that does not belong to it.
        """
        ...

    @property
    def rest(self) -> str:
        """The text that has been taken and does not belong to the call."""
        ...


def held_back(text: str, *tags: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of one of the tags."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0
