"""Soaks the engine with mixed load and checks for late compiles, leaked pages and requests that never end.

    meshserve bench soak --model qwen3-0.6b --random-weights --seconds 600

Requests of all lengths and sampling modes arrive as others end, with one or several samples, and with every logits
processor except grammars, which need a tokenizer. Some are cancelled midway. The compile watch is strict: a compile
after ready stops the engine and is reported. Exits with 1 if any check fails.

    meshserve bench soak --model demo --cpu-devices 1 --set draft_model=demo-head --set draft_tokens=3 --draft-turns 15

With `--draft-turns`, drafts are switched off and on in turns of that many seconds, and the tokens per second of both
are compared: "on" means that the engine decides at each step whether drafts pay, as a server does.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.drafting_switch import switch_drafts
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.runtime.api.request import FinishReason, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.model_files.quantization import NOT_QUANTIZED, SCHEMES
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup.launch import build_engine, open_model

_SETTLE_SECONDS = 60.0
_PROGRESS_SECONDS = 60.0
_LONGEST_OUTPUT = 256  # tokens
_MAX_CONTEXT = 4096  # tokens, unless --max-context is given
_CANCELLED = 0.2  # maximum share of the requests


class Crowd:
    """Keeps samples in flight and counts how they end; `deliver` is the engine's output callback.

    Args:
      processed: The share of requests with logits processors.
    """

    def __init__(self, vocab_size: int, max_context: int, seed: int, processed: float):
        self._draw = random.Random(seed)
        self._vocab_size = min(vocab_size, 10_000)
        self._max_context = max_context
        self._controlled = processed
        self._lock = threading.Lock()
        self._open: set[tuple[str, int]] = set()
        self._num_submitted = 0
        self._num_cancelled = 0
        self.num_tokens = 0
        self.num_ended: dict[str, int] = {}
        self.num_double_ends = 0

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._lock:
            for output in outputs:
                self.num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    sample = output.request_id, output.index
                    self.num_double_ends += sample not in self._open
                    self._open.discard(sample)
                    reason = output.finish_reason.value
                    self.num_ended[reason] = self.num_ended.get(reason, 0) + 1

    def submit_one(self, engine: Engine) -> None:
        """Submits a request with random length and parameters."""
        draw = self._draw
        request_id = str(self._num_submitted)
        self._num_submitted += 1
        num_prompt_tokens = min(int(draw.lognormvariate(4.5, 1.2)) + 1, self._max_context // 2)
        params = self._params()
        prompt = tuple(draw.randrange(self._vocab_size) for _ in range(num_prompt_tokens))
        num_samples = draw.choice([1, 1, 1, 3])
        with self._lock:
            self._open.update((request_id, index) for index in range(num_samples))
        engine.submit(request_id, prompt, params, RequestOptions(n=num_samples))

    def _params(self) -> SamplingParams:
        draw = self._draw
        fields: dict[str, Any] = dict(
            max_tokens=draw.randint(1, min(_LONGEST_OUTPUT, self._max_context // 2)),
            temperature=draw.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
            top_k=draw.choice([0, 0, 1, 20, 1000]),
            top_p=draw.choice([1.0, 1.0, 0.9, 0.5]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            ignore_eos=draw.random() < 0.5,
        )
        if draw.random() < self._controlled:
            some_ids = tuple(draw.randrange(self._vocab_size) for _ in range(100))
            fields |= draw.choice(
                [
                    {"logprobs": draw.randrange(6)},
                    {"logprobs": 0, "prompt_logprobs": draw.randrange(6)},
                    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
                    {"logit_bias": dict.fromkeys(some_ids, draw.uniform(-5.0, 5.0))},
                    {"bad_token_ids": some_ids},
                    {"allowed_token_ids": some_ids},
                    {"min_tokens": fields["max_tokens"] // 2},
                ]
            )
        return SamplingParams(**fields)

    def cancel_one(self, engine: Engine) -> None:
        """Cancels a random request in flight, unless enough have been cancelled."""
        if self._num_cancelled >= _CANCELLED * self._num_submitted:
            return
        with self._lock:
            victim = self._draw.choice(sorted(self._open)) if self._open else None
        if victim is not None:
            self._num_cancelled += 1
            engine.cancel(victim[0], FinishReason.CANCELLED)


class DraftTurns:
    """Switches drafts off and on in turn, and counts the tokens of each turn.

    Args:
      turn_seconds: The length of each turn; 0 leaves drafts as they are.
    """

    def __init__(self, engine: Engine, crowd: Crowd, turn_seconds: float):
        self._engine, self._crowd, self._turn_seconds = engine, crowd, turn_seconds
        self._began, self._num_before = time.monotonic(), 0
        self._rates: dict[bool, list[float]] = {True: [], False: []}
        self._is_on = True

    def look(self) -> None:
        """Ends the turn if it is over."""
        now = time.monotonic()
        if not self._turn_seconds or now - self._began < self._turn_seconds:
            return
        num_tokens = self._crowd.num_tokens
        self._rates[self._is_on].append((num_tokens - self._num_before) / (now - self._began))
        self._is_on = not self._is_on
        switch_drafts(self._engine, is_on=self._is_on)
        self._began, self._num_before = now, num_tokens

    def report(self) -> dict[str, object]:
        """Returns the rates of all turns but the first pair, in which the load begins and drafts are tried."""
        on, off = self._rates[True][1:], self._rates[False][1:]
        pairs = [mine / other for mine, other in zip(on, off, strict=False)]
        if not pairs:
            return {}
        speculation = self._engine._scheduler.speculation
        return {
            "tokens_per_second_with_drafts": round(statistics.mean(on)),
            "tokens_per_second_without": round(statistics.mean(off)),
            "ratio": round(sum(on[: len(pairs)]) / sum(off[: len(pairs)]), 4),
            "ratio_of_each_pair": [round(pair, 3) for pair in pairs],
            "ratio_standard_error": round(statistics.stdev(pairs) / len(pairs) ** 0.5, 4) if len(pairs) > 1 else None,
            "drafts": speculation.num_drafts,
            "drafts_accepted": speculation.num_accepted,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(options.model, random_weights=options.random_weights, quantize=options.quantize)
    settings: dict[str, Any] = dict(
        tp=options.tp,
        cpu_devices=options.cpu_devices,
        num_pages=options.num_pages,
        page_size=options.page_size,
        max_context=options.max_context or min(model.longest_context, _MAX_CONTEXT),
        max_running=options.max_running,
        max_step_tokens=max(options.max_step_tokens, options.max_running),
        attention=options.attention,
        decode_layers=options.decode_layers,
    )
    settings |= {"random_weights": options.random_weights, **parse_settings(options.set)}
    config = ServeConfig(model=options.model, **settings)
    crowd = Crowd(model.vocab_size, config.max_context, options.seed, options.controlled)
    started = time.monotonic()
    with CompileWatch(is_strict=True) as watch:
        engine, server = build_engine(config, model, make_params, None, crowd.deliver)
        ready_seconds = time.monotonic() - started
        engine.start()
        watch.ready()
        turns = DraftTurns(engine, crowd, options.draft_turns)
        seconds = _run(engine, crowd, server.limits.max_running, options, turns)
        report = _report(engine, crowd, watch, ready_seconds, seconds) | turns.report()
        engine.stop()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if report["is_clean"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench soak", description="Soak the engine with mixed load.")
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--quantize", choices=(NOT_QUANTIZED, *SCHEMES), default=NOT_QUANTIZED)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument("--num-pages", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-context", type=int, default=0, help="default: the model's, at most 4,096")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=256)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--decode-layers", default="auto")
    parser.add_argument("--controlled", type=float, default=0.25, help="share of requests with logits processors")
    parser.add_argument(
        "--draft-turns", type=float, default=0.0, metavar="SECONDS", help="switch drafts off and on in turn"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def _run(engine: Engine, crowd: Crowd, max_running: int, options: argparse.Namespace, turns: DraftTurns) -> float:
    """Keeps 1.5 times `max_running` samples open until the time is over, then waits for all of them to end.

    Prints the progress every minute. Returns the elapsed seconds.
    """
    started = printed = time.monotonic()
    draw = random.Random(options.seed)
    while time.monotonic() - started < options.seconds and engine.failure is None:
        if time.monotonic() - printed > _PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"{printed - started:.0f} s: {crowd.num_tokens} tokens", file=sys.stderr, flush=True)
        while crowd.num_open < max_running * 3 // 2:
            crowd.submit_one(engine)
        if draw.random() < 0.05:
            crowd.cancel_one(engine)
        turns.look()
        time.sleep(0.005)
    end = time.monotonic() + _SETTLE_SECONDS
    while crowd.num_open and engine.failure is None and time.monotonic() < end:
        time.sleep(0.05)
    return time.monotonic() - started


def _report(
    engine: Engine, crowd: Crowd, watch: CompileWatch, ready_seconds: float, seconds: float
) -> dict[str, object]:
    load, counts, runner = engine.load(), watch.counts, engine.runner
    experts = runner.expert_tokens if isinstance(runner, StepRunner) else None
    balance = experts.balance() if experts is not None else None
    is_clean = (
        engine.failure is None
        and counts.num_late_compiles == 0
        and crowd.num_open == crowd.num_double_ends == 0
        and load.num_free_pages == load.num_pages
    )
    return {
        "is_clean": is_clean,
        "failure": engine.failure,
        "ready_seconds": round(ready_seconds, 1),
        "load_seconds": round(seconds, 1),
        "late_compiles": counts.num_late_compiles,
        "cache_hits": counts.num_cache_hits,
        "cache_misses": counts.num_cache_misses,
        "ended": crowd.num_ended,
        "tokens": crowd.num_tokens,
        "tokens_per_second": round(crowd.num_tokens / seconds),
        "pages": load.num_pages,
        "pages_free_at_the_end": load.num_free_pages,
        "expert_imbalance": round(balance.expert_imbalance, 2) if balance is not None else None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
