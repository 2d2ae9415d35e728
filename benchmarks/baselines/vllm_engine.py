"""Runs vLLM's engine with random weights, all requests at once. Needs vllm."""

import time

import vllm
from vllm import LLM

from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock

from .job import Batch, Job, Started, serve_job
from .vllm_common import engine_arguments, kv_tokens, sampling_params


def start(job: Job) -> Started:
    llm = LLM(**engine_arguments(job.model_dir, job.settings, dtype=job.dtype, skip_tokenizer_init=True))
    engine = llm.llm_engine
    num_requests = 0

    def run_whole(batch: Batch) -> RunTimes:
        """Runs a batch without intermediate outputs, which cost vLLM's frontend time."""
        began = time.perf_counter()
        llm.generate(
            [{"prompt_token_ids": work.prompt_token_ids} for work in batch.works],
            [sampling_params(work.max_tokens, batch.temperature) for work in batch.works],
            use_tqdm=False,
        )
        num_tokens = sum(work.max_tokens for work in batch.works)
        return RunTimes(seconds=time.perf_counter() - began, num_tokens=num_tokens, first_seconds=[], gap_seconds=[])

    def run(batch: Batch) -> RunTimes:
        nonlocal num_requests
        if not batch.has_token_times:
            return run_whole(batch)
        clock = TokenClock()
        began = time.perf_counter()
        num_seen = [0] * len(batch.works)
        for index, work in enumerate(batch.works):
            params = sampling_params(work.max_tokens, batch.temperature)
            engine.add_request(str(num_requests + index), {"prompt_token_ids": work.prompt_token_ids}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                index = int(output.request_id) - num_requests
                num_tokens = len(output.outputs[0].token_ids)  # cumulative
                clock.add(index, began, now, num_tokens - num_seen[index])
                num_seen[index] = num_tokens
        num_requests += len(batch.works)
        return clock.times(time.perf_counter() - began)

    return Started(f"vllm {vllm.__version__}", run, kv_tokens(engine))


if __name__ == "__main__":
    serve_job(start)
