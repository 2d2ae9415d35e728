"""Times starts of a real server from the command to the first token through gRPC, and splits them into their phases.

    meshserve bench start --rounds 3
    meshserve bench start --model qwen3-8b --random-weights --markdown build/start.md
    meshserve bench start --model qwen3-0.6b --random-weights --set stored_programs=on    # the trial of decision 098

Each start is a process of its own with a home directory of its own, in which compiled programs and kernels are kept:
`cold` begins with an empty one, `warm` finds what the cold start left, and `second` finds a copy of it that is
read-only, as a machine does that mounts the folder of another. Prints a line of JSON for each start: seconds until the
server was ready and sent a first token; processor time of all its threads; the server's own timeline
(`telemetry.start_timeline`); how many programs were loaded without tracing; and what shows that these are the same: the
tokens of some requests, the time of a decode step, and the number of pages. Then a table of medians.

Exits with 1 if tokens or pages are not those of the cold start, if a start of the third kind changed the folder, or if
stored programs were asked for and a later start loaded none.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.server_process import ServerProcess
from meshserve.runtime.client.client import AsyncClient
from meshserve.runtime.telemetry.start_timeline import StartTimeline, read_timeline

COLD, WARM, SECOND = "cold", "warm", "second"
_PROMPT_TOKENS = 4
_GREEDY = {"temperature": 0.0}
# Further requests, by the length of their prompts. They follow each other, so that each start has the same steps: on
# GPUs, the rounding of a step depends on its size.
_FURTHER: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1}),
    (60, {"temperature": 1.0, "min_p": 0.05, "seed": 2}),
    (300, _GREEDY),
    (1500, _GREEDY),
)
_PENALIZED = (4, {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "logprobs": 1})  # needs logits processors
_LOADED = re.compile(r"CompileCounts\(num_loaded=(\d+), num_compiles=(\d+)")
_CACHE = Path(".cache") / "meshserve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What one start took, in seconds from the command."""

    case: str
    ready_seconds: float
    first_token_seconds: float
    cpu_seconds: float  # of the process and its children until it ended
    step_seconds: float  # median from token to token of a request that runs alone
    tokens: tuple[tuple[int, ...], ...]  # of each request
    num_pages: int
    num_loaded: int  # programs that were neither traced nor compiled
    num_compiles: int  # with those from jax's cache
    changed_files: int  # files of the cache folder that are new, gone or written
    timeline: StartTimeline

    def line(self) -> str:
        """Returns it as a line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    options = _parser().parse_args(arguments)
    settings: dict[str, Any] = {"model": options.model, "random_weights": options.random_weights, "http_port": -1}
    settings |= parse_settings(options.set)
    with tempfile.TemporaryDirectory(prefix="meshserve-start-") as folder:
        rounds = [Path(folder) / str(number) for number in range(options.rounds)]
        starts = [start for each in rounds for start in _round(settings, each, options.tokens)]
    table = table_of(starts)
    print(table)
    if options.markdown:
        Path(options.markdown).write_text(f"{table}\n")
    if problem := _problem(starts, is_stored=settings.get("stored_programs") == "on"):
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="start", description="Time starts from the command to the first token.")
    parser.add_argument("--model", default="demo", help="a model as for `serve` (default: %(default)s)")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each request (default: %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the server")
    parser.add_argument("--markdown", help="also write the table of medians to this file")
    return parser


def _round(settings: Mapping[str, Any], folder: Path, num_tokens: int) -> list[Start]:
    """Starts a server cold, warm, and with a copy of the folder."""
    first, second = folder / "first", folder / "second"
    first.mkdir(parents=True)
    starts = [time_start(case, settings, first, num_tokens) for case in (COLD, WARM)]
    shutil.copytree(first / _CACHE, second / _CACHE)
    _set_writable(second / _CACHE, is_writable=False)
    starts.append(time_start(SECOND, settings, second, num_tokens))
    _set_writable(second / _CACHE, is_writable=True)
    return starts


def time_start(case: str, settings: Mapping[str, Any], home: Path, num_tokens: int) -> Start:
    """Starts a server with this home directory, takes a first token and further ones from it, and stops it.

    Raises:
      SystemExit: The server ended before it was ready.
    """
    before, used_before = _files(home / _CACHE), resource.getrusage(resource.RUSAGE_CHILDREN)
    log = home.parent / f"{home.name}-{case}.log"
    hub = os.environ.get("HF_HOME", str(Path("~/.cache/huggingface").expanduser()))
    began = time.monotonic()
    with ServerProcess(settings, log=log, environment={"HOME": str(home), "HF_HOME": hub}) as server:
        try:
            served = asyncio.run(_served(server, began, settings, num_tokens))
        except SystemExit:
            print(log.read_text(), file=sys.stderr)
            raise
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = _LOADED.search(log.read_text())
    start = Start(
        case=case,
        cpu_seconds=round(used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime, 2),
        num_loaded=int(counts[1]) if counts else 0,
        num_compiles=int(counts[2]) if counts else 0,
        changed_files=len(before.items() ^ _files(home / _CACHE).items()),
        timeline=read_timeline(log.read_text()),
        **served,
    )
    print(start.line(), flush=True)
    return start


async def _served(server: ServerProcess, began: float, settings: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Returns the fields of `Start` that callers of the server see."""
    async with await server.connect() as client:
        ready_seconds = time.monotonic() - began
        first, _ = await _generated(client, _PROMPT_TOKENS, 1, _GREEDY)
        first_token_seconds = time.monotonic() - began
        again, step_seconds = await _generated(client, _PROMPT_TOKENS, num_tokens, _GREEDY)
        tokens, max_context = [first, again], (await client.model_info()).max_context_tokens
        for prompt_tokens, fields in (*_FURTHER, *([_PENALIZED] if settings.get("logits_processors", True) else [])):
            if prompt_tokens + num_tokens <= max_context:
                tokens.append((await _generated(client, prompt_tokens, num_tokens, fields))[0])
        return {
            "ready_seconds": round(ready_seconds, 3),
            "first_token_seconds": round(first_token_seconds, 3),
            "step_seconds": round(step_seconds, 6),
            "tokens": tuple(tokens),
            "num_pages": (await client.load()).num_pages,
        }


async def _generated(
    client: AsyncClient, prompt_tokens: int, num_tokens: int, fields: Mapping[str, Any]
) -> tuple[tuple[int, ...], float]:
    """Returns the tokens of a request, and the median time between two of its chunks for each token, 0 if it has one.

    Several steps of a dispatch send their tokens in one chunk.
    """
    tokens: list[int] = []
    gaps, before = [], 0.0
    prompt = [300 + number % 100 for number in range(prompt_tokens)]
    async for chunk in client.generate(prompt, max_tokens=num_tokens, ignore_eos=True, **fields):
        now = time.monotonic()
        if chunk.token_ids and tokens:
            gaps.append((now - before) / len(chunk.token_ids))
        tokens += chunk.token_ids
        before = now
    return tuple(tokens), statistics.median(gaps) if gaps else 0.0


def _files(folder: Path) -> dict[Path, int]:
    """Returns when each file below a folder was last written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def _set_writable(folder: Path, *, is_writable: bool) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200 if is_writable else path.stat().st_mode & ~0o222)


def table_of(starts: Sequence[Start]) -> str:
    """Returns medians as a table in Markdown, with a column for each kind of start."""
    cases = [case for case in (COLD, WARM, SECOND) if any(start.case == case for start in starts)]
    by_case = {case: [start for start in starts if start.case == case] for case in cases}
    rows: dict[str, list[str]] = {
        "first token": [_median([start.first_token_seconds for start in by_case[case]]) for case in cases],
        "ready": [_median([start.ready_seconds for start in by_case[case]]) for case in cases],
        "processor time": [_median([start.cpu_seconds for start in by_case[case]]) for case in cases],
        "a decode step, ms": [_median([1e3 * start.step_seconds for start in by_case[case]]) for case in cases],
        "programs loaded without tracing": [
            f"{statistics.median(start.num_loaded for start in by_case[case]):g}" for case in cases
        ],
    }
    for field, mark in (("phases", ""), ("within", "of it, over threads: ")):
        for name in dict.fromkeys(name for start in starts for name in getattr(start.timeline, field)):
            rows[mark + name] = [
                _median([getattr(start.timeline, field).get(name, 0.0) for start in by_case[case]]) for case in cases
            ]
    lines = [f"| s | {' | '.join(cases)} |", f"|---|{'---|' * len(cases)}"]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}"


def _problem(starts: Sequence[Start], *, is_stored: bool = False) -> str:
    """Returns what is wrong with the starts, or "". `is_stored`: later ones should have loaded stored programs."""
    if len({start.tokens for start in starts}) > 1:
        tokens = "; ".join(f"{start.case}: {start.tokens}" for start in starts)
        return f"the starts sent different tokens for the same requests: {tokens}"
    if len({start.num_pages for start in starts}) > 1:
        return f"the starts have different numbers of pages: {[start.num_pages for start in starts]}"
    if is_stored and (slow := [start.case for start in starts if start.case != COLD and not start.num_loaded]):
        return f"stored_programs is on, and these starts loaded no stored program: {', '.join(slow)}"
    if any(start.changed_files for start in starts if start.case == SECOND):
        return "a start with a copy of the folder wrote to it, so it did not find all that it needed"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
