"""Runs vLLM's engine with random weights, all requests at once. Needs vllm."""

import time

import vllm
from vllm import LLM, SamplingParams

from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock
from meshserve.benchmarks.lib.workloads import Work

from .job import Batch, Job, Started, serve_job


def start(job: Job) -> Started:
    llm = LLM(
        model=job.model_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=job.dtype,
        enable_prefix_caching=False,
        **job.settings,
    )
    engine = llm.llm_engine
    num_requests = 0

    def run_whole(batch: Batch) -> RunTimes:
        """Runs a batch without intermediate outputs, which cost vLLM's frontend time."""
        began = time.perf_counter()
        llm.generate(
            [{"prompt_token_ids": work.prompt_token_ids} for work in batch.works],
            [_params(batch, work) for work in batch.works],
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
            prompt = {"prompt_token_ids": work.prompt_token_ids}
            engine.add_request(str(num_requests + index), prompt, _params(batch, work))
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

    cache = engine.vllm_config.cache_config
    return Started(f"vllm {vllm.__version__}", run, (cache.num_gpu_blocks or 0) * cache.block_size)


def _params(batch: Batch, work: Work) -> SamplingParams:
    return SamplingParams(temperature=batch.temperature, max_tokens=work.max_tokens, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve_job(start)
