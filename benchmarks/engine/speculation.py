"""Measures the gain and cost of draft tokens: output tokens per second through the engine, with and without them.

    meshserve bench speculation --model qwen3-8b --random-weights --requests 1 8 32
    meshserve bench speculation --model DIRECTORY --temperature 0
    meshserve bench speculation --model qwen3-8b --random-weights --acceptance 1.5 2.4 4 --draft-tokens 7
    meshserve bench speculation --model qwen3-32b --random-weights --set draft_model=qwen3-0.6b --draft-tokens 3 \\
        --acceptance 2.4 --one-engine
    meshserve bench speculation --model demo --set draft_model=demo-head --draft-tokens 4 --text PLAY.txt

With `--acceptance`, an oracle decides how many draft tokens hold, so that a step with `--draft-tokens` of a request
brings that many of its tokens on average. So speed against acceptance is measured without a trained drafter, and
without the time that one would take; a draft model's time is included. The tokens of such a run mean nothing. Several
numbers of draft tokens may be given; one engine, compiled for the largest, serves all.

The prompts are random tokens, or parts of the text that `--text` names.

The last columns say where the time between two steps with drafts goes: planning and packing, the calls that dispatch,
waiting until the sampled tokens are known, and the rest (booking and delivering), then the GPU's clock and power
without drafts and with, if NVIDIA's library is available. With `--profile`, one more run of each case is traced, and
the device's kernels and the gaps between them are printed.

All requests begin at once and are equally long. With drafts, some end before others, and the last steps have few
requests. A server, where others take their places, gains more than the first ratio says: the second, "all run", is that
of the steps in which all requests decode.

The two temperatures cover both extremes. At temperature 0, models (especially with random weights) begin to repeat
themselves, and most drafts are accepted. At temperature 1 with random weights nothing repeats, so the loss is the price
of the option. The tokens must be the same with and without drafts, except for near ties, which may be broken
differently by a different shape of the step; the number of requests with different tokens is printed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from meshserve.benchmarks.lib.drafting_switch import switch_drafts
from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for, parse_settings
from meshserve.benchmarks.lib.oracle import Oracle
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed
from meshserve.runtime.draft.model.drafting_runner import RunnerBeside
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.scheduler.drafts.payoff import Payoffs
from meshserve.runtime.startup.launch import open_model
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.locate import find_model

_WARM_UP_SEED = 99


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload with and without drafts, over all timed runs."""

    num_requests: int
    temperature: float
    draft_tokens: int  # the most of a request in a step
    acceptance: float  # the mean number of tokens that the oracle aims at; 0 without it
    plain_tokens_per_second: float
    tokens_per_second: float
    plain_full_tokens_per_second: float  # while all requests decode; 0 if there was no such time
    full_tokens_per_second: float
    num_drafts: int
    num_accepted: int
    num_verified: int  # times that a request's drafts were verified
    num_changed: int  # requests that got different tokens; with an oracle, most do
    plain_step_ms: float  # mean time between steps of the timed runs, prefill included
    step_ms: float
    host_ms: float  # the part for planning and packing, for which the device waits
    dispatch_ms: float  # the calls that dispatch a step, and those that dispatch its draft tokens
    wait_ms: float  # from there until the sampled tokens are known
    plain_power: Reading | None  # for the GPU with the highest power, during the timed runs without drafts
    power: Reading | None  # and with drafts

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def full_ratio(self) -> float:
        """The ratio while all requests decode."""
        plain = self.plain_full_tokens_per_second
        return self.full_tokens_per_second / plain if plain else math.nan

    @property
    def accepted_length(self) -> float:
        """The mean number of tokens of a request in a step that verifies its drafts."""
        return 1.0 + self.num_accepted / self.num_verified if self.num_verified else 1.0


@dataclasses.dataclass(frozen=True)
class _Side:
    """The result of one engine with the workload of a case."""

    tokens_per_second: float
    full_tokens_per_second: float
    tokens: list[list[int]]
    num_drafts: int
    num_accepted: int
    num_verified: int
    step_seconds: float
    host_seconds: float
    dispatch_seconds: float
    wait_seconds: float
    power: Reading | None


class _Dispatches:
    """Adds up the time of a runner's calls that dispatch work."""

    def __init__(self, runner: Runner):
        self.seconds = 0.0
        for name in ("run", "propose", "run_drafted"):
            if hasattr(runner, name):
                setattr(runner, name, partial(self._timed, getattr(runner, name)))
        self._is_timing = False

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_timing:  # `run_drafted` calls `run`
            return method(*arguments)
        self._is_timing, started = True, time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self.seconds += time.perf_counter() - started
            self._is_timing = False


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(options.model, random_weights=options.random_weights)
    workloads = {number: _draw(options, number, model.vocab_size) for number in options.requests}
    settings = {"tp": options.tp, "cpu_devices": options.cpu_devices, **parse_settings(options.set)}
    works = [work for batches in workloads.values() for work in batches]
    plain: dict[tuple[int, float], _Side] = {}
    cases: list[Case] = []
    num_drafts = max(options.draft_tokens)
    for draft_tokens in (num_drafts,) if options.one_engine else (0, num_drafts):
        records: list[StepRecord] = []
        chosen = {
            "model": options.model, "random_weights": options.random_weights, **settings, "draft_tokens": draft_tokens
        }  # fmt: skip
        if not draft_tokens:
            chosen.pop("draft_model", None)
        built = OfflineEngine(config_for(works, chosen), model, make_params, records.append)
        with built as engine, PowerWatch() as power:
            dispatches = _Dispatches(engine.engine.runner)
            for key in itertools.product(workloads, options.temperature):
                run = partial(_run, engine, records, dispatches, power, workloads[key[0]], key[1])
                if key not in plain:
                    plain[key] = _without_drafts(engine, run)
                if draft_tokens:
                    cases += _with_drafts(options, engine, key, plain[key], run)
    print(f"{options.model} tp {options.tp} on {jax.devices()[0].device_kind}, up to {num_drafts} draft tokens")
    columns = "requests  temperature  draft tokens  tokens/s without  with  ratio, all run  drafts held  tokens a step"
    columns += "  changed"
    print(f"{columns}  step, ms: plan, dispatch, wait, rest")
    for case in cases:
        print(_row(case))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1))
    return 0


def _without_drafts(engine: OfflineEngine, run: Callable[[], "_Side"]) -> "_Side":
    """Returns the result without drafts, for which an engine that has some switches them off."""
    switch_drafts(engine.engine, is_on=False)
    try:
        return run()
    finally:
        switch_drafts(engine.engine, is_on=True)


def _with_drafts(
    options: argparse.Namespace,
    engine: OfflineEngine,
    key: tuple[int, float],
    plain: "_Side",
    run: Callable[[], "_Side"],
) -> Iterator[Case]:
    """Yields a case for each number of draft tokens and each acceptance."""
    speculation = engine.engine._scheduler.speculation
    speculation.is_always_on = options.always
    has_draft_model = isinstance(engine.engine.runner, RunnerBeside)
    for acceptance, draft_tokens in itertools.product(options.acceptance or [0.0], options.draft_tokens):
        if not acceptance:
            yield _case(*key, draft_tokens, acceptance, plain, _profiled(options.profile, run))
            continue
        oracle = Oracle(draft_tokens, acceptance, has_draft_model=has_draft_model)
        speculation.make_drafter = oracle.drafter
        speculation._payoffs = Payoffs()  # what the last drafter brought says nothing of this one
        with oracle.deciding():
            yield _case(*key, draft_tokens, acceptance, plain, _profiled(options.profile, run))


def _profiled(folder: Path | None, run: Callable[[], "_Side"]) -> "_Side":
    """Returns the result of a run. With a folder, traces another one and prints where the device's time went."""
    side = run()
    if folder is not None:
        its_folder = folder / str(time.monotonic_ns())
        with jax.profiler.trace(str(its_folder), create_perfetto_trace=False):
            run()
        print(kernel_table(its_folder, num_rows=12), flush=True)
    return side


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench speculation", description="Compare decoding with and without draft tokens."
    )
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="numbers of concurrent requests")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[7], help="the most of a request in a step")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[], metavar="TOKENS",
        help="mean tokens per step and request that an oracle drafter is made to reach, instead of prompt lookup",
    )  # fmt: skip
    parser.add_argument(
        "--one-engine", action="store_true",
        help="measure both sides in one engine, in which drafts are switched off for the first; for models that fill "
        "the device's memory",
    )  # fmt: skip
    parser.add_argument("--always", action="store_true", help="make as many drafts as fit, whether they pay or not")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also trace a run of each case into this folder")
    parser.add_argument("--text", type=Path, help="a text whose parts are the prompts, instead of random tokens")
    parser.add_argument("--input-tokens", type=int, default=256, help="input tokens of each request")
    parser.add_argument("--output-tokens", type=int, default=512, help="output tokens of each request")
    parser.add_argument("--runs", type=int, default=3, help="number of timed runs, each with a new draw")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the cases to this file")
    return parser


def _draw(options: argparse.Namespace, num_requests: int, vocab_size: int) -> list[list[Work]]:
    """Returns the warm-up batch, followed by the batches of the timed runs."""
    max_id = min(MAX_TOKEN_ID, vocab_size - 1)
    seeds = (_WARM_UP_SEED, *range(options.runs))
    if len(options.draft_tokens) > 1 and not options.acceptance:
        raise ValueError("--draft-tokens: several numbers need --acceptance. Give one.")
    if options.text:
        token_ids = open_tokenizer(find_model(options.model).small).encode(options.text.read_text())
        return _parts(token_ids, len(seeds), num_requests, options)
    return [fixed(seed, num_requests, options.input_tokens, options.output_tokens, max_id) for seed in seeds]


def _parts(
    token_ids: Sequence[int], num_batches: int, num_requests: int, options: argparse.Namespace
) -> list[list[Work]]:
    """Returns batches whose prompts are parts of a text, at equal distances.

    Raises:
      ValueError: The text is too short.
    """
    count, length = num_batches * num_requests, options.input_tokens
    distance = (len(token_ids) - length) // count
    if distance < 1:
        raise ValueError(f"--text has {len(token_ids)} tokens; {length + count} are needed. Use a longer one.")
    works = [
        Work(list(token_ids[start : start + length]), options.output_tokens)
        for start in range(0, count * distance, distance)
    ]
    return [works[start : start + num_requests] for start in range(0, count, num_requests)]


def _run(
    engine: OfflineEngine,
    records: list[StepRecord],
    dispatches: _Dispatches,
    power: PowerWatch,
    works: Sequence[list[Work]],
    temperature: float,
) -> _Side:
    warm_up, *timed = works
    engine.run(warm_up, temperature)
    tokens, num_warm_up = list(engine.tokens), len(warm_up)
    records.clear()
    seconds = dispatches.seconds = full_seconds = 0.0
    num_full_tokens = 0
    began = time.perf_counter()
    for batch in timed:
        seconds += engine.run(batch, temperature).seconds
        tokens += engine.tokens
        full = engine.while_full
        num_full_tokens, full_seconds = num_full_tokens + full[0], full_seconds + full[1]
    return _Side(
        sum(map(len, tokens[num_warm_up:])) / seconds,
        num_full_tokens / full_seconds if full_seconds else 0.0,
        tokens,
        sum(record.num_draft_tokens for record in records),
        sum(record.num_accepted_tokens for record in records),
        sum(record.num_drafts_at[0] for record in records if record.num_drafts_at),
        seconds / len(records),
        sum(record.host_seconds for record in records) / len(records),
        dispatches.seconds / len(records),
        (sum(record.step_seconds for record in records) - dispatches.seconds) / len(records),
        power.between(began, time.perf_counter()),
    )


def _case(
    num_requests: int, temperature: float, draft_tokens: int, acceptance: float, plain: _Side, drafted: _Side
) -> Case:
    return Case(
        num_requests=num_requests,
        temperature=temperature,
        draft_tokens=draft_tokens,
        acceptance=acceptance,
        plain_tokens_per_second=plain.tokens_per_second,
        tokens_per_second=drafted.tokens_per_second,
        plain_full_tokens_per_second=plain.full_tokens_per_second,
        full_tokens_per_second=drafted.full_tokens_per_second,
        num_drafts=drafted.num_drafts,
        num_accepted=drafted.num_accepted,
        num_verified=drafted.num_verified,
        num_changed=sum(mine != other for mine, other in zip(plain.tokens, drafted.tokens, strict=True)),
        plain_step_ms=1000 * plain.step_seconds,
        step_ms=1000 * drafted.step_seconds,
        host_ms=1000 * drafted.host_seconds,
        dispatch_ms=1000 * drafted.dispatch_seconds,
        wait_ms=1000 * drafted.wait_seconds,
        plain_power=plain.power,
        power=drafted.power,
    )


def _row(case: Case) -> str:
    rest_ms = case.step_ms - case.host_ms - case.dispatch_ms - case.wait_ms
    held = f"{case.num_accepted / case.num_drafts:.0%}" if case.num_drafts else "none made"
    return (
        f"{case.num_requests:8}  {case.temperature:11g}  {case.draft_tokens:12}  "
        f"{case.plain_tokens_per_second:16,.0f}  {case.tokens_per_second:,.0f}  {case.ratio:5.2f}  "
        f"{case.full_ratio:7.2f}  {held:>11}  {case.accepted_length:13.2f}  {case.num_changed:7}  "
        f"{case.plain_step_ms:.2f} -> {case.step_ms:.2f}: {case.host_ms:.2f}, {case.dispatch_ms:.2f}, "
        f"{case.wait_ms:.2f}, {rest_ms:.2f}{at_power(case.plain_power)}{at_power(case.power)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
