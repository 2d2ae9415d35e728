"""Puts load on a running server through gRPC and reports latencies and throughput.

    meshserve bench serve --target 127.0.0.1:50051 --rate 4 8 16 --requests 500 \\
        --input-tokens lognormal:512:1:4096 --output-tokens uniform:64:512 --goodput ttft:500 tpot:50 --plot load.png

`--rate` sends requests at the times of a Poisson process, whether or not earlier ones have been answered (open loop);
`inf` sends all at once. `--concurrency` keeps a fixed number of requests open (closed loop). Several values are run as
separate loads, one after the other, with different prompts. Prompts are token ids drawn from a seed, and end tokens are
ignored, so that outputs have the drawn lengths. With `--prefix-tokens`, prompts share prefixes. Lengths that are not
given are 1024 and 128 tokens, or less if the server's context or KV cache has no room for them. The figures are
those of vLLM's serving benchmark.
"""

import argparse
import asyncio
import collections
import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from meshserve.benchmarks.lib.traffic import Lengths, Traffic
from meshserve.benchmarks.lib.workloads import Work
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.client.client import AsyncClient, CallError, credentials_from
from meshserve.runtime.commands.cli import add_credentials
from meshserve.runtime.options.flags import Parser

from .serving_report import Call, figures, text

_GOODPUT_NAMES = ("ttft", "tpot", "e2el")
_READY_SECONDS = 30.0
_INPUT_TOKENS, _OUTPUT_TOKENS = 1024, 128  # in requests, unless given or too many for the server
_LEAST_TOKENS = 8  # in a request
_SEEDS_A_LOAD = 1000  # distance of the loads' seeds, so that no load finds another's prompts in the prefix cache


class Sender:
    """Sends requests and records their results, with times since its construction."""

    def __init__(self, client: AsyncClient, temperature: float):
        self._client = client
        self._temperature = temperature
        self._began = time.perf_counter()
        self.calls: list[Call] = []
        self.first_error = ""

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    async def send(self, work: Work, due: float | None = None) -> None:
        """Sends one request and waits until it has ended or failed."""
        call = Call(num_input_tokens=len(work.prompt_token_ids), sent=self.now, due=due)
        self.calls.append(call)
        try:
            chunks = self._client.generate(
                work.prompt_token_ids, max_tokens=work.max_tokens, temperature=self._temperature, ignore_eos=True
            )
            async for chunk in chunks:
                if chunk.token_ids:
                    call.messages.append((self.now, len(chunk.token_ids)))
            if call.num_output_tokens != work.max_tokens:
                call.error = "too few tokens"
        except CallError as error:
            call.error = error.code.name
            self.first_error = self.first_error or str(error)
        call.ended = self.now

    async def send_at(self, works: Sequence[Work], arrivals: Sequence[float]) -> None:
        """Sends the requests at the given times (open loop)."""
        tasks = []
        for work, due in zip(works, arrivals, strict=True):
            await asyncio.sleep(max(0.0, due - self.now))
            tasks.append(asyncio.create_task(self.send(work, due)))
        await asyncio.gather(*tasks)

    async def keep_open(self, works: Sequence[Work], concurrency: int) -> None:
        """Keeps `concurrency` requests open (closed loop)."""
        shared = iter(works)

        async def one_after_the_other() -> None:
            for work in shared:
                await self.send(work)

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the loads and returns 1 if a request failed."""
    options = _parser().parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib. Install meshserve with the extra [plots], or leave it out.")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(run(options))
    return uvloop.run(run(options))


async def run(options: argparse.Namespace) -> int:
    credentials, token = credentials_from(options.tls_ca, options.token_file)
    loads = _loads(options)
    found, calls = [], {}
    async with AsyncClient(options.target, credentials=credentials, token=token) as client:
        await client.wait_until_ready(_READY_SECONDS)
        info, load = await client.model_info(), await client.load()
        fit_lengths(options, min(info.max_context_tokens, load.num_pages * info.page_size_tokens))
        server = f"{info.name} on {info.num_devices} x {info.device_kind}, meshserve {info.server_version}"
        print(f"{server}: {options.input_tokens} input tokens, {options.output_tokens} output tokens", flush=True)
        for index, (name, size) in enumerate(loads.items()):
            traffic = _traffic(options, info.vocab_size, options.seed + index * _SEEDS_A_LOAD)
            sender = await _load(options, client, traffic, size)
            calls[name] = sender.calls
            found.append(figures(name, calls[name], options.goodput))
            print(text(found[-1]), flush=True)
            if sender.first_error:
                print(f"The first failure: {sender.first_error}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    if options.plot and (empty := [each.load for each in found if not each.completed]):
        print(f"No plot is drawn, because no request of {', '.join(empty)} succeeded.", file=sys.stderr)
    elif options.plot:
        from .serving_plots import plot

        lengths = f"{options.input_tokens} tokens in, {options.output_tokens} out, {options.requests} requests per load"
        plot(calls, found, options.plot, title=f"{server}\n{lengths}")
    return 1 if any(each.failed for each in found) else 0


def fit_lengths(options: argparse.Namespace, max_tokens: int) -> None:
    """Sets the lengths that were not given, so that a request has at most `max_tokens` tokens.

    Raises:
      ConfigError: The prefix leaves no room for a prompt and an output.
    """
    room = max_tokens - options.prefix_tokens
    if room < _LEAST_TOKENS:
        raise ConfigError(
            f"--prefix-tokens is {options.prefix_tokens}, and a request may have {max_tokens} tokens on this server. "
            f"Use {max_tokens - _LEAST_TOKENS} or fewer."
        )
    if options.output_tokens is None:
        options.output_tokens = Lengths("fixed", (min(_OUTPUT_TOKENS, room // 4),))
    if options.input_tokens is None:
        longest_output = math.ceil(options.output_tokens.values[-1])
        options.input_tokens = Lengths("fixed", (max(1, min(_INPUT_TOKENS, room - longest_output)),))


def _loads(options: argparse.Namespace) -> dict[str, float]:
    """Returns the loads by name: a float is a request rate, an int a number of open requests.

    Repeated loads get a number in their name.
    """
    loads: dict[str, float] = {}
    times: collections.Counter[str] = collections.Counter()
    closed = options.concurrency or ([] if options.rate else [32])
    for load in (*options.rate, *closed):
        name = f"{load} open (closed loop)" if isinstance(load, int) else f"{load:g} requests/s (Poisson)"
        times[name] += 1
        loads[name if times[name] == 1 else f"{name}, {times[name]}"] = load
    return loads


async def _load(options: argparse.Namespace, client: AsyncClient, traffic: Traffic, size: float) -> Sender:
    works = traffic.requests()
    warm_up = dataclasses.replace(traffic, num_requests=options.warmups, seed=traffic.seed - 1)
    await Sender(client, options.temperature).keep_open(warm_up.requests(), options.warmups)
    sender = Sender(client, options.temperature)
    if isinstance(size, int):
        await sender.keep_open(works, size)
    else:
        await sender.send_at(works, traffic.arrivals(size))
    return sender


def _traffic(options: argparse.Namespace, vocab_size: int, seed: int) -> Traffic:
    return Traffic(
        num_requests=options.requests,
        input_lengths=options.input_tokens,
        output_lengths=options.output_tokens,
        num_prefix_tokens=options.prefix_tokens,
        num_prefixes=options.prefixes,
        vocab_size=vocab_size,
        seed=seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="meshserve bench serve", description="Put load on a server through gRPC.")
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the server (default: %(default)s)")
    parser.add_argument("--rate", type=_rate, nargs="+", default=[], help="requests per second of a Poisson process")
    parser.add_argument(
        "--concurrency", type=_count, nargs="+", default=[], help="number of requests kept open (default: 32)"
    )
    parser.add_argument("--requests", type=_count, default=200, help="requests per load (default: %(default)s)")
    parser.add_argument(
        "--warmups", type=_count, default=1, help="warm-up requests, not measured (default: %(default)s)"
    )
    lengths = (
        "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH (default: fixed:{}, or what the server has room for)"
    )
    parser.add_argument("--input-tokens", type=_lengths, help=lengths.format(_INPUT_TOKENS))
    parser.add_argument("--output-tokens", type=_lengths, help=lengths.format(_OUTPUT_TOKENS))
    parser.add_argument(
        "--prefix-tokens", type=int, default=0, help="tokens of the shared prefix, before the input tokens (default: 0)"
    )
    parser.add_argument(
        "--prefixes", type=_count, default=1, help="number of different shared prefixes (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    seed = "seed of prompts and arrivals; prompts of a reused seed hit the prefix cache (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=seed)
    parser.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        action=_Limits,
        metavar="NAME:MS",
        help="service level objectives: ttft, tpot, e2el",
    )
    add_credentials(parser)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the loads into this PNG file (needs the extra `plots`)")
    return parser


def _rate(value: str) -> float:
    rate = float(value)
    if math.isnan(rate) or rate <= 0:
        raise ValueError
    return rate


def _count(value: str) -> int:
    count = int(value)
    if count < 1:
        raise ValueError
    return count


def _lengths(value: str) -> Lengths:
    try:
        return Lengths.parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limit(value: str) -> tuple[str, float]:
    name, _, milliseconds = value.partition(":")
    if name not in _GOODPUT_NAMES:
        raise argparse.ArgumentTypeError(
            f"got {value!r}; allowed is NAME:MS, where NAME is one of {', '.join(_GOODPUT_NAMES)}"
        )
    return name, float(milliseconds)


class _Limits(argparse.Action):
    """Stores the pairs as a dict."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        setattr(namespace, self.dest, dict(values))


if __name__ == "__main__":
    raise SystemExit(main())
