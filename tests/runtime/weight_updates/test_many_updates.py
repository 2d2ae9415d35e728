"""Many updates of the demo model while requests run: no stream, no page and no memory is lost.

`make test-updates` runs 1,000 updates; every fourth fails on purpose, and must change nothing.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.weight_updates import assembly, weight_sources
from tests import checkpoints

SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 96, "max_running": 4, "max_step_tokens": 16, "cache_dir": "",
    "show_progress": False, "logits_processors": False, "max_context": 128,
}  # fmt: skip
PROMPTS = ["ROMEO:\n", "A street in Verona.\n\nJULIET:\n", "HAMLET:\n"]
LENGTHS = (3, 11, 24)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
NAN, SHAPE, BROKEN_OFF = "nan", "shape", "broken off"  # how an update fails
MOST_GROWTH_BYTES = 64 << 20  # of the process, over the second half of 1,000 updates


@pytest.fixture
def num_updates(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--updates")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", tp=2, **SMALL) as llm:
        yield llm


class Streams:
    """Threads that complete prompts again and again, and check what becomes of every sample."""

    def __init__(self, llm: LLM, pool: ThreadPoolExecutor, num_threads: int):
        self._llm, self._stop = llm, threading.Event()
        self._futures = [pool.submit(self._run, number) for number in range(num_threads)]
        self.num_samples = 0

    def _run(self, number: int) -> int:
        num_samples = 0
        for length in itertools.cycle(LENGTHS[number % 3 :] + LENGTHS[: number % 3]):
            if self._stop.is_set():
                return num_samples
            params = SamplingParams(n=2, max_tokens=length, temperature=1.0, ignore_eos=True)
            outputs = list(self._llm.generate_as_finished(PROMPTS, params))
            assert len(outputs) == len(PROMPTS), "an output is lost"
            for sample in (sample for output in outputs for sample in output.outputs):
                assert sample.finish_reason in ("length", "cancelled"), sample
                assert sample.finish_reason == "cancelled" or len(sample.token_ids) == length
                assert sum(span.num_tokens for span in sample.weight_spans) == len(sample.token_ids)
                num_samples += 1

    def check(self) -> None:
        """Raises what a thread has raised."""
        for future in self._futures:
            if future.done():
                future.result()

    def end(self) -> int:
        """Returns the number of samples."""
        self._stop.set()
        return sum(future.result() for future in self._futures)


def failing(
    llm: LLM, given: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[type[Exception], Callable[[], object]]:
    """Returns an update that fails, and the error that it must raise."""
    if how == NAN:
        return InvalidRequestError, lambda: llm.update_weights(given | {"model.norm.weight": jnp.full(192, jnp.nan)})
    if how == SHAPE:
        return InvalidRequestError, lambda: llm.update_weights(given | {"model.norm.weight": jnp.ones(191)})
    num_left = iter(range(4, -1, -1))

    def breaking_off(*arguments: Any) -> jax.Array:
        if not next(num_left):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.1GiB")
        return assembly.assembled(*arguments)

    def update() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(weight_sources, "assembled", breaking_off)
            llm.update_weights(given)

    return MemoryError, update


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def test_many_updates_under_load(llm: LLM, num_updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = {name: jnp.asarray(array) for name, array in load_file(checkpoints.DEMO / "model.safetensors").items()}
    second = first | {"model.norm.weight": -first["model.norm.weight"]}
    engine, kinds = llm._launched.engine, itertools.cycle(("continue", "finish", "abort"))
    failures, held, resident = itertools.cycle((NAN, SHAPE, BROKEN_OFF)), [], []
    with ThreadPoolExecutor(3) as pool:
        streams = Streams(llm, pool, num_threads=3)
        try:
            for number in range(num_updates):
                given, version = (first, second)[number % 2], llm.weight_version
                if number % 4 == 3:
                    error, update = failing(llm, given, next(failures), monkeypatch)
                    with pytest.raises(error):
                        update()
                    assert llm.weight_version == version
                else:
                    llm.update_weights(given, version=f"update {number}", running=next(kinds))  # type: ignore[arg-type]
                    assert llm.weight_version == f"update {number}"
                streams.check()
                with engine._changed:
                    engine._scheduler.audit()
                held.append(sum(array.nbytes for array in jax.live_arrays()))
                resident.append(resident_bytes())
        finally:
            num_samples = streams.end()
    middle = num_updates // 2
    print(f"{num_updates} updates beside {num_samples} samples; arrays of jax: at most {max(held[:middle]) / 1e6:.1f} "
          f"MB in the first half, {max(held[middle:]) / 1e6:.1f} in the second; the process: "
          f"{resident[middle] / 1e6:.0f} MB in the middle, {resident[-1] / 1e6:.0f} at the end")  # fmt: skip
    assert num_samples >= 2 * len(PROMPTS)
    assert max(held[middle:]) <= 1.1 * max(held[:middle])
    if num_updates >= 1_000:
        assert resident[-1] - resident[middle] <= MOST_GROWTH_BYTES
    for given in (second, first):  # the last one is the published model, which transformers reads
        llm.update_weights(given)
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    ids = [list(llm.get_tokenizer().encode(prompt)) for prompt in PROMPTS]
    assert tokens == checkpoints.greedy(checkpoints.DEMO, ids, 8)
    with engine._changed:
        engine._scheduler.audit()
        assert not engine._scheduler.requests and not engine._open._spans
    load = engine.load()
    assert load.num_free_pages == load.num_pages
