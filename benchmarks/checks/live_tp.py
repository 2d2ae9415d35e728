"""Changes the TP size of a running server under load and checks that every stream ends whole.

    meshserve bench live_tp --model qwen3-8b --tp 1 2 1
    meshserve bench live_tp --model qwen3-0.6b --dtype float32 --tp 1 4 2

The server starts with random weights and the first TP size. Streams of greedy tokens run through gRPC, each with its
own prompt, and begin again as they end. First each runs once without a change. Then the config file is rewritten
and the server told to read it again, for each further TP size, while the streams run on. Exits with 1 if a stream ended
early, or, in float32, with other tokens than without a change.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.server_process import ServerProcess
from meshserve.runtime.api.errors import MeshserveError
from meshserve.runtime.client.client import AsyncClient

_POLL_SECONDS = 0.1
_MAX_TOKEN_ID = 250  # every model has at least as many tokens
# By default XLA may round float32 operands of products to 19 bits on GPUs, in a way that depends on their shape.
_EXACT_PRODUCTS = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


@dataclasses.dataclass(kw_only=True)
class Change:
    """One change of the TP size."""

    tp: int
    seconds: float  # from the signal until the server reports the new TP size
    paused_seconds: float | None  # for which the server says that streams paused
    step_ms: float  # median time between two tokens of a stream afterwards


@dataclasses.dataclass(kw_only=True)
class Report:
    """What the streams saw."""

    model: str
    dtype: str
    num_streams: int
    output_tokens: int
    changes: list[Change] = dataclasses.field(default_factory=list)
    num_ended: int = 0  # while the TP size changed and afterwards
    num_lost: int = 0
    num_different: int = 0  # that ended whole, with other tokens than without a change
    longest_gap_seconds: float = 0.0  # between two tokens of a stream
    first_error: str = ""

    @property
    def is_well(self) -> bool:
        are_equal = self.num_different == 0 or self.dtype != "float32"
        return self.num_lost == 0 and self.num_ended > 0 and are_equal


class Streams:
    """Streams that begin again as they end. The first round's tokens are the expected ones."""

    def __init__(self, client: AsyncClient, report: Report, prompt_tokens: int):
        draw = random.Random(0)
        self._client, self._report = client, report
        self._prompts = [
            [draw.randint(0, _MAX_TOKEN_ID) for _ in range(prompt_tokens)] for _ in range(report.num_streams)
        ]
        self._expected: dict[int, list[int]] = {}
        self._num_rounds = [0] * report.num_streams
        self._is_over = False
        self._gaps: list[float] = []

    async def run_once(self) -> None:
        """Runs each stream once, all at the same time, to learn its tokens."""
        found = await asyncio.gather(*(self._tokens(index) for index in range(len(self._prompts))))
        self._expected = dict(enumerate(found))
        self._report.longest_gap_seconds = 0.0

    async def repeat(self) -> None:
        """Repeats all streams until `end`."""
        await asyncio.gather(*(self._repeat_one(index) for index in range(len(self._prompts))))

    async def wait_for_rounds(self, num_rounds: int, load: asyncio.Task) -> float:
        """Waits until each stream has ended `num_rounds` more times; returns the median milliseconds between tokens."""
        self._gaps.clear()
        goals = [number + num_rounds for number in self._num_rounds]
        while any(number < goal for number, goal in zip(self._num_rounds, goals, strict=True)):
            if load.done():
                load.result()
            await asyncio.sleep(_POLL_SECONDS)
        return 1e3 * statistics.median(self._gaps) if self._gaps else 0.0

    def end(self) -> None:
        """Lets no stream begin again."""
        self._is_over = True

    async def _repeat_one(self, index: int) -> None:
        report = self._report
        while not self._is_over:
            report.num_ended += 1
            try:
                tokens = await self._tokens(index)
            except MeshserveError as error:
                report.num_lost += 1
                report.first_error = report.first_error or str(error)
                await asyncio.sleep(_POLL_SECONDS)
            else:
                report.num_lost += len(tokens) != report.output_tokens
                report.num_different += tokens != self._expected[index]
            self._num_rounds[index] += 1

    async def _tokens(self, index: int) -> list[int]:
        tokens: list[int] = []
        last = 0.0
        chunks = self._client.generate(
            self._prompts[index], max_tokens=self._report.output_tokens, temperature=0.0, ignore_eos=True
        )
        async for chunk in chunks:
            now = time.perf_counter()
            if tokens and chunk.token_ids:
                self._gaps.append((now - last) / len(chunk.token_ids))
                self._report.longest_gap_seconds = max(self._report.longest_gap_seconds, now - last)
            tokens += chunk.token_ids
            last = now
        return tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns 1 if it failed."""
    options = _parser().parse_args(arguments)
    report = Report(
        model=options.model, dtype=options.dtype, num_streams=options.streams, output_tokens=options.output_tokens
    )
    settings: dict[str, Any] = {
        "model": options.model, "random_weights": options.model != "demo", "dtype": options.dtype,
        "tp": options.tp[0], "cpu_devices": options.cpu_devices, "max_running": options.streams,
        "logits_processors": False, **parse_settings(options.set),
    }  # fmt: skip
    exact = _EXACT_PRODUCTS if options.dtype == "float32" else {}
    with tempfile.TemporaryDirectory(prefix="meshserve-live-tp-") as folder:
        log = Path(folder) / "log"
        try:
            with ServerProcess(settings, log=log, environment=exact) as server:
                asyncio.run(_change(options, server, report, log))
        finally:
            print(log.read_text()[-4000:], flush=True)
    print(_text(report))
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(report), indent=1))
    return 0 if report.is_well else 1


async def _change(options: argparse.Namespace, server: ServerProcess, report: Report, log: Path) -> None:
    async with await server.connect() as client:
        streams = Streams(client, report, options.prompt_tokens)
        await streams.run_once()
        load = asyncio.create_task(streams.repeat())
        await streams.wait_for_rounds(1, load)
        for tp in options.tp[1:]:
            began = time.monotonic()
            server.reload({"tp": tp})
            await asyncio.wait_for(_wait_for_tp(client, server, log, tp), options.change_seconds)
            seconds = time.monotonic() - began
            # The first round began before the change or during it.
            await streams.wait_for_rounds(1, load)
            step_ms = await streams.wait_for_rounds(1, load)
            pauses = re.findall(r"the streams paused for ([0-9.]+) s", log.read_text())
            paused_seconds = float(pauses[-1]) if pauses else None
            report.changes.append(Change(tp=tp, seconds=seconds, paused_seconds=paused_seconds, step_ms=step_ms))
        streams.end()
        await load


async def _wait_for_tp(client: AsyncClient, server: ServerProcess, log: Path, tp: int) -> None:
    while (await client.model_info()).tp_size != tp:
        text = log.read_text()
        if server.process.poll() is not None or "TP size was not changed" in text or "TP size failed" in text:
            raise SystemExit(f"the server did not change to tp {tp}; its log ends with:\n{text[-4000:]}")
        await asyncio.sleep(_POLL_SECONDS)


def _text(report: Report) -> str:
    lines = [
        f"{report.model}, {report.dtype}, {report.num_streams} streams of {report.output_tokens} tokens: "
        f"{report.num_ended} ended, {report.num_lost} lost, {report.num_different} with other tokens; "
        f"longest gap {report.longest_gap_seconds:.2f} s"
    ]
    for change in report.changes:
        paused = "unknown" if change.paused_seconds is None else f"{change.paused_seconds:.2f} s"
        lines.append(
            f"  to tp {change.tp}: after {change.seconds:.1f} s, paused {paused}, then {change.step_ms:.2f} ms a token"
        )
    if report.first_error:
        lines.append(f"  the first error: {report.first_error}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench live_tp", description="Change the TP size of a server under load."
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a published size, or 'demo' (default: %(default)s)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 1], help="TP sizes in turn (default: 1 2 1)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--streams", type=int, default=16, help="open at the same time (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each stream (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=256, help="of each stream (default: %(default)s)")
    parser.add_argument(
        "--change-seconds", type=float, default=300.0, help="time limit of a change (default: %(default)s)"
    )
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual CPU devices")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
