"""Measures the capacity of the gRPC server itself, with an engine that costs nothing and a client on another core.

    python benchmarks/load/edge_streams.py --streams 256 --step-ms 5 --seconds 15

The engine delivers one token per step to each open stream, as the real one does. Reports messages and tokens per
second, the gap between messages of a stream as the client sees it, and the share of one core that the server's event
loop takes (the CPU time of its thread, an upper bound for its share of the interpreter lock).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import uvloop

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.request import FinishReason, Load, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.server.inference_service import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, run_server
from meshserve.runtime.server.output_queue import OutputQueues

WARM_UP_SECONDS = 2.0
_INFO = ModelInfo(
    name="nothing", architecture="Qwen3ForCausalLM", vocab_size=1000, max_context_tokens=2**20, eos_token_ids=(),
    tp_size=1, dtype="float32", page_size_tokens=16, num_parameters=0, num_devices=1, device_kind="none",
    server_version="0",
)  # fmt: skip


class Ticking:
    """An engine that gives every open request one token per step."""

    failure = None

    def __init__(self, queues: OutputQueues, step_seconds: float):
        self._queues = queues
        self._step_seconds = step_seconds
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        pass

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        grammar: None = None,
    ) -> None:
        with self._lock:
            self._open[request_id] = 0

    def hold(self, is_held: bool) -> bool:
        return False

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        with self._lock:
            if self._open.pop(request_id, None) is not None:
                self._queues.deliver([Output(request_id=request_id, finish_reason=reason)])

    def load(self) -> Load:
        return Load(num_running=len(self._open), num_waiting=0, num_pages=1, num_free_pages=1)

    def flush_prefix_cache(self) -> int:
        return 0

    def run(self) -> None:
        due = time.monotonic()
        while True:
            with self._lock:
                outputs = [Output(request_id=name, token_ids=(7,), text=" word") for name in self._open]
            self._queues.deliver(outputs)
            due = max(due + self._step_seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


class NoTokenizer:
    """A placeholder for the tokenizer, since prompts are token ids."""

    max_token_chars = 1


def serve(step_seconds: float) -> None:
    """Runs the server process."""
    queues = OutputQueues()
    engine = Ticking(queues, step_seconds)
    edge = Edge(queues)
    edge.attach(Backend(engine, NoTokenizer(), _INFO))  # type: ignore[arg-type]
    thread = threading.Thread(target=engine.run, daemon=True)
    run_server(edge, Listen(drain_seconds=0.0), on_ready=lambda handle: thread.start())


def thread_seconds(pid: int) -> dict[int, float]:
    """Returns the CPU seconds of each thread of a process; the event loop's thread has the id of the process."""
    found = {}
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        found[int(tid)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a client saw of a server, and the server's processor time.

    Attributes:
      gaps: Seconds between two messages of a stream.
      cpu_seconds: Of each thread of the server; the event loop's is `loop`.
    """

    num_streams: int
    seconds: float
    num_messages: int
    num_tokens: int
    gaps: list[float]
    loop: int
    cpu_seconds: dict[int, float]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def __str__(self) -> str:
        cuts = statistics.quantiles(self.gaps, n=1000)
        loop = self.cpu_seconds[self.loop]
        busiest = max((used for tid, used in self.cpu_seconds.items() if tid != self.loop), default=0.0)
        return (
            f"{self.num_streams} streams for {self.seconds:.0f} s, {os.cpu_count()} cores:\n"
            f"  {self.num_messages / self.seconds:,.0f} messages/s, {self.tokens_per_second:,.0f} tokens/s\n"
            f"  gap ms: p50 {cuts[499] * 1e3:.1f}, p99 {cuts[989] * 1e3:.1f}, p99.9 {cuts[998] * 1e3:.1f}\n"
            f"  server CPU: event loop {loop / self.seconds:.0%} of a core, the busiest other thread "
            f"{busiest / self.seconds:.0%}, all {len(self.cpu_seconds)} threads "
            f"{sum(self.cpu_seconds.values()) / self.seconds:.0%}; "
            f"{1e6 * sum(self.cpu_seconds.values()) / self.num_tokens:.1f} us a token"
        )


async def measure(
    target: str, pid: int, requests: Sequence[pb.GenerateRequest], seconds: float, warm_up_seconds: float
) -> Measured:
    """Streams all requests for a while after a warm-up.

    Raises:
      RuntimeError: A stream ended before the time was over, so that the figures would be of fewer streams.
    """
    gaps: list[float] = []
    counts = {"messages": 0, "tokens": 0, "ended": 0}
    begin = time.monotonic() + warm_up_seconds
    end = begin + seconds

    async def one(generate: Any, request: bytes) -> None:
        last = 0.0
        async for data in generate(request):
            now = time.monotonic()
            if now >= end:
                return
            if now >= begin:
                counts["messages"] += 1
                counts["tokens"] += len(pb.GenerateResponse.FromString(data).token_ids)
                if last:
                    gaps.append(now - last)
            last = now
        counts["ended"] += 1

    async def cpu() -> dict[int, float]:
        await asyncio.sleep(begin - time.monotonic())
        before = thread_seconds(pid)
        await asyncio.sleep(end - time.monotonic() - 0.1)
        return {tid: used - before.get(tid, 0.0) for tid, used in thread_seconds(pid).items()}

    async with grpc.aio.insecure_channel(target) as channel:  # raw bytes, because the client is not measured
        generate: Any = channel.unary_stream("/meshserve.v1.InferenceService/Generate")
        watching = asyncio.create_task(cpu())
        await asyncio.gather(*(one(generate, request.SerializeToString()) for request in requests))
        used = await watching
    if counts["ended"]:
        raise RuntimeError(f"{counts['ended']} of {len(requests)} streams ended too soon: measure for fewer seconds")
    return Measured(
        num_streams=len(requests),
        seconds=seconds,
        num_messages=counts["messages"],
        num_tokens=counts["tokens"],
        gaps=gaps,
        loop=pid,
        cpu_seconds=used,
    )


def measure_server(
    command: Sequence[str],
    requests: Sequence[pb.GenerateRequest],
    seconds: float,
    warm_up_seconds: float = WARM_UP_SECONDS,
) -> Measured:
    """Starts a server on one core, and streams all requests from it on another. Raises as `measure`."""
    with started(command) as (target, pid):
        return uvloop.run(measure(target, pid, requests, seconds, warm_up_seconds))


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Runs a server on one core and this process on another. Yields the server's address and process id."""
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if len(cores) > 1:
            os.sched_setaffinity(process.pid, cores[:1])
            os.sched_setaffinity(0, cores[1:2])
        assert process.stdout is not None
        target = next(found[1] for line in process.stdout if (found := re.search(r"listens on (\S+)", line)))
        yield target, process.pid
    finally:
        process.kill()
        process.wait()
        os.sched_setaffinity(0, allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.step_ms / 1000)
        return 0
    request = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1]), sampling=pb.SamplingParams(max_tokens=1_000_000))
    command = [sys.executable, __file__, "--serve", f"--step-ms={options.step_ms}"]
    print(measure_server(command, [request] * options.streams, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
