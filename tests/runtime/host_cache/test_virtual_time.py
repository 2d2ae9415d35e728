"""Tests what the host tier is worth, and what it costs others, with the times of an 8B on an H100."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from meshserve.benchmarks.lib.workloads import AT_A_TIME, OUTPUT_TOKENS, conversations
from meshserve.runtime.host_cache.sizes import HostCacheSize, host_cache_size
from meshserve.runtime.scheduler.limits import SchedulerLimits
from tests.runtime.virtual_gpu import GpuTimes, VirtualGpu

PAGE_SIZE, PAGE_BYTES = 32, 32 * 147_456


def make_limits(max_context: int) -> SchedulerLimits:
    return SchedulerLimits(
        page_size=PAGE_SIZE, max_running=64, max_step_tokens=8192, max_waiting=256, max_context=max_context,
        max_prefill_tokens=4096, low_load_prefill_tokens=1024, step_sizes=(256, 512, 1024, 2048, 4096, 8192),
    )  # fmt: skip


def make_size(limits: SchedulerLimits, gib: int) -> HostCacheSize | None:
    return host_cache_size(
        gib << 30,
        page_bytes=PAGE_BYTES,
        num_local_devices=1,
        max_request_pages=limits.num_pages_for(limits.max_context),
        max_step_pages=limits.num_pages_for(limits.max_step_tokens),
    )


def conversation_seconds(
    gib: int,
    times: GpuTimes,
    num_rounds: int = 1,
    num_users: int = 10,
    at_a_time: int = AT_A_TIME,
    most_lost: int = 100,
) -> list[float]:
    """Serves users, 8 turns of 2,000 tokens, with twice the pages that the GPU has; then other users, and so on."""
    limits = make_limits(8 * 2000 + 128)
    gpu, seconds = VirtualGpu(limits, 250 * num_users, make_size(limits, gib), times), []
    for number in range(num_rounds):
        before, shift = gpu.now, 2000 * number  # other tokens
        turns = conversations(num_users, 8, 2000)
        prompts = ([token + shift for token in turn.prompt_token_ids] for turn in turns)
        gpu.serve(prompts, at_a_time, OUTPUT_TOKENS)
        seconds.append(gpu.now - before)
    if gpu.host is not None:
        assert gpu.host.counts.num_lost < most_lost + 600 * (num_rounds - 1) and not gpu.host.counts.num_recomputed
    return seconds


@pytest.mark.parametrize(
    ("times", "least"),
    [(GpuTimes(), 1.9), (GpuTimes(do_inputs_wait=True), 1.9), (GpuTimes(do_blocks_wait=True), 1.88)],
    ids=["nothing waits", "inputs wait for blocks", "blocks wait for steps"],
)
def test_conversations_that_the_gpu_holds_half_of(times: GpuTimes, least: float):
    """If copies took no time, the ratio would be 2.0, and 2.2 if the GPU held everything: decodes take 6 s anyway."""
    assert conversation_seconds(0, times)[0] / conversation_seconds(20, times)[0] > least


def test_conversations_of_more_users_have_twice_the_throughput():
    """2.22 times as measured on an H200."""
    sizes, times = {"num_users": 24, "at_a_time": 16, "most_lost": 1500}, GpuTimes(do_blocks_wait=True)
    with_tier, without = (conversation_seconds(gib, times, **sizes)[0] for gib in (56, 0))
    assert without / with_tier > 2.0


def test_conversations_beside_a_host_memory_that_is_full_of_ended_ones():
    first, *later = conversation_seconds(20, GpuTimes(), num_rounds=3)
    assert max(later) < 1.1 * first


def decode_seconds(gpu: VirtualGpu, prefixes: Iterator[list[int]] | None) -> list[float]:
    """Returns the times of the steps without prompts, while 32 requests decode and others come one after another."""
    draw = np.random.default_rng(0)
    decodes = [gpu.request(draw.integers(300, 1800, 64).tolist(), 400) for _ in range(32)]
    for request in decodes:
        gpu.submit(request)
    gpu.steps.clear()
    other = None
    while gpu.scheduler.has_work or gpu.flight:
        is_next = other is None or other.is_finished
        if prefixes is not None and is_next and not all(request.is_finished for request in decodes):
            other = gpu.request(next(prefixes), 1)
            gpu.submit(other)
        gpu.step()
    return [step.seconds for step in gpu.steps if not step.num_prompt_tokens]


def test_decodes_are_hardly_slower_while_one_request_after_another_is_restored():
    """The GPU holds two of four prefixes."""
    limits, draw = make_limits(30_128), np.random.default_rng(1)
    gpu = VirtualGpu(limits, 2800, make_size(limits, 40), GpuTimes())
    prefixes = [draw.integers(300, 1800, 30_000).tolist() for _ in range(4)]
    gpu.serve(prefixes * 2, 1, 1)
    assert gpu.host is not None
    before = gpu.host.counts.num_restored
    alone, beside = decode_seconds(gpu, None), decode_seconds(gpu, itertools.cycle(prefixes))
    assert gpu.host.counts.num_restored - before > 4 * 900
    assert np.percentile(beside, 99) < 1.06 * np.percentile(alone, 99)
