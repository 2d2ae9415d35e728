"""`meshserve demo`: starts a real server on a mesh of virtual CPU devices and streams from it with a real client.

With several processes it starts a cluster in which each process has an equal share of the devices.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
_READY_SECONDS = 180.0
_LISTENS = re.compile(r"listens on (\S+)")
_FLAGS = ("--model=demo", "--dtype=float32", "--page-size=16", "--max-running=8", "--max-step-tokens=64")


@dataclass
class _Run:
    """Text and timing of one request."""

    prompt: str
    text: str = ""
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
    started = time.monotonic()
    with _server(tp, max(tp, 4)) if num_processes == 1 else _cluster(tp, num_processes) as target:
        print(f"Ready on {target} after {time.monotonic() - started:.0f} s. Streaming {len(_PROMPTS)} requests:\n")
        asyncio.run(_stream_all(target))
    return 0


@contextlib.contextmanager
def _server(tp: int, num_devices: int) -> Iterator[str]:
    """Runs a server process on a free port and yields its address once it listens."""
    command = [
        sys.executable, "-m", "meshserve", "serve", "--port=0", f"--tp={tp}",
        f"--cpu-devices={num_devices}", *_FLAGS,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _LISTENS.search(line):
                yield found[1]
                break
        else:
            raise MeshserveError(f"the server ended with status {process.wait()} before it was ready; see above.")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _cluster(tp: int, num_processes: int) -> Iterator[str]:
    """Runs a cluster and yields its address. If a call fails, the error contains the logs of all processes."""
    flags = [f"--tp={tp}", f"--cpu-devices={tp // num_processes}", *_FLAGS]
    with tempfile.TemporaryDirectory() as folder, local_cluster(num_processes, flags, Path(folder)) as cluster:
        try:
            yield cluster.target
        except CallError as error:
            logs = "\n".join(cluster.log(index).read_text() for index in range(num_processes))
            raise MeshserveError(f"the cluster failed: {error}\n{logs}") from None
        statuses = cluster.stop()
        print(f"The cluster was stopped. Exit statuses of its processes: {', '.join(map(str, statuses))}.")


async def _stream_all(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.wait_until_ready(_READY_SECONDS)
        started = time.monotonic()
        runs = await asyncio.gather(*(_stream(client, prompt, seed) for seed, prompt in enumerate(_PROMPTS)))
        seconds = time.monotonic() - started
        load = await client.load()
    for run in runs:
        print(f"{run.prompt}{run.text}\n")
        print(
            f"  [{run.num_tokens} tokens; first token after {run.first_token_seconds * 1000:.0f} ms, "
            f"then {(run.num_tokens - 1) / (run.total_seconds - run.first_token_seconds):.0f} tokens/s]\n"
        )
    num_tokens = sum(run.num_tokens for run in runs)
    print(
        f"{len(runs)} requests, {num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.0f} tokens/s in total."
    )
    print(f"Free KV pages afterwards: {load.num_free_pages} of {load.num_pages}.")


async def _stream(client: AsyncClient, prompt: str, seed: int) -> _Run:
    run, started = _Run(prompt), time.monotonic()
    chunks = client.generate(prompt, max_tokens=_MAX_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    async for chunk in chunks:
        run.first_token_seconds = run.first_token_seconds or time.monotonic() - started
        run.text += chunk.text
        run.num_tokens += len(chunk.token_ids)
    run.total_seconds = time.monotonic() - started
    return run
