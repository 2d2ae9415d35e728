"""`meshserve chat`: a conversation in the terminal, or one line after the other from a pipe. Imports no jax.

Ctrl-C ends the answer that is coming, and keeps what has come of it. Ctrl-D or /quit ends; /reset forgets.

An answer is heard in an event loop, which an interrupt reaches as a cancellation. In a blocking call it would be an
exception between any two lines of grpc, which may then hold a lock for ever, and the next answer would never come.
"""

import asyncio
import contextlib
import io
import sys

import grpc

from ..client.client import AsyncClient, CallError

_HELP = "Ctrl-C stops an answer; /reset forgets the conversation; /quit or Ctrl-D ends."
_PROMPT = "> "


def chat(
    target: str,
    *,
    max_tokens: int,
    temperature: float,
    system: str,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
) -> int:
    """Talks to the server at `target` until the input ends. Errors are printed, and the conversation goes on.

    Args:
      credentials, token: as `client.Client` takes them.
      max_tokens: of each answer.
      temperature: 0 is greedy.
      system: a system message to begin with; empty for none.

    Returns:
      The exit status: 1 if the input is a pipe and any answer failed, else 0.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is no UTF-8 ends no conversation
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives `input` a history and keys to edit with

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
    """The next line, stripped; None at the end of the input."""
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
    """What has been said. A turn that brings no answer is forgotten, so that speakers always alternate."""

    def __init__(
        self, runner: asyncio.Runner, client: AsyncClient, *, max_tokens: int, temperature: float, system: str
    ):
        self.num_failures = 0
        self._runner = runner
        self._client = client
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def close(self) -> None:
        self._runner.run(self._client.close())

    def say(self, content: str) -> None:
        """Sends one message of the user, and prints the answer as it comes. An interrupt ends the answer."""
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
        """Prints the answer, and adds its parts to `heard`. If it is cancelled, so is the call."""
        chunks = self._client.chat(messages, max_tokens=self._max_tokens, temperature=self._temperature)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                heard.append(chunk.text)
                print(chunk.text, end="", flush=True)


async def _client(target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> AsyncClient:
    """It wants to be made where it is used."""
    return AsyncClient(target, credentials=credentials, token=token)
