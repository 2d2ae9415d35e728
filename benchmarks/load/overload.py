"""Puts a server under four times its maximum load through gRPC and measures goodput and refusals.

    python benchmarks/load/overload.py [--seconds 120] [--rounds 1] [--shared] [--json FILE]

First, a closed loop of callers keeps every slot busy, which gives the server's maximum rate. Then callers arrive at
four times that rate, whether or not earlier ones have been served, so the queue fills and requests are refused. Then
the closed loop runs again, because other work on the machine may have changed the maximum. Goodput counts the tokens
that callers received. If the maximum changes from one minute to the next, many short rounds, each compared with the
closed loops right before and after it, are more reliable than a long one: --seconds 15 --rounds 12.

Server and callers have one core each, if there are two: the callers of a real server do not run on its cores, and a
refused caller needs about as much CPU time as the refusal itself. With --shared they compete for all cores. The callers
share one event loop. The lateness of that loop's own wake-ups is reported next to the refusal times, because it is
added by the machine rather than by the server. Two more figures do not depend on how much of the machine other work has
taken: the goodput per second of CPU time that the server got, and the CPU time of the server's event loop per refusal,
which is its thread's CPU time minus the time that the same number of tokens took in the closed loop.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import grpc

from meshserve.runtime.client.client import AsyncClient, CallError

MAX_RUNNING = 16
_SERVE = [
    sys.executable, "-m", "meshserve", "serve", "--model=demo", "--port=0", "--cpu-devices=1",
    "--dtype=float32", "--page-size=16", f"--max-running={MAX_RUNNING}", "--max-step-tokens=64", "--num-pages=512",
    "--max-context=512", "--max-waiting=32",
]  # fmt: skip
_LISTENS = re.compile(r"listens on (\S+)")
_MAX_TOKENS = 32
_OVERLOAD = 4


@dataclass
class Phase:
    """The results of one part of the run, as seen by the callers."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the server
    loop_seconds: float = 0.0  # of the server's event loop thread
    num_completed: int = 0
    num_tokens: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    retry_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="overload", description="Measure goodput and refusals of an overloaded server."
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of overload per round")
    parser.add_argument("--rounds", type=int, default=1, help="number of overloads, each between two closed loops")
    parser.add_argument("--shared", action="store_true", help="let the callers compete for the server's core")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    results = asyncio.run(_run(options.seconds, options.rounds, is_shared=options.shared))
    for name, value in results.items():
        print(f"{name:32s} {value}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


async def _run(seconds: float, num_rounds: int, *, is_shared: bool) -> dict[str, float | list[float] | list[str]]:
    async with _server(is_shared=is_shared) as (target, pid), AsyncClient(target) as client:
        await client.wait_until_ready(300.0)
        draw = random.Random(0)
        await _closed_loop(client, draw, 5.0)  # warm-up
        rounds = [await _timed(pid, _closed_loop(client, draw, seconds / 4))]
        memory = _Memory(pid)
        lateness: list[float] = []
        watching = [asyncio.create_task(memory.sample()), asyncio.create_task(_watch_loop(lateness))]
        for _ in range(num_rounds):
            rate = _OVERLOAD * rounds[-1].num_completed / rounds[-1].seconds
            rounds.append(await _timed(pid, _open_loop(client, draw, rate, seconds)))
            rounds.append(await _timed(pid, _closed_loop(client, draw, seconds / 4)))
        for task in watching:
            task.cancel()
        load = await client.load()
    maximum, overload = _together(rounds[::2]), _together(rounds[1::2])
    goodputs = sorted(
        2 * during.tokens_per_second / (before.tokens_per_second + after.tokens_per_second)
        for before, during, after in zip(rounds[::2], rounds[1::2], rounds[2::2], strict=False)
    )
    refusals = sorted(overload.refusal_seconds) or [0.0]
    lateness.sort()
    return {
        "max_tokens_per_second": [round(closed.tokens_per_second, 1) for closed in rounds[::2]],
        "overload_tokens_per_second": [round(during.tokens_per_second, 1) for during in rounds[1::2]],
        "goodput_over_maximum": round(statistics.median(goodputs), 3),
        "goodput_over_maximum_rounds": [round(goodput, 3) for goodput in goodputs],
        "tokens_per_cpu_second_maximum": round(maximum.num_tokens / maximum.cpu_seconds, 1),
        "tokens_per_cpu_second_overload": round(overload.num_tokens / overload.cpu_seconds, 1),
        "server_cpu_share_maximum": round(maximum.cpu_seconds / maximum.seconds, 2),
        "server_cpu_share_overload": round(overload.cpu_seconds / overload.seconds, 2),
        "loop_us_a_refusal": round(1e6 * _refusal_seconds(maximum, overload)),
        "num_completed": overload.num_completed,
        "num_refused": len(overload.refusal_seconds),
        "refusals_within_50_ms": round(sum(seconds < 0.05 for seconds in refusals) / len(refusals), 4),
        "refusal_ms_p50": round(1000 * refusals[len(refusals) // 2], 1),
        "refusal_ms_p99": round(1000 * refusals[len(refusals) * 99 // 100], 1),
        "refusal_ms_longest": round(1000 * refusals[-1], 1),
        "own_lateness_ms_p99": round(1000 * lateness[len(lateness) * 99 // 100], 1),
        "own_lateness_ms_longest": round(1000 * lateness[-1], 1),
        "retry_hint_seconds_longest": round(max(overload.retry_seconds, default=0.0), 2),
        "memory_mib_start": memory.mib[0],
        "memory_mib_half": memory.mib[len(memory.mib) // 2],
        "memory_mib_end": memory.mib[-1],
        "num_running_at_end": load.num_running,
        "num_waiting_at_end": load.num_waiting,
        "num_pages_not_free_at_end": load.num_pages - load.num_free_pages,
        "errors": sorted({*maximum.errors, *overload.errors}),
    }


async def _timed(pid: int, running: Awaitable[Phase]) -> Phase:
    """Returns the phase together with the CPU time that the server used during it."""
    process, loop = Path(f"/proc/{pid}/stat"), Path(f"/proc/{pid}/task/{pid}/stat")  # the loop runs in the main thread
    before, loop_before = _cpu_seconds(process), _cpu_seconds(loop)
    phase = await running
    phase.cpu_seconds, phase.loop_seconds = _cpu_seconds(process) - before, _cpu_seconds(loop) - loop_before
    return phase


def _cpu_seconds(stat: Path) -> float:
    values = stat.read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


def _together(phases: Sequence[Phase]) -> Phase:
    """Merges several phases into one by adding numbers and joining lists."""
    whole = Phase()
    for phase in phases:
        for part in fields(Phase):
            setattr(whole, part.name, getattr(whole, part.name) + getattr(phase, part.name))
    return whole


def _refusal_seconds(maximum: Phase, overload: Phase) -> float:
    """Returns the CPU time of the server's event loop per refusal; the closed loops give its cost per token."""
    token_seconds = maximum.loop_seconds / maximum.num_tokens
    return (overload.loop_seconds - overload.num_tokens * token_seconds) / max(len(overload.refusal_seconds), 1)


async def _closed_loop(client: AsyncClient, draw: random.Random, seconds: float) -> Phase:
    """Runs callers that each send a new request after an answer; 1.5 callers per slot keep all slots busy."""
    phase = Phase()
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await _call(client, draw, phase, end)

    await asyncio.gather(*(caller() for _ in range(MAX_RUNNING + MAX_RUNNING // 2)))
    phase.seconds = seconds
    return phase


async def _open_loop(client: AsyncClient, draw: random.Random, rate: float, seconds: float) -> Phase:
    """Runs callers that arrive at random, `rate` per second, whether or not earlier ones have been served."""
    phase = Phase()
    started = next_arrival = time.monotonic()
    end = started + seconds
    calls: set[asyncio.Task[None]] = set()
    while (next_arrival := next_arrival + draw.expovariate(rate)) < end:
        await asyncio.sleep(max(next_arrival - time.monotonic(), 0.0))
        call = asyncio.create_task(_call(client, draw, phase, end))
        calls.add(call)
        call.add_done_callback(calls.discard)
    phase.seconds = time.monotonic() - started
    await asyncio.gather(*calls)
    return phase


async def _call(client: AsyncClient, draw: random.Random, phase: Phase, end: float) -> None:
    """Sends one request and adds its result to the phase; tokens after the end of the phase do not count."""
    prompt = [draw.randrange(300, 2000) for _ in range(draw.randint(16, 48))]
    started, num_tokens, has_ended = time.monotonic(), 0, False
    try:
        async for chunk in client.generate(prompt, max_tokens=_MAX_TOKENS, temperature=0.8, ignore_eos=True):
            if time.monotonic() < end:
                num_tokens += len(chunk.token_ids)
                has_ended = chunk.finish is not None
    except CallError as error:
        if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            phase.errors.append(str(error))
            return
        phase.refusal_seconds.append(time.monotonic() - started)
        if error.retry_seconds is not None:
            phase.retry_seconds.append(error.retry_seconds)
        return
    phase.num_completed += has_ended
    phase.num_tokens += num_tokens


async def _watch_loop(lateness: list[float]) -> None:
    """Records every 10 ms how late this process's event loop wakes up."""
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        lateness.append(time.monotonic() - due)


class _Memory:
    """Samples the resident memory of a process once per second."""

    def __init__(self, pid: int):
        self._status = Path(f"/proc/{pid}/status")
        self.mib: list[int] = []

    async def sample(self) -> None:
        while True:
            found = re.search(r"VmRSS:\s+(\d+) kB", self._status.read_text())
            assert found is not None
            self.mib.append(int(found[1]) // 1024)
            await asyncio.sleep(1.0)


@asynccontextmanager
async def _server(*, is_shared: bool) -> AsyncIterator[tuple[str, int]]:
    """Starts a server process and yields its address and process id once it listens."""
    process = subprocess.Popen(_SERVE, stdout=subprocess.PIPE, text=True)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1 and not is_shared:
        os.sched_setaffinity(process.pid, cores[:1])  # at once: later threads inherit it, and so far there is only one
        os.sched_setaffinity(0, cores[1:2])
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _LISTENS.search(line):
                yield found[1], process.pid
                break
        else:
            raise SystemExit(f"the server ended with status {process.wait()} before it was ready; see above.")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
