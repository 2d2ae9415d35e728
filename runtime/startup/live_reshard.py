"""Changes the TP size of a running engine by moving its weights between devices, without ending its requests.

    compile the programs for the new mesh, while the old one serves (if that needs the memory of its cache, afterwards)
    -> collect the steps in flight, preempt every running request, free the cache
    -> move the weights, one parameter at a time -> allocate the cache
    -> the requests recompute their tokens and continue

Tokens do not depend on the mesh or the batch, so the streams continue as they would have without the change.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.checkpoints.resharding import reshard
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import check_weights_fit, is_out_of_memory, shard_bytes
from meshserve.sharding.mesh import make_mesh, named_sharding

from ..api.errors import ConfigError
from ..engine.engine import Engine
from ..model_files.model_config import ModelConfig
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer
from ..weights.formats.grids import Granule, regrid_indices
from ..weights.orbax_layout import common_granule, moved_pieces, parameters_in, stack_of
from ..weights.registry import abstract_model, weight_bytes
from .runner_build import compile_runner

_log = logging.getLogger(__name__)


class Resharder:
    """Changes the TP size of one engine. May be called from any thread; changes run one after another.

    `compiling` is entered around each change. Code that watches for late compiles sets it to a context that allows
    them.
    """

    def __init__(self, engine: Engine, server: PlacedServer):
        self._engine, self._server = engine, server
        self.compiling: Callable[[], AbstractContextManager[None]] = nullcontext
        self.one_at_a_time = threading.Lock()  # held during each change of the engine

    @property
    def server(self) -> PlacedServer:
        """The server on its current mesh."""
        return self._server

    @property
    def tp(self) -> int:
        """The current TP size."""
        return self._server.tp

    def change_tp(self, tp: int) -> float:
        """Changes the TP size. Returns the number of seconds for which the streams paused; 0 if nothing changed.

        Raises:
          ConfigError, MemoryError: The model or the devices do not allow this TP size. Nothing has changed.
          EngineStoppedError: The engine is not running.
          Exception: The change failed after the weights began to move; the engine has ended.
        """
        with self.one_at_a_time:
            if tp == self.tp:
                return 0.0
            old = self._engine.runner
            if not isinstance(old, StepRunner):
                raise ConfigError("tp: it cannot change while a draft model is served. Restart with another --tp.")
            if not old.has_state:
                raise ConfigError("tp: it cannot change while the server sleeps. Wake it first.")
            with self.compiling():
                try:
                    server = self._server.on_mesh(make_mesh(tp))
                    runner = self._compiled_meanwhile(server, old)
                except ValueError as error:  # too few devices, or the model or its kernels cannot be split like this
                    raise ConfigError(str(error)) from None
                paused_seconds = self._swap(server, old, runner)
            self._server = server
            _log.info("the TP size is now %d; the streams paused for %.2f s", tp, paused_seconds)
            return paused_seconds

    def _compiled_meanwhile(self, server: PlacedServer, old: StepRunner) -> StepRunner | None:
        """Compiles the programs for the new mesh, while the old one serves; None if XLA finds no memory beside it."""
        self._check_memory(server, old)
        try:
            return self._compiled(server, old.device_bytes)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("compiling for the new TP size needs the memory of the KV cache; the streams pause meanwhile")
            return None

    def _compiled(self, server: PlacedServer, held_bytes: int) -> StepRunner:
        """Compiles the programs for the new mesh. The old runner holds `held_bytes` of each device, to be freed."""
        mesh = server.mesh
        # Virtual CPU devices share the host's memory, and their cache is sized as at startup.
        num_measured = mesh.size if server.platform == "cpu" else min(mesh.size, self.tp)
        return compile_runner(
            server,
            *server.abstract_params(),
            measured=Mesh(mesh.devices[:num_measured], mesh.axis_names),
            reserved_bytes=weight_bytes(server.model, server.layout, server.dtype) - held_bytes,
        )

    def _swap(self, server: PlacedServer, old: StepRunner, compiled: StepRunner | None) -> float:
        """Moves the weights and starts the new runner between two steps. Returns the seconds that it took."""
        seconds = 0.0

        def start_runner() -> tuple[StepRunner, int]:
            nonlocal seconds
            started = time.monotonic()
            params = old.release()
            new = compiled or self._compiled(server, shard_bytes(params))
            params = move_params(server.model, params, self._server.layout, server.layout, server.mesh)
            new = self._started(new, server, params)
            if self._engine.host_cache is not None and new.copies is not None:
                self._engine.host_cache.reset(new.copies)
            seconds = time.monotonic() - started
            return new, new.num_pages

        self._engine.rebuild(start_runner)
        return seconds

    def _started(self, runner: StepRunner, server: PlacedServer, params: nnx.State) -> StepRunner:
        """Starts the runner, or, if the devices have no block for its cache even then, one with a smaller cache."""
        if _has_started(runner, params):
            return runner
        _log.info("the weights lie scattered over the devices' memory; moving them together by way of the host")
        params = moved_together(params)
        if _has_started(runner, params):
            return runner
        _log.warning("the devices have no block for the cache; compiling for one that is smaller by an eighth")
        spared_bytes = runner.num_pages * server.page_bytes // 8
        smaller = self._compiled(server, shard_bytes(params) - spared_bytes)
        smaller.start(params)
        return smaller

    def _check_memory(self, server: PlacedServer, old: StepRunner) -> None:
        """Checks that the weights fit.

        If the mesh grows, this concerns the devices that are added. If it shrinks, it concerns those that remain, after
        their present shards and cache are freed.
        """
        mesh, old_tp = server.mesh, self.tp
        needed_bytes = weight_bytes(server.model, server.layout, server.dtype) + server.adapter_bytes
        held_bytes = old.device_bytes
        if mesh.size > old_tp:
            mesh, held_bytes = Mesh(mesh.devices[old_tp:], mesh.axis_names), 0
        elif server.platform == "cpu":
            held_bytes = held_bytes * old_tp // mesh.size  # all devices share the host's memory
        check_weights_fit(mesh, server.memory_fraction, needed_bytes, held_bytes=held_bytes)


def _has_started(runner: StepRunner, params: nnx.State) -> bool:
    """Starts the runner; False if a device has no block that is large enough for its cache."""
    try:
        runner.start(params)
    except MemoryError as error:
        _log.info("%s", error)
        return False
    return True


def move_params(
    model: ModelConfig, params: nnx.State, old_layout: ShardLayout, layout: ShardLayout, mesh: Mesh
) -> nnx.State:
    """Moves parameters to another layout and mesh.

    Consumes `params`: each parameter is deleted as soon as it has been moved, so that a device needs memory for at most
    one parameter in addition to its old and new shards.
    """
    pieces = moved_pieces(model, old_layout, layout, is_common=True)
    before, after = parameters_in(model, old_layout), parameters_in(model, layout)
    old = dict(nnx.to_flat_state(params))
    _, abstract = abstract_model(model, layout, jax.tree.leaves(params)[0].dtype)
    flat = []
    for path, weight in nnx.to_flat_state(abstract):
        name = ".".join(map(str, path))
        granules = before[name].granule, after[name].granule
        common = common_granule(*granules)
        array = old[path][...]
        array = _in_granule(array, granules[0], common, NamedSharding(array.sharding.mesh, PartitionSpec()))
        found, stack = pieces[name], stack_of(model, name)
        if stack is not None:
            found = [_of_all_layers(piece, len(stack.layers)) for piece in found]
        sharding = named_sharding(mesh, weight.axes)
        moved = reshard(array, found, _shape_in_granule(weight.shape, granules[1], common), sharding)
        new = _in_granule(moved, common, granules[1], sharding)
        new.block_until_ready()
        flat.append((path, weight.replace(new)))
        array.delete()
        old[path][...].delete()
    return nnx.from_flat_state(flat)


def moved_together(params: nnx.State) -> nnx.State:
    """Moves parameters to host memory and back, so that they lie side by side on each device.

    Moved one after another, while others are freed, they can lie so that no free block is as large as the cache. Takes
    as much host memory as the shards of this process, of which one array at a time is pinned, and consumes `params`.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [(leaf.shape, leaf.sharding) for leaf in leaves]
    shards = [[(np.asarray(shard.data), shard.device) for shard in leaf.addressable_shards] for leaf in leaves]
    for leaf in leaves:
        leaf.delete()
    moved = []
    for (shape, sharding), found in zip(shapes, shards, strict=True):
        placed = jax.block_until_ready([jax.device_put(*shard) for shard in found])
        moved.append(jax.make_array_from_single_device_arrays(shape, sharding, placed))
    return jax.tree.unflatten(structure, moved)


def _in_granule(grid: jax.Array, old: Granule | None, new: Granule | None, sharding: NamedSharding) -> jax.Array:
    """Returns a grid of scales [..., N / n, K / k] for other rectangles."""
    if old is None or new is None or old == new:
        return grid
    rows, columns = (
        regrid_indices(length * old[axis], old[axis], new[axis]) for axis, length in enumerate(grid.shape[-2:])
    )
    return jax.jit(lambda grid: grid[..., rows[:, None], columns], out_shardings=sharding)(grid)


def _shape_in_granule(shape: tuple[int, ...], old: Granule | None, new: Granule | None) -> tuple[int, ...]:
    """Returns the shape of a grid for rectangles that divide its own."""
    if old is None or new is None:
        return shape
    *leading, rows, columns = shape
    return (*leading, rows * old[0] // new[0], columns * old[1] // new[1])


def _of_all_layers(piece: Piece, num_layers: int) -> Piece:
    """Returns the same piece of a parameter in which all layers are stacked."""
    return Piece(piece.tensor, (0, *piece.start), (num_layers, *piece.size), (0, *piece.place))
