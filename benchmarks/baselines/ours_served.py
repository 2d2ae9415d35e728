"""Runs `meshserve serve` with random weights and sends it requests through gRPC from this process."""

import asyncio
import atexit
from collections.abc import AsyncIterator

import jax

from meshserve.benchmarks.lib.server_process import ServerProcess
from meshserve.benchmarks.lib.workloads import Work
from meshserve.runtime.client.client import AsyncClient

from .job import Job, Started, serve_job
from .streams import streaming


def start(job: Job) -> Started:
    """Starts a server with the job's settings as its config file, and its own defaults for all other options."""
    settings = {"dtype": job.dtype, **job.settings, "model": job.model, "random_weights": True}
    server = ServerProcess(settings)
    atexit.register(server.stop)
    loop = asyncio.new_event_loop()
    client, kv_tokens = loop.run_until_complete(connected(server))

    async def stream(work: Work, temperature: float) -> AsyncIterator[int]:
        chunks = client.generate(  # top_p as the other engines have it, not as the model's generation config says
            work.prompt_token_ids, max_tokens=work.max_tokens, temperature=temperature, top_p=1.0, ignore_eos=True
        )
        async for chunk in chunks:
            yield len(chunk.token_ids)

    return streaming(f"jax {jax.__version__}", loop, stream, kv_tokens)


async def connected(server: ServerProcess) -> tuple[AsyncClient, int]:
    """Waits until the server is ready; returns a client, and the tokens that fit in the server's KV cache."""
    client = await server.connect()
    page_size_tokens = (await client.model_info()).page_size_tokens
    return client, (await client.load()).num_pages * page_size_tokens


if __name__ == "__main__":
    serve_job(start)
