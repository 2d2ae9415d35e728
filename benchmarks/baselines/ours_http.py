"""Runs `meshserve serve` with random weights and sends it requests through OpenAI's API from this process."""

import asyncio
import atexit
from collections.abc import AsyncIterator

import aiohttp
import jax

from meshserve.benchmarks.lib.event_streams import num_tokens, session
from meshserve.benchmarks.lib.server_process import ServerProcess, free_port
from meshserve.benchmarks.lib.workloads import Work

from .job import Job, Started, serve_job
from .ours_served import connected
from .streams import streaming


def start(job: Job) -> Started:
    """Starts a server as `ours_served` does, with OpenAI's API beside gRPC."""
    port = free_port()
    settings = {"dtype": job.dtype, **job.settings, "model": job.model, "random_weights": True, "openai_port": port}
    server = ServerProcess(settings)
    atexit.register(server.stop)
    loop = asyncio.new_event_loop()
    _, kv_tokens = loop.run_until_complete(connected(server))
    client = loop.run_until_complete(_session())
    atexit.register(lambda: loop.run_until_complete(client.close()))
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def stream(work: Work, temperature: float) -> AsyncIterator[int]:
        body = {
            "prompt": list(work.prompt_token_ids), "max_tokens": work.max_tokens, "temperature": temperature,
            "top_p": 1.0, "ignore_eos": True,
        }  # fmt: skip
        async for new in num_tokens(client, url, body):
            yield new

    return streaming(f"jax {jax.__version__}", loop, stream, kv_tokens)


async def _session() -> aiohttp.ClientSession:
    return session()


if __name__ == "__main__":
    serve_job(start)
