"""Sends completions to a gateway as an OpenAI client does, and measures what comes back."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.waiting import WAIT_SECONDS


@dataclass
class Answer:
    """What came back for one prompt."""

    text: str = ""
    finish_reason: str = ""
    first_seconds: float = 0.0  # until the first text
    error: str = ""


@dataclass
class Load:
    """A list of prompts, of which a fixed number is under way at any time."""

    url: str
    prompts: Sequence[str]
    max_tokens: int
    concurrency: int
    is_enough: Callable[[int], bool] = lambda number: False  # whether a prompt and all later ones are left out
    answers: list[Answer] = field(default_factory=list)  # in the order of the prompts
    num_done: int = 0

    def run(self) -> list[Answer]:
        """Sends the prompts and waits for all answers."""
        asyncio.run(self._run())
        return self.answers

    async def _run(self) -> None:
        numbers = iter(range(len(self.prompts)))
        timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._worker(session, numbers) for _ in range(self.concurrency)))

    async def _worker(self, session: aiohttp.ClientSession, numbers) -> None:  # noqa: ANN001
        for number in numbers:
            if self.is_enough(number):
                return
            self.answers.append(Answer())  # numbers come in order, and nothing is awaited in between
            try:
                await self._complete(session, self.prompts[number], self.answers[number])
            except Exception as error:
                self.answers[number].error = f"{type(error).__name__}: {error}"
            self.num_done += 1

    async def _complete(self, session: aiohttp.ClientSession, prompt: str, answer: Answer) -> None:
        body = {"model": "demo", "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": True}
        began = time.monotonic()
        async with session.post(f"{self.url}/v1/completions", json=body | {"ignore_eos": True}) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                message = json.loads(data)
                if "error" in message:
                    answer.error = json.dumps(message["error"])
                    return
                for choice in message["choices"]:
                    if choice["text"] and not answer.text:
                        answer.first_seconds = time.monotonic() - began
                    answer.text += choice["text"]
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if not answer.finish_reason:
            answer.error = "the stream ended before its last message"
