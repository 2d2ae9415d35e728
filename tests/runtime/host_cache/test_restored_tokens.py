"""Tests that an engine on virtual devices samples the same tokens whether pages are computed, kept or restored."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.runtime.api.request import FinishReason
from tests import checkpoints
from tests.runtime.token_server import PROMPTS, Server
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(
        tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=333, intermediate_size=90
    )


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    server = Server(model, tp=4)
    yield server
    server.launched.close()
    assert server.launched.engine.failure is None


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """The tokens of each prompt, computed before anything can have been restored."""
    served = [server.serve(index) for index in range(4)]
    assert [cached for _, cached in served] == [0] * 4
    return [tokens for tokens, _ in served]


def test_restored_pages_give_the_same_tokens(server: Server, expected: list[list[int]]) -> None:
    before = server.host.counts.num_restored
    for index in (0, 1, 2, 3, 0, 2):
        tokens, num_cached = server.serve(index)
        assert tokens == expected[index]
        assert num_cached == (len(PROMPTS[index]) - 1) // 4 * 4
    assert server.host.counts.num_restored > before + 80


def test_requests_that_return_together_give_the_same_tokens(server: Server, expected: list[list[int]]) -> None:
    """They take each other's pages, are preempted and restored."""
    names = [server.submit(index) for index in (3, 1, 0, 2, 1, 3, 0)]
    server.wait(*names)
    for name in names:
        assert server.tokens[name] == expected[int(name[0])], name


def test_cancelled_in_mid_copy(server: Server, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    server_evicts(server, but=2)
    is_there = threading.Event()
    has_arrived, wait = server.copies.has_arrived, server.copies.wait
    monkeypatch.setattr(server.copies, "has_arrived", lambda ticket: has_arrived(ticket) if is_there.is_set() else None)
    monkeypatch.setattr(server.copies, "wait", lambda ticket: is_there.wait(0.001) and wait(ticket))
    name = server.submit(2)
    wait_for(lambda: server.host.is_fetching)
    server.launched.engine.cancel(name, FinishReason.CANCELLED)
    server.wait(name)
    assert server.tokens[name] == [] and not server.host.is_fetching
    is_there.set()
    assert server.serve(2)[0] == expected[2]


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_failures_in_mid_copy(
    method: str, server: Server, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.launched.engine.flush_prefix_cache()
    server_evicts(server, but=0)
    before = server.host.counts.num_failed
    server.fail_copies(method, monkeypatch)
    for index in (0, 3, 2, 0, 1, 3):
        assert server.serve(index)[0] == expected[index]
    assert server.host.counts.num_failed > before


def test_a_preempted_request_continues_with_restored_pages(server: Server, expected: list[list[int]]) -> None:
    server.launched.engine.flush_prefix_cache()
    server.may_go_on.clear()
    preempted = server.submit(3)
    wait_for(lambda: preempted in server.tokens)
    before = server.host.counts.num_restored
    first = server.submit(1, priority=1)  # both need 44 of 40 pages
    server.may_go_on.set()
    server.wait(preempted, first)
    assert server.tokens[preempted] == expected[3] and server.tokens[first] == expected[1]
    assert server.host.counts.num_restored > before


def test_a_flush_empties_host_memory(server: Server, expected: list[list[int]]) -> None:
    server.launched.engine.flush_prefix_cache()
    assert server.host.num_pages == 0
    assert server.serve(1) == (expected[1], 0)


def test_the_tier_starts_over_with_another_mesh(server: Server, expected: list[list[int]]) -> None:
    server.launched.resharder.change_tp(2)
    assert server.host.num_pages == 0
    server.copies = server.launched.engine.runner.copies
    for index in (0, 1, 2, 3, 0, 1):
        assert server.serve(index)[0] == expected[index]
    assert server.host.num_pages > 0


def server_evicts(server: Server, but: int) -> None:
    """Makes the pages of a prompt leave the devices, and keeps them in host memory."""
    for index in {0, 1, 2, 3} - {but}:
        server.serve(index)
