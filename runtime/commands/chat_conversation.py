"""The conversation of `meshserve chat`: its messages, its answers, and the screen on which they are shown.

Answers are received in an asyncio event loop, which an interrupt reaches as a cancellation. In a blocking call, the
KeyboardInterrupt could be raised inside gRPC while it holds a lock, and every later answer would block forever.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..client.answers import Answer
from ..client.client import AsyncClient, CallError, Finish
from ..client.messages import ChatFields, Chunk
from ..text.answers.answer_parts import AnswerPart, ContentPart


class Screen(Protocol):
    """Where the user types and reads."""

    def read(self) -> str | None:
        """Returns the next line, stripped, or None at the end of the input."""

    def answer(self) -> contextlib.AbstractContextManager[Callable[[AnswerPart], None]]:
        """Shows one answer: the context gives a function that takes its parts."""

    def note(self, text: str) -> None:
        """Shows something that is no answer."""

    def error(self, text: str) -> None:
        """Shows an error."""


@dataclass
class Speed:
    """How fast the last answer came."""

    num_tokens: int = 0
    first_seconds: float = 0.0
    total_seconds: float = 0.0

    def __str__(self) -> str:
        rest_seconds = self.total_seconds - self.first_seconds
        rate = f", then {(self.num_tokens - 1) / rest_seconds:.1f} tokens/s" if rest_seconds > 0 else ""
        return f"{self.num_tokens} tokens; the first after {1000 * self.first_seconds:.0f} ms{rate}"


class Conversation:
    """The messages so far. A turn without an answer is dropped, so that roles always alternate.

    Attributes:
      messages: The messages, with the system message first if there is one.
      fields: Sampling parameters of the next answers.
      system: The system message; empty if there is none.
      speed: The speed of the last answer.
      open_calls: The tools that the last answer has called and whose results have not been given.
      screen: Where answers and notes are shown.
    """

    def __init__(
        self, runner: asyncio.Runner, client: AsyncClient, screen: Screen, *, system: str = "", fields: ChatFields
    ):
        self.num_failures = 0
        self.screen, self.fields, self.system, self.speed = screen, fields, system, Speed()
        self._runner, self._client = runner, client
        self.messages: list[dict[str, Any]] = []
        self.open_calls: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all messages except the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.open_calls = []

    def say(self, content: str) -> None:
        """Sends one user message and streams the answer to the screen. An interrupt stops the answer."""
        self._ask([{"role": "user", "content": content}])

    def give_result(self, content: str) -> None:
        """Takes the result of the next tool call. After the last one, the model goes on."""
        result = {"role": "tool", "content": content}
        if len(self.open_calls) > 1:
            self.messages.append(result)
            self.open_calls.pop(0)
            self._note_calls()
        else:
            self._ask([result])

    def _ask(self, new: list[dict[str, Any]]) -> None:
        """Sends new messages behind the others, and streams the answer to the screen."""
        heard = Answer(tool_calls=[])
        try:
            with self.screen.answer() as write:
                self._runner.run(self._hear([*self.messages, *new], heard, write))
            self.screen.note("")
        except KeyboardInterrupt:
            self.screen.note(" [stopped]")
        except CallError as error:
            self.num_failures += 1
            if heard.content:
                self.screen.note("")
            self.screen.error(str(error))
        if heard.content or heard.reasoning or heard.tool_calls:
            self.messages += [*new, heard.message()]
            self.open_calls = [call.name for call in heard.tool_calls]
            self._note_calls()

    def _note_calls(self) -> None:
        if self.open_calls:
            self.screen.note(f"/result TEXT gives the model the result of {self.open_calls[0]}.")

    def about_server(self) -> str:
        """Returns what the server and its model are, and its load."""
        try:
            info = self._runner.run(self._client.model_info())
            load = self._runner.run(self._client.load())
        except CallError as error:
            return str(error)
        return (
            f"{info.name} ({info.size} parameters, {info.dtype}) on {info.num_devices} x "
            f"{info.device_kind}, tp {info.tp_size}; context of {info.max_context_tokens:,} tokens\n"
            f"{load.num_running} requests run, {load.num_waiting} wait; {load.num_free_pages} of {load.num_pages} KV "
            f"pages are free\nlast answer: {self.speed}"
        )

    async def _hear(self, messages: list[dict[str, Any]], heard: Answer, write: Callable[[AnswerPart], None]) -> None:
        """Shows the answer and adds its parts to `heard`. Cancellation also cancels the call."""
        began = time.monotonic()
        self.speed = Speed()
        fields: ChatFields = {"answer": {}}
        fields.update(self.fields)
        chunks = self._client.chat(messages, **fields)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                for part in _parts(chunk):
                    heard.add(part)
                    write(part)
                self._count(len(chunk.token_ids), chunk.finish, time.monotonic() - began)

    def _count(self, num_tokens: int, finish: Finish | None, seconds: float) -> None:
        if num_tokens and not self.speed.num_tokens:
            self.speed.first_seconds = seconds
        self.speed.num_tokens += num_tokens
        if finish is not None:
            self.speed.total_seconds = seconds


def _parts(chunk: Chunk) -> tuple[AnswerPart, ...]:
    """Returns the parts of a chunk. An older server does not divide its answers."""
    return chunk.parts or ((ContentPart(chunk.text),) if chunk.text else ())
