"""Loads weights from a `TensorSource` straight into each device's shard.

A few threads read the source block by block. Each block is read once and scattered into every shard that needs a part
of it, so the host never holds the whole model:

* for accelerators, the host holds only the data in flight: at most `_MAX_FLIGHT_BYTES`, or one layer of one parameter;
* for CPU devices, which share the host's memory, the shards are filled in place without further buffers.

The result does not depend on thread timing: every element is written exactly once, from one place.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from .parameters import Parameter, Region, TensorSource, bounds, copies_into, part_of

_NUM_THREADS = min(8, 2 * (os.cpu_count() or 1))  # twice the cores, because about half of the threads wait for the disk
_MAX_FLIGHT_BYTES = 512 * 2**20
_ALIGNMENT = 64  # bytes; jax uses host memory with this alignment as a CPU device's buffer without a copy
_PROGRESS_DELAY_SECONDS = 2.0


def load_parameters(source: TensorSource, parameters: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """Loads each parameter onto its devices, with a progress bar if loading takes long.

    Raises:
      CheckpointError: the source is damaged.
    """
    num_bytes = sum(math.prod(p.shape) * p.dtype.itemsize for p in parameters.values())
    arrays: dict[str, _HostAssembly | _DeviceAssembly] = {}
    with progress_bar(num_bytes, "weights") as progress, _thread_pool() as pool:
        flight: deque[_Slab] = deque()

        def land() -> None:
            slab = flight.popleft()
            progress.update(slab.land())

        for name, parameter in parameters.items():
            assembly = (_HostAssembly if _is_on_host(parameter) else _DeviceAssembly)(parameter)
            for layer in range(parameter.num_layers or 1):
                flight.append(_Slab(assembly, layer, source, pool))
                while len(flight) > 1 and sum(slab.num_bytes for slab in flight) > _MAX_FLIGHT_BYTES:
                    land()
            arrays[name] = assembly
        while flight:
            land()
        return {name: assembly.array() for name, assembly in arrays.items()}


def progress_bar(num_bytes: int, what: str) -> tqdm:
    """Returns a bar of bytes and bytes per second. It appears only on a terminal, after a delay of 2 seconds."""
    delay = _PROGRESS_DELAY_SECONDS
    return tqdm(total=num_bytes, unit="B", unit_scale=True, desc=what, delay=delay, leave=False, disable=None)


@contextlib.contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    """Yields a thread pool that drops queued work on an error, so that the error is reported at once."""
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weights")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _is_on_host(parameter: Parameter) -> bool:
    return parameter.sharding.mesh.devices.flat[0].platform == "cpu"


class _HostAssembly:
    """A parameter on CPU devices. Each shard is host memory that becomes the device's buffer without a copy."""

    def __init__(self, parameter: Parameter):
        self.parameter = parameter
        self._shards = {
            index: _aligned(index, parameter.dtype) for index in _addressable(parameter.sharding, parameter.shape)
        }

    def blocks(self, layer: int) -> dict[Region, np.ndarray]:
        """Returns the memory of a layer's shards, keyed by their region in the layer."""
        if self.parameter.num_layers is None:
            return self._shards
        return {index[1:]: shard[layer] for index, shard in self._shards.items()}

    def land(self, layer: int, blocks: Mapping[Region, np.ndarray]) -> None:
        pass

    def array(self) -> jax.Array:
        return _place(self.parameter.shape, self.parameter.sharding, self._shards)


class _DeviceAssembly:
    """A parameter on accelerators. Its layers are uploaded one by one into a stacked array.

    The stack is zeroed first, which takes a few milliseconds at the speed of device memory.
    """

    def __init__(self, parameter: Parameter):
        self.parameter = parameter
        self._array: jax.Array | None = None
        self._shape, self._sharding = parameter.shape, parameter.sharding
        if parameter.num_layers is not None:
            spec = PartitionSpec(*parameter.sharding.spec[1:])
            self._shape, self._sharding = parameter.shape[1:], NamedSharding(parameter.sharding.mesh, spec)

    def blocks(self, layer: int) -> dict[Region, np.ndarray]:
        indices = _addressable(self._sharding, self._shape)
        return {index: _aligned(index, self.parameter.dtype) for index in indices}

    def land(self, layer: int, blocks: Mapping[Region, np.ndarray]) -> None:
        array = _place(self._shape, self._sharding, blocks)
        if self.parameter.num_layers is None:
            self._array = array
        else:
            if self._array is None:
                zeros = partial(jnp.zeros, self.parameter.shape, self.parameter.dtype)
                self._array = jax.jit(zeros, out_shardings=self.parameter.sharding)()
            self._array = _put_layer(self._array, array, layer)
        array.block_until_ready()  # the host memory is free for the next layer

    def array(self) -> jax.Array:
        assert self._array is not None
        return self._array


@partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)


class _Slab:
    """One layer of one parameter (or a whole unstacked parameter) being read. Reading starts on construction."""

    def __init__(
        self, assembly: "_HostAssembly | _DeviceAssembly", layer: int, source: TensorSource, pool: ThreadPoolExecutor
    ):
        self._assembly, self._layer = assembly, layer
        self._blocks = assembly.blocks(layer)
        self.num_bytes = sum(block.nbytes for block in self._blocks.values())
        shape = assembly.parameter.shape
        num_layers = assembly.parameter.num_layers
        self._layer_bytes = math.prod(shape) * assembly.parameter.dtype.itemsize // (num_layers or 1)
        copies = copies_into(assembly.parameter.pieces(layer), self._blocks)
        self._reads: list[Future[None]] = []
        for tensor, wanted in copies.items():
            for block in source.blocks(tensor):
                parts = [part for copy in wanted if (part := part_of(copy, block)) is not None]
                if parts:
                    self._reads.append(pool.submit(source.fill, tensor, block, parts))

    def land(self) -> int:
        """Waits for the reads and moves the data to the devices. Returns the bytes of the parameter this completes."""
        for read in self._reads:
            read.result()
        self._assembly.land(self._layer, self._blocks)
        return self._layer_bytes


def _addressable(sharding: NamedSharding, shape: tuple[int, ...]) -> list[Region]:
    """Returns the distinct blocks of an array on this process's devices, in mesh order."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(bounds(index, shape) for index in indices if index is not None))


def _aligned(index: Region, dtype: jnp.dtype) -> np.ndarray:
    """Allocates uninitialized, aligned memory for a block."""
    shape = [last - first for first, last in index]
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)


def _place(shape: tuple[int, ...], sharding: NamedSharding, blocks: Mapping[Region, np.ndarray]) -> jax.Array:
    """Puts the blocks on their devices and returns them as one array."""
    indices = sharding.addressable_devices_indices_map(shape)
    shards = [
        jax.device_put(blocks[bounds(index, shape)], device) for device, index in indices.items() if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
