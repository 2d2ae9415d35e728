"""Measures the capacity of the server's fronts, with an engine that costs nothing and a client on another core.

    python benchmarks/load/edge_streams.py --streams 256 --step-ms 5 --seconds 15
    python benchmarks/load/edge_streams.py --streams 512 --step-ms 50 5 --fronts grpc completions chat --rounds 3

The engine delivers one token per step to each open stream, as the real one does. Reports messages and tokens per
second, the gap between messages of a stream as the client sees it, and the share of one core that the server's event
loop takes (the CPU time of its thread, an upper bound for its share of the interpreter lock). The fronts take turns:
gRPC's Generate, and OpenAI's API (server-sent events) by /v1/completions and /v1/chat/completions.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import uvloop

from meshserve.benchmarks.load.sse_streams import read
from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.adapters import NoAdapters
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.loopback import proxy_options
from meshserve.runtime.api.request import FinishReason, Load, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, run_server
from meshserve.runtime.server.output_queue import OutputQueues

GRPC = "grpc"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WARM_UP_SECONDS = 2.0
_MANY_TOKENS = 1_000_000
_INFO = ModelInfo(
    name="nothing", architecture="Qwen3ForCausalLM", vocab_size=1000, max_context_tokens=2**20, eos_token_ids=(),
    tp_size=1, dtype="float32", page_size_tokens=16, num_parameters=0, num_devices=1, device_kind="none",
    server_version="0", supports_chat=True,
)  # fmt: skip


class Ticking:
    """An engine that gives every open request one token per step."""

    failure = None
    adapters = NoAdapters()

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
    """A placeholder for the tokenizer, since prompts are token ids. Every conversation is rendered as one token."""

    max_token_chars = 1_000
    chat_template = ""

    def token_id(self, text: str) -> int | None:
        return None

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        return ""

    def encode(self, text: str) -> tuple[int, ...]:
        return (1,)


def serve(step_seconds: float) -> None:
    """Runs the server process."""
    queues = OutputQueues()
    engine = Ticking(queues, step_seconds)
    edge = Edge(queues)
    edge.attach(Backend(engine, NoTokenizer(), _INFO))  # type: ignore[arg-type]
    thread = threading.Thread(target=engine.run, daemon=True)
    listen = Listen(drain_seconds=0.0, openai_port=0, open_api=OpenAIPort)
    run_server(edge, listen, on_ready=lambda handle: thread.start())


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
      cpu_seconds: By thread of the server; the event loop's is `loop`.
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


# Reads one stream until a time on the monotonic clock, passes on the messages and tokens that arrive, and returns
# whether it ended before.
Stream = Callable[[float, Callable[[int, int], None]], Awaitable[bool]]


async def measure(
    target: str, pid: int, requests: Sequence[pb.GenerateRequest], seconds: float, warm_up_seconds: float
) -> Measured:
    """Streams all requests through gRPC for a while after a warm-up. Raises as `measured`."""
    # Raw bytes, because the client is not measured.
    async with grpc.aio.insecure_channel(target, proxy_options(target)) as channel:
        generate: Any = channel.unary_stream("/meshserve.v1.InferenceService/Generate")

        def stream(request: bytes) -> Stream:
            async def read_until(end: float, on_messages: Callable[[int, int], None]) -> bool:
                async for data in generate(request):
                    if time.monotonic() >= end:
                        return False
                    on_messages(1, len(pb.GenerateResponse.FromString(data).token_ids))
                return True

            return read_until

        streams = [stream(request.SerializeToString()) for request in requests]
        return await measured(streams, pid, seconds, warm_up_seconds)


async def measured(streams: Sequence[Stream], pid: int, seconds: float, warm_up_seconds: float) -> Measured:
    """Reads all streams for a while after a warm-up.

    Raises:
      RuntimeError: A stream ended before the time was over, so that the figures would be of fewer streams.
    """
    gaps: list[float] = []
    counts = {"messages": 0, "tokens": 0, "ended": 0}
    begin = time.monotonic() + warm_up_seconds
    end = begin + seconds

    async def one(stream: Stream) -> None:
        last = 0.0

        def count(num_messages: int, num_tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            if begin <= now < end:
                counts["messages"] += num_messages
                counts["tokens"] += num_tokens
                if last:
                    gaps.extend([now - last, *[0.0] * (num_messages - 1)])
            last = now

        if await stream(end, count):
            counts["ended"] += 1

    async def cpu() -> dict[int, float]:
        await asyncio.sleep(begin - time.monotonic())
        before = thread_seconds(pid)
        await asyncio.sleep(end - time.monotonic() - 0.1)
        return {tid: used - before.get(tid, 0.0) for tid, used in thread_seconds(pid).items()}

    watching = asyncio.create_task(cpu())
    await asyncio.gather(*map(one, streams))
    used = await watching
    if counts["ended"]:
        raise RuntimeError(f"{counts['ended']} of {len(streams)} streams ended too soon: measure for fewer seconds")
    return Measured(
        num_streams=len(streams),
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
    """Starts a server on one core, and streams all requests through gRPC on another. Raises as `measured`."""
    with started(command) as (found, pid):
        return uvloop.run(measure(found[GRPC], pid, requests, seconds, warm_up_seconds))


def measure_front(command: Sequence[str], front: str, num_streams: int, seconds: float) -> Measured:
    """Like `measure_server`, through any of the fronts, with requests that go on for long."""
    if front == GRPC:
        sampling = pb.SamplingParams(max_tokens=_MANY_TOKENS)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1]), sampling=sampling)
        return measure_server(command, [request] * num_streams, seconds)
    with started(command) as (found, pid):
        stream = functools.partial(read, found["http"], PATHS[front], _MANY_TOKENS)
        return uvloop.run(measured([stream] * num_streams, pid, seconds, WARM_UP_SECONDS))


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[dict[str, str], int]]:
    """Runs a server on one core and this process on another. Yields the server's addresses and process id.

    The addresses are that of `grpc`, and that of `http` if it opens the port.
    """
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if len(cores) > 1:
            os.sched_setaffinity(process.pid, cores[:1])
            os.sched_setaffinity(0, cores[1:2])
        assert process.stdout is not None
        found: dict[str, str] = {}
        for line in process.stdout:
            if at := re.search(r"API on http://([^/\s]+)", line):
                found["http"] = at[1]
            if at := re.search(r"listens on (\S+)", line):
                found[GRPC] = at[1]
                break  # it is told last
        yield found, process.pid
    finally:
        process.kill()
        process.wait()
        os.sched_setaffinity(0, allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--fronts", nargs="+", choices=[GRPC, *PATHS], default=[GRPC], help="in turn")
    parser.add_argument("--rounds", type=int, default=1, help="of all fronts and steps")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.step_ms[0] / 1000)
        return 0
    found: dict[tuple[float, str], list[Measured]] = {}
    for _, step_ms, front in itertools.product(range(options.rounds), options.step_ms, options.fronts):
        command = [sys.executable, __file__, "--serve", f"--step-ms={step_ms}"]
        result = measure_front(command, front, options.streams, options.seconds)
        found.setdefault((step_ms, front), []).append(result)
        print(f"{front}, a step each {step_ms:g} ms: {result}", flush=True)
    if options.rounds > 1:
        print(table(found))
    return 0


def table(found: Mapping[tuple[float, str], Sequence[Measured]]) -> str:
    """Formats the figures of several rounds as Markdown: medians, and the least and the most."""
    lines = ["| step, ms | front | messages/s | tokens/s | gap P99, ms | event loop, share of a core | us a message |"]
    lines.append("|---" * 7 + "|")
    for (step_ms, front), results in found.items():
        cells = [f"{step_ms:g}", front]
        for figure, form in _FIGURES:
            values = sorted(map(figure, results))
            cells.append(f"{form(statistics.median(values))} ({form(values[0])} to {form(values[-1])})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_FIGURES: tuple[tuple[Callable[[Measured], float], Callable[[float], str]], ...] = (
    (lambda one: one.num_messages / one.seconds, "{:,.0f}".format),
    (lambda one: one.tokens_per_second, "{:,.0f}".format),
    (lambda one: 1e3 * statistics.quantiles(one.gaps, n=100)[98], "{:.1f}".format),
    (lambda one: one.cpu_seconds[one.loop] / one.seconds, "{:.0%}".format),
    (lambda one: 1e6 * one.cpu_seconds[one.loop] / one.num_messages, "{:.1f}".format),
)


if __name__ == "__main__":
    sys.exit(main())
