"""An engine that drafts, on CPU devices, and what it has delivered."""

import threading
from collections.abc import Sequence
from typing import Any

from meshserve.runtime.api.request import DEFAULT_OPTIONS, FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import launch
from meshserve.runtime.text.grammar import compiled
from tests.waiting import WAIT_SECONDS


class Serving:
    """A running engine.

    Args:
      options: Options of `ServeConfig`, beside those that all tests share.
    """

    def __init__(self, **options: Any):
        config = ServeConfig(cpu_devices=8, dtype="float32", cache_dir="", **options)
        self.records: list[StepRecord] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self._changed = threading.Condition()
        self.launched = launch(config, self._deliver, self.records.append)
        self.engine = self.launched.engine
        self.num_pages = self.engine.load().num_pages
        self.engine.start()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens[output.request_id].extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
            self._changed.notify_all()

    def submit(self, prompt: str | Sequence[int], params: SamplingParams) -> str:
        """Returns the request's name."""
        token_ids = self.launched.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        resumed = token_ids[len(token_ids) - params.num_resumed_tokens :]
        grammar = compiled(params.constraint, self.launched.grammars, resumed)
        name = str(len(self.tokens))
        self.tokens[name] = []
        self.engine.submit(name, token_ids, params, DEFAULT_OPTIONS, grammar)
        return name

    def wait(self, *names: str) -> list[list[int]]:
        """Returns the tokens of requests that have ended."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: all(name in self.ends for name in names), WAIT_SECONDS)
            assert is_done, self.engine.failure
        return [self.tokens[name] for name in names]

    def wait_for(self, num_ends: int) -> None:
        """Waits until `num_ends` requests have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) >= num_ends, WAIT_SECONDS), self.engine.failure

    def together(self, requests: Sequence[tuple[str | Sequence[int], SamplingParams]]) -> list[list[int]]:
        return self.wait(*[self.submit(*request) for request in requests])

    def alone(self, requests: Sequence[tuple[str | Sequence[int], SamplingParams]]) -> list[list[int]]:
        return [self.wait(self.submit(*request))[0] for request in requests]

    def cancel(self, name: str) -> None:
        self.engine.cancel(name, FinishReason.CANCELLED)

    def preempt_all(self, num_pages: int | None = None) -> None:
        """Preempts all running requests; they go on in a cache of `num_pages` pages."""
        self.engine.rebuild(lambda: (self.engine.runner, num_pages or self.num_pages))

    def check_all_is_free(self, num_pages: int | None = None) -> None:
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, num_pages or self.num_pages)

    @property
    def num_drafts(self) -> int:
        return sum(record.num_draft_tokens for record in self.records)

    @property
    def num_accepted(self) -> int:
        return sum(record.num_accepted_tokens for record in self.records)


def equal_counts(shares: Sequence[float], lengths: Sequence[int], costs: object, *, num_tokens: int, room: int):
    """Replaces `draft_counts`, with which a drafter that errs would soon get few."""
    return [min(length, room // len(lengths)) for length in lengths]
