"""Measures the gain and cost of draft tokens: output tokens per second through the engine, with and without them.

    meshserve bench speculation --model qwen3-8b --random-weights --requests 1 8 32
    meshserve bench speculation --model DIRECTORY --temperature 0
    meshserve bench speculation --model qwen3-8b --random-weights --acceptance 1.5 2.4 4 --draft-tokens 7
    meshserve bench speculation --model qwen3-32b --random-weights --set draft_model=qwen3-0.6b --draft-tokens 4
    meshserve bench speculation --model demo --set draft_model=demo-head --draft-tokens 4 --text PLAY.txt

With `--acceptance`, an oracle drafts: it knows the tokens of the run without drafts, and errs so often that a step
brings that many tokens of a request on average. So speed against acceptance is measured without a trained drafter, and
without the time that one would take.

The prompts are random tokens, or parts of the text that `--text` names.

The two temperatures cover both extremes. At temperature 0, models (especially with random weights) begin to repeat
themselves, and most drafts are accepted. At temperature 1 with random weights nothing repeats, so the loss is the price
of the option. The tokens must be the same with and without drafts, except for near ties, which may be broken
differently by a different shape of the step; the number of requests with different tokens is printed.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for, parse_settings
from meshserve.benchmarks.lib.oracle import Oracle, chance_of
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.startup.launch import open_model
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.locate import find_model

_WARM_UP_SEED = 99


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload with and without drafts, over all timed runs."""

    num_requests: int
    temperature: float
    acceptance: float  # the mean number of tokens that the oracle aims at; 0 without it
    plain_tokens_per_second: float
    tokens_per_second: float
    num_drafts: int
    num_accepted: int
    num_verified: int  # times that a request's drafts were verified
    num_changed: int  # requests that got different tokens

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def accepted_length(self) -> float:
        """The mean number of tokens of a request in a step that verifies its drafts."""
        return 1.0 + self.num_accepted / self.num_verified if self.num_verified else 1.0


@dataclasses.dataclass(frozen=True)
class _Side:
    """The result of one engine with the workload of a case."""

    tokens_per_second: float
    tokens: list[list[int]]
    num_drafts: int
    num_accepted: int
    num_verified: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(options.model, random_weights=options.random_weights)
    workloads = {number: _draw(options, number, model.vocab_size) for number in options.requests}
    settings = {"tp": options.tp, "cpu_devices": options.cpu_devices, **parse_settings(options.set)}
    plain: dict[tuple[int, float], _Side] = {}
    cases: list[Case] = []
    for draft_tokens in (0, options.draft_tokens):
        records: list[StepRecord] = []
        chosen = {"model": options.model, **settings, "draft_tokens": draft_tokens}
        if not draft_tokens:
            chosen.pop("draft_model", None)
        config = config_for([work for works in workloads.values() for work in works], chosen)
        with OfflineEngine(config, model, make_params, records.append) as engine:
            engine.engine._scheduler.speculation.is_always_on = options.always
            for key in itertools.product(workloads, options.temperature):
                works, temperature = workloads[key[0]], key[1]
                if not draft_tokens:
                    plain[key] = _run(engine, records, works, temperature)
                    continue
                for acceptance in options.acceptance or [0.0]:
                    if acceptance:
                        oracle = Oracle(works, plain[key].tokens, chance_of(acceptance, draft_tokens))
                        engine.engine._scheduler.speculation.make_drafter = oracle.drafter
                    cases.append(_case(*key, acceptance, plain[key], _run(engine, records, works, temperature)))
    print(
        f"{options.model} tp {options.tp} on {jax.devices()[0].device_kind}, up to {options.draft_tokens} draft tokens"
    )
    print("requests  temperature  tokens/s without  with  ratio  drafts held  tokens a step  changed")
    for case in cases:
        print(_row(case))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench speculation", description="Compare decoding with and without draft tokens."
    )
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="numbers of concurrent requests")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[], metavar="TOKENS",
        help="mean tokens per step and request that an oracle drafter is made to reach, instead of prompt lookup",
    )  # fmt: skip
    parser.add_argument("--always", action="store_true", help="make as many drafts as fit, whether they pay or not")
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


def _run(engine: OfflineEngine, records: list[StepRecord], works: Sequence[list[Work]], temperature: float) -> _Side:
    warm_up, *timed = works
    engine.run(warm_up, temperature)
    tokens, num_warm_up = list(engine.tokens), len(warm_up)
    records.clear()
    seconds = 0.0
    for batch in timed:
        seconds += engine.run(batch, temperature).seconds
        tokens += engine.tokens
    return _Side(
        sum(map(len, tokens[num_warm_up:])) / seconds,
        tokens,
        sum(record.num_draft_tokens for record in records),
        sum(record.num_accepted_tokens for record in records),
        sum(record.num_drafts_at[0] for record in records if record.num_drafts_at),
    )


def _case(num_requests: int, temperature: float, acceptance: float, plain: _Side, drafted: _Side) -> Case:
    return Case(
        num_requests=num_requests,
        temperature=temperature,
        acceptance=acceptance,
        plain_tokens_per_second=plain.tokens_per_second,
        tokens_per_second=drafted.tokens_per_second,
        num_drafts=drafted.num_drafts,
        num_accepted=drafted.num_accepted,
        num_verified=drafted.num_verified,
        num_changed=sum(mine != other for mine, other in zip(plain.tokens, drafted.tokens, strict=True)),
    )


def _row(case: Case) -> str:
    held = f"{case.num_accepted / case.num_drafts:.0%}" if case.num_drafts else "none made"
    return (
        f"{case.num_requests:8}  {case.temperature:11g}  {case.plain_tokens_per_second:16,.0f}  "
        f"{case.tokens_per_second:,.0f}  {case.ratio:5.2f}  {held:>11}  {case.accepted_length:13.2f}  "
        f"{case.num_changed:7}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
