"""Runs the engine without a server, for benchmarks: random or real weights, fed with whole batches."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.draft.model.drafting_runner import RunnerBeside
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.step_record import Record
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.serve_config import ServeConfig, options
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup.launch import MakeParams, build_engine

from .token_times import RunTimes, TokenClock
from .workloads import Work

_OWN_OPTIONS = {"model": "--model", "random_weights": "--random-weights"}  # the benchmarks need these before the config


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Parses options of ServeConfig from KEY=VALUE.

    Raises:
      ConfigError: The option does not exist, the benchmark has its own, or the value is not of its type.
    """
    types = {field.name: field.type for field in dataclasses.fields(ServeConfig)}
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        kind = types.get(key)
        if kind is None:
            raise ConfigError(f"--set {pair}: there is no option {key!r}; known options are {', '.join(types)}.")
        if key in _OWN_OPTIONS:
            raise ConfigError(f"--set {pair}: use {_OWN_OPTIONS[key]} instead.")
        if options()[key].is_list:
            settings[key] = (*settings.get(key, ()), value)
            continue
        try:
            settings[key] = value.lower() in ("1", "true") if kind is bool else kind(value)  # type: ignore[operator]
        except ValueError:
            raise ConfigError(f"--set {pair}: {value!r} is not of type {kind.__name__}.") from None  # type: ignore[union-attr]
    return settings


def config_for(batches: Sequence[Sequence[Work]], settings: Mapping[str, Any]) -> ServeConfig:
    """Returns a server's defaults, but a whole batch can run at once and nothing is cached; `settings` take precedence.

    Limits of steps are then chosen as for a server (`planning.auto_limits`).
    """
    num_requests = max(len(batch) for batch in batches)
    longest = max(len(work.prompt_token_ids) + work.max_tokens for batch in batches for work in batch)
    chosen: dict[str, Any] = {
        "max_running": num_requests,
        "max_waiting": num_requests,
        "max_context": longest,
        "prefix_cache": False,
    }
    return ServeConfig(**{**chosen, **settings})


class OfflineEngine:
    """A running engine, for use as a context manager from a single thread."""

    def __init__(self, config: ServeConfig, model: ModelConfig, make_params: MakeParams, record: Record | None = None):
        self._changed = threading.Condition()
        self._clock = TokenClock()
        self._began = 0.0
        self._num_open = 0
        self._fault = ""
        self._full_steps: list[tuple[float, int]] = []  # the time and the tokens of the steps of `while_full`
        self.tokens: list[list[int]] = []  # from the last run, per request
        self.engine, _ = build_engine(config, model, make_params, None, self._deliver, record)

    def __enter__(self) -> "OfflineEngine":
        self.engine.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stops the engine and frees the devices' memory, which another engine may need."""
        self.engine.stop()
        if isinstance(self.engine.runner, StepRunner | RunnerBeside):
            self.engine.runner.release()

    def run(self, batch: Sequence[Work], temperature: float) -> RunTimes:
        """Submits all requests at once and waits for all of them; end tokens are ignored.

        Raises:
          RuntimeError: A request did not reach its full length.
        """
        engine: Engine = self.engine
        with self._changed:
            self._clock, self._num_open = TokenClock(), len(batch)
            self.tokens, self._full_steps = [[] for _ in batch], []
            self._began = time.perf_counter()
        for index, work in enumerate(batch):
            params = SamplingParams(max_tokens=work.max_tokens, temperature=temperature, seed=index, ignore_eos=True)
            engine.submit(str(index), work.prompt_token_ids, params)
        with self._changed:
            while self._num_open and not self._fault:
                self._changed.wait(timeout=1.0)
            if self._fault:
                raise RuntimeError(self._fault)
            return self._clock.times(time.perf_counter() - self._began)

    @property
    def while_full(self) -> tuple[int, float]:
        """The tokens and seconds of the last run's steps in which all of its requests decode, the first one aside."""
        if not self._full_steps:
            return 0, 0.0
        times, tokens = zip(*self._full_steps, strict=True)
        return sum(tokens[1:]), times[-1] - times[0]

    def _deliver(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        with self._changed:
            had_begun = all(self.tokens)
            for output in outputs:
                self.tokens[int(output.request_id)] += output.token_ids
                self._clock.add(int(output.request_id), self._began, now, len(output.token_ids))
                if output.finish_reason is not None:
                    self._num_open -= 1
                    if output.finish_reason is not FinishReason.LENGTH:
                        self._fault = f"request {output.request_id} ended: {output.finish_reason}: {output.message}"
            if had_begun and self._num_open == len(self.tokens):
                self._full_steps.append((now, sum(len(output.token_ids) for output in outputs)))
            if self._num_open == 0 or self._fault:
                self._changed.notify()
