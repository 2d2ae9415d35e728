"""Runs the engine of vLLM's server with random weights, without HTTP. Needs vllm.

`AsyncLLM` has the defaults of `vllm serve`, takes requests at any time and streams what each step gives. The offline
engine's `step()` blocks, so a request that arrives meanwhile would have to wait for its end.
"""

import asyncio
import atexit
import itertools
from collections.abc import AsyncIterator

import vllm
from vllm import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from meshserve.benchmarks.lib.workloads import Work

from .job import Job, Started, serve_job
from .streams import streaming
from .vllm_common import engine_arguments, kv_tokens, sampling_params


def start(job: Job) -> Started:
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(_start(job))
    atexit.register(lambda: loop.run_until_complete(_stop(engine)))
    numbers = itertools.count()

    async def stream(work: Work, temperature: float) -> AsyncIterator[int]:
        params = sampling_params(work.max_tokens, temperature, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": work.prompt_token_ids}
        async for output in engine.generate(prompt, params, str(next(numbers))):
            yield len(output.outputs[0].token_ids)

    return streaming(f"vllm {vllm.__version__}", loop, stream, kv_tokens(engine))


async def _start(job: Job) -> AsyncLLM:
    """Starts the engine inside the event loop, as vLLM's server does."""
    arguments = engine_arguments(
        job.model_dir, job.settings, dtype=job.dtype, skip_tokenizer_init=True, disable_log_stats=True
    )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.OPENAI_API_SERVER)


async def _stop(engine: AsyncLLM) -> None:
    """Closes the engine's sockets inside the event loop, without which the process would not end."""
    engine.shutdown()
    await asyncio.sleep(0)


if __name__ == "__main__":
    serve_job(start)
