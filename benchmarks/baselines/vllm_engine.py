"""Runs vLLM's engine with random weights, all requests at once. Needs vllm."""

import time

import vllm
from vllm import LLM, SamplingParams

from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock
from meshserve.benchmarks.lib.workloads import Work

from .job import Job, Run, serve_job


def start(job: Job) -> tuple[str, Run]:
    longest = max(len(work.prompt_token_ids) + work.max_tokens for batch in job.batches for work in batch)
    options = {
        "max_model_len": longest,
        "max_num_seqs": max(len(batch) for batch in job.batches),
        **job.settings,
    }
    llm = LLM(
        model=job.model_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=job.dtype,
        enable_prefix_caching=False,
        **options,
    )
    engine = llm.llm_engine
    num_requests = 0

    def run(batch: list[Work]) -> RunTimes:
        nonlocal num_requests
        clock = TokenClock()
        began = time.perf_counter()
        num_seen = [0] * len(batch)
        for index, work in enumerate(batch):
            params = SamplingParams(
                temperature=job.temperature, max_tokens=work.max_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(num_requests + index), {"prompt_token_ids": work.prompt_token_ids}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                index = int(output.request_id) - num_requests
                num_tokens = len(output.outputs[0].token_ids)  # cumulative
                clock.add(index, began, now, num_tokens - num_seen[index])
                num_seen[index] = num_tokens
        num_requests += len(batch)
        return clock.times(time.perf_counter() - began)

    return f"vllm {vllm.__version__}", run


if __name__ == "__main__":
    serve_job(start)
