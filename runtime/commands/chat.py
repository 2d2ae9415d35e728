"""`meshserve chat`: an interactive conversation in the terminal, or one message per line from a pipe.

A terminal has history, completion of commands, and answers rendered as markdown while they arrive, with the reasoning
dimmed (`chat_terminal.py`); a pipe gets the plain text of the content and of tool calls. Ctrl-C stops the current
answer and keeps the text received so far. Ctrl-D or /quit ends the chat; `chat_commands.py` has the other commands.
Does not import JAX.
"""

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Iterator

import grpc

from ..client.client import AsyncClient
from ..client.messages import ChatFields
from ..text.answers.answer_parts import AnswerPart
from .chat_calls import ReadableCalls
from .chat_commands import HINT, run_command
from .chat_conversation import Conversation, Screen


class PipeScreen:
    """Lines from standard input, and plain text to standard output."""

    def read(self) -> str | None:
        try:
            return input().strip()
        except EOFError:
            return None

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[AnswerPart], None]]:
        calls = ReadableCalls()

        def show(part: AnswerPart) -> None:
            print(calls.text(part), end="", flush=True)

        yield show
        print(calls.end(), end="", flush=True)

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
    adapter: str = "",
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
      adapter: Name of the adapter that answers. Empty is the model itself.

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
    if adapter:
        fields["adapter"] = adapter
    with asyncio.Runner() as runner:
        client = runner.run(_client(target, credentials, token))
        conversation = Conversation(runner, client, _screen(is_terminal), system=system, fields=fields)
        try:
            _run(conversation, is_terminal)
        finally:
            runner.run(client.close())
    return 1 if conversation.num_failures and not is_terminal else 0


def _screen(is_terminal: bool) -> Screen:
    if not is_terminal:
        return PipeScreen()
    from .chat_terminal import TerminalScreen  # not at module level: a pipe does not need its libraries

    return TerminalScreen()


def _run(conversation: Conversation, is_terminal: bool) -> None:
    """Runs the lines that the user enters, until the input ends or a command ends the chat."""
    screen = conversation.screen
    if is_terminal:
        screen.note(HINT)
    while True:
        try:
            line = screen.read()
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            screen.note(HINT)
            continue
        if line is None or run_command(conversation, line) == "quit":
            return


async def _client(target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> AsyncClient:
    """Creates the client inside the event loop that uses it, as grpc.aio requires."""
    return AsyncClient(target, credentials=credentials, token=token)
