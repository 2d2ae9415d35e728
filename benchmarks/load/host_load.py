"""Measures what the host needs for steps of many requests: the real engine and gRPC server beside a simulated device.

    python benchmarks/load/host_load.py --streams 512 --step-ms 13.3 --decode-steps 4

The simulated device takes a given time for each decode step, by default none for prompts, and returns random tokens.
All else is the server's own: scheduler, batches, texts, metrics, output queues and messages. Reports the time of a step
beside the device's, the tokens per second that reach a client on another core, and the processor time of the engine's
thread and of the event loop. What a dispatch to a real device costs its host (0.3 to 0.7 ms) comes on top.

    python benchmarks/load/host_load.py --together 4 --step-ms 0.63 --prompt-ms 2.7

times requests that start together on an idle server, as the Python client sees them. On a shared machine, both need a
higher priority than what else runs: `nice -n -19` before the command.
"""

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import uvloop

from meshserve.benchmarks.lib.token_times import TokenClock, percentile
from meshserve.benchmarks.lib.workloads import MAX_CONVERSATION_ID, Work, fixed
from meshserve.benchmarks.load.edge_streams import WARM_UP_SECONDS, measure_server, started
from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.client.client import AsyncClient
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.planning.buckets import declare_buckets
from meshserve.runtime.program.batch import BatchBuilder, Bucket
from meshserve.runtime.program.processor_batch import Logprobs, ProcessorBatchBuilder, Sampled
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.server.inference_service import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, run_server
from meshserve.runtime.server.output_queue import OutputQueues, max_dispatch_tokens
from meshserve.runtime.startup.interpreter import take_turns_often
from meshserve.runtime.telemetry.request_log import Observer
from meshserve.runtime.text.tokenizer import Tokenizer
from meshserve.runtime.weights.locate import DEMO_MODEL, model_directory

_PAGE_SIZE, _MAX_CONTEXT, _NUM_INPUT_TOKENS = 32, 4096, 64
_TOGETHER_IN, _TOGETHER_OUT, _TIMES, _PAUSE_SECONDS = 32, 100, 40, 0.05


class SimulatedTokens:
    """Tokens that a device has computed at a moment, for which `np.asarray` waits."""

    def __init__(self, tokens: np.ndarray, ready: float):
        self._tokens = tokens
        self._ready = ready

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._tokens


class SimulatedDevice(Runner):
    """Runs steps one after another, each decode step in a fixed time."""

    def __init__(self, step_seconds: float, prompt_seconds: float, vocab_size: int):
        self._step_seconds, self._prompt_seconds = step_seconds, prompt_seconds
        self._draw = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._free = 0.0  # when the device has done what it was given

    def set_page_row(self, page_row: np.ndarray) -> None:
        pass

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        now = time.monotonic()
        seconds = self._step_seconds * bucket.num_steps if bucket.is_decode else self._prompt_seconds
        self._free = max(self._free, now) + seconds
        tokens = self._draw.integers(300, self._vocab_size, (bucket.num_steps, bucket.num_requests), np.int32)
        return SimulatedTokens(tokens, self._free)  # type: ignore[return-value]

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        raise AssertionError("no request has logits processors")

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[np.ndarray]:
        raise AssertionError("no request has logits processors")

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[np.ndarray]:
        raise AssertionError("no request asks for log-probabilities")

    def copy_pages(self, command: np.ndarray) -> None:
        raise AssertionError("there is no host cache")


def serve(options: argparse.Namespace) -> None:
    """Runs the server process."""
    take_turns_often()
    queues = OutputQueues()
    tokenizer = Tokenizer(str(model_directory(DEMO_MODEL)))
    limits = SchedulerLimits(
        page_size=_PAGE_SIZE,
        max_running=options.streams,
        max_step_tokens=max(8192, options.streams),
        max_waiting=10_000,
        max_context=_MAX_CONTEXT,
        max_decode_steps=options.decode_steps,
    )
    pages = PageAllocator(options.streams * limits.num_pages_for(_MAX_CONTEXT))
    buckets = declare_buckets(
        max_step_tokens=limits.max_step_tokens,
        max_running=limits.max_running,
        page_size=_PAGE_SIZE,
        max_decode_steps=limits.max_decode_steps,
        max_fused_tokens=64,
    )
    observer = Observer()
    engine = Engine(
        scheduler=Scheduler(limits, pages, frozenset()),
        pages=pages,
        batches=BatchBuilder(
            buckets,
            max_running=limits.max_running,
            page_size=_PAGE_SIZE,
            max_request_pages=limits.num_pages_for(_MAX_CONTEXT),
            processors=ProcessorBatchBuilder(
                max_running=limits.max_running, vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset()
            ),
        ),
        runner=SimulatedDevice(options.step_ms / 1e3, options.prompt_ms / 1e3, tokenizer.vocab_size),
        tokenizer=tokenizer,
        deliver=queues.deliver,
        record=observer.metrics.record_step,
    )
    queues.max_dispatch_tokens = max_dispatch_tokens(limits)
    edge = Edge(queues, observer=observer)
    info = ModelInfo(
        name="simulated", architecture="Qwen3ForCausalLM", vocab_size=tokenizer.vocab_size,
        max_context_tokens=_MAX_CONTEXT, eos_token_ids=(), tp_size=1, dtype="bfloat16", page_size_tokens=_PAGE_SIZE,
        num_parameters=0, num_devices=1, device_kind="simulated", server_version="0",
    )  # fmt: skip
    edge.attach(Backend(engine, tokenizer, info))
    gc.collect()
    gc.freeze()
    engine.start()
    run_server(edge, Listen(drain_seconds=0.0))


async def time_together(target: str, num_requests: int) -> str:
    """Returns the times of requests that start together, each time with an idle server before them."""
    times, firsts, lasts = [], [], []
    async with AsyncClient(target) as client:
        await client.model_info()
        for seed in range(_TIMES + 2):  # the first two are not counted
            clock, began = TokenClock(), time.perf_counter()

            async def one(index: int, work: Work, clock: TokenClock = clock, began: float = began) -> None:
                chunks = client.generate(work.prompt_token_ids, max_tokens=work.max_tokens, temperature=0.0)
                async for chunk in chunks:
                    clock.add(index, began, time.perf_counter(), len(chunk.token_ids))

            works = fixed(seed, num_requests, _TOGETHER_IN, _TOGETHER_OUT, MAX_CONVERSATION_ID)
            await asyncio.gather(*(one(index, work) for index, work in enumerate(works)))
            found = clock.times(time.perf_counter() - began)
            assert found.num_tokens == num_requests * _TOGETHER_OUT, found.num_tokens
            if seed >= 2:
                times.append(1e3 * found.seconds)
                firsts.append(1e3 * min(found.first_seconds))
                lasts.append(1e3 * max(found.first_seconds))
            await asyncio.sleep(_PAUSE_SECONDS)
    low, middle, high = (percentile(times, percent) for percent in (10, 50, 90))
    return (
        f"{num_requests} requests of {_TOGETHER_IN} tokens in, {_TOGETHER_OUT} out, {_TIMES} times: "
        f"{1e3 * num_requests * _TOGETHER_OUT / middle:,.0f} tokens/s; {middle:.2f} ms (P10 {low:.2f}, P90 {high:.2f})"
        f"; first tokens after {percentile(firsts, 50):.2f} to {percentile(lasts, 50):.2f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of a decode step on the simulated device")
    parser.add_argument("--decode-steps", type=int, default=4, help="decode steps of a dispatch")
    parser.add_argument("--prompt-ms", type=float, default=0.0, help="time of a step with prompts")
    parser.add_argument(
        "--together", type=int, default=0, metavar="N", help=f"instead, time N requests at once, {_TIMES} times"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up-seconds", type=float, default=WARM_UP_SECONDS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options)
        return 0
    command = [sys.executable, __file__, "--serve", *(sys.argv[1:] if arguments is None else arguments)]
    if options.together:
        with started(command) as (target, _):
            print(uvloop.run(time_together(target, options.together)))
        return 0
    draw = random.Random(0)
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=[draw.randrange(300) for _ in range(_NUM_INPUT_TOKENS)]),
            sampling=pb.SamplingParams(max_tokens=_MAX_CONTEXT - _NUM_INPUT_TOKENS),
        )
        for _ in range(options.streams)
    ]
    measured = measure_server(command, requests, options.seconds, options.warm_up_seconds)
    step_ms = 1e3 * options.streams / measured.tokens_per_second
    print(
        f"{measured}\n  a step {step_ms:.2f} ms, {step_ms / options.step_ms:.2f} of the device's {options.step_ms} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
