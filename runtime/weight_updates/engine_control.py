"""Pauses a running engine, and has it give up the devices' memory for a while, as trainers need it for their own steps.

Compiled programs stay. What sleeps takes no step, but accepts requests, which wait. Pages are dropped and requests
recompute their tokens afterwards, as after an update of the weights.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshserve.sharding.checkpoints.parameters import Region, bounds
from meshserve.sharding.memory import shard_bytes

from ..api.errors import InvalidRequestError, UnavailableFeatureError
from ..engine.engine import Engine
from ..host_cache.pinning import PINNED, host_shardings
from ..program.step_runner import StepRunner
from .weight_updater import RUNNING, Running, WeightUpdater, replaceable

_log = logging.getLogger(__name__)

_PAUSED = "the server was paused"


class EngineControl:
    """Pauses one engine and lets it sleep. May be called from any thread.

    Args:
      engine: The engine.
      updater: Replaces its weights.
      one_at_a_time: Held during each change of the engine, as by the updater.
    """

    def __init__(self, engine: Engine, updater: WeightUpdater, one_at_a_time: threading.Lock):
        self._engine, self._updater, self._one_at_a_time = engine, updater, one_at_a_time
        self._host: _HostParams | None = None  # the weights while the engine sleeps
        self.is_asleep = False

    @property
    def is_paused(self) -> bool:
        """Whether no step is taken, asleep or not."""
        return self._engine.is_paused

    @property
    def unready_reason(self) -> str:
        """Why no request is served until somebody acts: the engine sleeps, or has no weights. "" otherwise.

        Pauses do not count: they are short, and requests wait.
        """
        if self.is_asleep:
            return "the engine sleeps until Wake is called"
        return "the weights were dropped; update them" if self._updater.lacks_weights else ""

    def pause(self, running: Running = "continue") -> None:
        """Stops the steps, and returns when none is in flight. Requests are accepted, and wait.

        Args:
          running: What becomes of unfinished requests: "continue" after `resume`, "finish" first, or "abort".

        Raises:
          InvalidRequestError: `running` is none of these.
          UnavailableFeatureError: They are to finish, and the engine is paused already.
          EngineStoppedError: The engine is not running.
        """
        if running not in RUNNING:
            raise InvalidRequestError("running", f"got {running!r}; allowed are {', '.join(RUNNING)}.")
        with self._one_at_a_time:
            self._between_steps(lambda: self._engine.pause(True), running)

    def _between_steps(self, action: Callable[[], None], running: Running) -> None:
        def act() -> None:
            if running == "abort":
                self._engine.end_open(_PAUSED)
            action()

        self._engine.between_steps(act, after_open=running == "finish")

    def resume(self) -> None:
        """Lets the steps go on.

        Raises:
          UnavailableFeatureError: The engine sleeps, or its weights were dropped and not replaced.
        """
        with self._one_at_a_time:
            if self.is_asleep:
                raise UnavailableFeatureError("the engine sleeps. Wake it first.")
            if self._updater.lacks_weights:
                raise UnavailableFeatureError("the weights were dropped. Update them first.")
            self._engine.pause(False)

    def sleep(self, *, drop_weights: bool = False) -> int:
        """Pauses, and frees the cache and the weights on the devices. Returns the bytes freed on each.

        Args:
          drop_weights: Whether no copy of the weights is kept in host memory.

        Raises:
          UnavailableFeatureError: The engine has a draft model or other processes, or sleeps already.
          EngineStoppedError: The engine is not running.
          Exception: Memory was freed in part; the engine has ended.
        """
        with self._one_at_a_time, self._updater.compiling():
            if self.is_asleep:
                raise UnavailableFeatureError("the engine sleeps already. Wake it first.")
            runner, started = replaceable(self._engine.runner), time.monotonic()
            num_bytes = runner.device_bytes - runner.adapter_bytes  # adapters stay

            def fall_asleep() -> None:
                self._engine.pause(True)
                self._engine.begin_weights(self._engine.weight_version)  # no page survives
                self._host = _HostParams(runner.params, is_dropped=drop_weights)
                runner.free_state()
                for array in jax.tree.leaves(runner.params):
                    array.delete()

            self._engine.between_steps(fall_asleep)
            self.is_asleep = True
            self._updater.lacks_weights |= drop_weights
            _log.info("asleep: freed %.2f GB of each device in %.2f s", num_bytes / 1e9, time.monotonic() - started)
            return num_bytes

    def wake(self) -> bool:
        """Takes the memory back, and lets the steps go on unless the weights were dropped. Returns whether it does.

        Raises:
          MemoryError: The devices have no room. The engine goes on sleeping.
          EngineStoppedError: The engine is not running.
        """
        with self._one_at_a_time, self._updater.compiling():
            if self.is_asleep:
                assert self._host is not None
                host, runner, started = self._host, replaceable(self._engine.runner), time.monotonic()
                failure: list[MemoryError] = []

                def wake_up() -> None:
                    try:
                        _wake(runner, host)
                    except MemoryError as error:
                        failure.append(error)

                self._engine.between_steps(wake_up)
                if failure:
                    raise failure[0]
                self._host, self.is_asleep = None, False
                _log.info("awake after %.2f s", time.monotonic() - started)
                if not self._updater.lacks_weights:
                    self._engine.pause(False)
            return not self._engine.is_paused


def _wake(runner: StepRunner, host: "_HostParams") -> None:
    """Puts parameters back on the devices and allocates the cache, or leaves the devices as they were."""
    params = host.on_devices()
    try:
        runner.allocate_state()
    except MemoryError:
        for array in jax.tree.leaves(params):
            array.delete()
        raise
    runner.replace_params(params)


class _HostParams:
    """Parameters in host memory; or only their shapes, if they are dropped.

    The memory is pinned, if jax can pin so much: copies to and from it are several times as fast. jax keeps what it has
    pinned for the next sleep. Memory that is not pinned holds each distinct block once.
    """

    def __init__(self, params: nnx.State, *, is_dropped: bool):
        leaves, self._structure = jax.tree.flatten(params)
        self._shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves]
        self._pinned = None if is_dropped else _pinned(leaves)
        self._blocks = [] if is_dropped or self._pinned is not None else [_blocks(leaf) for leaf in leaves]

    def on_devices(self) -> nnx.State:
        """Returns the parameters on their devices; zeros if they were dropped.

        Raises:
          MemoryError: The devices have no room.
        """
        placed: list[jax.Array] = []
        try:
            if self._pinned is not None:
                placed += jax.device_put(self._pinned, [shape.sharding for shape in self._shapes])
            else:
                for index, shape in enumerate(self._shapes):
                    placed.append(self._placed(index, shape))
            return jax.tree.unflatten(self._structure, jax.block_until_ready(placed))
        except jax.errors.JaxRuntimeError as error:
            for array in placed:
                array.delete()
            size = shard_bytes(self._shapes) / (1 << 30)
            raise MemoryError(
                f"the devices have no room for {size:.2f} GiB of weights ({error}). Free their memory and wake again."
            ) from None

    def _placed(self, index: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if not self._blocks:
            return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
        blocks = self._blocks[index]

        def block(place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None, "every device holds a block"
            return blocks[bounds(place, shape.shape)]

        return jax.make_array_from_callback(shape.shape, shape.sharding, block)


def _pinned(leaves: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Returns copies of arrays in pinned host memory; None if the devices have none, or not so much."""
    if host_shardings(sorted(leaves[0].sharding.addressable_devices, key=lambda device: device.id)) is None:
        return None
    try:
        where = [leaf.sharding.with_memory_kind(PINNED) for leaf in leaves]
        return jax.block_until_ready(jax.device_put(list(leaves), where))
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        _log.warning("host memory for the weights could not be pinned, so the copies are slower: %s", error)
        return None


def _blocks(leaf: jax.Array) -> dict[Region, np.ndarray]:
    """Returns each distinct block of an array, in memory that is not pinned."""
    blocks: dict[Region, np.ndarray] = {}
    for shard in leaf.addressable_shards:
        if (region := bounds(shard.index, leaf.shape)) not in blocks:
            is_view = shard.device.platform == "cpu"  # of memory that will be freed
            blocks[region] = np.array(shard.data) if is_view else np.asarray(shard.data)
    return blocks
