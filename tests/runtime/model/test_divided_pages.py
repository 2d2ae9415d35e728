"""Tests that devices that divide the pages of a KV head among them sample the tokens of devices that repeat it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshserve.runtime.api.request import FinishReason
from tests import checkpoints
from tests.runtime.token_server import Server
from tests.waiting import wait_for

# KV heads, TP size, and context-parallel sizes.
SPLITS = [(1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 8, 1), (2, 8, 2), (2, 8, 4)]
LIMITS = {"max_running": 3, "max_step_tokens": 16, "max_context": 128, "num_pages": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    found: dict[int, Path] = {}

    def save(kv_heads: int) -> Path:
        if kv_heads not in found:
            found[kv_heads] = checkpoints.save_checkpoint(
                tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_key_value_heads=kv_heads
            )
        return found[kv_heads]

    return save


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[int]]]:
    """The tokens of each prompt, by the number of KV heads: those of the first server."""
    return {}


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: "kv{}-tp{}-cp{}".format(*split))
def server(request: pytest.FixtureRequest, model: Callable[[int], Path], expected: dict) -> Iterator[Server]:
    kv_heads, tp, cp = request.param
    server = Server(model(kv_heads), tp=tp, cp=cp, **LIMITS)
    server.expected = expected.setdefault(kv_heads, [server.serve(index)[0] for index in range(4)])
    yield server
    server.launched.close()
    assert server.launched.engine.failure is None


def test_prompts_one_after_another(server: Server) -> None:
    """In chunks, beside pages that are kept, and with pages that come back from host memory."""
    for index in (0, 0, 1, 2, 3, 0, 2):
        tokens, num_cached = server.serve(index)
        assert tokens == server.expected[index]
    assert num_cached and server.host.counts.num_restored


def test_prompts_together_with_preemptions_and_cancellations(server: Server) -> None:
    server.may_go_on.clear()
    low = server.submit(3)
    wait_for(lambda: low in server.tokens)
    cancelled = server.submit(2)
    names = [server.submit(index, priority=1) for index in (1, 0, 2, 3)]
    server.launched.engine.cancel(cancelled, FinishReason.CANCELLED)
    server.may_go_on.set()
    server.wait(low, cancelled, *names)
    for name, index in zip([low, *names], (3, 1, 0, 2, 3), strict=True):
        assert server.tokens[name] == server.expected[index], name
