"""Runs Hugging Face's `generate`, one request at a time or as one padded batch. Needs torch and transformers."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock
from meshserve.benchmarks.lib.workloads import Work

from .job import Batch, Job, Started, serve_job


class _Stamps(BaseStreamer):
    """Records the arrival times of each request's tokens, up to its length; `generate` passes the prompt first."""

    def __init__(self, clock: TokenClock, lengths: list[int], first_index: int):
        self._clock = clock
        self._lengths = lengths
        self._first_index = first_index
        self._began = time.perf_counter()
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        for row, length in enumerate(self._lengths):
            if 0 < self._num_puts <= length:
                self._clock.add(self._first_index + row, self._began, now)
        self._num_puts += 1

    def end(self) -> None:
        pass


class _Lengths(StoppingCriteria):
    """Stops each request at its own length."""

    def __init__(self, ends: torch.Tensor):
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def start(job: Job) -> Started:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(job.model_dir)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
    model.generation_config.eos_token_id = None

    def generate(works: list[Work], temperature: float, clock: TokenClock, first_index: int) -> None:
        width = max(len(work.prompt_token_ids) for work in works)
        padded = [[0] * (width - len(work.prompt_token_ids)) + work.prompt_token_ids for work in works]
        mask = [[0] * (width - len(work.prompt_token_ids)) + [1] * len(work.prompt_token_ids) for work in works]
        lengths = [work.max_tokens for work in works]
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        settings = GenerationConfig(max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0, **sampling)
        stamps = _Stamps(clock, lengths, first_index)
        ends = torch.tensor([width + length for length in lengths], device=device)
        with torch.inference_mode():
            model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=settings,
                streamer=stamps,
                stopping_criteria=StoppingCriteriaList([_Lengths(ends)]),
            )

    def run(batch: Batch) -> RunTimes:
        clock = TokenClock()
        began = time.perf_counter()
        for index, works in enumerate([[work] for work in batch.works] if job.is_single else [batch.works]):
            generate(works, batch.temperature, clock, index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock.times(time.perf_counter() - began)

    return Started(f"transformers {transformers.__version__}, torch {torch.__version__}", run)


if __name__ == "__main__":
    serve_job(start)
