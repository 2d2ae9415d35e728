"""Measures embeddings: all texts of a batch through the engine, or calls to a server through gRPC.

    meshserve bench embed --model qwen3-0.6b --random-weights --texts 10000 --tokens uniform:20:500
    meshserve bench embed --target 127.0.0.1:50051 --texts 10000 --tokens uniform:20:500 --batch 64 --concurrency 16
    meshserve bench embed --target 127.0.0.1:50051 --texts 2000 --tokens uniform:8:32 --rate 100

Texts are token ids drawn from a seed. The first form needs no server: it prints tokens per second and the share of the
devices' peak that the products of the layers reach, after one untimed run of other texts, and with --profile the
kernels of a step. The second form keeps calls of `--batch` texts open. With `--rate`, calls of one text are sent at the
times of a Poisson process, and percentiles of their durations are printed. Any option of `meshserve serve` is set with
--set KEY=VALUE in the first form.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.traffic import Lengths, Traffic
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.request import Output, RequestOptions
from meshserve.runtime.api.tasks import EMBED
from meshserve.runtime.client.client import AsyncClient, CallError, credentials_from
from meshserve.runtime.commands.cli import add_credentials
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.pooled_rows import POOLING_PARAMS
from meshserve.runtime.resolve.resolved_server import PlacedServer
from meshserve.runtime.startup.interpreter import take_turns_often
from meshserve.runtime.startup.launch import build_engine, open_model

_READY_SECONDS = 30.0
_GROUP_TEXTS = 64  # submitted at a time
_PROFILED_TEXTS = 256
_TIMER_SECONDS = 0.002  # an event loop may wake so much later than asked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The result of a run. Durations of calls are only of interest with a server."""

    load: str
    device: str
    num_texts: int
    num_tokens: int
    seconds: float
    texts_per_second: float
    tokens_per_second: float
    peak_share: float | None = None  # share of the devices' peak GEMM rate; None if unknown
    num_steps: int = 0
    padding: float | None = None  # share of the steps' token positions that no text used
    host_ms: float | None = None  # median of planning and batch building per step
    p50_ms: float | None = None
    p99_ms: float | None = None
    num_failed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a call failed."""
    options = _parser().parse_args(arguments)
    if bool(options.model) == bool(options.target):
        raise ConfigError("give --model to measure the engine, or --target to measure a server.")
    found = _offline(options) if options.model else asyncio.run(_served(options))
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(found), indent=1))
    return 1 if found.num_failed else 0


def _draw(options: argparse.Namespace, vocab_size: int, seed: int) -> list[list[int]]:
    traffic = Traffic(
        num_requests=options.texts, input_lengths=options.tokens, output_lengths=Lengths.parse("fixed:1"),
        vocab_size=vocab_size, seed=seed,
    )  # fmt: skip
    return [work.prompt_token_ids for work in traffic.requests()]


def _offline(options: argparse.Namespace) -> Figures:
    import jax

    model, make_params = open_model(options.model, random_weights=options.random_weights, task=EMBED)
    settings = {"tp": options.tp, "cpu_devices": options.cpu_devices, **parse_settings(options.set)}
    config = ServeConfig(model=options.model, task=EMBED, max_waiting=options.texts + 1, **settings)
    batch = _Batch()
    records: list[StepRecord] = []
    engine, server = build_engine(config, model, make_params, None, batch.deliver, records.append)
    take_turns_often()
    engine.start()
    try:
        seconds = 0.0
        for seed in (options.seed + 1, options.seed):  # the first run is not timed
            texts = _draw(options, model.vocab_size, seed)
            records.clear()
            seconds = _embed(engine, batch, texts, str(seed))
        found = _offline_figures(model, server, texts, records, seconds, batch.num_failed)
        print(_text(found), flush=True)
        if options.profile:
            records.clear()
            with jax.profiler.trace(str(options.profile)):
                _embed(engine, batch, _draw(options, model.vocab_size, options.seed + 2)[:_PROFILED_TEXTS], "profiled")
            print(kernel_table(options.profile, num_steps=max(1, len(records)) * server.mesh.size))
    finally:
        engine.stop()
    return found


def _offline_figures(
    model: ModelConfig, server: PlacedServer, texts: Sequence[Sequence[int]], steps: Sequence[StepRecord],
    seconds: float, num_failed: int,
) -> Figures:  # fmt: skip
    lengths = np.array([len(text) for text in texts])
    device = server.mesh.devices.flat[0]
    return Figures(
        load=f"engine, {server.step_limits}",
        device=f"{server.mesh.size} x {device.device_kind}",
        num_texts=len(texts),
        num_tokens=int(lengths.sum()),
        seconds=seconds,
        texts_per_second=len(texts) / seconds,
        tokens_per_second=lengths.sum() / seconds,
        peak_share=_peak_share(model, lengths, seconds, server.mesh),
        num_steps=len(steps),
        padding=float(np.mean([step.padding for step in steps])),
        host_ms=1e3 * percentile([step.host_seconds for step in steps], 50),
        num_failed=num_failed,
    )


def _embed(engine: Engine, batch: "_Batch", texts: Sequence[Sequence[int]], name: str) -> float:
    """Embeds texts that are submitted all at once, and returns the seconds that it took."""
    began = time.perf_counter()
    batch.expect(len(texts))
    for first in range(0, len(texts), _GROUP_TEXTS):
        engine.submit_prompts(f"{name}/{first}", texts[first : first + _GROUP_TEXTS], POOLING_PARAMS, RequestOptions())
    batch.wait()
    return time.perf_counter() - began


class _Batch:
    """Waits for the results of a batch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_open = 0
        self.num_failed = 0

    def expect(self, num_texts: int) -> None:
        with self._changed:
            self._num_open = num_texts

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self._num_open -= sum(output.finish_reason is not None for output in outputs)
            self.num_failed += sum(output.pooled is None for output in outputs)
            self._changed.notify()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_open <= 0)


def _peak_share(model: ModelConfig, lengths: np.ndarray, seconds: float, mesh: object) -> float | None:
    """Returns the share of the devices' peak: products of the layers and of attention, without padding."""
    from meshserve.sharding.chips import chip_of

    devices = mesh.devices.flat  # type: ignore[attr-defined]
    chip = chip_of(devices[0])
    if chip is None or not chip.flops_per_second:
        return None
    table = model.vocab_size * model.embed_dim
    products = 2.0 * (model.num_active_params - table) * lengths.sum()
    products += 2.0 * model.num_layers * model.num_query_heads * model.head_dim * float(np.square(lengths).sum())
    return products / seconds / (chip.flops_per_second * len(devices))


async def _served(options: argparse.Namespace) -> Figures:
    credentials, token = credentials_from(options.tls_ca, options.token_file)
    async with AsyncClient(options.target, credentials=credentials, token=token) as client:
        await client.wait_until_ready(_READY_SECONDS)
        info = await client.model_info()
        info.require(EMBED)
        texts = _draw(options, info.vocab_size, options.seed)
        await client.embed(_draw(options, info.vocab_size, options.seed + 1)[: options.batch])
        gc.collect()
        gc.freeze()  # or a full collection in this process would add to the duration of a call
        calls = _Calls(client)
        if options.rate:
            arrivals = Traffic(
                num_requests=len(texts), input_lengths=options.tokens, output_lengths=options.tokens, seed=options.seed
            ).arrivals(options.rate)
            load = f"{options.rate:g} calls/s of one text (Poisson)"
            await calls.send_at(texts, arrivals)
        else:
            load = f"{options.concurrency} calls of {options.batch} texts open"
            await calls.keep_open(texts, options.batch, options.concurrency)
    if calls.first_error:
        print(f"The first failure: {calls.first_error}", file=sys.stderr)
    num_tokens, seconds = sum(map(len, texts)), calls.now
    found = Figures(
        load=load,
        device=f"{info.num_devices} x {info.device_kind}",
        num_texts=len(texts),
        num_tokens=num_tokens,
        seconds=seconds,
        texts_per_second=len(texts) / seconds,
        tokens_per_second=num_tokens / seconds,
        p50_ms=1e3 * percentile(calls.seconds, 50),
        p99_ms=1e3 * percentile(calls.seconds, 99),
        num_failed=calls.num_failed,
    )
    print(_text(found))
    return found


class _Calls:
    """Sends calls and records their durations; those of an open loop count from when they were due."""

    def __init__(self, client: AsyncClient):
        self._client, self._began = client, time.perf_counter()
        self.seconds: list[float] = []
        self.num_failed = 0
        self.first_error = ""

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    async def _send(self, texts: Sequence[Sequence[int]], due: float) -> None:
        try:
            await self._client.embed(texts)
        except CallError as error:
            self.num_failed += 1
            self.first_error = self.first_error or str(error)
        self.seconds.append(self.now - due)

    async def send_at(self, texts: Sequence[Sequence[int]], arrivals: Sequence[float]) -> None:
        """Sends each text at its time (open loop)."""
        tasks = []
        for text, due in zip(texts, arrivals, strict=True):
            while (left := due - self.now) > 0:
                await asyncio.sleep(max(0.0, left - _TIMER_SECONDS))  # at last only lets other tasks run
            tasks.append(asyncio.create_task(self._send([text], due)))
        await asyncio.gather(*tasks)

    async def keep_open(self, texts: Sequence[Sequence[int]], batch: int, concurrency: int) -> None:
        """Keeps `concurrency` calls of `batch` texts open (closed loop)."""
        parts = iter([texts[first : first + batch] for first in range(0, len(texts), batch)])

        async def one_after_the_other() -> None:
            for part in parts:
                await self._send(part, self.now)

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


def _text(found: Figures) -> str:
    lines = [
        f"{found.load}, {found.device}",
        f"  {found.num_texts:,} texts, {found.num_tokens:,} tokens in {found.seconds:.2f} s: "
        f"{found.tokens_per_second:,.0f} tokens/s, {found.texts_per_second:,.0f} texts/s",
    ]
    if found.peak_share is not None:
        lines.append(f"  {found.peak_share:.1%} of the devices' peak in products")
    if found.padding is not None:
        lines.append(f"  {found.num_steps:,} steps, {found.padding:.1%} padding, host {found.host_ms:.2f} ms per step")
    if found.p50_ms is not None:
        lines.append(f"  calls: P50 {found.p50_ms:.2f} ms, P99 {found.p99_ms:.2f} ms")
    if found.num_failed:
        lines.append(f"  {found.num_failed} failed")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench embed", description="Measure embeddings.")
    parser.add_argument("--model", default="", help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--target", default="", help="HOST:PORT of a server, in place of --model")
    parser.add_argument("--texts", type=int, default=10_000, help="number of texts (default: %(default)s)")
    lengths = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH (default: %(default)s)"
    parser.add_argument("--tokens", type=Lengths.parse, default=Lengths.parse("uniform:20:500"), help=lengths)
    parser.add_argument("--rate", type=float, default=0.0, help="calls of one text per second; 0: closed loop")
    parser.add_argument("--batch", type=int, default=64, help="texts of a call without --rate (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="open calls without --rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts and arrivals (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size, with --model (default: %(default)s)")
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual CPU devices, with --model")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other options of the server")
    add_credentials(parser)
    parser.add_argument("--profile", type=Path, help="with --model, also trace steps into this folder; prints kernels")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
