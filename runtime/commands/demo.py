"""`meshserve demo`: starts a real server on a mesh of virtual CPU devices and streams from it with a real client.

With several processes it starts a cluster in which each process has an equal share of the devices. All requests run at
the same time; their texts are shown one after the other, each as it arrives.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshserve.protos import inference_pb2 as pb

from ..api.errors import MeshserveError
from ..client.client import AsyncClient, CallError
from .local_cluster import local_cluster

_PROMPTS = (
    "HAMLET:\nTo be, or not to be",
    "ROMEO:\nBut soft! What light",
    "KING RICHARD:\nNow is the winter",
    "FIRST WITCH:\nWhen shall we",
)
_MAX_TOKENS = 96
_READY_SECONDS = 900.0
_POLL_SECONDS = 0.2
_LISTENS = re.compile(r"listens on (\S+)")
# Without the programs of penalties and constraints, which it does not show: a sixth of the time of a first start.
_FLAGS = (
    "--model=demo", "--dtype=float32", "--page-size=16", "--max-running=8", "--max-step-tokens=64",
    "--no-logits-processors",
)  # fmt: skip


@dataclass
class _Run:
    """Text and timing of one request. `parts` receives the text as it arrives, and None at its end."""

    prompt: str
    parts: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    num_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


def run_demo(*, tp: int, num_processes: int = 1) -> int:
    """Starts the server, streams a few concurrent requests, and prints their output and speed.

    Raises:
      MeshserveError: The server did not start, or `tp` is not a multiple of `num_processes`.
    """
    if tp % num_processes:
        raise MeshserveError(f"tp is {tp}; it must be a multiple of the {num_processes} processes.")
    where = f" of {num_processes} processes" if num_processes > 1 else ""
    print(
        f"Starting a server{where}: the embedded Shakespeare model on a mesh of {tp} virtual CPU devices ...",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        with _server(tp, max(tp, 4), folder) if num_processes == 1 else _cluster(tp, num_processes, folder) as target:
            try:
                asyncio.run(_show_all(target, started))
            except CallError as error:
                logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
                raise MeshserveError(f"the server failed: {error}\n{logs}") from None
    print("\nTo serve it yourself: meshserve serve demo --cpu-devices 4 --tp 4")
    print("and then, in another terminal: meshserve chat")
    return 0


@contextlib.contextmanager
def _server(tp: int, num_devices: int, folder: Path) -> Iterator[str]:
    """Runs a server process on a free port, with its log in `folder`, and yields its address once it listens."""
    command = [
        sys.executable, "-m", "meshserve", "serve", "--port=0", f"--tp={tp}",
        f"--cpu-devices={num_devices}", *_FLAGS,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _LISTENS.search(line):
                yield found[1]
                break
        else:
            raise MeshserveError(f"the server ended with status {process.wait()}:\n{log.read_text()}")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _cluster(tp: int, num_processes: int, folder: Path) -> Iterator[str]:
    """Runs a cluster, with its logs in `folder`, and yields its address."""
    flags = [f"--tp={tp}", f"--cpu-devices={tp // num_processes}", *_FLAGS]
    with local_cluster(num_processes, flags, folder) as cluster:
        yield cluster.target
        statuses = cluster.stop()
        print(f"The cluster was stopped. Exit statuses of its processes: {', '.join(map(str, statuses))}.")


async def _show_all(target: str, started: float) -> None:
    """Waits until the server is ready, runs all requests, and prints their texts as they arrive."""
    async with AsyncClient(target) as client:
        await _ready(client, started)
        print(f"Ready on {target} after {time.monotonic() - started:.0f} s. {len(_PROMPTS)} requests run together:\n")
        began = time.monotonic()
        runs = [_Run(prompt) for prompt in _PROMPTS]
        streams = asyncio.gather(*(_stream(client, run, seed) for seed, run in enumerate(runs)))
        for run in runs:
            print(run.prompt, end="", flush=True)
            while (text := await run.parts.get()) is not None:
                print(text, end="", flush=True)
            print("\n")
        await streams
        seconds = time.monotonic() - began
        load = await client.load()
    for run in runs:
        print(
            f"{run.prompt.splitlines()[0]:<14} {run.num_tokens} tokens; first token after "
            f"{run.first_token_seconds * 1000:.0f} ms, then "
            f"{(run.num_tokens - 1) / (run.total_seconds - run.first_token_seconds):.0f} tokens/s"
        )
    num_tokens = sum(run.num_tokens for run in runs)
    print(
        f"{len(runs)} requests, {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.0f} tokens/s in total."
    )
    print(f"Free KV pages afterwards: {load.num_free_pages} of {load.num_pages}.")


async def _ready(client: AsyncClient, started: float) -> None:
    """Waits until the server accepts requests, and prints what it is doing meanwhile.

    Raises:
      CallError: The server has ended.
      MeshserveError: It was not ready in time.
    """
    tell = _progress_printer(started)
    while (info := await client.server_info()).state != pb.SERVER_STATE_READY:
        if time.monotonic() - started > _READY_SECONDS:
            raise MeshserveError(f"the server was not ready within {_READY_SECONDS:g} s ({info.progress}).")
        tell(info.progress)
        await asyncio.sleep(_POLL_SECONDS)
    tell("")


def _progress_printer(started: float) -> Callable[[str], None]:
    """Returns a function that prints progress: one line that changes on a terminal, elsewhere a line for each phase."""
    is_terminal, last = sys.stdout.isatty(), ""

    def tell(progress: str) -> None:
        nonlocal last
        if is_terminal:
            text = f"  {progress} ... {time.monotonic() - started:.0f} s" if progress else ""
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif progress and progress != last:
            print(f"  {progress} ...", flush=True)
        last = progress

    return tell


async def _stream(client: AsyncClient, run: _Run, seed: int) -> None:
    started = time.monotonic()
    chunks = client.generate(run.prompt, max_tokens=_MAX_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    try:
        async for chunk in chunks:
            run.first_token_seconds = run.first_token_seconds or time.monotonic() - started
            run.parts.put_nowait(chunk.text)
            run.num_tokens += len(chunk.token_ids)
    finally:
        run.total_seconds = time.monotonic() - started
        run.parts.put_nowait(None)
