"""A server process with the real engine beside a simulated device, to measure what the host needs for a step.

The device takes a given time for each decode step and none for prompts, and returns random tokens. All else is the
server's own: scheduler, batches, texts, metrics, output queues and messages. What a dispatch to a real device costs its
host (0.3 to 0.7 ms) comes on top.
"""

import gc
import json
import sys
import time

import jax
import numpy as np

from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.program.batch import BatchBuilder, Bucket
from meshserve.runtime.program.processors.processor_batch import Logprobs, ProcessorBatchBuilder, Sampled
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, run_server
from meshserve.runtime.server.output_queue import OutputQueues, max_dispatch_tokens
from meshserve.runtime.startup.interpreter import take_turns_often
from meshserve.runtime.telemetry.request_log import Observer
from meshserve.runtime.text.tokenizer import Tokenizer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY

MAX_CONTEXT = 4096
_PAGE_SIZE = 32

_PROGRAM = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import serve
serve(*map(float, sys.argv[2:]))
"""


def command(num_streams: int, step_ms: float, decode_steps: int) -> list[str]:
    """Returns the command of a server for this number of streams, which prints its address as `meshserve serve`."""
    arguments = map(str, (num_streams, step_ms, decode_steps))
    return [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *arguments]


class SimulatedTokens:
    """Tokens that a device has computed at a moment, for which `np.asarray` waits."""

    def __init__(self, tokens: np.ndarray, ready: float):
        self._tokens = tokens
        self._ready = ready

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return self._tokens


class SimulatedDevice(Runner):
    """Runs steps one after another, each decode step in a fixed time."""

    def __init__(self, step_seconds: float, vocab_size: int):
        self._step_seconds = step_seconds
        self._draw = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._free = 0.0  # when the device has done what it was given

    def set_page_row(self, page_row: np.ndarray) -> None:
        pass

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        seconds = self._step_seconds * bucket.num_steps if bucket.is_decode else 0.0
        self._free = max(self._free, time.monotonic()) + seconds
        tokens = self._draw.integers(300, self._vocab_size, (bucket.num_steps, bucket.num_requests), np.int32)
        return SimulatedTokens(tokens, self._free)  # type: ignore[return-value]

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        raise AssertionError("no request has logits processors")

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[np.ndarray]:
        raise AssertionError("no request has logits processors")

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[np.ndarray]:
        raise AssertionError("no request asks for log-probabilities")

    def copy_pages(self, command: np.ndarray) -> None:
        raise AssertionError("there is no host cache")


def serve(num_streams: float, step_ms: float, decode_steps: float) -> None:
    """Runs the server process."""
    take_turns_often()
    max_running = int(num_streams)
    queues, observer, tokenizer = OutputQueues(), Observer(), Tokenizer(str(DEMO_DIRECTORY))
    limits = SchedulerLimits(
        page_size=_PAGE_SIZE,
        max_running=max_running,
        max_step_tokens=max(8192, max_running),
        max_waiting=10_000,
        max_context=MAX_CONTEXT,
        max_decode_steps=int(decode_steps),
    )
    pages = PageAllocator(max_running * limits.num_pages_for(MAX_CONTEXT))
    buckets = declare_buckets(
        max_step_tokens=limits.max_step_tokens,
        max_running=max_running,
        page_size=_PAGE_SIZE,
        max_decode_steps=limits.max_decode_steps,
        max_fused_tokens=64,
    )
    engine = Engine(
        scheduler=Scheduler(limits, pages, frozenset()),
        pages=pages,
        batches=BatchBuilder(
            buckets,
            max_running=max_running,
            page_size=_PAGE_SIZE,
            max_request_pages=limits.num_pages_for(MAX_CONTEXT),
            processors=ProcessorBatchBuilder(
                max_running=max_running, vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset()
            ),
        ),
        runner=SimulatedDevice(step_ms / 1e3, tokenizer.vocab_size),
        tokenizer=tokenizer,
        deliver=queues.deliver,
        record=observer.metrics.record_step,
    )
    queues.max_dispatch_tokens = max_dispatch_tokens(limits)
    edge = Edge(queues, observer=observer)
    info = ModelInfo(
        name="simulated", architecture="Qwen3ForCausalLM", vocab_size=tokenizer.vocab_size,
        max_context_tokens=MAX_CONTEXT, eos_token_ids=(), tp_size=1, dtype="bfloat16", page_size_tokens=_PAGE_SIZE,
        num_parameters=0, num_devices=1, device_kind="simulated", server_version="0",
    )  # fmt: skip
    edge.attach(Backend(engine, tokenizer, info))
    gc.collect()
    gc.freeze()
    engine.start()
    run_server(edge, Listen(drain_seconds=0.0))
