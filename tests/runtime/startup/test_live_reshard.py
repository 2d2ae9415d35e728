"""A running engine changes its TP size: the streams go on with the same tokens."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshserve.runtime.api.errors import ConfigError, EngineStoppedError
from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup import live_reshard
from meshserve.runtime.startup.launch import Launched, launch
from meshserve.runtime.startup.live_reshard import move_params
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints
from tests.waiting import WAIT_SECONDS, wait_for

MAX_TOKENS = 60
# Few shapes, because compiling them is what takes the time.
CONFIG = {"page_size": 16, "max_running": 2, "max_step_tokens": 2, "num_pages": 64, "dtype": "float32", "cache_dir": ""}
PROMPTS = checkpoints.random_prompts((3, 20, 41), vocab_size=320)  # one more than may run at a time
SAMPLING = [SamplingParams(max_tokens=MAX_TOKENS, temperature=t, seed=5, ignore_eos=True) for t in (0, 0.8, 1)]


class Streams:
    """Collects outputs; `wait` waits for a number of tokens, all streams together."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.stop_at = sys.maxsize  # tokens, all streams together; the engine waits there for `go_on`
        self._may_go_on = threading.Event()
        self.go_on()
        self._changed = threading.Condition()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason
            self._changed.notify()
            if sum(map(len, self.token_ids.values())) >= self.stop_at:
                self._may_go_on.clear()
        self._may_go_on.wait()

    def go_on(self, stop_at: int = sys.maxsize) -> None:
        self.stop_at = stop_at
        self._may_go_on.set()

    def wait(self, num_tokens: int = 0, num_finished: int = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(map(len, self.token_ids.values())) >= num_tokens and len(self.reasons) >= num_finished,
                WAIT_SECONDS,
            )

    def run(self, launched: Launched) -> None:
        for index, (prompt, params) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
            launched.engine.submit(str(index), tuple(prompt), params)


MakeRunner = Callable[[], tuple[Runner, int]]


def rebuild_meanwhile(
    streams: Streams, engine: Engine, rebuild: Callable[[MakeRunner], None], make_runner: MakeRunner, stop_at: int
) -> None:
    """Rebuilds under streams that stand still until the engine has been told to."""

    is_over = threading.Event()

    def go_on() -> None:
        wait_for(lambda: engine._pause is not None or is_over.is_set())
        streams.go_on(stop_at)

    with ThreadPoolExecutor(1) as other:
        other.submit(go_on)
        try:
            rebuild(make_runner)
        finally:
            is_over.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        vocab_size=333,
        intermediate_size=90,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("has_experts", [False, True])
def test_streams_go_on_with_the_same_tokens(
    has_experts: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 -> 4 -> 1 while three requests run, against an engine that stays at 2.

    At 4, weights first lie scattered; for 1, XLA has memory only once the cache is freed, and then no block for it,
    so that it becomes smaller.
    """
    streams = Streams()
    config = ServeConfig(model=str(model), tp=2, **CONFIG)
    if has_experts:
        checkpoints.save_checkpoint(tmp_path, num_hidden_layers=2, **checkpoints.TINY_EXPERTS)
        config = replace(config, model=str(tmp_path), expert_parallel=True, logits_processors=False)
    launched = launch(config, streams.deliver)
    launched.engine.start()
    streams.run(launched)
    streams.wait(num_finished=len(PROMPTS))
    expected, streams.token_ids, streams.reasons = streams.token_ids, {}, {}
    rebuild = launched.engine.rebuild
    stops = iter((40, 110, 160))  # tokens at which the streams stand still, or a busy machine might see them end first

    def going_on(make_runner: MakeRunner) -> None:
        rebuild_meanwhile(streams, launched.engine, rebuild, make_runner, next(stops))

    start, scattered = StepRunner.start, iter((True, False, True, True, False))

    def start_together(runner: StepRunner, params: nnx.State) -> None:
        if next(scattered):
            raise MemoryError("no block is large enough")
        start(runner, params)

    compiled, refusals = live_reshard.compile_runner, iter((False, True, False, False))

    def compile_runner(*arguments: object, **options: object) -> StepRunner:
        if next(refusals):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 609.50MiB")
        return compiled(*arguments, **options)

    monkeypatch.setattr(live_reshard, "compile_runner", compile_runner)
    monkeypatch.setattr(launched.engine, "rebuild", going_on)
    monkeypatch.setattr(StepRunner, "start", start_together)

    streams.stop_at = next(stops)
    streams.run(launched)
    for num_tokens, tp in ((40, 4), (110, 1)):
        streams.wait(num_tokens)
        assert launched.resharder.change_tp(tp) > 0
        assert not all(index in streams.reasons for index in map(str, range(len(PROMPTS)))), "too late: all have ended"
        assert launched.resharder.tp == tp
        with pytest.raises(ConfigError, match="tp is 3"):  # and nothing has changed
            launched.resharder.change_tp(3)
    streams.go_on()
    streams.wait(num_finished=len(PROMPTS))
    assert streams.token_ids == expected
    assert set(streams.reasons.values()) == {FinishReason.LENGTH}
    assert next(scattered, None) is None and next(refusals, None) is None
    load = launched.engine.load()
    assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)

    monkeypatch.undo()
    launched.engine.stop()
    with pytest.raises(EngineStoppedError):
        launched.resharder.change_tp(2)


def test_the_cache_of_cpu_devices_is_that_of_a_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one memory, so more devices have no larger cache."""
    monkeypatch.setattr("meshserve.sharding.memory.CPU_CACHE_BYTES", 1 << 20)
    config = CONFIG | {"num_pages": 0}
    pages = {}
    for tp in (1, 4):
        launched = launch(ServeConfig(model=str(model), tp=tp, **config), lambda outputs: None)
        pages[tp] = launched.engine.load().num_pages
    launched = launch(ServeConfig(model=str(model), tp=1, **config), lambda outputs: None)
    launched.engine.start()
    launched.resharder.change_tp(4)
    assert launched.engine.load().num_pages == pages[4] > 0
    launched.engine.stop()


def test_what_no_longer_fits_and_what_fails(model: Path) -> None:
    """A request too large for the new cache is told so; a change that fails ends the engine and every stream."""
    streams = Streams()
    launched = launch(ServeConfig(model=str(model), tp=1, **CONFIG), streams.deliver)
    launched.engine.start()
    streams.stop_at = 20
    streams.run(launched)
    streams.wait(num_tokens=20)
    engine, runner = launched.engine, launched.engine.runner
    # 96 tokens: too few for a prompt of 41 tokens and 60 more
    rebuild_meanwhile(streams, engine, engine.rebuild, lambda: (runner, 6), stop_at=50)
    streams.wait(num_finished=1)
    assert streams.reasons == {"2": FinishReason.ERROR}

    def make_runner() -> tuple:
        raise MemoryError("no room")

    streams.wait(num_tokens=50)
    with pytest.raises(MemoryError):
        rebuild_meanwhile(streams, engine, engine.rebuild, make_runner, sys.maxsize)
    streams.wait(num_finished=len(PROMPTS))
    assert set(streams.reasons.values()) == {FinishReason.ERROR}
    assert launched.engine.failure == "MemoryError: no room"


EXPERTS = {**checkpoints.TINY_EXPERTS, "num_experts": 12, "moe_intermediate_size": 20, "mlp_only_layers": [0]}


@pytest.mark.parametrize("is_by_expert", [False, True])
def test_moved_experts_are_those_that_loading_gives(is_by_expert: bool, tmp_path: Path) -> None:
    """With padding: neither 12 experts nor their 20 rows are multiples of 8. Also from tensor to expert."""
    directory = checkpoints.save_checkpoint(tmp_path, num_hidden_layers=2, **EXPERTS)
    config = read_model(directory / "config.json")

    def load(layout: ShardLayout) -> nnx.State:
        return load_model(directory, config, layout, make_mesh(layout.num_shards), jnp.dtype("bfloat16"))[1]

    layouts = [model_layout(config, tp, expert_parallel=is_by_expert) for tp in (2, 8, 1, 4)]
    layouts.append(model_layout(config, 8, expert_parallel=not is_by_expert))
    for old, new in zip(layouts, layouts[1:], strict=False):
        moved, loaded = move_params(config, load(old), old, new, make_mesh(new.num_shards)), load(new)
        assert jax.tree.structure(moved) == jax.tree.structure(loaded)
        for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(loaded), strict=True):
            assert one.sharding == other.sharding
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("shape", [{}, {"num_attention_heads": 6, "num_key_value_heads": 2}])
def test_moved_parameters_are_those_that_loading_gives(shape: dict, tmp_path: Path) -> None:
    """Bit for bit and padding included, growing and shrinking."""
    directory = checkpoints.save_checkpoint(
        tmp_path, num_hidden_layers=2, vocab_size=333, intermediate_size=90, **shape
    )
    config = read_model(directory / "config.json")
    tp_sizes = (2, 8, 4, 1, 2) if config.num_query_heads == 8 else (2, 3, 6, 3)

    def load(tp: int) -> nnx.State:
        return load_model(directory, config, model_layout(config, tp), make_mesh(tp), jnp.dtype("bfloat16"))[1]

    for old, new in zip(tp_sizes, tp_sizes[1:], strict=False):
        moved = move_params(config, load(old), model_layout(config, old), model_layout(config, new), make_mesh(new))
        loaded = load(new)
        assert jax.tree.structure(moved) == jax.tree.structure(loaded)
        for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(loaded), strict=True):
            assert one.sharding == other.sharding
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=f"{old} -> {new}")
