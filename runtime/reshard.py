"""Another tensor-parallel degree for a running engine: the weights move from device to device, streams go on.

    collect the steps in flight -> preempt every running request -> free the cache -> move the weights, one parameter
    at a time -> compile the programs -> allocate the cache -> the requests compute their tokens anew and go on

A token depends on neither the mesh nor the batch, so the streams are what they would have been.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import make_mesh, named_sharding
from meshserve.sharding.resharding import reshard
from meshserve.sharding.weights import Piece

from .config import ModelConfig, ServeConfig
from .engine import Engine
from .errors import ConfigError
from .model import abstract_model
from .orbax_weights import model_layout
from .step import StepRunner

_log = logging.getLogger(__name__)

# Compiles the programs and allocates the cache for parameters in place: the runner, and the number of its pages.
MakeRunner = Callable[[ServeConfig, ModelConfig, Mesh, nnx.GraphDef, nnx.State], tuple[StepRunner, int]]


class Resharder:
    """Changes the degree of one engine. Safe to call from any thread; changes wait for each other."""

    def __init__(self, engine: Engine, config: ServeConfig, model: ModelConfig, make_runner: MakeRunner):
        self._engine, self._config, self._model, self._make_runner = engine, config, model, make_runner
        self._one_at_a_time = threading.Lock()

    @property
    def tp(self) -> int:
        """The present degree."""
        return self._config.tp

    def change_tp(self, tp: int) -> float:
        """Serves at another degree from now on. Returns the seconds for which the streams paused.

        Raises:
          ConfigError: the model or the devices do not allow it; nothing has changed.
          EngineStoppedError: the engine is not running.
        """
        with self._one_at_a_time:
            if tp == self._config.tp:
                return 0.0
            try:
                mesh, layout = make_mesh(tp), model_layout(self._model, tp)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            config = dataclasses.replace(self._config, tp=tp)
            started = time.monotonic()

            def make_runner() -> tuple[StepRunner, int]:
                nonlocal started
                started = time.monotonic()
                assert isinstance(self._engine.runner, StepRunner)
                params = move_params(self._model, self._engine.runner.release(), self._config.tp, layout, mesh)
                moved = time.monotonic()
                structure, _ = abstract_model(self._model, layout, jax.tree.leaves(params)[0].dtype)
                made = self._make_runner(config, self._model, mesh, structure, params)
                _log.info(
                    "weights moved in %.2f s, programs and cache made in %.2f s",
                    moved - started,
                    time.monotonic() - moved,
                )
                return made

            self._engine.rebuild(make_runner)
            self._config = config
            seconds = time.monotonic() - started
            _log.info("tp is %d now; streams paused for %.2f s", tp, seconds)
            return seconds


def move_params(model: ModelConfig, params: nnx.State, old_tp: int, layout: ShardLayout, mesh: Mesh) -> nnx.State:
    """The parameters in another layout on another mesh. Consumes `params`: each is deleted when its successor is
    there, so that the most a device holds beyond both shards is one parameter."""
    pieces = _pieces(model, model_layout(model, old_tp), layout)
    old = dict(nnx.to_flat_state(params))
    _, abstract = abstract_model(model, layout, jax.tree.leaves(params)[0].dtype)
    flat = []
    for path, weight in nnx.to_flat_state(abstract):
        array = old[path][...]
        new = reshard(
            array, pieces(".".join(map(str, path)), array.shape), weight.shape, named_sharding(mesh, weight.axes)
        )
        new.block_until_ready()
        flat.append((path, weight.replace(new)))
        array.delete()
    return nnx.from_flat_state(flat)


class _PiecesOf(Protocol):
    def __call__(self, name: str, shape: tuple[int, ...]) -> list[Piece]: ...


def _pieces(model: ModelConfig, old: ShardLayout, new: ShardLayout) -> _PiecesOf:
    """What each parameter of the new layout is made of, in terms of the same parameter in the old one."""
    head_dim = model.head_dim

    def qkv(shape: tuple[int, ...]) -> list[Piece]:
        num_layers, embed = shape[0], shape[3]
        queries, old_queries = new.group_size * head_dim, old.group_size * head_dim
        pieces = []
        for group in range(new.num_groups):
            first, last = group * queries, (group + 1) * queries  # rows of all query heads, in the model's order
            for source in range(first // old_queries, -(-last // old_queries)):
                start = max(first, source * old_queries)
                count = min(last, (source + 1) * old_queries) - start
                place = (0, group, start - first, 0)
                pieces.append(
                    Piece("", (0, source, start - source * old_queries, 0), (num_layers, 1, count, embed), place)
                )
            keys = new.kv_head(group) * old.repeats  # the first of the old groups that repeat the KV head
            size = (num_layers, 1, 2 * head_dim, embed)
            pieces.append(Piece("", (0, keys, old_queries, 0), size, (0, group, queries, 0)))
        return pieces

    real = {"embedding": (0, model.vocab_size), "head": (0, model.vocab_size)}
    real |= {"layers.mlp.gate_up": (2, model.mlp_dim), "layers.mlp.down": (2, model.mlp_dim)}

    def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
        if name == "layers.attention.qkv":
            return qkv(shape)
        size = list(shape)
        if name in real:  # the rest of this dimension is padding
            dimension, length = real[name]
            size[dimension] = length
        zeros = (0,) * len(shape)
        return [Piece("", zeros, tuple(size), zeros)]

    return pieces
