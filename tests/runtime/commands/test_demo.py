"""Tests what `meshserve demo` shows: progress until the server is ready, and text while it is made."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.commands import demo
from tests.runtime.loopback import running
from tests.waiting import WAIT_SECONDS, wait_for


def test_texts_are_shown_while_they_are_made(capsys: pytest.CaptureFixture[str]):
    said: list[str] = []

    def so_far() -> str:
        said.append(capsys.readouterr().out)
        return "".join(said)

    with running() as server:
        with server.engine.holding(demo._MAX_TOKENS):
            thread = threading.Thread(target=lambda: asyncio.run(demo._show_all(server.target, time.monotonic())))
            thread.start()
            last = ord(demo._PROMPTS[0][-1])
            wait_for(lambda: f"{demo._PROMPTS[0]}{last + 1} " in so_far())  # the first token of the first text
            assert "tokens/s in total" not in so_far()
        thread.join(WAIT_SECONDS)
    text = so_far()
    assert text.index("Ready on") < text.index(demo._PROMPTS[0])
    assert all(prompt in text for prompt in demo._PROMPTS)
    assert "4 requests, 384 tokens" in text and "Free KV pages afterwards: 90 of 100" in text


class StartingClient:
    """Tells one state after the other."""

    def __init__(self, *states: tuple[Any, str]):
        self._states = iter(states)

    async def server_info(self) -> SimpleNamespace:
        state, progress = next(self._states)
        return SimpleNamespace(state=state, progress=progress)


def test_progress_is_shown_until_the_server_is_ready(capsys: pytest.CaptureFixture[str]):
    starting = pb.SERVER_STATE_STARTING
    client: Any = StartingClient(
        (starting, "loading the weights"), (starting, "loading the weights"), (starting, "compiling the programs"),
        (pb.SERVER_STATE_READY, ""),
    )  # fmt: skip
    asyncio.run(demo._ready(client, time.monotonic()))
    assert capsys.readouterr().out == "  loading the weights ...\n  compiling the programs ...\n"
