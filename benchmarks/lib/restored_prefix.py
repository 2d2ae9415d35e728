"""Measures a prefix that has left the devices: restored from host memory, beside computed and kept on the devices."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from meshserve.runtime.api.request import Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.host_cache import commands
from meshserve.runtime.host_cache.host_cache import HostCache
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup.interpreter import take_turns_often
from meshserve.runtime.startup.launch import launch

from .gpu_power import PowerWatch, at_power
from .step_seconds import StepSeconds

_GB = 1e9
_LINK_BYTES = 4 << 30  # copied each way when the link is measured
_REPEATS = 3
_IDLE_SECONDS = 0.2  # after which the engine, which saves pages while it is idle, is done


class _Clock:
    """The times of all tokens, by request."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def deliver(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        with self._changed:
            for output in outputs:
                self.times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
                if output.finish_reason is not None:
                    self._ended.add(output.request_id)
            self._changed.notify_all()

    def wait(self, engine: Engine, names: Sequence[str]) -> None:
        with self._changed:
            while not self._ended.issuperset(names):
                self._changed.wait(timeout=1.0)
                if engine.failure is not None:
                    raise SystemExit(f"the engine failed: {engine.failure}")

    def wait_for_tokens(self, names: Sequence[str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(self.times.get(name) for name in names))


class EngineClock:
    """An engine with a host tier, and the times of its tokens. Sets up this process's interpreter as a server does."""

    def __init__(self, config: ServeConfig):
        self.clock = _Clock()
        self.steps = StepSeconds()
        take_turns_often()
        self.engine = launch(config, self.clock.deliver, self.steps.record).engine
        gc.collect()
        gc.freeze()
        self.engine.start()
        assert self.engine.host_cache is not None and isinstance(self.engine.runner, StepRunner)
        self.host: HostCache = self.engine.host_cache
        self.runner: StepRunner = self.engine.runner
        self._names = map(str, itertools.count())

    def submit(self, prompt: Sequence[int], max_tokens: int = 1) -> str:
        name = next(self._names)
        self.engine.submit(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        return name

    def keep_pages(self, is_kept: bool) -> None:
        """Makes the engine, which is idle, go on with empty caches, and with host memory or without."""
        self.engine.flush_prefix_cache()
        time.sleep(_IDLE_SECONDS)

        def switch() -> None:
            self.host.attach() if is_kept else self.host.detach()
            self.engine.host_cache = self.host if is_kept else None

        self.engine.between_steps(switch)

    def first_token_seconds(self, prompt: Sequence[int]) -> float:
        """Returns the time from the submission of a request, with nothing else running, to its first token."""
        started = time.perf_counter()
        name = self.submit(prompt)
        self.clock.wait(self.engine, [name])
        return self.clock.times[name][0] - started


def measure_prefix(
    server: EngineClock, num_prefixes: int, num_tokens: int, num_decodes: int, num_decode_tokens: int
) -> None:
    """Prints the first-token times of a prefix of `num_tokens`, the rates of copies, and decodes beside copies.

    Args:
      num_prefixes: More than the devices hold, so that each has left them when its turn comes again.
    """
    prompts = [random_prompt(number, num_tokens) for number in range(num_prefixes)]
    computed = [server.first_token_seconds(prompt) for prompt in prompts]
    kept = [server.first_token_seconds(prompts[-1]) for _ in range(_REPEATS)]
    before = server.host.counts.num_restored
    restored = [server.first_token_seconds(prompt) for prompt in prompts * _REPEATS]
    num_pages = (server.host.counts.num_restored - before) / len(restored)
    rate = server.host.rates.copy_bytes_per_second
    print(f"first token of {num_tokens} tokens: computed {_ms(computed)}, kept on the devices {_ms(kept)}, "
          f"restored {_ms(restored)} ms (minimum, median)")  # fmt: skip
    print(f"restored {num_pages:.0f} pages a request; copies of each device ran at {rate / _GB:.1f} GB/s meanwhile; "
          f"{server.host.counts}", flush=True)  # fmt: skip
    decodes = [random_prompt(100 + number, 64) for number in range(num_decodes)]
    for name, beside in (("alone", ()), ("beside a kept prefix", prompts[-1:]), ("beside restored ones", prompts)):
        _measure_decodes(server, decodes, num_decode_tokens, name, beside)
    copy_seconds = 0.0
    for name, seconds, num_bytes in _link_times(server):
        print(f"{name}: {num_bytes / seconds / _GB:.1f} GB/s on each device, in blocks of "
              f"{server.host.size.block_bytes / 2**20:.1f} MiB", flush=True)  # fmt: skip
        copy_seconds = num_pages * server.host.size.page_bytes * seconds / num_bytes
    if copy_seconds:
        middle = float(np.median(restored))
        print(f"restored {min(computed) / middle:.1f} times sooner than computed, in {middle / copy_seconds:.2f} "
              f"times the {1e3 * copy_seconds:.1f} ms of the copies alone", flush=True)  # fmt: skip


def _measure_decodes(
    server: EngineClock, decodes: Sequence[Sequence[int]], num_tokens: int, name: str, beside: Sequence[Sequence[int]]
) -> None:
    """Prints the times of decodes called `name`, while requests for `beside` come one after another."""
    before = server.host.counts.num_restored
    with PowerWatch() as watch:
        gaps, started, ended = _gaps_beside(server, decodes, num_tokens, beside)
        power = at_power(watch.between(started, ended))
    num_bytes = (server.host.counts.num_restored - before) * server.host.size.page_bytes
    typical, slow, slowest = np.percentile(gaps, (50, 90, 99))
    step, slow_step = 1e3 * np.percentile(server.steps.decode_seconds, (50, 99))
    print(f"{len(decodes)} decodes {name}: a token every {typical:.2f} ms, P90 {slow:.2f}, P99 {slowest:.2f}; "
          f"{len(server.steps.decode_seconds)} steps without prompts {step:.2f} ms, P99 {slow_step:.2f}; "
          f"restored {num_bytes / (ended - started) / _GB:.1f} GB/s{power}", flush=True)  # fmt: skip


def random_prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(300, 1800, num_tokens).tolist())


def _ms(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.1f} {np.median(seconds) * 1e3:.1f}"


def _gaps_beside(
    server: EngineClock, decodes: Sequence[Sequence[int]], num_tokens: int, prompts: Sequence[Sequence[int]]
) -> tuple[np.ndarray, float, float]:
    """Returns the milliseconds between tokens of decodes, while requests for `prompts` come one after another.

    Also returns when that began and ended, by `time.perf_counter`.
    """
    names = [server.submit(prompt, num_tokens) for prompt in decodes]
    server.clock.wait_for_tokens(names)
    server.steps.reset()
    with _requesting(server, prompts) as started:
        server.clock.wait(server.engine, names)
        ended = time.perf_counter()
    times = [np.array(server.clock.times[name]) for name in names]
    return 1e3 * np.concatenate([np.diff(each[each > started]) for each in times]), started, ended


@contextmanager
def _requesting(server: EngineClock, prompts: Sequence[Sequence[int]]) -> Iterator[float]:
    is_over = threading.Event()

    def run() -> None:
        for prompt in itertools.cycle(prompts):
            if is_over.is_set():
                return
            server.clock.wait(server.engine, [server.submit(prompt)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield time.perf_counter()
    finally:
        is_over.set()
        thread.join()


def _link_times(server: EngineClock) -> Iterator[tuple[str, float, int]]:
    """Copies blocks each way while the engine is idle, as many at a time as the tier does. Empties the tier.

    Yields the direction, seconds, and bytes on each device.
    """
    server.engine.flush_prefix_cache()
    time.sleep(_IDLE_SECONDS)
    copies, size = server.runner.copies, server.host.size
    assert copies is not None
    blocks = range(min(-(-_LINK_BYTES // size.block_bytes), size.num_blocks))
    num_bytes = len(blocks) * size.block_bytes
    server.runner.copy_pages(commands.clear())
    for is_measured in (False, True):  # the first time, jax allocates host memory
        started = time.perf_counter()
        for block in blocks:
            while copies.num_saving() >= size.max_saves:
                copies.wait_saved()
            server.runner.copy_pages(commands.save(block, [block], size.block_pages))
        while copies.num_saving():
            copies.wait_saved()
        if is_measured:
            yield "to host memory", time.perf_counter() - started, num_bytes
        started = time.perf_counter()
        for block in blocks:
            if block >= size.max_fetches:
                _await(server.runner, block - size.max_fetches)
            server.runner.copy_pages(commands.fetch(block, block, {}, size.block_pages, size.num_pages))
        for block in blocks[-size.max_fetches :]:
            _await(server.runner, block)
        if is_measured:
            yield "to the devices", time.perf_counter() - started, num_bytes
    server.engine.flush_prefix_cache()


def _await(runner: StepRunner, block: int) -> None:
    assert runner.copies is not None
    runner.copies.wait(block)
    runner.copy_pages(commands.forget(block))
