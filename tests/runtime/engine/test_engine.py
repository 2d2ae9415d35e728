"""Tests the engine's loop with a fake device that can be paused and broken, and whose tokens are easy to predict.

The next token is always the last one plus 1, modulo 128, and its text is its ASCII character: after "a" comes "bcdef".
"""

import functools
import itertools
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from meshserve.kernels.p2p import sm90 as p2p_sm90
from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.errors import EngineStoppedError, InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import DEFAULT_OPTIONS, NO_TOKEN, FinishReason, Load, Output, WeightSpan
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine import engine as engine_module
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.program.batch import ON_DEVICE, BatchBuilder, Bucket
from meshserve.runtime.program.processors.processor_batch import (
    Logprobs,
    ProcessorBatchBuilder,
    ProcessorShape,
    Sampled,
)
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler import running
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.text.grammar import Grammars
from tests.waiting import WAIT_SECONDS, wait_for

VOCAB_SIZE = 128


class Letters:
    """A tokenizer with one token per ASCII character."""

    @staticmethod
    def token_bytes(token_id: int) -> bytes:
        return bytes([token_id])


class Device:
    """A runner that keeps each slot's last token, as the real one does, and records what is dispatched and collected.

    While `is_ready` is clear, collecting a step's tokens blocks; `is_awaited` is set while a thread waits for them.
    """

    def __init__(self, max_running: int):
        self.events: list[str] = []
        self.seeds: list[int] = []
        self.is_ready = threading.Event()
        self.is_ready.set()
        self.is_awaited = threading.Event()
        self.fails_at = ""  # an event: "dispatch 3"
        self.spoils = ""  # a character: sampling it fails because of logits that are not finite
        self._last_tokens = np.zeros(max_running + 1, np.int32)  # the last slot is for padding
        self._changed = threading.Condition()

    def set_page_row(self, page_slot: np.ndarray) -> None:
        """Does nothing; this device has no pages, since a token follows from the one before it."""

    def run(self, bucket: Bucket, packed: np.ndarray) -> "Tokens":
        step = sum(event.startswith("dispatch") for event in self.events)
        self.note(f"dispatch {step}")
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        on_device = self._last_tokens[fields["slots"][fields["token_request"]]]
        token_ids = np.where(fields["token_ids"] == ON_DEVICE, on_device, fields["token_ids"])
        sampled = (token_ids[fields["last_index"]] + 1) % VOCAB_SIZE
        sampled = np.where(np.isin(sampled, list(self.spoils.encode())), NO_TOKEN, sampled)
        self._last_tokens[fields["slots"]] = self._sampled = sampled
        low, high = (int(fields[name].view(np.uint32)[0]) for name in ("seed_low", "seed_high"))
        self.seeds.append(low + (high << 32))
        return Tokens(self, step, sampled)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled["Tokens"]:
        """Returns the tokens of the last step, or the lowest ones that the masks allow instead."""
        step = sum(event.startswith("dispatch") for event in self.events) - 1
        self.note(f"sample {step}")
        shape = next(shape for size in range(1, 9) if (shape := ProcessorShape(size)).size == len(packed))
        slots = packed[shape.fields["slots"]][: len(self._sampled)]
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little") if masks is not None else []
        sampled = self._sampled.copy()
        for index, allowed in enumerate(bits):
            if sampled[index] != NO_TOKEN and not allowed[sampled[index]]:
                sampled[index] = np.flatnonzero(allowed)[0]
        self._last_tokens[slots] = sampled
        return Sampled(Tokens(self, step, sampled), None)

    def note(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        if event == self.fails_at:
            raise RuntimeError("device lost")

    def wait_for(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, WAIT_SECONDS), f"no {event}: {self.events}"


class Tokens:
    """A step's tokens, on their way to the host."""

    def __init__(self, device: Device, step: int, sampled: np.ndarray):
        self._device, self._step, self._sampled = device, step, sampled

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        if not self._device.is_ready.is_set():
            self._device.is_awaited.set()
        assert self._device.is_ready.wait(WAIT_SECONDS)
        self._device.note(f"collect {self._step}")
        return self._sampled


@functools.cache
def letter_grammars(eos: str) -> Grammars:
    """Compiles grammars for the vocabulary of `Letters`."""
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({char: byte for char, byte in ascii_tokens()}, []))
    letters.decoder = tokenizers.decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as directory:
        letters.save(f"{directory}/tokenizer.json")
        grammars = Grammars(Path(directory, "tokenizer.json"), VOCAB_SIZE, tuple(eos.encode()))
        grammars.wait_until_ready()  # it has read the file
        return grammars


def ascii_tokens() -> Iterator[tuple[str, int]]:
    """Yields each byte as byte-level BPE writes it: printable ones unchanged, the others from U+0100 on."""
    others = itertools.count(0x100)
    for byte in range(VOCAB_SIZE):
        yield chr(byte if 0x21 <= byte < 0x7F else next(others)), byte


class Serving:
    """A running engine and everything that it has delivered."""

    def __init__(self, *, num_pages: int = 32, eos: str = "", has_text: bool = True, **limits: int):
        values = dict(page_size=4, max_running=4, max_step_tokens=16, max_waiting=64, max_context=64) | limits
        self.limits = SchedulerLimits(**values)
        sizes = {name: values[name] for name in ("max_running", "page_size")}
        buckets = declare_buckets(max_step_tokens=values["max_step_tokens"], **sizes)
        pages = PageAllocator(num_pages)
        self.grammars = letter_grammars(eos)
        self.device = Device(values["max_running"])
        self.scheduler = Scheduler(self.limits, pages, frozenset(eos.encode()))
        self.engine = Engine(
            scheduler=self.scheduler,
            pages=pages,
            batches=BatchBuilder(
                buckets,
                **sizes,
                max_request_pages=16,
                processors=ProcessorBatchBuilder(
                    max_running=values["max_running"], vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(eos.encode())
                ),
            ),
            runner=self.device,
            tokenizer=Letters() if has_text else None,
            deliver=self._deliver,
        )
        self.deliveries: list[list[Output]] = []
        self.delivering_threads: set[str] = set()
        self._outputs: dict[str, list[Output]] = defaultdict(list)
        self._changed = threading.Condition()
        self.engine.start()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self.deliveries.append(list(outputs))
            self.delivering_threads.add(threading.current_thread().name)
            for output in outputs:
                self._outputs[output.request_id].append(output)
            self._changed.notify_all()

    def submit(self, request_id: str, prompt: str = "a", regex: str | None = None, **params: object) -> None:
        constraint = Constraint(kind="regex", text=regex) if regex is not None else None
        grammar = self.grammars.compile(constraint) if constraint is not None else None
        params = {"temperature": 0.0, "constraint": constraint, **params}
        self.engine.submit(request_id, tuple(prompt.encode()), SamplingParams(**params), DEFAULT_OPTIONS, grammar)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on what has been delivered."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS)

    def outputs(self, request_id: str) -> list[Output]:
        """Returns all outputs of a request, once it has ended; only the last one has a finish reason."""
        with self._changed:
            outputs = self._outputs[request_id]
            assert self._changed.wait_for(lambda: outputs and outputs[-1].finish_reason, WAIT_SECONDS), "no end came"
            assert [output for output in outputs if output.finish_reason] == outputs[-1:]
            return list(outputs)

    def result(self, request_id: str) -> tuple[str, str, FinishReason | None]:
        """Returns the tokens as characters, the text, and the finish reason."""
        outputs = self.outputs(request_id)
        tokens = bytes(token for output in outputs for token in output.token_ids).decode()
        return tokens, "".join(output.text for output in outputs), outputs[-1].finish_reason

    @property
    def free_load(self) -> Load:
        """The load of an idle engine."""
        num_pages = self.engine.load().num_pages
        return Load(num_running=0, num_waiting=0, num_pages=num_pages, num_free_pages=num_pages)


Start = Callable[..., Serving]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines, stops them after the test, and checks that none leaves a thread behind."""
    started: list[Serving] = []

    def start_one(**options: object) -> Serving:
        started.append(Serving(**options))
        return started[-1]

    yield start_one
    for serving in started:
        serving.device.is_ready.set()
        serving.engine.stop()
    assert engine_threads() == []


# --- the loop


def test_tokens_and_text_come_step_by_step(start: Start):
    serving = start()
    serving.submit("r", "xa", max_tokens=3)
    first, second, last = serving.outputs("r")
    assert first == Output(request_id="r", token_ids=(98,), text="b")
    assert second == Output(request_id="r", token_ids=(99,), text="c")
    assert last == Output(
        request_id="r", token_ids=(100,), text="d", finish_reason=FinishReason.LENGTH, num_prompt_tokens=2,
        num_output_tokens=3, weight_spans=(WeightSpan("0", 3),),
    )  # fmt: skip


def test_each_step_is_dispatched_before_the_one_before_it_is_collected(start: Start):
    serving = start()
    serving.submit("r", max_tokens=4)
    serving.outputs("r")
    assert serving.device.events == [
        "dispatch 0",
        "dispatch 1", "collect 0",
        "dispatch 2", "collect 1",
        "dispatch 3", "collect 2",
        "collect 3",
    ]  # fmt: skip


def test_what_runs_between_steps_sees_an_idle_device_and_the_streams_go_on(start: Start):
    serving = start()
    serving.submit("r", max_tokens=40)
    seen = []
    for _ in range(5):
        serving.engine.between_steps(
            lambda: seen.append((threading.current_thread().name, list(serving.device.events)))
        )
    assert serving.result("r")[2] is FinishReason.LENGTH
    for thread, events in seen:
        assert thread == "engine"
        assert sum("dispatch" in event for event in events) == sum("collect" in event for event in events)
    serving.engine.stop()
    with pytest.raises(EngineStoppedError):
        serving.engine.between_steps(lambda: None)


def test_logits_that_are_not_finite_end_their_request_alone(start: Start):
    serving = start()
    serving.device.spoils = "d"
    prompt = "xyzwxyzwa"  # two full pages
    for request_id, text in (("bad", prompt), ("good", "m")):
        serving.submit(request_id, text, max_tokens=6)
    *others, last = serving.outputs("bad")
    assert "".join(output.text for output in others) == "bc"
    assert (last.finish_reason, last.token_ids, last.num_output_tokens) == (FinishReason.ERROR, (), 2)
    assert "logits that are NaN or infinite" in last.message
    assert serving.result("good") == ("nopqrs", "nopqrs", FinishReason.LENGTH)
    assert serving.scheduler.num_not_finite == 1
    serving.device.spoils = ""
    serving.submit("again", prompt, max_tokens=2)
    assert serving.outputs("again")[-1].num_cached_tokens == 0  # the pages that led to the error are not reused
    serving.scheduler.audit()


def test_logits_that_are_not_finite_are_not_taken_for_a_constraint_at_its_end(start: Start):
    serving = start(eos="!")
    serving.device.spoils = "c"
    serving.submit("r", "a", regex="b*", max_tokens=4)
    assert "logits that are NaN or infinite" in serving.outputs("r")[-1].message


def test_requests_that_come_while_an_idle_engine_is_held_share_the_first_step(start: Start):
    serving = start()
    assert serving.engine.hold(True)
    for name in "xyz":
        serving.submit(name, max_tokens=1)
    time.sleep(0.05)  # an engine that is not held would have begun
    assert serving.device.events == [] and serving.engine.load().num_waiting == 3
    assert not serving.engine.hold(False)
    assert {serving.result(name)[0] for name in "xyz"} == {"b"}
    assert [event for event in serving.device.events if event.startswith("dispatch")] == ["dispatch 0"]


def test_an_engine_with_requests_is_not_held(start: Start):
    serving = start()
    serving.device.is_ready.clear()
    serving.submit("x", max_tokens=3)
    assert not serving.engine.hold(True)
    serving.device.is_ready.set()
    assert serving.result("x") == ("bcd", "bcd", FinishReason.LENGTH)


def test_a_held_engine_ends_what_is_cancelled_and_can_be_stopped(start: Start):
    serving = start()
    assert serving.engine.hold(True)
    serving.submit("x")
    serving.engine.cancel("x", FinishReason.CANCELLED)
    assert serving.result("x") == ("", "", FinishReason.CANCELLED)
    serving.submit("y")
    serving.engine.stop()
    assert serving.result("y") == ("", "", FinishReason.CANCELLED) and serving.device.events == []


def test_the_host_waits_for_the_device_with_two_steps_under_way(start: Start):
    serving = start()
    serving.device.is_ready.clear()
    serving.submit("r", max_tokens=10)
    assert serving.device.is_awaited.wait(WAIT_SECONDS)  # a third dispatch would have come before
    assert serving.device.events == ["dispatch 0", "dispatch 1"]
    assert serving.deliveries == []
    serving.device.is_ready.set()
    assert serving.result("r") == ("bcdefghijk", "bcdefghijk", FinishReason.LENGTH)


def test_the_outputs_of_a_step_are_delivered_together_from_the_engine_s_own_thread(start: Start):
    serving = start()
    serving.device.is_ready.clear()
    serving.submit("first", "a", max_tokens=3)
    serving.device.wait_for("dispatch 1")
    serving.submit("second", "A", max_tokens=2)
    serving.device.is_ready.set()
    assert serving.result("first") == ("bcd", "bcd", FinishReason.LENGTH)
    assert serving.result("second") == ("BC", "BC", FinishReason.LENGTH)
    assert [[output.text for output in outputs] for outputs in serving.deliveries] == [["b"], ["c"], ["d", "B"], ["C"]]
    assert serving.delivering_threads == {"engine"}


@pytest.mark.parametrize(
    ("most", "send_seconds", "order"),
    [
        (0, -1.0, ["dispatch 0", "dispatch 1", "collect 0", "dispatch 2", "deliver b", "collect 1", "deliver c"]),
        (1, -1.0, ["dispatch 0", "dispatch 1", "collect 0", "deliver b", "dispatch 2", "collect 1", "deliver c"]),
        (0, 1e6, ["dispatch 0", "dispatch 1", "collect 0", "deliver b", "dispatch 2", "collect 1", "deliver c"]),
    ],
)
def test_many_outputs_are_delivered_behind_the_next_dispatch(
    start: Start, monkeypatch: pytest.MonkeyPatch, most: int, send_seconds: float, order: list[str]
):
    """With nothing left to dispatch, or without time to send them meanwhile, they are delivered at once."""
    monkeypatch.setattr(engine_module, "_MAX_OUTPUTS_AT_ONCE", most)
    monkeypatch.setattr(engine_module, "_SEND_SECONDS", send_seconds)
    serving = start()
    deliver = serving._deliver
    monkeypatch.setattr(
        serving.engine,
        "_deliver",
        lambda outputs: (serving.device.note(f"deliver {outputs[0].text}"), deliver(outputs)),
    )
    serving.submit("x", max_tokens=3)
    assert serving.result("x") == ("bcd", "bcd", FinishReason.LENGTH)
    assert serving.device.events == [*order, "collect 2", "deliver d"]


def test_a_prompt_longer_than_a_step_gives_its_first_token_after_its_last_chunk(start: Start):
    serving = start()
    serving.submit("r", "z" * 39 + "a", max_tokens=2)
    assert serving.result("r") == ("bc", "bc", FinishReason.LENGTH)
    assert serving.device.events[-1] == "collect 3"  # 16 + 16 + 8 tokens, and a decode


def test_a_seed_is_kept_and_a_missing_one_is_drawn_for_each_request(start: Start):
    serving = start(max_running=1)
    for request_id, seed in (("given", 2**62 + 5), ("drawn", None), ("drawn again", None)):
        serving.submit(request_id, max_tokens=1, seed=seed)
        serving.outputs(request_id)
    assert serving.device.seeds[0] == 2**62 + 5
    assert len(set(serving.device.seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in serving.device.seeds)


def test_without_a_tokenizer_there_is_no_text(start: Start):
    serving = start(has_text=False)
    serving.submit("r", max_tokens=3, stop=("c",))
    assert serving.result("r") == ("bcd", "", FinishReason.LENGTH)


# --- constraints


def test_masks_are_made_while_the_device_is_in_the_layers(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshserve.runtime.text.constrained_samples.PATIENCE_SECONDS", WAIT_SECONDS)
    serving = start(eos="~")
    serving.submit("r", regex="b[x-z]c?d{2,3}!", max_tokens=9)
    assert serving.result("r") == ("bxcdd!", "bxcdd!", FinishReason.STOP)
    assert serving.device.events[:8] == [
        "dispatch 0", "sample 0", "dispatch 1", "collect 0", "sample 1", "dispatch 2", "collect 1", "sample 2",
    ]  # fmt: skip


def test_a_constraint_leaves_the_others_alone(start: Start):
    serving = start(eos="~")
    serving.device.is_ready.clear()
    serving.submit("free", "A", max_tokens=6)
    serving.submit("held", regex="(be|no)+", max_tokens=6)
    serving.submit("stops", regex="(be|no)+", max_tokens=6, stop=("be",))
    serving.device.is_ready.set()
    assert serving.result("free") == ("BCDEFG", "BCDEFG", FinishReason.LENGTH)
    assert serving.result("held") == ("bebebe", "bebebe", FinishReason.LENGTH)
    assert serving.result("stops") == ("be", "", FinishReason.STOP)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_mask_that_does_not_come_holds_up_nobody_else(start: Start, monkeypatch: pytest.MonkeyPatch, is_slow: bool):
    """Its worker is suspended, and `is_slow` says whether that was to be expected."""
    monkeypatch.setattr("meshserve.runtime.text.mask_exchange._STUCK_SECONDS", WAIT_SECONDS)
    if is_slow:
        monkeypatch.setattr("meshserve.runtime.text.mask_exchange._SLOW_SECONDS", -1.0)
        monkeypatch.setattr("meshserve.runtime.text.grammar._FAST_MASK_SECONDS", -1.0)
    serving = start(eos="~", max_context=256, num_pages=128)
    serving.submit("held", regex="(be|no){30}", max_tokens=40)
    serving.wait_until(lambda: len(serving.deliveries) > 3)
    exchange = serving.engine._open.constrained._exchange
    workers = [followers.worker for followers in (*exchange._shared, *exchange._own.values())]
    for worker in workers:
        worker.pause()
    serving.submit("free", "A", max_tokens=25)
    assert serving.result("free")[0] == "BCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert not any(output.finish_reason for output in serving._outputs["held"])
    assert serving.scheduler.num_running == 1
    for worker in workers:
        worker.resume()
    assert serving.result("held") == ("be" * 20, "be" * 20, FinishReason.LENGTH)
    serving.scheduler.audit()


def test_a_request_without_a_mask_can_be_cancelled(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshserve.runtime.text.mask_exchange._STUCK_SECONDS", WAIT_SECONDS)
    serving = start(eos="~", max_context=256, num_pages=128)
    serving.submit("held", regex="(be|no){100}", max_tokens=200)
    serving.wait_until(lambda: len(serving.deliveries) > 3)
    worker = serving.engine._open.constrained._exchange._shared[0].worker
    worker.pause()
    serving.submit("free", "A", max_tokens=25)
    assert serving.result("free")[2] is FinishReason.LENGTH
    serving.engine.cancel("held", FinishReason.CANCELLED)
    assert serving.result("held")[2] is FinishReason.CANCELLED
    assert serving.engine.load() == serving.free_load
    worker.resume()
    serving.submit("next", regex="(be|no){30}", max_tokens=4)
    assert serving.result("next")[0] == "bebe"


def test_an_output_that_is_complete_with_its_last_token_stops(start: Start):
    serving = start(eos="~")
    serving.submit("whole", regex="bcd", max_tokens=3)
    serving.submit("part", regex="bcd", max_tokens=2)
    assert serving.result("whole") == ("bcd", "bcd", FinishReason.STOP)
    assert serving.result("part") == ("bc", "bc", FinishReason.LENGTH)


def test_an_end_token_may_come_where_the_grammar_may_end(start: Start):
    serving = start(eos="d~")
    serving.submit("r", regex="[b-z]*", max_tokens=9)
    assert serving.result("r") == ("bc", "bc", FinishReason.STOP)


def test_a_stop_token_cuts_an_output_short(start: Start):
    serving = start(eos="~")
    serving.submit("r", regex="[b-z]{9}", max_tokens=9, stop_token_ids=tuple(b"d"))
    assert serving.result("r") == ("bc", "bc", FinishReason.STOP)


def test_a_preempted_request_goes_on_in_its_grammar(start: Start):
    serving = start(num_pages=8, max_running=3, eos="~", max_context=32)
    names = [f"r{index}" for index in range(6)]
    serving.device.is_ready.clear()
    for name in names:
        serving.submit(name, regex="(be|xy){20}", max_tokens=26)
    serving.device.is_ready.set()
    assert {serving.result(name)[0] for name in names} == {"be" * 13}
    assert serving.scheduler.num_preemptions > 0


def test_a_token_that_breaks_the_grammar_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch):
    """Simulates the case that bans and the grammar together leave no token."""
    serving = start(eos="~")
    sample = serving.device.sample
    monkeypatch.setattr(serving.device, "sample", lambda packed, masks=None: sample(packed))
    serving.submit("r", regex="bx", max_tokens=9)
    assert serving.result("r")[2] is FinishReason.ERROR
    assert "both allow" in serving.outputs("r")[-1].message
    serving.submit("ends", "}", regex="x", max_tokens=9)  # fails at an end token
    assert serving.result("ends") == ("", "", FinishReason.ERROR)


# --- how requests end


def test_an_end_token_costs_one_wasted_step_and_is_no_output(start: Start):
    serving = start(eos="e")
    serving.submit("r", max_tokens=36)
    assert serving.result("r") == ("bcd", "bcd", FinishReason.STOP)
    assert serving.outputs("r")[-1].num_output_tokens == 3
    serving.device.wait_for("collect 4")  # step 3 sampled the "e", and step 4 was already dispatched
    assert serving.device.events[-2:] == ["collect 3", "collect 4"]
    serving.submit("next", "m", max_tokens=2)  # takes the slot of the first
    assert serving.result("next") == ("no", "no", FinishReason.LENGTH)
    assert serving.scheduler.num_wasted_tokens == 1


def test_an_end_token_may_be_ignored(start: Start):
    serving = start(eos="c")
    serving.submit("r", max_tokens=3, ignore_eos=True)
    assert serving.result("r") == ("bcd", "bcd", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [(("d",), "bcd", "bc"), (("cd",), "bcd", "b"), (("x", "ef", "e"), "bcde", "bcd"), (("b",), "b", "")],
)
def test_a_stop_string_ends_the_text_before_it(start: Start, stop: tuple[str, ...], tokens: str, text: str):
    serving = start()
    serving.submit("r", max_tokens=20, stop=stop)
    assert serving.result("r") == (tokens, text, FinishReason.STOP)


def test_a_stop_string_may_stay_in_the_text(start: Start):
    serving = start()
    serving.submit("r", max_tokens=20, stop=("cd",), include_stop=True)
    assert serving.result("r") == ("bcd", "bcd", FinishReason.STOP)


def test_a_stop_token_ends_the_request_like_an_end_token(start: Start):
    serving = start(eos="c")
    serving.submit("r", max_tokens=20, stop_token_ids=tuple(b"ze"), ignore_eos=True)
    assert serving.result("r") == ("bcd", "bcd", FinishReason.STOP)
    assert serving.outputs("r")[-1].num_output_tokens == 3


def test_a_stop_string_in_the_last_token_is_the_reason(start: Start):
    serving = start()
    serving.submit("r", max_tokens=3, stop=("d",))
    assert serving.result("r") == ("bcd", "bc", FinishReason.STOP)


def test_text_held_for_a_stop_string_that_does_not_come_is_delivered_with_the_end(start: Start):
    serving = start()
    serving.submit("r", max_tokens=3, stop=("dX",))
    assert serving.result("r") == ("bcd", "bcd", FinishReason.LENGTH)


def test_cancelling_frees_the_pages_while_the_device_still_works(start: Start):
    serving = start()
    serving.device.is_ready.clear()
    serving.submit("r", "some prompt", max_tokens=20)
    serving.device.wait_for("dispatch 1")
    assert serving.engine.load() == Load(num_running=1, num_waiting=0, num_pages=32, num_free_pages=29)
    serving.engine.cancel("r", FinishReason.DEADLINE)
    assert serving.engine.load() == serving.free_load
    serving.submit("next", "A", max_tokens=2)
    serving.device.is_ready.set()
    assert serving.result("r") == ("", "", FinishReason.DEADLINE)
    assert serving.result("next") == ("BC", "BC", FinishReason.LENGTH)


def test_cancelling_one_that_waits_or_has_ended_or_never_was(start: Start):
    serving = start(max_running=1)
    serving.device.is_ready.clear()
    serving.submit("runs", max_tokens=4)
    serving.device.wait_for("dispatch 1")
    serving.submit("waits", max_tokens=4)
    assert serving.engine.load().num_waiting == 1
    serving.engine.cancel("waits", FinishReason.CANCELLED)
    serving.engine.cancel("never was", FinishReason.CANCELLED)
    serving.device.is_ready.set()
    assert serving.result("runs")[2] == FinishReason.LENGTH
    serving.engine.cancel("runs", FinishReason.CANCELLED)
    assert serving.result("runs")[2] == FinishReason.LENGTH
    assert serving.result("waits") == ("", "", FinishReason.CANCELLED)
    assert sum(map(len, serving.deliveries)) == 4 + 1


# --- refusals, failure, stop


def test_what_is_refused_leaves_no_trace(start: Start):
    serving = start(max_running=1, max_waiting=1)
    with pytest.raises(InvalidRequestError, match="has 64 tokens"):
        serving.submit("long", "x" * 64)
    serving.device.is_ready.clear()
    serving.submit("runs", max_tokens=2)
    serving.device.wait_for("dispatch 1")
    serving.engine.check_room()
    serving.submit("waits", max_tokens=2)
    with pytest.raises(QueueFullError, match="1 requests wait; this server queues 1"):
        serving.engine.check_room()
    with pytest.raises(InvalidRequestError, match="'waits' is still being served"):
        serving.submit("waits")
    with pytest.raises(QueueFullError, match="1 requests wait; this server queues 1"):
        serving.submit("refused")
    serving.device.is_ready.set()
    assert serving.result("waits") == ("bc", "bc", FinishReason.LENGTH)
    assert {output.request_id for outputs in serving.deliveries for output in outputs} == {"runs", "waits"}
    assert serving.engine.load() == serving.free_load


@pytest.mark.parametrize("fails_at", ["dispatch 2", "collect 1"])
def test_when_the_device_fails_every_open_request_is_told_why(start: Start, fails_at: str):
    serving = start(max_running=2)
    serving.device.fails_at = fails_at
    serving.device.is_ready.clear()
    for request_id in ("runs", "runs too", "waits"):
        serving.submit(request_id, max_tokens=9)
    serving.device.is_ready.set()
    for request_id in ("runs", "runs too", "waits"):
        last = serving.outputs(request_id)[-1]
        assert (last.finish_reason, last.message) == (FinishReason.ERROR, "RuntimeError: device lost")
    assert serving.engine.failure == "RuntimeError: device lost"
    with pytest.raises(EngineStoppedError, match="the engine has failed: RuntimeError: device lost"):
        serving.submit("late")
    assert serving.engine.load() == serving.free_load
    for thread in engine_threads():
        thread.join(WAIT_SECONDS)
    assert engine_threads() == []
    serving.engine.stop()  # has no further effect


def test_a_failure_while_pages_are_shared_is_told_too(start: Start, monkeypatch: pytest.MonkeyPatch):
    """Ending a request shares its pages, which is what failed."""

    def fail(*_: object) -> None:
        raise RuntimeError("no key")

    serving = start()
    serving.device.is_ready.clear()
    serving.submit("runs", prompt="a" * 12, max_tokens=9)
    serving.device.wait_for("dispatch 1")  # it has its pages, and shares the first at its next token
    monkeypatch.setattr(running, "extend_page_keys", fail)
    serving.device.is_ready.set()
    assert serving.outputs("runs")[-1].message == "RuntimeError: no key"


class Arriving:
    """Log-probabilities that do not arrive until the test allows it."""

    def __init__(self) -> None:
        self.is_awaited, self.is_there = threading.Event(), threading.Event()
        self.came_in_time = True

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.is_awaited.set()
        self.came_in_time &= self.is_there.wait(WAIT_SECONDS)
        return np.zeros((16, 20), np.float32)


def test_a_failure_is_told_while_log_probabilities_are_on_their_way(start: Start, monkeypatch: pytest.MonkeyPatch):
    serving, values = start(), Arriving()
    logprobs = Logprobs(values, values, values)
    monkeypatch.setattr(serving.device, "prompt_logprobs", lambda targets: logprobs, raising=False)
    serving.submit("r", "abc", prompt_logprobs=0)
    assert values.is_awaited.wait(WAIT_SECONDS)
    serving.engine.fail("a peer is lost")
    assert serving.outputs("r")[-1].message == "a peer is lost"
    values.is_there.set()
    serving.engine.stop()
    assert values.came_in_time, "the failure was reported only after they had arrived"


def test_who_ends_in_the_step_that_fails_is_told_too(start: Start, monkeypatch: pytest.MonkeyPatch):
    """The scheduler has ended the request before the failure, but its caller has not been told."""

    def fail(*_: object) -> None:
        raise RuntimeError("no text")

    serving = start()
    serving.device.is_ready.clear()
    with serving.engine._changed:  # both in one step
        serving.submit("ends", max_tokens=1)
        serving.submit("goes on", max_tokens=9)
    monkeypatch.setattr(serving.engine._open, "stream", fail)
    serving.device.is_ready.set()
    for name in ("ends", "goes on"):
        assert serving.outputs(name)[-1].message == "RuntimeError: no text"


class Panic(BaseException):
    """A panic as raised by Rust libraries; not a subclass of Exception."""


def test_a_panic_is_told_too(start: Start, monkeypatch: pytest.MonkeyPatch):
    def panic(*_: object) -> None:
        raise Panic("no such state")

    serving = start()
    monkeypatch.setattr(serving.engine._open, "stream", panic)
    serving.submit("r")
    assert serving.outputs("r")[-1].message == serving.engine.failure == "Panic: no such state"


def test_nothing_comes_after_the_end_that_a_failure_brings(start: Start):
    """Outputs taken by the engine's thread are delivered before those of the failure, even if delivery is slow."""
    serving, deliver = start(), threading.Event()
    plain = serving.engine._deliver

    def slow(outputs: Sequence[Output]) -> None:
        if threading.current_thread().name == "engine":
            serving.device.note("delivers")
            assert deliver.wait(WAIT_SECONDS)
        plain(outputs)

    serving.engine._deliver = slow
    serving.submit("r", max_tokens=9)
    serving.device.wait_for("delivers")
    failing = threading.Thread(target=serving.engine.fail, args=("a peer is lost",))
    failing.start()
    failing.join(0.1)  # enough time to deliver first, if it wrongly did
    deliver.set()
    failing.join(WAIT_SECONDS)
    serving.engine.stop()
    assert serving.outputs("r")[-1].message == "a peer is lost"


def test_callers_hear_which_gpu_did_not_answer(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(p2p_sm90, "timeouts", lambda: "P2P timeout: GPU 2 waited for GPU 1")
    serving = start()
    serving.device.fails_at = "collect 0"
    serving.submit("runs", max_tokens=9)
    assert serving.outputs("runs")[-1].message == "P2P timeout: GPU 2 waited for GPU 1; RuntimeError: device lost"
    assert serving.engine.failure == serving.outputs("runs")[-1].message


def test_stopping_ends_open_requests_and_the_thread(start: Start):
    serving = start(max_running=1)
    serving.device.is_ready.clear()
    serving.submit("runs", max_tokens=60)
    serving.submit("waits", max_tokens=60)
    serving.device.wait_for("dispatch 1")

    def end_step() -> None:
        wait_for(lambda: serving.engine._is_stopping)
        serving.device.is_ready.set()

    threading.Thread(target=end_step).start()
    serving.engine.stop()
    assert engine_threads() == []
    assert [serving.result(name)[2] for name in ("runs", "waits")] == [FinishReason.CANCELLED] * 2
    assert serving.engine.failure is None
    with pytest.raises(EngineStoppedError, match="the engine is stopping"):
        serving.submit("late")
    serving.engine.cancel("late", FinishReason.CANCELLED)
    serving.engine.stop()
    assert serving.engine.load() == serving.free_load


def test_a_crowd_with_cancellations_from_other_threads(start: Start):
    """The cache is too small for all requests, so some are preempted; each ends once, with the expected tokens."""
    serving = start(num_pages=16, eos="~")
    rng = random.Random(1)
    jobs = {f"r{index}": (chr(rng.randrange(48, 123)), rng.randint(1, 55)) for index in range(64)}

    def cancel_some(names: list[str]) -> None:
        for name in names[::5]:
            time.sleep(0.001)
            serving.engine.cancel(name, FinishReason.CANCELLED)

    serving.device.is_ready.clear()
    for name, (prompt, max_tokens) in jobs.items():
        serving.submit(name, prompt, max_tokens=max_tokens)
    cancel_some(list(jobs)[::-1])  # these wait, or run without a token so far
    threads = [threading.Thread(target=cancel_some, args=(list(jobs)[part::3],)) for part in range(3)]
    serving.device.is_ready.set()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reasons = set()
    for name, (prompt, max_tokens) in jobs.items():
        tokens, text, reason = serving.result(name)
        until_end_token = "".join(map(chr, range(ord(prompt) + 1, ord("~"))))
        whole = until_end_token[:max_tokens]
        assert tokens == text == whole[: len(tokens)]
        assert reason == FinishReason.CANCELLED or tokens == whole
        assert (reason == FinishReason.STOP) <= (tokens == until_end_token)
        reasons.add(reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    assert serving.scheduler.num_preemptions > 0
    assert serving.engine.load() == serving.free_load
