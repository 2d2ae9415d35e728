"""Traffic through the real engine and the demo model: the tokens are those of each request served alone.

The same kind of trace as in test_simulation.py, at a size that a CPU serves in seconds: prefixes shared and not,
several samples, priorities, cancellations, a cache that is too small, one decode step in a dispatch and four, with
drafts and without.
"""

import dataclasses
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from meshserve.runtime.api.request import FinishReason, Output, RequestOptions, TokenLogprobs
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import BatchBuilder
from meshserve.runtime.program.processors.processor_batch import ProcessorBatchBuilder
from meshserve.runtime.resolve import resolved_server
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.startup.launch import launch
from tests.runtime.trace import Arrival, Traffic, make_trace
from tests.waiting import WAIT_SECONDS

NUM_PAGES, PAGE_SIZE, MAX_RUNNING, MAX_STEP_TOKENS, MAX_CONTEXT = 256, 8, 8, 16, 256
MAX_DRAFTS = 7
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.1, "presence_penalty": 0.5, "logit_bias": {400: 3.0}, "min_tokens": 1, "logprobs": 3,
     "prompt_logprobs": 1},
)  # fmt: skip
TRAFFIC = Traffic(
    num_requests=24,
    max_context=MAX_CONTEXT,
    mean_prompt_tokens=12,
    mean_output_tokens=60,
    requests_per_step=0.3,
    vocab=range(300, 2000),
)


@pytest.fixture(scope="module")
def runner(optimised: None) -> Iterator[Runner]:
    """The demo model's programs, for one decode step in a dispatch and for four."""
    config = ServeConfig(
        model="demo", cpu_devices=8, dtype="float32", page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_decode_steps=4,
        max_running=MAX_RUNNING, max_step_tokens=MAX_STEP_TOKENS, max_context=MAX_CONTEXT, cache_dir="",
        draft_tokens=MAX_DRAFTS,
    )  # fmt: skip
    yield launch(config, lambda outputs: None).engine.runner


class Serving:
    """An engine of its own on the shared runner, and what it has delivered."""

    def __init__(self, runner: Runner, num_pages: int = NUM_PAGES, **limits: float):
        values = dict(
            page_size=PAGE_SIZE, max_running=MAX_RUNNING, max_step_tokens=MAX_STEP_TOKENS, max_waiting=1000,
            max_context=MAX_CONTEXT,
        )  # fmt: skip
        self.limits = SchedulerLimits(**(values | limits))
        self.pages = PageAllocator(num_pages)
        self.scheduler = Scheduler(self.limits, self.pages, frozenset({2}))
        sizes = {"max_running": MAX_RUNNING, "page_size": PAGE_SIZE}
        buckets = resolved_server.declare_buckets(
            max_step_tokens=MAX_STEP_TOKENS, max_decode_steps=self.limits.max_decode_steps, **sizes
        )
        self.records: list[StepRecord] = []
        self.engine = Engine(
            scheduler=self.scheduler,
            pages=self.pages,
            batches=BatchBuilder(
                buckets,
                **sizes,
                max_request_pages=MAX_CONTEXT // PAGE_SIZE,
                processors=ProcessorBatchBuilder(
                    max_running=MAX_RUNNING, vocab_size=2048, eos_token_ids=frozenset(), num_drafts=MAX_DRAFTS
                ),
                has_drafts=self.limits.draft_tokens > 0,
            ),
            runner=runner,
            tokenizer=None,
            deliver=self._deliver,
            record=self.records.append,
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: list[TokenLogprobs] = []  # for all requests
        self.ends: dict[tuple[str, int], Output] = {}
        self._changed = threading.Condition()
        self.engine.start()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.stop()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                key = (output.request_id, output.index)
                self.tokens.setdefault(key, []).extend(output.token_ids)
                self.logprobs.extend(output.logprobs)
                if output.finish_reason is not None:
                    self.ends[key] = output
            self._changed.notify_all()

    def wait(self, num_ends: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) >= num_ends, WAIT_SECONDS), "not everyone ended"

    def complete(self, prompt: tuple[int, ...], params: SamplingParams, n: int = 1) -> list[list[int]]:
        request_id = f"alone {len(self.ends)}"
        num_ends = len(self.ends) + n
        self.engine.submit(request_id, prompt, params, RequestOptions(n=n))
        self.wait(num_ends)
        return [self.tokens[request_id, index] for index in range(n)]


def params_of(arrival: Arrival, number: int) -> SamplingParams:
    """Some greedy, some drawn, some under controls."""
    fields: dict[str, Any] = random.Random(number).choice(SAMPLING)
    return SamplingParams(
        max_tokens=min(arrival.max_tokens, 80), seed=1000 * number, ignore_eos=arrival.ignore_eos, **fields
    )


@pytest.fixture(scope="module")
def alone(runner: Runner) -> dict[tuple[int, int], list[int]]:
    """What each sample of the trace gets when it has the engine to itself and nothing is shared."""
    tokens = {}
    with Serving(runner, has_prefix_cache=False) as serving:
        for number, arrival in enumerate(make_trace(random.Random(5), TRAFFIC)):
            for index in range(arrival.options.n):
                params = params_of(arrival, number)
                params = dataclasses.replace(params, seed=1000 * number + index)
                (tokens[number, index],) = serving.complete(arrival.prompt, params)
    return tokens


CROWDED = 34  # pages


@pytest.mark.parametrize(
    ("max_decode_steps", "draft_tokens", "num_pages"),
    [(1, 0, CROWDED), (4, 0, CROWDED), (1, 7, CROWDED), (4, 3, CROWDED), (4, 3, NUM_PAGES)],
)
def test_company_does_not_change_a_token(
    runner: Runner, alone, max_decode_steps: int, draft_tokens: int, num_pages: int
) -> None:
    cancelled = set()
    limits = {"max_decode_steps": max_decode_steps, "draft_tokens": draft_tokens, "draft_min_match": 2}
    with Serving(runner, num_pages, **limits, max_prefill_tokens=9) as serving:
        for number, arrival in enumerate(make_trace(random.Random(5), TRAFFIC)):
            options = dataclasses.replace(arrival.options, timeout_seconds=None)
            serving.engine.submit(str(number), arrival.prompt, params_of(arrival, number), options)
            if arrival.cancel_after_steps is not None and arrival.cancel_after_steps > 50:
                serving.wait(min(number // 3, len(serving.ends) + 2))
                serving.engine.cancel(str(number), FinishReason.CANCELLED)
                cancelled.add(str(number))
        serving.wait(len(alone))
        for (number, index), expected in alone.items():
            end, tokens = serving.ends[str(number), index], serving.tokens[str(number), index]
            if end.finish_reason is FinishReason.CANCELLED:
                assert str(number) in cancelled and tokens == expected[: len(tokens)]
            else:
                assert tokens == expected, f"request {number}, sample {index}"
        if num_pages != CROWDED:  # how many the small cache preempts depends on how fast the machine is
            assert serving.scheduler.num_preemptions == 0
        assert any(record.num_cached_tokens for record in serving.records)
        assert any(record.num_steps > 1 for record in serving.records) == (max_decode_steps > 1)
        assert any(record.num_draft_tokens for record in serving.records) == (draft_tokens > 0)
        load = serving.engine.load()
        assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, num_pages)


@pytest.mark.parametrize(("prompt", "temperature"), [((300,), 0.0), ((350, 351, 352, 353) * 3, 0.3)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"repetition_penalty": 1.02, "frequency_penalty": 0.01, "logit_bias": {300: 1.0}, "min_tokens": 100},
    ],
    ids=["plain", "logprobs", "adjusted"],
)
def test_drafts_save_steps_and_change_no_token(
    runner: Runner, prompt: tuple[int, ...], temperature: float, fields: dict[str, Any]
) -> None:
    logprobs = fields.get("logprobs")
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=3, ignore_eos=True, **fields)
    with Serving(runner) as plain:
        (expected,) = plain.complete(prompt, params)
    with Serving(runner, draft_tokens=7, draft_min_match=2) as serving:
        (tokens,) = serving.complete(prompt, params)
    assert tokens == expected
    assert [found.token_id for found in serving.logprobs] == (tokens if logprobs is not None else [])
    for found, wanted in zip(serving.logprobs, plain.logprobs, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert dict(found.top) == pytest.approx(dict(wanted.top), abs=1e-4)
    num_accepted = sum(record.num_accepted_tokens for record in serving.records)
    assert 0 < num_accepted <= sum(record.num_draft_tokens for record in serving.records)
    assert len(serving.records) == 120 - num_accepted


def test_the_records_add_up(runner: Runner) -> None:
    """Every token of every request is in the records: computed, found in the cache, or wasted."""
    prompt = tuple(range(300, 337))
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=1, ignore_eos=True)
    with Serving(runner) as serving:
        serving.complete(prompt, params, n=3)
        serving.complete(prompt, params)
    records = serving.records
    assert sum(record.num_prefill_tokens for record in records) == 37 + 3 * 5  # 4 of 4 full pages were found 3 times
    assert sum(record.num_cached_tokens for record in records) == 3 * 32
    assert sum(record.num_admitted_tokens for record in records) == 4 * 37
    assert sum(record.num_decode_tokens for record in records) == 4 * 8
    assert sum(len(record.queue_seconds) for record in records) == 4
    assert [serving.ends["alone 0", index].num_cached_tokens for index in range(3)] == [0, 32, 32]
    assert sum(record.num_wasted_tokens + record.num_evicted_pages + record.num_refused for record in records) == 0
    for record in records:
        assert 0.0 < record.occupancy <= 1.0 and 0.0 <= record.padding < 1.0
        assert 0.0 <= record.host_seconds and 0.0 < record.step_seconds
