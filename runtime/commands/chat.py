"""`meshserve chat`: an interactive conversation in the terminal, or one message per line from a pipe.

A terminal has history, completion of commands, and answers rendered as markdown while they arrive
(`chat_terminal.py`); a pipe gets the plain text. Ctrl-C stops the current answer and keeps the text received so far.
Ctrl-D or /quit ends the chat; `chat_commands.py` has the other commands. Does not import JAX.

Answers are received in an asyncio event loop, which an interrupt reaches as a cancellation. In a blocking call, the
KeyboardInterrupt could be raised inside gRPC while it holds a lock, and every later answer would block forever.
"""

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from ..client.client import AsyncClient, CallError, Finish
from ..client.messages import ChatFields
from .chat_commands import HINT, run_command

_HISTORY = Path("~/.cache/meshserve/chat_history")


class Screen(Protocol):
    """Where the user types and reads."""

    def read(self) -> str | None:
        """Returns the next line, stripped, or None at the end of the input."""

    def answer(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Shows one answer: the context gives a function that takes its text part by part."""

    def note(self, text: str) -> None:
        """Shows something that is no answer."""

    def error(self, text: str) -> None:
        """Shows an error."""


class PipeScreen:
    """Lines from standard input, and plain text to standard output."""

    def read(self) -> str | None:
        try:
            return input().strip()
        except EOFError:
            return None

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        yield lambda text: print(text, end="", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def error(self, text: str) -> None:
        print(f"meshserve: {text}", file=sys.stderr, flush=True)


def chat(
    target: str,
    *,
    max_tokens: int | None,
    temperature: float | None,
    system: str,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
) -> int:
    """Runs a conversation with the server at `target` until the input ends. Errors are printed and do not end it.

    Args:
      credentials: See `client.Client`.
      token: See `client.Client`.
      max_tokens: Maximum number of tokens per answer. None is what the server allows.
      temperature: Sampling temperature. 0 is greedy, None the server's default.
      system: System message that starts the conversation. Empty for none.

    Returns:
      The exit status: 1 if the input is not a terminal and any answer failed, else 0.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 in the input must not end the conversation
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    fields: ChatFields = {}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if temperature is not None:
        fields["temperature"] = temperature
    with asyncio.Runner() as runner:
        client = runner.run(_client(target, credentials, token))
        conversation = Conversation(runner, client, _screen(is_terminal), system=system, fields=fields)
        try:
            conversation.run(is_terminal)
        finally:
            runner.run(client.close())
    return 1 if conversation.num_failures and not is_terminal else 0


def _screen(is_terminal: bool) -> Screen:
    if not is_terminal:
        return PipeScreen()
    from .chat_terminal import TerminalScreen  # not at module level: a pipe does not need its libraries

    return TerminalScreen(_HISTORY.expanduser())


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
      speed: Of the last answer.
      screen: Where answers and notes are shown.
    """

    def __init__(
        self, runner: asyncio.Runner, client: AsyncClient, screen: Screen, *, system: str = "", fields: ChatFields
    ):
        self.num_failures = 0
        self.screen, self.fields, self.system, self.speed = screen, fields, system, Speed()
        self._runner, self._client = runner, client
        self.messages: list[dict[str, str]] = []
        self.reset()

    def run(self, is_terminal: bool) -> None:
        """Reads lines until the input ends or a command ends the chat."""
        if is_terminal:
            self.screen.note(HINT)
        while True:
            try:
                line = self.screen.read()
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                self.screen.note(HINT)
                continue
            if line is None or run_command(self, line) == "quit":
                return

    def reset(self) -> None:
        """Forgets all messages except the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, content: str) -> None:
        """Sends one user message and streams the answer to the screen. An interrupt stops the answer."""
        question = {"role": "user", "content": content}
        heard: list[str] = []
        try:
            with self.screen.answer() as write:
                self._runner.run(self._hear([*self.messages, question], heard, write))
            self.screen.note("")
        except KeyboardInterrupt:
            self.screen.note(" [stopped]")
        except CallError as error:
            self.num_failures += 1
            if any(heard):
                self.screen.note("")
            self.screen.error(str(error))
        if answer := "".join(heard):
            self.messages += [question, {"role": "assistant", "content": answer}]

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

    async def _hear(self, messages: list[dict[str, str]], heard: list[str], write: Callable[[str], None]) -> None:
        """Shows the answer and appends its parts to `heard`. Cancellation also cancels the call."""
        began = time.monotonic()
        self.speed = Speed()
        chunks = self._client.chat(messages, **self.fields)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                heard.append(chunk.text)
                write(chunk.text)
                self._count(len(chunk.token_ids), chunk.finish, time.monotonic() - began)

    def _count(self, num_tokens: int, finish: Finish | None, seconds: float) -> None:
        if num_tokens and not self.speed.num_tokens:
            self.speed.first_seconds = seconds
        self.speed.num_tokens += num_tokens
        if finish is not None:
            self.speed.total_seconds = seconds


async def _client(target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> AsyncClient:
    """Creates the client inside the event loop that uses it, as grpc.aio requires."""
    return AsyncClient(target, credentials=credentials, token=token)
