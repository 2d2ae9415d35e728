"""Runs `meshserve serve` with random weights and sends it whole batches through gRPC from this process."""

import asyncio
import atexit
import time

import jax

from meshserve.benchmarks.lib.server_process import ServerProcess
from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock
from meshserve.runtime.client.client import AsyncClient

from .job import Batch, Job, Started, serve_job


def start(job: Job) -> Started:
    """Starts a server with the job's settings as its config file, and its own defaults for all other options."""
    settings = {"dtype": job.dtype, **job.settings, "model": job.model, "random_weights": True}
    server = ServerProcess(settings)
    atexit.register(server.stop)
    loop = asyncio.new_event_loop()
    client, kv_tokens = loop.run_until_complete(_connect(server))

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


async def _connect(server: ServerProcess) -> tuple[AsyncClient, int]:
    """Waits until the server is ready; returns a client, and the tokens that fit in the server's KV cache."""
    client = await server.connect()
    page_size_tokens = (await client.model_info()).page_size_tokens
    return client, (await client.load()).num_pages * page_size_tokens


if __name__ == "__main__":
    serve_job(start)
