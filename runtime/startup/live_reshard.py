"""Another tensor-parallel degree for a running engine: the weights move from device to device, streams go on.

    compile the programs, while the old mesh goes on serving
    -> collect the steps in flight, preempt every running request, free the cache
    -> move the weights, one parameter at a time -> allocate the cache
    -> the requests compute their tokens anew and go on

A token depends on neither the mesh nor the batch, so the streams are what they would have been.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.checkpoints.resharding import reshard
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import check_weights_fit
from meshserve.sharding.mesh import make_mesh, named_sharding

from ..api.config import ServeConfig
from ..api.errors import ConfigError
from ..api.model_config import ModelConfig
from ..engine.engine import Engine
from ..program.step import StepRunner
from ..weights.load import device_weight_bytes
from ..weights.orbax_layout import STACK, model_layout, moved_pieces
from ..weights.registry import abstract_model

_log = logging.getLogger(__name__)

# `launch.make_runner`, which imports this module.
MakeRunner = Callable[..., tuple[StepRunner, int]]


class Resharder:
    """Changes the degree of one engine. Safe to call from any thread; changes wait for each other.

    `compiling` is entered around each change: who watches for compiles puts a context there in which they are no fault.
    """

    def __init__(self, engine: Engine, config: ServeConfig, model: ModelConfig, make_runner: MakeRunner):
        self._engine, self._config, self._model, self._make_runner = engine, config, model, make_runner
        self.compiling: Callable[[], AbstractContextManager[None]] = nullcontext
        self._one_at_a_time = threading.Lock()

    @property
    def tp(self) -> int:
        """The present degree."""
        return self._config.tp

    def change_tp(self, tp: int) -> float:
        """Serves at another degree from now on. Returns the seconds for which the streams paused.

        Raises:
          ConfigError, MemoryError: the model or the devices do not allow it; nothing has changed.
          EngineStoppedError: the engine is not running.
          What goes wrong later, once the weights are on their way, ends the engine.
        """
        with self._one_at_a_time:
            if tp == self._config.tp:
                return 0.0
            try:
                mesh, layout = make_mesh(tp), model_layout(self._model, tp)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            config = dataclasses.replace(self._config, tp=tp)
            old = self._engine.runner
            assert isinstance(old, StepRunner)
            with self.compiling():
                try:
                    runner, num_pages = self._prepared(config, old, mesh)
                except ValueError as error:  # the kernels that serve do not take the new blocks
                    raise ConfigError(str(error)) from None
                paused_seconds = self._swap(old, runner, num_pages, layout, mesh)
            self._config = config
            _log.info("tp is %d now; the streams paused for %.2f s", tp, paused_seconds)
            return paused_seconds

    def _prepared(self, config: ServeConfig, old: StepRunner, mesh: Mesh) -> tuple[StepRunner, int]:
        """The programs for the new mesh, while the old one goes on serving."""
        self._check_memory(old, mesh)
        structure, abstract = abstract_model(self._model, model_layout(self._model, mesh.size), old.dtype)
        placed = [
            (path, weight.replace(_placed(weight, old.dtype, named_sharding(mesh, weight.axes))))
            for path, weight in nnx.to_flat_state(abstract)
        ]
        weight_bytes = device_weight_bytes(self._model, mesh, old.dtype)
        # Virtual CPU devices share one memory, and a cache for each of them the same as at a start.
        num_measured = mesh.size if mesh.devices.flat[0].platform == "cpu" else min(mesh.size, self._config.tp)
        return self._make_runner(
            config,
            self._model,
            mesh,
            structure,
            nnx.from_flat_state(placed),
            measured=Mesh(mesh.devices[:num_measured], mesh.axis_names),
            reserved_bytes=weight_bytes - old.device_bytes,
        )

    def _swap(self, old: StepRunner, new: StepRunner, num_pages: int, layout: ShardLayout, mesh: Mesh) -> float:
        """Moves the weights and starts the new runner between two steps. Returns the seconds it took."""
        seconds = 0.0

        def make_runner() -> tuple[StepRunner, int]:
            nonlocal seconds
            started = time.monotonic()
            new.start(move_params(self._model, old.release(), self._config.tp, layout, mesh))
            seconds = time.monotonic() - started
            return new, num_pages

        self._engine.rebuild(make_runner)
        return seconds

    def _check_memory(self, old: StepRunner, mesh: Mesh) -> None:
        """Whether the weights have room: on the devices that are new to the mesh, or, where it shrinks, on those that
        stay, once their present shards and cache are gone."""
        old_tp = self._config.tp
        held_bytes, needed_bytes = old.device_bytes, device_weight_bytes(self._model, mesh, old.dtype)
        if mesh.size > old_tp:
            mesh, held_bytes = Mesh(mesh.devices[old_tp:], mesh.axis_names), 0
        elif mesh.devices.flat[0].platform == "cpu":
            held_bytes = held_bytes * old_tp // mesh.size  # all devices share one memory
        check_weights_fit(mesh, self._config.memory_fraction, needed_bytes, held_bytes=held_bytes)


def _placed(weight: nnx.Variable, dtype: jnp.dtype, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=sharding)


def move_params(model: ModelConfig, params: nnx.State, old_tp: int, layout: ShardLayout, mesh: Mesh) -> nnx.State:
    """The parameters in another layout on another mesh. Consumes `params`: each is deleted when its successor is
    there, so that the most a device holds beyond both shards is one parameter."""
    pieces = moved_pieces(model, model_layout(model, old_tp), layout)
    old = dict(nnx.to_flat_state(params))
    _, abstract = abstract_model(model, layout, jax.tree.leaves(params)[0].dtype)
    flat = []
    for path, weight in nnx.to_flat_state(abstract):
        array, name = old[path][...], ".".join(map(str, path))
        of_all = [_of_all_layers(piece, model.num_layers) for piece in pieces[name]]
        new = reshard(
            array, of_all if name.startswith(STACK) else pieces[name], weight.shape, named_sharding(mesh, weight.axes)
        )
        new.block_until_ready()
        flat.append((path, weight.replace(new)))
        array.delete()
    return nnx.from_flat_state(flat)


def _of_all_layers(piece: Piece, num_layers: int) -> Piece:
    """The same piece of a parameter in which layers are stacked."""
    return Piece(piece.tensor, (0, *piece.start), (num_layers, *piece.size), (0, *piece.place))
