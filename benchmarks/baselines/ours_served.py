"""Runs `meshserve serve` with random weights and sends it whole batches through gRPC from this process."""

import asyncio
import atexit
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock
from meshserve.runtime.client.client import AsyncClient

from .job import Batch, Job, Started, serve_job

_READY_SECONDS = 900.0
_STOP_SECONDS = 60.0


def start(job: Job) -> Started:
    """Starts a server with the job's settings as its config file, and its own defaults for all other options."""
    port = _free_port()
    folder = Path(tempfile.mkdtemp(prefix="meshserve-served-"))
    settings = {"dtype": job.dtype, **job.settings, "model": job.model, "random_weights": True, "port": port}
    (folder / "serve.toml").write_text(toml(settings))
    server = subprocess.Popen([sys.executable, "-m", "meshserve", "serve", "--config", str(folder / "serve.toml")])
    atexit.register(_stop, server)
    loop = asyncio.new_event_loop()
    client, kv_tokens = loop.run_until_complete(_connect(f"127.0.0.1:{port}", server))

    async def send(batch: Batch, clock: TokenClock, began: float) -> None:
        async def one(index: int) -> None:
            work = batch.works[index]
            chunks = client.generate(
                work.prompt_token_ids, max_tokens=work.max_tokens, temperature=batch.temperature, ignore_eos=True
            )
            async for chunk in chunks:
                clock.add(index, began, time.perf_counter(), len(chunk.token_ids))

        await asyncio.gather(*map(one, range(len(batch.works))))

    def run(batch: Batch) -> RunTimes:
        clock, began = TokenClock(), time.perf_counter()
        loop.run_until_complete(send(batch, clock, began))
        times = clock.times(time.perf_counter() - began)
        expected = sum(work.max_tokens for work in batch.works)
        assert times.num_tokens == expected, f"{times.num_tokens} tokens arrived, not {expected}"
        return times

    return Started(f"jax {jax.__version__}", run, kv_tokens)


async def _connect(target: str, server: subprocess.Popen) -> tuple[AsyncClient, int]:
    """Waits until the server is ready; returns a client, and the tokens that fit in the server's KV cache."""
    client = AsyncClient(target)
    ready = asyncio.create_task(client.wait_until_ready(_READY_SECONDS))
    while not ready.done():
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit status {server.returncode} before it was ready")
        await asyncio.wait([ready], timeout=0.2)
    ready.result()
    page_size_tokens = (await client.model_info()).page_size_tokens
    return client, (await client.load()).num_pages * page_size_tokens


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


def toml(settings: Mapping[str, Any]) -> str:
    """Formats options as the config file of a server; JSON's strings, numbers and booleans are also TOML's."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


if __name__ == "__main__":
    serve_job(start)
