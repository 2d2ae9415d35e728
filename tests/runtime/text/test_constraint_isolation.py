"""Constraints that crash their parser, run on or take much memory: each costs its own request and nothing else."""

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.errors import DeadlineError, EngineStoppedError, InvalidRequestError, QuotaExceededError
from meshserve.runtime.text.constraint_limits import ConstraintLimits, LimitError, SlowCompiles, check_size
from meshserve.runtime.text.constraint_worker import Worker
from meshserve.runtime.text.grammar import Compiling, Grammars
from meshserve.runtime.text.mask_exchange import _MAX_SHARED, MaskExchange, Matcher
from meshserve.runtime.text.worker_processes import WorkerProcess
from meshserve.runtime.text.worker_protocol import PROGRESS, is_answer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.hostile.corpus import (
    AMBIGUOUS,
    VERY_AMBIGUOUS,
    chained_references,
    chained_rules,
    chained_terminals,
    nested_schema,
)
from tests.runtime.following import Follower, wait_for_masks
from tests.waiting import WAIT_SECONDS, wait_for

MODEL = DEMO_DIRECTORY
ENDLESS = Constraint(kind="json_schema", text='{"type": "integer", "multipleOf": 3000017}')
LETTERS = Constraint(kind="regex", text="[a-z]{100}")


def new_grammars(seconds: float = WAIT_SECONDS, memory_mib: int = 64) -> Grammars:
    limits = ConstraintLimits(seconds=seconds, memory_bytes=memory_mib << 20)
    return Grammars(MODEL / "tokenizer.json", 2048, (0, 2), limits)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    grammars = new_grammars()
    yield grammars
    grammars.close()


def process_id(worker: WorkerProcess) -> int:
    """Waits until a worker has begun with its first message."""
    wait_for(lambda: PROGRESS.unpack_from(worker._memory, 0)[1])
    return PROGRESS.unpack_from(worker._memory, 0)[1]


def pause(worker: WorkerProcess) -> None:
    """Suspends a worker, and waits until it is."""
    worker.pause()
    stat = Path(f"/proc/{process_id(worker)}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def next_worker(grammars: Grammars) -> WorkerProcess:
    """Returns the worker that will compile the next constraint."""
    grammars.wait_until_ready()
    return grammars._spares[0][0]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("grammar", chained_rules(3_500), "has rules 3502; allowed is 2000 or less"),
        ("grammar", chained_terminals(3_500), "has rules 3502"),
        ("grammar", "root ::= " + "(" * 30_000, "has depth 30000; allowed is 200"),
        ("json_schema", chained_references(1_300), "has references 1301; allowed is 1000"),
        ("json_schema", nested_schema(2_000), "has depth 2001"),
        ("regex", "(" * 5_000 + "a" + ")" * 5_000, "has depth 5000"),
    ],
)
def test_sizes_are_refused_by_name(grammars: Grammars, kind: str, text: str, words: str):
    with pytest.raises(LimitError, match=f"^sampling.constraint.{kind}: {words}"):
        grammars.compile(Constraint(kind=kind, text=text))  # type: ignore[arg-type]
    assert grammars.num_lost_workers == 0 and grammars.num_refused.total() == 1


def test_quoted_brackets_do_not_count(grammars: Grammars):
    for kind, text in (
        ("json_schema", json.dumps({"enum": ["[{" * 300, '\\"{' * 300]})),
        ("regex", r"\(" * 300),
        ("regex", "[(]" * 300),
        ("grammar", 'start: "' + "(" * 300 + '"'),
        ("grammar", "start: " + "/[(]/ " * 300),
    ):
        assert grammars.compile(Constraint(kind=kind, text=text)).mask.any()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["\n" * 65_000, '"' * 65_000, '"\\' * 32_000, "/\\" * 32_000, "a" * 65_000, "[" * 65_000, " " * 65_000]
)
@pytest.mark.parametrize("kind", ["grammar", "regex", "json_schema"])
def test_checking_the_size_takes_linear_time(kind: str, text: str):
    """With anything more, this test would take minutes."""
    with contextlib.suppress(LimitError):
        check_size(Constraint(kind=kind, text=text))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        None, [], {}, {"rows": [], "slow": [], "seconds": "1", "mask_seconds": 0.0},
        {"rows": [[1]], "slow": [], "seconds": 1.0, "mask_seconds": 0.0},
        {"rows": [[1, ""]], "slow": [["a", 1.0]], "seconds": 1.0, "mask_seconds": 0.0},
    ],
)  # fmt: skip
def test_malformed_answers_are_rejected(answer: object):
    assert not is_answer(answer)


@pytest.mark.parametrize(
    ("kind", "text"), [("grammar", chained_rules(1_990)), ("json_schema", chained_references(990))]
)
def test_what_the_limits_allow_has_room_on_the_stack(grammars: Grammars, kind: str, text: str):
    assert Follower(grammars.compile(Constraint(kind=kind, text=text))).matcher.failure is None  # type: ignore[arg-type]
    assert grammars.num_lost_workers == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", chained_rules(1_990)),
        ("grammar", chained_terminals(1_990)),
        ("json_schema", chained_references(990)),
    ],
)
def test_a_crash_of_the_parser_costs_one_constraint(kind: str, text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshserve.runtime.text.grammar._STACK_BYTES", 256 << 10)
    grammars = new_grammars()
    with pytest.raises(LimitError, match="nested or chained more deeply than the parser's stack allows") as caught:
        grammars.compile(Constraint(kind=kind, text=text))  # type: ignore[arg-type]
    num_lost, num_refused = grammars.counts()
    assert caught.value.limit == "stack" and num_lost == num_refused["stack"] == 1
    assert grammars.compile(LETTERS).mask.any()
    grammars.close()


def test_memory_is_limited(grammars: Grammars):
    with pytest.raises(LimitError, match=r"takes more memory than 64 MiB \(constraint_memory_mib\)"):
        grammars.compile(Constraint(kind="regex", text=".*" * 8_000))
    assert grammars.compile(LETTERS).mask.any()


def test_time_is_limited_and_the_process_ends():
    grammars = new_grammars(seconds=0.3, memory_mib=4_096)
    worker = next_worker(grammars)
    with pytest.raises(LimitError, match=r"takes longer to compile than 0.3 s \(constraint_seconds\)"):
        grammars.compile(ENDLESS)
    wait_for(lambda: not is_alive(process_id(worker)))
    grammars.close()


@pytest.mark.parametrize("how", ["cancelled", "deadline", "stopped"])
def test_work_that_nobody_waits_for_ends(how: str):
    grammars, compiling, errors = new_grammars(memory_mib=4_096), Compiling(), []
    worker = next_worker(grammars)
    seconds = 0.5 if how == "deadline" else None

    def compile_it() -> None:
        try:
            grammars.compile(ENDLESS, seconds=seconds, compiling=compiling)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_it)
    thread.start()
    pid = process_id(worker)
    if how == "cancelled":
        compiling.cancel()
    elif how == "stopped":
        grammars.close()
    thread.join(WAIT_SECONDS)
    wait_for(lambda: not is_alive(pid))
    assert isinstance(errors[0], EngineStoppedError if how == "stopped" else DeadlineError), errors
    grammars.close()


def test_fast_constraints_do_not_wait_for_slow_ones(monkeypatch: pytest.MonkeyPatch):
    """Other callers of the same tenant fill all the room for slow ones."""
    monkeypatch.setattr("meshserve.runtime.text.worker_processes._MAX_STARVATION", 1e9)  # only processor time counts
    grammars = new_grammars(memory_mib=4_096)
    compilings = [Compiling() for _ in range(8)]
    errors: list[Exception] = []

    def compile_slowly(index: int) -> None:
        try:
            constraint = Constraint(kind="json_schema", text=ENDLESS.text + " " * index)
            grammars.compile(constraint, compiling=compilings[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_slowly, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: grammars._slow._running.total() == 2 and grammars._slow._waiting.total() == 4)
    wait_for(lambda: len(errors) == 2)  # a caller's share is full
    assert all(isinstance(error, QuotaExceededError) for error in errors)
    for index in range(20):
        assert grammars.compile(Constraint(kind="regex", text=f"a{{{index + 1}}}")).compiled.constraint
    for compiling in compilings:
        compiling.cancel()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not grammars._slow._running.total() and not grammars._slow._waiting.total()
    grammars.close()


def test_a_tenant_takes_no_more_than_half_of_the_room():
    slow = SlowCompiles()
    with slow.turn("a") as first, slow.turn("a") as second, slow.turn("a") as third:
        assert first.has_begun and second.has_begun and not third.wait(0.0)
        with slow.turn("b") as other:
            assert other.has_begun
    with slow.turn("a") as again:
        assert again.has_begun


def letters_of(grammars: Grammars, matcher: Matcher, number: int, exchange: MaskExchange) -> list[bytes]:
    """Follows a sample for some tokens, always the first that is allowed. Returns its masks."""
    masks = []
    for _ in range(number):
        exchange.advance(matcher, int(np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))[5]))
        wait_for_masks(exchange, [matcher])
        assert matcher.failure is None
        masks.append(matcher.mask.tobytes())
    return masks


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_samples_go_on_when_their_worker_is_lost(grammars: Grammars, how: signal.Signals):
    """It was idle, so none of them can be the cause."""
    grammar, exchange = grammars.compile(LETTERS), MaskExchange()
    expected = letters_of(grammars, Matcher(grammar), 10, exchange)
    matchers = [Matcher(grammar) for _ in range(3)]
    found = [letters_of(grammars, matcher, 5, exchange) for matcher in matchers]
    pid = process_id(exchange._shared[0].worker)
    os.kill(pid, how)
    wait_for(lambda: not is_alive(pid))
    for matcher, masks in zip(matchers, found, strict=True):
        assert masks + letters_of(grammars, matcher, 5, exchange) == expected
    assert grammars.num_lost_workers == 1


def crash_busy_with(matcher: Matcher, exchange: MaskExchange) -> None:
    """Ends a sample's worker as if it crashed with the sample's mask, which the sample then awaits."""
    assert matcher.place is not None
    worker, row = matcher.place[0].worker, matcher.place[1]
    pid = process_id(worker)
    os.kill(pid, signal.SIGSTOP)
    exchange.advance(matcher, matcher.token_ids[0])
    exchange.renew(0.0)  # sends
    _, *rest = PROGRESS.unpack_from(worker._memory, 0)
    PROGRESS.pack_into(worker._memory, 0, row + 1, *rest)
    os.kill(pid, signal.SIGKILL)
    wait_for_masks(exchange, [matcher])


def test_a_sample_whose_worker_crashes_goes_on_alone_and_ends_alone(grammars: Grammars):
    """Others may have used up the memory that its mask needed. A second crash is its own."""
    grammar, exchange = grammars.compile(LETTERS), MaskExchange()
    expected = letters_of(grammars, Matcher(grammar), 4, exchange)
    matchers = [Matcher(grammar) for _ in range(3)]
    for matcher in matchers:
        letters_of(grammars, matcher, 2, exchange)
    crash_busy_with(matchers[1], exchange)
    with pytest.raises(KeyError):  # the next request with it is compiled alone first
        grammars._cached[LETTERS]
    assert matchers[1].failure is None and matchers[1].mask.tobytes() == expected[2]
    assert matchers[1].place is not None and not matchers[1].place[0].is_shared
    for matcher in matchers[::2]:
        letters_of(grammars, matcher, 2, exchange)
        assert matcher.mask.tobytes() == expected[3] and matcher.place is not None and matcher.place[0].is_shared
    crash_busy_with(matchers[1], exchange)
    assert "its parser has crashed" in str(matchers[1].failure)
    assert [matcher.failure is None for matcher in matchers] == [True, False, True]


def test_constraints_that_use_up_the_memory_together_end_nobody():
    """Each lexer grows to some 3 MiB, and their worker has memory for a few."""
    grammars, exchange, rng = new_grammars(memory_mib=16), MaskExchange(), random.Random(1)
    hungry = [Constraint(kind="regex", text=f"[a-z ]*{letter}[a-z ]{{40}}!") for letter in "abcdefghijklmnopqrstuvwxy"]
    plain = Constraint(kind="regex", text="[a-z ]*")
    matchers = [Matcher(grammars.compile(constraint)) for constraint in (plain, *hungry)]
    expected = matchers[0].mask.tobytes()
    for _ in range(200):
        for matcher in matchers:
            letters = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
            exchange.advance(matcher, int(rng.choice(letters[5:])))
        wait_for_masks(exchange, matchers)
        assert not [matcher.failure for matcher in matchers if matcher.failure]
    assert grammars.num_lost_workers > 0 and matchers[0].mask.tobytes() == expected
    grammars.close()


def test_the_template_is_started_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    grammars.compile(LETTERS)
    assert grammars._template._process is not None
    grammars._template._process.kill()
    grammars._template._process.wait()

    def is_back() -> bool:
        try:
            return grammars.compile(Constraint(kind="regex", text="[0-9]{9}")).mask.any()
        except EngineStoppedError:
            return False

    wait_for(is_back)
    assert grammars._template.num_starts == 2
    # No report is awaited of a worker of the template that was killed.
    monkeypatch.setattr(grammars._template, "_read_report", None)
    assert grammars._template.exit_status(1) is None


def test_reports_that_nobody_asks_for_do_not_block_the_template(grammars: Grammars):
    """As many workers end as reports fill a socket."""
    for _ in range(600):
        grammars._template.fork().kill()
    assert grammars.compile(LETTERS).mask.any()


def test_slow_constraints_have_a_worker_of_their_own(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    """Their samples wait for it; others, which share a worker, do not."""
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_MASK_SECONDS", 0.0)
    slow = grammars.compile(Constraint(kind="grammar", text=AMBIGUOUS))
    monkeypatch.undo()
    assert not slow.compiled.is_fast and slow.compiled.worker is not None
    exchange, held = MaskExchange(), [Matcher(slow) for _ in range(4)]
    for matcher in held:
        letters_of(grammars, matcher, 1, exchange)
    pause(slow.compiled.worker)
    for matcher in held:
        exchange.advance(matcher, matcher.token_ids[0])
    exchange.renew(0.0)
    letters_of(grammars, Matcher(grammars.compile(LETTERS)), 20, exchange)
    assert all(matcher.is_waiting for matcher in held)
    slow.compiled.worker.resume()
    wait_for_masks(exchange, held)
    assert all(matcher.failure is None for matcher in held)


def test_the_last_sample_of_a_slow_constraint_may_leave_while_its_worker_computes(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    """The next one waits for what the worker does still for the first."""
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_MASK_SECONDS", 0.0)
    slow = grammars.compile(Constraint(kind="grammar", text=AMBIGUOUS))
    assert slow.compiled.worker is not None
    exchange, first, second = MaskExchange(), Matcher(slow), Matcher(slow)
    letters_of(grammars, first, 1, exchange)
    pause(slow.compiled.worker)
    exchange.advance(first, first.token_ids[0])
    exchange.renew(0.0)
    exchange.close(first)
    exchange.renew(0.0)
    exchange.advance(second, first.token_ids[0])
    exchange.renew(0.0)
    slow.compiled.worker.resume()
    wait_for_masks(exchange, [second])
    assert second.failure is None and second.mask.any()
    exchange.close(second)
    exchange.renew(0.0)
    assert not exchange._own and not exchange.has_work


def test_constraints_that_turn_out_slow_move(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_SECONDS", 1e9)
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_MASK_SECONDS", 1e9)
    grammar, exchange = grammars.compile(Constraint(kind="grammar", text=VERY_AMBIGUOUS)), None
    assert grammar.compiled.is_fast
    exchange, follower, draw = MaskExchange(), Follower(grammar), random.Random(1)
    follower.exchange = exchange
    while follower.matcher.failure is None and grammar.compiled.is_fast:
        bits = np.unpackbits((follower.matcher.mask & ~grammars.eos_mask).view(np.uint8), bitorder="little")
        follower.advance([int(draw.choice(np.flatnonzero(bits)))])
    assert not grammar.compiled.is_fast or "max is 500" in str(follower.matcher.failure)


def test_tenants_share_no_workers(grammars: Grammars):
    """Unless they are very many; the workers of those without samples end then."""
    exchange, samples = MaskExchange(), []
    for index in range(_MAX_SHARED):
        samples.append(Matcher(grammars.compile(LETTERS, tenant=f"tenant {index}")))
        letters_of(grammars, samples[-1], 1, exchange)
    workers = [followers.worker for followers in exchange._shared]
    assert len(set(workers)) == len(workers) == _MAX_SHARED
    letters_of(grammars, Matcher(grammars.compile(LETTERS, tenant="one more")), 1, exchange)
    assert [followers.worker for followers in exchange._shared] == workers
    exchange.close(samples[3])
    letters_of(grammars, Matcher(grammars.compile(LETTERS, tenant="another")), 1, exchange)
    assert len(exchange._shared) == _MAX_SHARED and workers[3] not in [each.worker for each in exchange._shared]


def test_rows_that_are_slow_together_are_told(monkeypatch: pytest.MonkeyPatch):
    """Rows of 3 ms: ten of one constraint, two of another."""
    now = 0.0

    class Timed(Worker):
        def __init__(self) -> None:
            self._memory, self._sources, self._starts, self._matchers = bytearray(64), {}, {}, {}
            self._mask_seconds = 0.0

        def _advance(self, *row: object) -> tuple[int, str]:
            nonlocal now
            now += 0.003
            return 0, ""

    monkeypatch.setattr("meshserve.runtime.text.constraint_worker.time.process_time", lambda: now)
    rows = [[row, 1 if row < 10 else 2, False, [5]] for row in range(12)]
    answer = Timed().answer({"rows": rows})
    assert answer["slow"] == [[9, pytest.approx(0.03)]] and is_answer({**answer, "rows": []})


def test_a_constraint_that_was_slow_is_not_taken_for_fast_again(grammars: Grammars):
    compiled = grammars.compile(LETTERS).compiled
    assert compiled.is_fast
    compiled.is_fast = False  # as its masks have shown
    grammars.forget(compiled)
    assert not grammars.compile(LETTERS).compiled.is_fast


def test_a_worker_of_one_constraint_ends_with_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_SECONDS", 0.0)
    pids = []
    for index in range(20):  # more than may be kept
        worker = grammars.compile(Constraint(kind="regex", text=f"a{{{index + 1}}}")).compiled.worker
        assert worker is not None
        pids.append(process_id(worker))
        del worker
    wait_for(lambda: sum(map(is_alive, pids)) <= 16)
    with pytest.raises(InvalidRequestError):
        grammars.compile(Constraint(kind="regex", text="("))
