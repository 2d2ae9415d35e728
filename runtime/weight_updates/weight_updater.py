"""Replaces the weights of a running engine, in three phases.

    prepare   names, shapes and dtypes are checked
    transfer  the new weights are made beside the old ones, and must be finite
    commit    between two steps the new ones take their place

A failure in the first two changes nothing: the old weights go on serving. If the devices have room for both, requests
run during the transfer. If not, the steps stop before it and the memory of the KV cache, whose pages are of no use
afterwards, holds the new weights until they are copied into the old ones' place.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.memory import is_out_of_memory

from ..api.errors import ConfigError, EngineStoppedError, InvalidRequestError, UnavailableFeatureError
from ..engine.engine import Engine
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer
from .assembly import not_finite, overwriter
from .named_arrays import SOURCE
from .weight_sources import Arrays, Source, by_path, open_source

_log = logging.getLogger(__name__)

Running = Literal["continue", "finish", "abort"]  # what becomes of unfinished requests
RUNNING: tuple[Running, ...] = ("continue", "finish", "abort")
_MAX_VERSION_CHARS = 256
_ABORTED = "the weights of the model were replaced"


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """What an update did.

    Attributes:
      version: The version of the weights that serve now.
      num_bytes: What was replaced on each device.
      seconds: The time of the call, without waiting for requests that were to finish first.
      paused_seconds: The part of it in which no step ran.
    """

    version: str
    num_bytes: int
    seconds: float
    paused_seconds: float


class WeightUpdater:
    """Replaces the weights of one engine. May be called from any thread; updates run one after another.

    `compiling` is entered around each update, which compiles small programs at the first time. Code that watches for
    late compiles sets it to a context that allows them.

    Args:
      engine: The engine.
      server: Returns its server on the present mesh.
      one_at_a_time: Held during each update, and during other changes of the engine.
    """

    def __init__(self, engine: Engine, server: Callable[[], PlacedServer], one_at_a_time: threading.Lock):
        self._engine, self._server, self._one_at_a_time = engine, server, one_at_a_time
        self._num_updates = 0
        self.lacks_weights = False  # whether they were dropped, so that no step may run before they are replaced
        self.compiling: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def version(self) -> str:
        """The version of the weights that serve: "0" at the start."""
        return self._engine.weight_version

    def update(
        self,
        source: Any,
        *,
        version: str | None = None,
        running: Running = "continue",
        is_partial: bool = False,
        is_donated: bool = False,
    ) -> WeightUpdate:
        """Replaces the weights. If it raises one of the first four errors, nothing has changed.

        Args:
          source: See `weight_sources.open_source`.
          version: Their name in outputs; None numbers them from 1.
          running: What becomes of unfinished requests. "continue": they recompute their tokens with the new weights and
            go on. "finish": they end with the old weights; requests that come meanwhile begin with the new ones.
            "abort": they end with the tokens that they have.
          is_partial: Whether weights may be missing, which stay as they are.
          is_donated: Whether arrays of `source` on devices are deleted as they are used up, also if it then fails.

        Raises:
          InvalidRequestError: The weights do not fit the model, are damaged, or are not finite.
          UnavailableFeatureError: This server cannot take other weights.
          MemoryError: The devices have no room for the new weights.
          EngineStoppedError: The engine is not running, or its mesh has changed meanwhile.
          Exception: The commit failed; the engine has ended.
        """
        if running not in RUNNING:
            raise InvalidRequestError("running", f"got {running!r}; allowed are {', '.join(RUNNING)}.")
        with self._one_at_a_time, self.compiling():
            version = self._checked_version(version)
            started = time.monotonic()
            runner = replaceable(self._engine.runner)
            if not runner.has_state:
                raise UnavailableFeatureError("the engine sleeps. Wake it first.")
            if is_partial and self.lacks_weights:
                raise InvalidRequestError("partial", "the weights were dropped. Pass all of them.")
            server = self._server()
            try:
                opened = open_source(source, server, runner.params, is_partial=is_partial, is_donated=is_donated)
            except (CheckpointError, ConfigError) as error:
                raise InvalidRequestError(SOURCE, str(error)) from None
            change = _Change(self._engine, runner, opened, version, _ABORTED if running == "abort" else "")
            has_room = has_room_for(server.mesh, opened.num_bytes)
            if has_room:
                change.transfer()
            else:
                for old in by_path(runner.params).values():
                    overwriter(old)  # compiled before the steps stop
            prepared_seconds = time.monotonic() - started
            self._engine.between_steps(change.run, after_open=running == "finish")
            change.check()
            self._num_updates += 1
            self.lacks_weights = False
            update = WeightUpdate(
                version=version,
                num_bytes=opened.num_bytes,
                seconds=prepared_seconds + change.paused_seconds,
                paused_seconds=change.paused_seconds,
            )
            _log.info(
                "the weights are now version %s: %.2f GB on each device in %.2f s; the steps paused for %.3f s",
                version, update.num_bytes / 1e9, update.seconds, update.paused_seconds,
            )  # fmt: skip
            return update

    def _checked_version(self, version: str | None) -> str:
        version = str(self._num_updates + 1) if version is None else version
        if not 1 <= len(version) <= _MAX_VERSION_CHARS or not version.isprintable():
            raise InvalidRequestError(
                "version", f"has {len(version)} characters; allowed are 1 to {_MAX_VERSION_CHARS} printable characters."
            )
        return version


class _Change:
    """The transfer and the commit of one update. `run` is for the engine's thread, between two steps."""

    def __init__(self, engine: Engine, runner: StepRunner, source: Source, version: str, aborting: str):
        self._engine, self._runner, self._source = engine, runner, source
        self._version, self._aborting = version, aborting
        self._new: Arrays | None = None
        self._failure: Exception | None = None
        self.paused_seconds = 0.0

    def transfer(self) -> None:
        """Makes the new weights beside the old ones.

        Raises:
          InvalidRequestError, MemoryError: See `WeightUpdater.update`.
        """
        try:
            new = self._source.make(by_path(self._runner.params))
            jax.block_until_ready(list(new.values()))
        except CheckpointError as error:
            raise InvalidRequestError(SOURCE, str(error)) from None
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(f"the devices have no room for the new weights beside the old ones ({error}).") from None
        damaged = list(not_finite(new))
        if damaged:
            names = ", ".join(damaged[:5])
            raise InvalidRequestError(SOURCE, f"NaN or infinite numbers would come into {names}. Check the training.")
        self._new = new

    def run(self) -> None:
        """Commits the new weights; without them, transfers them first, through the memory of the cache."""
        started = time.monotonic()
        if self._engine.runner is not self._runner:
            self._failure = EngineStoppedError("the TP size has changed during the update. Call it again.")
        elif self._new is not None:
            self._commit(self._new, is_in_place=False)
        else:
            self._run_through_cache()
        self.paused_seconds = time.monotonic() - started

    def _run_through_cache(self) -> None:
        self._engine.begin_weights(self._engine.weight_version)  # all cached pages are lost
        self._runner.free_state()
        try:
            self.transfer()
        except Exception as error:  # nothing has changed but the cache, so the engine goes on
            self._failure = error
        if self._new is not None:
            self._commit(self._new, is_in_place=True)
        self._runner.allocate_state()

    def _commit(self, new: Arrays, *, is_in_place: bool) -> None:
        old = by_path(self._runner.params)
        if is_in_place:
            placed = {name: overwriter(old[name])(old[name], array) for name, array in new.items()}
            jax.block_until_ready(list(placed.values()))
        self._runner.replace_params(_with(self._runner.params, placed if is_in_place else new))
        for name, array in new.items():
            (array if is_in_place else old[name]).delete()
        self._engine.begin_weights(self._version, aborting=self._aborting)

    def check(self) -> None:
        """Raises what kept the weights from being replaced."""
        if self._failure is not None:
            raise self._failure


def replaceable(runner: object) -> StepRunner:
    """Returns the runner of an engine whose weights can be replaced.

    Raises:
      UnavailableFeatureError: They cannot.
    """
    if not isinstance(runner, StepRunner):
        raise UnavailableFeatureError(
            "the weights of a server with a draft model or of several processes cannot be replaced, and it cannot "
            "sleep. Serve without --draft-model, from one process; or restart it."
        )
    return runner


def has_room_for(mesh: Mesh, num_bytes: int) -> bool:
    """Returns whether every device has so much free memory. CPU devices share the host's, which counts as enough."""
    for device in mesh.local_devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and stats.get("bytes_limit") and stats["bytes_limit"] - stats["bytes_in_use"] < num_bytes:
            return False
    return True


def _with(params: nnx.State, new: Mapping[str, jax.Array]) -> nnx.State:
    """Returns parameters of which some are replaced."""
    leaves, structure = jax.tree.flatten(params)
    names = by_path(params)
    assert len(leaves) == len(names), "the state has leaves that are no parameters"
    return jax.tree.unflatten(structure, [new.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)])
