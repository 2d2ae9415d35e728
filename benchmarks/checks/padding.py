"""Estimates how much of the compiled shapes is padding under realistic traffic, and its cost, without a device.

    python -m meshserve.benchmarks.checks.padding --model qwen3-8b --target h100:1 --rate 2 6 --set max_step_tokens=2048

Requests arrive as a Poisson process and go through the real scheduler and bucket choice. A step takes the time that the
target's data sheet promises for its shape, padding included: the longer of reading all weights and each request's keys
and values, and computing the matmuls. The times are therefore predictions, while the shares of padding are those of
this code.
"""

import argparse
import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.traffic import Lengths, Traffic
from meshserve.runtime.api.request import Request
from meshserve.runtime.api.sampling_params import SamplingMode, SamplingParams
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.roofline import Roofline
from meshserve.runtime.program.batch import BatchBuilder, Bucket
from meshserve.runtime.program.processors.processor_batch import ProcessorBatchBuilder
from meshserve.runtime.resolve.resolved_server import resolve_for
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import target

_NUM_PAGES = 1 << 20  # enough that no request waits for pages
_TOKEN_ID = 7


@dataclasses.dataclass(kw_only=True)
class Padding:
    """The result of the traffic at one rate; tokens are positions of the compiled shapes."""

    requests_per_second: float
    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    seconds: float = 0.0  # device time, by the roofline
    padding_seconds: float = 0.0  # the part of it that steps without padding would save
    first_token_seconds: list[float] = dataclasses.field(default_factory=list)
    shapes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # steps by token count

    @property
    def padding_share(self) -> float:
        return self.num_padding_tokens / (self.num_tokens + self.num_padding_tokens)

    @property
    def padding_time_share(self) -> float:
        return self.padding_seconds / self.seconds


class Server:
    """The scheduler and buckets of a server, and the roofline time of each step."""

    def __init__(self, config: ServeConfig, device: str):
        model, chip = named_model(config.model), target(device).chip
        server = resolve_for(config, model, chip=chip, num_devices=config.tp or 1)
        roofline = Roofline(shapes=server.kernel_shapes, chip=chip)
        self._weight_seconds = roofline.weight_bytes / chip.hbm_bytes_per_second
        self._key_seconds = roofline.token_bytes / chip.hbm_bytes_per_second  # one token's keys and values
        self._token_seconds = (
            2 * roofline.weight_bytes / server.dtype.itemsize / chip.flops_per_second
        )  # one token's matmuls
        limits, self.buckets = server.limits, server.buckets
        self.scheduler = Scheduler(limits, PageAllocator(_NUM_PAGES), frozenset())
        self._batches = BatchBuilder(
            self.buckets,
            max_running=limits.max_running,
            page_size=limits.page_size,
            max_request_pages=limits.num_pages_for(limits.max_context),
            processors=ProcessorBatchBuilder(max_running=limits.max_running, vocab_size=1, eos_token_ids=frozenset()),
        )

    def bucket(self, plan: StepPlan) -> Bucket:
        return self._batches.bucket(plan, SamplingMode.GREEDY)

    def seconds(self, plan: StepPlan, num_tokens: int) -> float:
        """Returns the time of the plan's step if it had `num_tokens` tokens."""
        num_keys = sum(plan.starts) + sum(chunk.start + chunk.num_tokens for chunk in plan.prefills)
        return max(self._weight_seconds + num_keys * self._key_seconds, num_tokens * self._token_seconds)


def run(server: Server, traffic: Traffic, rate: float) -> Padding:
    """Serves all of the traffic in roofline time, planning one step ahead."""
    result = Padding(requests_per_second=rate)
    coming = collections.deque(enumerate(zip(traffic.arrivals(rate), traffic.requests(), strict=True)))
    scheduler, now, device_free = server.scheduler, 0.0, 0.0
    flight: tuple[StepPlan, float] | None = None
    arrived: dict[Request, float] = {}
    while coming or scheduler.has_work or flight is not None:
        while coming and (coming[0][1][0] <= now or not (scheduler.has_work or flight)):
            number, (moment, work) = coming.popleft()
            now = max(now, moment)
            request = Request(
                request_id=str(number),
                prompt_token_ids=tuple(work.prompt_token_ids),
                params=SamplingParams(max_tokens=work.max_tokens, temperature=0.0, ignore_eos=True),
                seed=number,
                arrival_seconds=moment,
            )
            arrived[request] = moment
            scheduler.add(request)
        plan = scheduler.plan(now)
        ahead = None
        if plan is not None:
            num_places = server.bucket(plan).num_tokens
            seconds = server.seconds(plan, num_places)
            device_free = max(now, device_free) + seconds
            ahead = (plan, device_free)
            result.num_steps += 1
            result.num_tokens += plan.num_batch_tokens
            result.num_padding_tokens += num_places - plan.num_batch_tokens
            result.seconds += seconds
            result.padding_seconds += seconds - server.seconds(plan, plan.num_batch_tokens)
            result.shapes[num_places] += 1
        if flight is not None:
            done, now = flight
            for request, _ in scheduler.account(done, [_TOKEN_ID] * done.num_requests, now):
                if request in arrived:
                    result.first_token_seconds.append(now - arrived.pop(request))
        flight = ahead
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="padding", description="Estimate the padding of compiled shapes under traffic."
    )
    parser.add_argument("--model", default="qwen3-8b", help="a published size")
    parser.add_argument("--target", default="h100:1", help="the machine, as for meshserve plan")
    parser.add_argument("--rate", type=float, nargs="+", default=[2.0, 6.0, 12.0], help="requests per second")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--input-tokens", type=Lengths.parse, default="lognormal:512:1:8192")
    parser.add_argument("--output-tokens", type=Lengths.parse, default="lognormal:128:1:1024")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    config = ServeConfig(model=options.model, **{"prefix_cache": False, **parse_settings(options.set)})
    traffic = Traffic(
        num_requests=options.requests, input_lengths=options.input_tokens, output_lengths=options.output_tokens
    )
    server = Server(config, options.target)
    max_tokens, num_programs = server.scheduler.limits.max_step_tokens, len(server.buckets)
    print(f"{options.model} on {options.target}, {max_tokens} tokens a step, {num_programs} step programs")
    print("requests/s   steps    tokens/step  padding  of the time  first token p50, p99 ms")
    results = [run(Server(config, options.target), traffic, rate) for rate in options.rate]
    for result in results:
        print(_row(result), flush=True)
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    return 0


def _row(result: Padding) -> str:
    first, last = (1e3 * percentile(result.first_token_seconds, share) for share in (50, 99))
    return (
        f"{result.requests_per_second:10g}{result.num_steps:8d}{result.num_tokens / result.num_steps:15.1f}"
        f"{result.padding_share:9.1%}{result.padding_time_share:13.1%}{first:13.1f}{last:9.1f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
