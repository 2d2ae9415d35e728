"""Processes for constraints that are suspended, by whom it may be: limits hold, and others take their places."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.errors import EngineStoppedError
from meshserve.runtime.text import worker_processes
from meshserve.runtime.text.constraint_limits import ConstraintLimits, LimitError
from meshserve.runtime.text.grammar import Grammars
from meshserve.runtime.text.mask_exchange import MaskExchange, Matcher
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.hostile.corpus import AMBIGUOUS
from tests.runtime.text.test_constraint_isolation import LETTERS, letters_of, process_id
from tests.waiting import WAIT_SECONDS, wait_for


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    """With a short limit, which is exceeded by what is stopped only."""
    limits = ConstraintLimits(seconds=1.0, memory_bytes=64 << 20)
    grammars = Grammars(DEMO_DIRECTORY / "tokenizer.json", 2048, (0, 2), limits)
    grammars.wait_until_ready()
    yield grammars
    grammars.close()


def stop(pid: int) -> None:
    """Suspends a process, and waits until it is."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def template_of(grammars: Grammars) -> int:
    assert grammars._template._process is not None
    return grammars._template._process.pid


def renew_until_settled(exchange: MaskExchange, matcher: Matcher) -> None:
    """As the engine does, which has other things to do meanwhile."""

    def has_settled() -> bool:
        exchange.renew(0.01)
        return not matcher.is_waiting

    wait_for(has_settled)


def test_a_stopped_shared_worker_is_replaced(grammars: Grammars) -> None:
    exchange, matcher = MaskExchange(), Matcher(grammars.compile(LETTERS))
    letters_of(grammars, matcher, 2, exchange)
    assert matcher.place is not None
    stopped = matcher.place[0].worker
    stop(process_id(stopped))
    exchange.advance(matcher, matcher.token_ids[0])
    renew_until_settled(exchange, matcher)
    assert matcher.failure is None and matcher.place is not None and matcher.place[0].worker is not stopped
    wait_for(lambda: not Path(f"/proc/{process_id(stopped)}").exists())


def test_a_stopped_worker_of_one_constraint_fails_its_samples_at_the_limit(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit, and not at several times as much: no processor time tells that it computes."""
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_MASK_SECONDS", 0.0)
    grammar = grammars.compile(Constraint(kind="grammar", text=AMBIGUOUS))
    monkeypatch.setattr(worker_processes, "_MAX_STARVATION", 1e9)
    exchange, matcher = MaskExchange(), Matcher(grammar)
    letters_of(grammars, matcher, 1, exchange)
    worker = grammar.compiled.worker
    assert worker is not None
    stop(process_id(worker))
    exchange.advance(matcher, matcher.token_ids[0])
    renew_until_settled(exchange, matcher)
    assert matcher.failure == "a token mask takes longer than 1 s (constraint_seconds)" and worker.is_lost
    letters_of(grammars, Matcher(grammar), 1, exchange)  # a new one


@pytest.mark.parametrize("which", ["the template", "all processes"])
def test_a_stopped_template_is_started_again(
    which: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that wait for it go on with the processes of the new one."""
    monkeypatch.setattr(worker_processes, "_ANSWER_SECONDS", 1.0)
    exchange, matcher = MaskExchange(), Matcher(grammars.compile(LETTERS))
    letters_of(grammars, matcher, 2, exchange)
    template = template_of(grammars)
    for pid in [template, *children(template)] if which == "all processes" else [template]:
        stop(pid)
    fresh = Matcher(grammars.compile(LETTERS, tenant="another"))  # cached, but its worker has yet to be forked
    for each in (matcher, fresh):
        exchange.advance(each, matcher.token_ids[0])
    checking = threading.Thread(target=check_until, args=(grammars, lambda: template_of(grammars) != template))
    checking.start()
    for each in (matcher, fresh):
        renew_until_settled(exchange, each)
        assert each.failure is None
    checking.join(WAIT_SECONDS)
    assert "does not answer" in caplog.text and not Path(f"/proc/{template}").exists()
    wait_for(lambda: compiles(grammars, "[0-9]{7}"))


def check_until(grammars: Grammars, is_done) -> None:
    while not is_done():
        grammars.check()
        time.sleep(0.01)


def compiles(grammars: Grammars, regex: str) -> bool:
    try:
        return bool(grammars.compile(Constraint(kind="regex", text=regex)).mask.any())
    except (EngineStoppedError, LimitError):
        return False


def test_a_constraint_whose_process_is_stopped_does_not_wait(grammars: Grammars) -> None:
    """Compiling is resumed when it is the constraint's turn among those that take long."""
    for worker, _ in grammars._spares:
        worker.send({"sources": {}, "rows": []})
        assert worker.wait(WAIT_SECONDS)
        worker.receive()
        stop(process_id(worker))
    assert grammars.compile(LETTERS).mask.any()


def test_a_template_that_answers_is_left_alone(grammars: Grammars) -> None:
    before = template_of(grammars)
    for _ in range(50):
        grammars.check()
        grammars._template._read_pending_reports()
    assert template_of(grammars) == before and grammars._template.num_starts == 1


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_no_command_to_a_stopped_template_is_lost(grammars: Grammars) -> None:
    """Far more of them than its socket has room for, and a worker that is forked meanwhile."""
    suspended = grammars._template.fork()
    assert answers(suspended)
    pid, template = process_id(suspended), template_of(grammars)
    stop(pid)
    stop(template)
    for _ in range(4_000):
        suspended.pause()
    late = grammars._template.fork()
    suspended.kill()
    assert len(grammars._template._unsent) > 1_000 and is_running(pid)
    os.kill(template, signal.SIGCONT)

    def has_ended() -> bool:
        grammars.check()
        return not is_running(pid)

    wait_for(has_ended)
    assert answers(late)
    assert template_of(grammars) == template and not grammars._template._unsent


def answers(worker: worker_processes.WorkerProcess) -> bool:
    worker.send({"sources": {}, "rows": []})
    return worker.wait(WAIT_SECONDS) and worker.receive()["rows"] == []


def test_a_template_that_leaves_too_many_commands_unread_is_ended_with_its_workers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_processes, "_MAX_UNSENT", 10)
    template = template_of(grammars)
    pids = [template, *children(template)]
    worker, _ = grammars._spares[0]
    stop(template)

    def is_ended() -> bool:
        worker.pause()
        return not any(map(is_running, pids))

    wait_for(is_ended)
    assert "reads no commands" in caplog.text
    wait_for(lambda: compiles(grammars, "[0-9]{7}"))


def test_workers_that_are_suspended_at_once_end_with_their_template() -> None:
    """Before they could ask to end with it."""
    settings = {"stack_bytes": 16 << 20, "mask_bytes": 4, "num_ahead": 0}
    template = worker_processes.WorkerTemplate(settings, 512 << 20, "text_worker")
    template.wait_until_ready()
    assert template._process is not None
    pid = template._process.pid
    stop(pid)
    workers = [template.fork() for _ in range(20)]
    for worker in workers:
        worker.pause()
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: len(children(pid)) == len(workers))
    pids = children(pid)
    template.close()
    wait_for(lambda: not any(map(is_running, pids)))
