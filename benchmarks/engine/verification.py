"""Times the steps that verify draft tokens, against steps that decode as many requests without any.

    meshserve bench verification --model qwen3-8b --random-weights --requests 1 8 32 --draft-tokens 1 3 7
    meshserve bench verification --model deploy/demo/model --cpu-devices 1 --context 128
    meshserve bench verification --model qwen3-8b --random-weights --set draft_model=qwen3-0.6b --profile /tmp/trace

The device is timed: the same step runs again and again, one dispatched behind the other, and the host waits at the end
of each run. A second time is that of steps that are dispatched only when the tokens of the last are known, as those
with drafts are: the difference is what a dispatch and the way of the tokens to the host take, without the engine's own
work. That, and how many draft tokens are accepted, is the subject of `speculation`. The requests are as long as
`--context` says. With a draft model, the dispatches that propose draft tokens are timed as well.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.draft_model.proposing_runner import ProposingRunner
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import ANY_MODE, Bucket
from meshserve.runtime.startup.launch import build_runner, open_model

_WARM_UP_STEPS = 5
_CHAIN_GAP_NS = 30_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The time of a step."""

    num_requests: int
    num_drafts: int  # of each request
    kind: str  # of the step's program
    num_tokens: int  # of the step's shape
    step_ms: float  # median over the runs
    ratio: float  # to the step of as many requests without draft tokens
    awaited_ms: float  # the same where each step waits for the tokens of the last


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(options.model, random_weights=options.random_weights)
    longest = options.context + max(options.draft_tokens) + 2
    chosen = {
        "model": options.model, "random_weights": options.random_weights, "tp": options.tp, "page_size": 64,
        "cpu_devices": options.cpu_devices, "draft_tokens": max(options.draft_tokens), "max_context": longest,
        "max_running": max(options.requests) * (1 + max(options.draft_tokens)), "logits_processors": False,
        "num_pages": max(options.requests) * -(-longest // 64),
    }  # fmt: skip
    chosen["max_step_tokens"] = max(512, chosen["max_running"])
    config = ServeConfig(**{**chosen, **parse_settings(options.set)})
    runner, server, chain_buckets = build_runner(config, model, make_params)
    num_pages = server.limits.num_pages_for(longest)
    for slot in range(max(options.requests)):
        row = np.zeros(1 + server.limits.num_pages_for(server.limits.max_context), np.int32)
        row[0], row[1 : 1 + num_pages] = slot, np.arange(slot * num_pages, (slot + 1) * num_pages)
        runner.set_page_row(row)
    cases = []
    for num_requests in options.requests:
        plain_ms = 0.0
        for num_drafts in (0, *options.draft_tokens):
            bucket = _bucket(server.buckets, num_requests * (1 + num_drafts), options.mode)
            packed = _packed(bucket, num_requests, num_drafts, options.context, server.limits.max_running)
            packed[bucket.fields["mode"]] = options.mode
            packed[bucket.fields["temperature"]] = np.ones(1, np.float32).view(np.int32)
            step = partial(runner.run, bucket, packed)
            step_ms = _median_ms(step, options.steps, options.runs)
            plain_ms = plain_ms or step_ms
            cases.append(
                Case(
                    num_requests=num_requests, num_drafts=num_drafts, kind=bucket.kind, num_tokens=bucket.num_tokens,
                    step_ms=step_ms, ratio=step_ms / plain_ms,
                    awaited_ms=_median_ms(partial(_awaited, step), options.steps, options.runs),
                )
            )  # fmt: skip
    print(f"{options.model} tp {options.tp} on {jax.devices()[0].device_kind}, {options.context} tokens of context")
    print("requests  drafts of each  shape                step, ms  ratio  awaited, ms")
    for case in cases:
        shape, times = f"{case.kind} {case.num_tokens}", f"{case.step_ms:8.3f}  {case.ratio:5.2f}"
        print(f"{case.num_requests:8}  {case.num_drafts:14}  {shape:20} {times}  {case.awaited_ms:11.3f}")
    if isinstance(runner, ProposingRunner):
        _time_chains(options, runner, chain_buckets, server.limits.max_running)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1))
    return 0


def _time_chains(options: argparse.Namespace, runner: ProposingRunner, buckets: Sequence[Bucket], no_slot: int) -> None:
    """Prints the times of the dispatches that propose draft tokens, and the gaps between their kernels."""
    print("requests  steps  chain, ms  a step")
    for num_requests in options.requests:
        bucket = _chain_bucket(buckets, num_requests)
        packed = _packed(bucket, num_requests, 0, options.context, no_slot)
        packed[bucket.fields["num_steps"]][:num_requests] = bucket.num_steps
        propose = partial(runner.propose, bucket, packed)
        chain_ms = _median_ms(propose, options.steps, options.runs)
        print(f"{num_requests:8}  {bucket.num_steps:5}  {chain_ms:9.3f}  {chain_ms / bucket.num_steps:6.3f}")
        if options.profile:
            folder = options.profile / str(num_requests)
            with jax.profiler.trace(str(folder), create_perfetto_trace=False):
                _median_ms(propose, 1, 1)
            num_chains = _WARM_UP_STEPS + 1
            print(kernel_table(folder, num_steps=num_chains * bucket.num_steps, num_rows=12, gap_ns=_CHAIN_GAP_NS))


def _chain_bucket(buckets: Sequence[Bucket], num_requests: int) -> Bucket:
    fitting = (bucket for bucket in buckets if bucket.num_requests >= num_requests)
    return next(bucket for bucket in fitting if bucket.mode in (ANY_MODE, SamplingMode.GREEDY))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench verification", description="Time steps that verify draft tokens."
    )
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="numbers of requests in a step")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 3, 7], help="draft tokens of each request")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request before the step")
    parser.add_argument(
        "--mode", type=lambda name: SamplingMode[name.upper()], default=SamplingMode.GREEDY, metavar="MODE",
        help="how steps sample: greedy or random",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=30, help="steps in a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument(
        "--profile", type=Path, help="trace the dispatches of a draft model into this folder, and print their kernels"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the cases to this file")
    return parser


def _bucket(buckets: Sequence[Bucket], num_tokens: int, mode: SamplingMode) -> Bucket:
    """Returns the smallest shape for a step of so many tokens, each of which is sampled after."""
    for bucket in buckets:
        fits = min(bucket.num_tokens, bucket.num_requests) >= num_tokens and bucket.num_steps == 1
        if fits and bucket.mode in (ANY_MODE, mode) and (bucket.has_drafts or not bucket.is_decode):
            return bucket
    raise ValueError(f"no shape holds {num_tokens} tokens that are sampled after")


def _packed(bucket: Bucket, num_requests: int, num_drafts: int, context: int, no_slot: int) -> np.ndarray:
    """Returns the vector of a step; see `batch.BatchBuilder`."""
    packed = np.zeros(bucket.size, np.int32)
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    num_tokens, length = num_requests * (1 + num_drafts), 1 + num_drafts
    fields["token_ids"][:num_tokens] = np.arange(1, 1 + num_tokens)
    fields["positions"][:] = -1
    fields["positions"][:num_tokens] = context + np.arange(num_tokens) % length
    fields["token_request"][:num_tokens] = np.arange(num_tokens) // length
    fields["slots"][:] = no_slot
    fields["slots"][:num_requests] = np.arange(num_requests)
    fields["page_slot"][:] = no_slot
    fields["last_index"][:num_tokens] = np.argsort(np.arange(num_tokens) % length > 0, kind="stable")
    fields["sample_position"][:num_tokens] = 1 + fields["positions"][fields["last_index"][:num_tokens]]
    return packed


def _awaited(run: Callable[[], jax.Array | np.ndarray]) -> np.ndarray:
    return np.asarray(run())


def _median_ms(run: Callable[[], jax.Array | np.ndarray], num_steps: int, num_runs: int) -> float:
    times = []
    for count in (_WARM_UP_STEPS, *[num_steps] * num_runs):
        started = time.perf_counter()
        for _ in range(count):
            sampled = run()
        np.asarray(sampled)
        times.append((time.perf_counter() - started) / count)
    return 1000 * statistics.median(times[1:])


if __name__ == "__main__":
    raise SystemExit(main())
