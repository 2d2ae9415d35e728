"""`meshserve chat`: an interactive conversation in the terminal, or one message per line from a pipe.

Ctrl-C stops the current answer and keeps the text received so far. Ctrl-D or /quit ends the chat; /reset clears the
conversation. Does not import JAX.

Answers are received in an asyncio event loop, which an interrupt reaches as a cancellation. In a blocking call, the
KeyboardInterrupt could be raised inside gRPC while it holds a lock, and every later answer would block forever.
"""

import asyncio
import contextlib
import io
import sys

import grpc

from ..client.client import AsyncClient, CallError
from ..client.messages import SamplingFields

_HELP = "Ctrl-C stops an answer; /reset clears the conversation; /quit or Ctrl-D exits."
_PROMPT = "> "


def chat(
    target: str,
    *,
    max_tokens: int,
    temperature: float | None,
    system: str,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
) -> int:
    """Runs a conversation with the server at `target` until the input ends. Errors are printed and do not end it.

    Args:
      credentials: See `client.Client`.
      token: See `client.Client`.
      max_tokens: Maximum number of tokens per answer.
      temperature: Sampling temperature. 0 is greedy, None the server's default.
      system: System message that starts the conversation. Empty for none.

    Returns:
      The exit status: 1 if the input is not a terminal and any answer failed, else 0.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 in the input must not end the conversation
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - adds history and line editing to `input`

        print(_HELP)
    with asyncio.Runner() as runner:
        client = runner.run(_client(target, credentials, token))
        conversation = Conversation(runner, client, max_tokens=max_tokens, temperature=temperature, system=system)
        try:
            while (line := _read_line(is_terminal)) is not None:
                if line == "/quit":
                    break
                if line == "/reset":
                    conversation.reset()
                elif line:
                    conversation.say(line)
        finally:
            conversation.close()
    return 1 if conversation.num_failures and not is_terminal else 0


def _read_line(is_terminal: bool) -> str | None:
    """Returns the next line, stripped, or None at the end of the input."""
    while True:
        try:
            return input(_PROMPT if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n" + _HELP)


class Conversation:
    """The messages so far. A turn without an answer is dropped, so that roles always alternate."""

    def __init__(
        self, runner: asyncio.Runner, client: AsyncClient, *, max_tokens: int, temperature: float | None, system: str
    ):
        self.num_failures = 0
        self._runner = runner
        self._client = client
        self._sampling: SamplingFields = {"max_tokens": max_tokens}
        if temperature is not None:
            self._sampling["temperature"] = temperature
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def close(self) -> None:
        self._runner.run(self._client.close())

    def say(self, content: str) -> None:
        """Sends one user message and streams the answer to stdout. An interrupt stops the answer."""
        question = {"role": "user", "content": content}
        heard: list[str] = []
        try:
            self._runner.run(self._hear([*self.messages, question], heard))
            print()
        except KeyboardInterrupt:
            print(" [stopped]", flush=True)
        except CallError as error:
            self.num_failures += 1
            print("\n" if any(heard) else "", end="", flush=True)
            print(f"meshserve: {error}", file=sys.stderr, flush=True)
        if answer := "".join(heard):
            self.messages += [question, {"role": "assistant", "content": answer}]

    async def _hear(self, messages: list[dict[str, str]], heard: list[str]) -> None:
        """Prints the answer and appends its parts to `heard`. Cancellation also cancels the call."""
        chunks = self._client.chat(messages, **self._sampling)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                heard.append(chunk.text)
                print(chunk.text, end="", flush=True)


async def _client(target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> AsyncClient:
    """Creates the client inside the event loop that uses it, as grpc.aio requires."""
    return AsyncClient(target, credentials=credentials, token=token)
