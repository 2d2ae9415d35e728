"""Times starts of a real server from the command to the first token through gRPC, and splits them into their phases.

    meshserve bench start --rounds 3
    meshserve bench start --model qwen3-8b --random-weights --markdown build/start.md

Each start is a process of its own with a home directory of its own, in which compiled programs and kernels are kept:
`cold` begins with an empty one, `warm` finds what the cold start left, and `second` finds a copy of it that is
read-only, as a machine does that mounts the folder of another. Prints a line of JSON for each start: seconds until the
server listened, was ready, and sent a first token; processor time of all its threads; and the server's own timeline
(`telemetry.start_timeline`). Then a table of medians. Exits with 1 if a first token is not that of the cold start, or
if a start of the third kind changed the folder.
"""

import argparse
import asyncio
import dataclasses
import json
import os
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
from meshserve.runtime.telemetry.start_timeline import StartTimeline, read_timeline

COLD, WARM, SECOND = "cold", "warm", "second"
_PROMPT = [300, 301, 302, 303]
_CACHE = Path(".cache") / "meshserve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What one start took, in seconds from the command."""

    case: str
    ready_seconds: float
    first_token_seconds: float
    cpu_seconds: float  # of the process and its children until it ended
    first_token: int
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
        starts = [start for number in range(options.rounds) for start in _round(settings, Path(folder) / str(number))]
    table = table_of(starts)
    print(table)
    if options.markdown:
        Path(options.markdown).write_text(f"{table}\n")
    if problem := _problem(starts):
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="start", description="Time starts from the command to the first token.")
    parser.add_argument("--model", default="demo", help="a model as for `serve` (default: %(default)s)")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each kind (default: %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the server")
    parser.add_argument("--markdown", help="also write the table of medians to this file")
    return parser


def _round(settings: Mapping[str, Any], folder: Path) -> list[Start]:
    """Starts a server cold, warm, and with a copy of the folder."""
    first, second = folder / "first", folder / "second"
    first.mkdir(parents=True)
    starts = [time_start(COLD, settings, first), time_start(WARM, settings, first)]
    shutil.copytree(first / _CACHE, second / _CACHE)
    _set_writable(second / _CACHE, is_writable=False)
    starts.append(time_start(SECOND, settings, second))
    _set_writable(second / _CACHE, is_writable=True)
    return starts


def time_start(case: str, settings: Mapping[str, Any], home: Path) -> Start:
    """Starts a server with this home directory, takes a first token from it, and stops it.

    Raises:
      SystemExit: The server ended before it was ready.
    """
    before, used_before = _files(home / _CACHE), resource.getrusage(resource.RUSAGE_CHILDREN)
    log = home.parent / f"{home.name}-{case}.log"
    hub = os.environ.get("HF_HOME", str(Path("~/.cache/huggingface").expanduser()))
    began = time.monotonic()
    with ServerProcess(settings, log=log, environment={"HOME": str(home), "HF_HOME": hub}) as server:
        try:
            ready_seconds, first_token_seconds, first_token = asyncio.run(_first_token(server, began))
        except SystemExit:
            print(log.read_text(), file=sys.stderr)
            raise
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = Start(
        case=case,
        ready_seconds=round(ready_seconds, 3),
        first_token_seconds=round(first_token_seconds, 3),
        cpu_seconds=round(used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime, 2),
        first_token=first_token,
        changed_files=len(before.items() ^ _files(home / _CACHE).items()),
        timeline=read_timeline(log.read_text()),
    )
    print(start.line(), flush=True)
    return start


async def _first_token(server: ServerProcess, began: float) -> tuple[float, float, int]:
    async with await server.connect() as client:
        ready_seconds = time.monotonic() - began
        async for chunk in client.generate(_PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True):
            if chunk.token_ids:
                return ready_seconds, time.monotonic() - began, chunk.token_ids[0]
    raise AssertionError("a request that was accepted has sent no token")


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


def _problem(starts: Sequence[Start]) -> str:
    """Returns what is wrong with the starts, or ""."""
    tokens = {start.first_token for start in starts}
    if len(tokens) > 1:
        return f"the starts sent different first tokens for the same prompt: {sorted(tokens)}"
    if any(start.changed_files for start in starts if start.case == SECOND):
        return "a start with a copy of the folder wrote to it, so it did not find all that it needed"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
