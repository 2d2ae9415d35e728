"""Copies pages between the KV cache on the devices and host memory, on the engine's thread.

In: the commands of `host_cache`. A page's keys and values of all layers lie together in a block, and each device's
part of a block is one array. Copies run beside the steps: SAVE gathers the pages into a block by a small program in the
order of the steps, then the block is copied by the devices' copy engines; FETCH copies a block to the devices,
behind the input of the step that is dispatched next, and WRITE scatters it into the cache by another small program.

Host memory is pinned where the devices have such memory (GPUs, TPUs, and CPU devices of recent jax): at the start, by
`pinning`. jax keeps it.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from meshserve.kernels.paged_attention.storage import as_bits, from_bits
from meshserve.sharding.memory import is_out_of_memory
from meshserve.sharding.mesh import named_sharding, partition_spec

from .commands import Op
from .pinning import host_shardings
from .sizes import HostCacheSize

_BLOCK_AXES = (None, None, "kv_heads", None, None, None)  # [pages, L, K, 2, S, H], in the cache's bits

_log = logging.getLogger(__name__)

_Shards = list[jax.Array]  # one on each device of this process


def lower_save(cache: jax.ShapeDtypeStruct, block_pages: int) -> jax.stages.Lowered:
    """Lowers the program (cache, pages [block_pages]) -> block."""
    mesh = cache.sharding.mesh
    cache_spec, block_spec = cache.sharding.spec, partition_spec(_BLOCK_AXES)
    program = jax.shard_map(
        _gather, mesh=mesh, in_specs=(cache_spec, PartitionSpec()), out_specs=block_spec, check_vma=False
    )
    return jax.jit(program).lower(cache, _pages_shape(cache, block_pages))


def lower_write(cache: jax.ShapeDtypeStruct, block_pages: int) -> jax.stages.Lowered:
    """Lowers the program (cache, block, pages [block_pages]) -> cache, which updates the cache in place."""
    mesh = cache.sharding.mesh
    cache_spec, block_spec = cache.sharding.spec, partition_spec(_BLOCK_AXES)
    program = jax.shard_map(
        _scatter,
        mesh=mesh,
        in_specs=(cache_spec, block_spec, PartitionSpec()),
        out_specs=cache_spec,
        check_vma=False,
    )
    block = block_shape(cache, block_pages)
    return jax.jit(program, donate_argnums=0).lower(cache, block, _pages_shape(cache, block_pages))


def block_shape(cache: jax.ShapeDtypeStruct, block_pages: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a block of a cache [L, P, K, 2, S, H], with its sharding."""
    num_layers, _, *page = cache.shape
    dtype = jax.eval_shape(as_bits, jax.ShapeDtypeStruct((), cache.dtype)).dtype
    sharding = named_sharding(cache.sharding.mesh, _BLOCK_AXES)
    return jax.ShapeDtypeStruct((block_pages, num_layers, *page), dtype, sharding=sharding)


def _pages_shape(cache: jax.ShapeDtypeStruct, block_pages: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((block_pages,), jnp.int32, sharding=named_sharding(cache.sharding.mesh, ()))


def _gather(cache: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.moveaxis(as_bits(cache).at[:, pages].get(mode="clip"), 1, 0)


def _scatter(cache: jax.Array, block: jax.Array, pages: jax.Array) -> jax.Array:
    """Pages beyond the cache, which differ from each other, are dropped."""
    written = as_bits(cache).at[:, pages].set(jnp.moveaxis(block, 0, 1), mode="drop", unique_indices=True)
    return from_bits(written, cache.dtype)


def _are_ready(shards: Sequence[Any]) -> bool:
    return all(shard.is_ready() for shard in shards)


def _wait(shards: _Shards | None) -> None:
    """Waits until copies have ended. Whether they failed is seen later, by what needs their results."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(shards)


class PageCopies:
    """The blocks of one process, in host memory and on their way to its devices.

    Args:
      size: The sizes of the tier.
      shape: The shape of a block, with its sharding; see `block_shape`.
      gather, scatter: The compiled programs of `lower_save` and `lower_write`.
    """

    def __init__(
        self,
        size: HostCacheSize,
        shape: jax.ShapeDtypeStruct,
        gather: jax.stages.Compiled,
        scatter: jax.stages.Compiled,
    ):
        self.size = size
        self._shape, self._gather, self._scatter = shape, gather, scatter
        devices = shape.sharding.mesh.local_devices
        self._on_device = [SingleDeviceSharding(device) for device in devices]
        self._on_host = host_shardings(devices) or self._on_device
        # One process's failure would leave the others with other contents, so in a cluster it ends the server.
        self._is_alone = len({device.process_index for device in shape.sharding.mesh.devices.flat}) == 1
        self._blocks: dict[int, _Shards] = {}
        # A mesh of this process alone: it may fetch blocks before a step, while the others fetch them with the step.
        self._local = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
        argument = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=self._local)
        # Computes nothing of use. Copies dispatched after it begin when its argument has arrived.
        self._barrier = jax.jit(jnp.negative).lower(argument).compile()
        self._unsent: list[tuple[int, int, np.ndarray]] = []  # tickets, blocks, pages to be fetched
        self._fetched: dict[int, _Shards | None] = {}  # by ticket, page numbers last; None if the copy failed
        self._saving: deque[_Shards] = deque()
        self._failed: list[tuple[int, bool]] = []

    def run(self, command: np.ndarray, cache: jax.Array) -> jax.Array:
        """Carries out a command of `commands` and returns the cache, which WRITE has donated and updated."""
        op, *numbers = command.tolist()
        if op == Op.FETCH:
            self._unsent.append((numbers[0], numbers[1], command[3:]))
            return cache
        self._send()
        if op == Op.SAVE:
            self._try(partial(self._save, cache, numbers[0], command[2:]), numbers[0])
        elif op == Op.WRITE:
            fetched = self._fetched.pop(numbers[0])
            assert fetched is not None, "a block that could not be fetched is written"
            return self._scatter(cache, *self._joined(fetched))
        elif op == Op.FORGET:
            del self._fetched[numbers[0]]
        else:
            self._blocks.clear()
        return cache

    def _save(self, cache: jax.Array, block: int, pages: np.ndarray) -> None:
        self._blocks.pop(block, None)  # first, so that its memory can be used again
        gathered = self._gather(cache, pages)
        shards = self.to_host([shard.data for shard in gathered.addressable_shards])
        self._blocks[block] = shards
        self._saving.append(shards)

    def send_behind(self, packed: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Sends a step's input to the devices, then the blocks to be fetched beside the step; returns the input.

        The step would otherwise wait for these blocks, which take the same link. A copy to the devices begins when what
        was dispatched before has been computed, so a program keeps them behind the input if its argument follows that.
        """
        if self._unsent:
            packed = self._replicated(self._on_each(packed))
            arguments = self._on_each(np.zeros(1, np.int32))
            self._barrier(jax.make_array_from_single_device_arrays((1,), self._local, arguments))
            self._send()
        return packed

    def _send(self) -> None:
        """Dispatches the copies of the blocks to be fetched."""
        unsent, self._unsent = self._unsent, []
        for ticket, block, pages in unsent:
            self._fetched[ticket] = None
            self._try(partial(self._fetch, ticket, block, pages))

    def _fetch(self, ticket: int, block: int, pages: np.ndarray) -> None:
        """Copies a block and its page numbers, for which WRITE would otherwise wait behind the next blocks."""
        self._fetched[ticket] = [*self.to_device(self._blocks[block]), *self._on_each(pages)]

    def _on_each(self, array: np.ndarray | jax.Array) -> _Shards:
        return jax.device_put([array] * len(self._on_device), self._on_device)

    def _replicated(self, copies: _Shards) -> jax.Array:
        sharding = named_sharding(self._shape.sharding.mesh, ())
        return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, copies)

    def to_host(self, shards: Sequence[jax.Array]) -> _Shards:
        """Dispatches the copies of a block's shards to host memory."""
        return jax.device_put(list(shards), self._on_host)

    def to_device(self, shards: Sequence[jax.Array]) -> _Shards:
        """Dispatches the copies of a block's shards to the devices."""
        return jax.device_put(list(shards), self._on_device)

    def to_pinned(self, parts: Sequence[bytes]) -> _Shards:
        """Copies the parts of a block, as `content` returns them, to host memory. May be called from any thread.

        Raises:
          ValueError: They are not of this process's devices.
        """
        shape = self._shape.sharding.shard_shape(self._shape.shape)
        if len(parts) != len(self._on_host):
            raise ValueError(f"a block has {len(parts)} parts, and this process {len(self._on_host)} devices")
        arrays = [np.frombuffer(part, self._shape.dtype).reshape(shape) for part in parts]
        return jax.device_put(arrays, self._on_host)

    def adopt(self, block: int, shards: _Shards) -> None:
        """Makes the result of `to_pinned` a block."""
        self._blocks[block] = shards

    def content(self, block: int) -> tuple[bytes, ...]:
        """Returns the parts of a block. May be called from any thread, but beside no `run`.

        Raises:
          KeyError: The block could not be saved.
        """
        return tuple(np.asarray(shard).tobytes() for shard in self._blocks[block])

    def _try(self, copy: Callable[[], None], saved_block: int | None = None) -> None:
        """Dispatches a copy. In a single process an error of the devices fails this copy only."""
        try:
            copy()
        except (jax.errors.JaxRuntimeError, KeyError) as error:  # KeyError: the block itself could not be saved
            if not self._is_alone:
                raise
            _log.warning("a copy of KV cache pages to or from host memory failed, and is given up: %s", error)
            if saved_block is not None:
                is_full = isinstance(error, jax.errors.JaxRuntimeError) and is_out_of_memory(error)
                self._failed.append((saved_block, is_full))

    def _joined(self, fetched: _Shards) -> tuple[jax.Array, jax.Array]:
        shards, pages = fetched[: len(self._on_device)], fetched[len(self._on_device) :]
        block = jax.make_array_from_single_device_arrays(self._shape.shape, self._shape.sharding, shards)
        return block, self._replicated(pages)

    def has_arrived(self, ticket: int) -> bool | None:
        """Returns whether a fetched block is on the devices; None while it is on its way, False if it failed.

        A block that is not sent yet waits for the next step, which may be about to be planned, or for `wait`.
        """
        if any(ticket == unsent for unsent, *_ in self._unsent):
            return None
        shards = self._fetched[ticket]
        if shards is None:
            return False
        if not _are_ready(shards):
            return None
        try:
            jax.block_until_ready(shards)
        except jax.errors.JaxRuntimeError as error:
            if not self._is_alone:
                raise
            _log.warning("a copy of KV cache pages from host memory failed: %s", error)
            return False
        return True

    def wait(self, ticket: int) -> None:
        """Waits until a fetched block has arrived or failed."""
        self._send()
        _wait(self._fetched[ticket])

    def wait_saved(self) -> None:
        """Waits until the oldest block that is being copied to host memory is there, if there is one."""
        _wait(self._saving[0] if self._saving else None)

    def num_saving(self) -> int:
        """Returns how many blocks are being copied to host memory."""
        while self._saving and _are_ready(self._saving[0]):
            self._saving.popleft()
        return len(self._saving)

    def take_failed(self) -> list[tuple[int, bool]]:
        """Returns the blocks that could not be saved since the last call, and whether host memory was exhausted."""
        failed, self._failed = self._failed, []
        return failed

    def release(self) -> None:
        """Frees all blocks."""
        self._blocks.clear()
        self._unsent.clear()
        self._fetched.clear()
        self._saving.clear()
