"""The matrices of all adapter slots on the devices: their shapes, their split over shards, and how one is loaded.

A shard's part of A and B follows its part of the projection that they change: rows of B where it has rows, columns of A
where it has columns. So the product of a shard is added to its own result, before or without the sum over shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import shard_bytes
from meshserve.sharding.mesh import named_sharding, partition_spec

from ..backend.kernels import Kernels
from ..backend.products import Products
from ..model_files.model_config import ModelConfig
from .adapter_products import AdapterProducts, leaf
from .adapter_targets import targets_of
from .changes import NO_SLOT, AdapterChanges
from .peft_files import DOWN, UP, HostAdapter

LOADS_AT_ONCE = 2  # whose matrices lie beside the bank until the devices have copied them: of this step and the last
PART_BYTES = 16 << 20  # of matrices that are sent to another process at a time
WRITE, ALLOCATE_BANK = ("write adapter", 0), ("allocate adapters", 0)  # keys of its programs


class AdapterShape(NamedTuple):
    """The room for adapters on the devices."""

    num_slots: int
    rank: int  # to which the ranks of all are padded


class BankArray(NamedTuple):
    """An array of the bank."""

    shape: tuple[int, ...]  # [L, slots, ...]
    axes: tuple[str | None, ...]


def bank_arrays(model: ModelConfig, layout: ShardLayout, shape: AdapterShape) -> dict[str, BankArray]:
    """Returns the arrays of the bank by `adapter_products.leaf`, of the whole mesh."""
    embed, head, rank = model.embed_dim, model.head_dim, shape.rank
    queries, groups = layout.group_size * head, layout.num_groups
    # The dimensions of A and of B behind [L, slots], and the sharded axis of each.
    of_embed = (rank, embed), (None, None)
    both: dict[str, tuple[Any, Any]] = {
        "q_proj": (of_embed, ((groups, queries, rank), ("kv_heads", None, None))),
        "k_proj": (of_embed, ((groups, head, rank), ("kv_heads", None, None))),
        "v_proj": (of_embed, ((groups, head, rank), ("kv_heads", None, None))),
        "o_proj": (((rank, model.num_query_heads * head), (None, "query_heads")), ((embed, rank), (None, None))),
        "gate_proj": (of_embed, ((layout.mlp_dim, rank), ("mlp", None))),
        "up_proj": (of_embed, ((layout.mlp_dim, rank), ("mlp", None))),
        "down_proj": (((rank, layout.mlp_dim), (None, "mlp")), ((embed, rank), (None, None))),
    }
    leading = model.num_layers, shape.num_slots
    return {
        leaf(target, kind): BankArray((*leading, *sizes), (None, None, *axes))
        for target in targets_of(model)
        for kind, (sizes, axes) in zip((DOWN, UP), both[target], strict=True)
    }


def bank_bytes(
    model: ModelConfig, layout: ShardLayout, shape: AdapterShape | None, dtype: jnp.dtype, max_running: int
) -> int:
    """Returns the bytes of the bank on each device, with the table of requests' slots; 0 without one."""
    if shape is None:
        return 0
    total = max_running * jnp.dtype("int32").itemsize
    for array in bank_arrays(model, layout, shape).values():
        parts = layout.num_shards if any(array.axes) else 1
        total += int(np.prod(array.shape, dtype=np.int64)) // parts * jnp.dtype(dtype).itemsize
    return total


@dataclass(frozen=True, kw_only=True)
class AdapterBank:
    """Declares the arrays of the bank and its programs."""

    model: ModelConfig
    layout: ShardLayout
    shape: AdapterShape
    dtype: jnp.dtype
    mesh: Mesh
    max_running: int

    @cached_property
    def arrays(self) -> dict[str, BankArray]:
        return bank_arrays(self.model, self.layout, self.shape)

    @cached_property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments of a step that follow its weights, as shapes with shardings.

        The last is a table [max_running] of int32: the adapter slot of each request, by the request's own slot.
        """
        found = [self._placed(each.shape, self.dtype, each.axes) for each in self.arrays.values()]
        return (*found, self._placed((self.max_running,), jnp.dtype("int32"), (None,)))

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """How each of the leaves is split over the mesh."""
        return (*(partition_spec(each.axes) for each in self.arrays.values()), PartitionSpec())

    @property
    def device_bytes(self) -> int:
        """The bytes of the leaves on each device."""
        return shard_bytes(self.leaves)

    def bound(self, kernels: Kernels, leaves: tuple[jax.Array, ...], *, is_one: bool = False) -> Kernels:
        """Returns kernels whose `products_of` add the adapters of these leaves. Call inside `shard_map`.

        Args:
          kernels: The kernels of the server.
          leaves: This shard's part of `leaves`.
          is_one: Whether all tokens of a step that have an adapter have the same, whose matrices alone are read then.
        """
        *matrices, table = leaves
        bank = dict(zip(self.arrays, matrices, strict=True))

        def adapted(slots: jax.Array) -> Products:
            of_tokens = table.at[slots].get(mode="fill", fill_value=NO_SLOT)
            return AdapterProducts(kernels.linear, bank, of_tokens, jnp.max(of_tokens) if is_one else None)

        return kernels.with_adapters(adapted)

    def to_lower(self) -> dict[tuple[str, int], Callable[[], jax.stages.Lowered]]:
        """Returns how to lower the programs that allocate the bank and that write a slot of it."""
        return {ALLOCATE_BANK: self._lower_allocate, WRITE: self._lower_write}

    def _placed(self, shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(self.mesh, axes))

    def _lower_allocate(self) -> jax.stages.Lowered:
        *matrices, table = self.leaves

        def empty() -> tuple[jax.Array, ...]:
            return (
                *(jnp.zeros(each.shape, each.dtype) for each in matrices),
                jnp.full(table.shape, NO_SLOT, table.dtype),
            )

        return jax.jit(empty, out_shardings=tuple(each.sharding for each in self.leaves)).lower()

    def _lower_write(self) -> jax.stages.Lowered:
        matrices = self.leaves[:-1]
        values = [
            self._placed(_without_slots(each.shape), self.dtype, _without_slots(each.axes))
            for each in self.arrays.values()
        ]

        def write(matrices: Any, slot: jax.Array, values: Any) -> Any:
            return [bank.at[:, slot].set(new) for bank, new in zip(matrices, values, strict=True)]

        program = jax.jit(write, donate_argnums=0, out_shardings=[each.sharding for each in matrices])
        slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=named_sharding(self.mesh, ()))
        return program.lower(list(matrices), slot, values)

    def arranged(self, matrices: Mapping[tuple[str, str], np.ndarray]) -> list[np.ndarray]:
        """Returns an adapter's matrices in the order and layout of the bank, without the dimension of slots.

        Args:
          matrices: See `HostAdapter.matrices`. Those of targets that it does not change are zeros.
        """
        found = []
        for name, array in self.arrays.items():
            target, _, kind = name.partition(".")
            shape = _without_slots(array.shape)
            values = matrices.get((target, kind))
            found.append(
                np.zeros(shape, self.dtype) if values is None else self._in_layout(target, kind, values, shape)
            )
        return found

    def parts(self, matrices: Mapping[tuple[str, str], np.ndarray]) -> Iterator[np.ndarray]:
        """Yields an adapter's matrices as bytes for other processes, [n] uint8 each; see `joined`."""
        for array in self.arranged(matrices):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start in range(0, data.size, PART_BYTES):
                yield data[start : start + PART_BYTES]

    def joined(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what `arranged` returned where these parts are from."""
        data, start, found = np.concatenate(parts), 0, []
        for array in self.arrays.values():
            shape = _without_slots(array.shape)
            stop = start + int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
            found.append(data[start:stop].view(self.dtype).reshape(shape))
            start = stop
        assert start == data.size, "parts of an adapter are missing"
        return found

    def _in_layout(self, target: str, kind: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns one matrix of all layers in the layout of the mesh: heads by group, the MLP padded."""
        if target in ("k_proj", "v_proj") and kind == UP:
            heads = values.reshape(len(values), self.model.num_kv_heads, self.model.head_dim, -1)
            return np.repeat(heads, self.layout.repeats, axis=1)
        if target == "q_proj" and kind == UP:
            return values.reshape(shape)
        if values.shape == shape:
            return values
        return np.pad(values, [(0, size - given) for size, given in zip(shape, values.shape, strict=True)])


def _without_slots(dimensions: tuple[Any, ...]) -> tuple[Any, ...]:
    return (dimensions[0], *dimensions[2:])


class DeviceAdapters:
    """The bank of a running server. Dispatched in order with the steps: those before still have what was there."""

    def __init__(self, bank: AdapterBank, programs: Mapping[tuple[str, int], jax.stages.Compiled]):
        self.bank = bank
        self._allocate, self._write = programs[ALLOCATE_BANK], programs[WRITE]
        self._table = np.full(bank.max_running, NO_SLOT, np.int32)
        self.leaves: tuple[jax.Array, ...] = ()
        self._staged: list[np.ndarray] = []  # parts of an adapter from another process

    def allocate(self) -> None:
        """Allocates the bank, in which no slot has an adapter."""
        self.leaves = jax.block_until_ready(self._allocate())
        self._table = np.full(self.bank.max_running, NO_SLOT, np.int32)

    def release(self) -> None:
        """Frees the memory."""
        for array in self.leaves:
            array.delete()
        self.leaves = ()

    def apply(self, changes: AdapterChanges) -> None:
        """Loads adapters and sets the slots of requests, for the steps that are dispatched from now on."""
        for index, (slot, adapter) in enumerate(changes.loads):
            if index:  # there is memory for few adapters beside the bank; see `LOADS_AT_ONCE`
                jax.block_until_ready(self.leaves)
            assert isinstance(adapter, HostAdapter), adapter
            self.load(slot, adapter.matrices)
        self.set_slots(changes.request_slots)

    def load(self, slot: int, matrices: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Copies an adapter to a slot, for the steps that are dispatched from now on."""
        self._write_slot(slot, self.bank.arranged(matrices))

    def stage(self, part: np.ndarray) -> None:
        """Takes the next part of an adapter from another process; see `AdapterBank.parts`."""
        self._staged.append(part)

    def load_staged(self, slot: int) -> None:
        """Loads the adapter whose parts have been staged, like `load`."""
        parts, self._staged = self._staged, []
        jax.block_until_ready(self.leaves)  # see `apply`
        self._write_slot(slot, self.bank.joined(parts))

    def _write_slot(self, slot: int, arrays: Sequence[np.ndarray]) -> None:
        *before, table = self.leaves
        values = [
            _on_mesh(values, named_sharding(self.bank.mesh, _without_slots(each.axes)))
            for values, each in zip(arrays, self.bank.arrays.values(), strict=True)
        ]
        after = self._write(list(before), np.int32(slot), values)
        self.leaves = (*after, table)

    def set_slots(self, slots: Mapping[int, int]) -> None:
        """Sets the adapter slots of requests by their own slots, for the steps that are dispatched from now on."""
        if all(self._table[request_slot] == slot for request_slot, slot in slots.items()):
            return
        self._table = self._table.copy()  # the devices may still read the last one
        for request_slot, slot in slots.items():
            self._table[request_slot] = slot
        self.leaves = (*self.leaves[:-1], _on_mesh(self._table, named_sharding(self.bank.mesh, ())))


def _on_mesh(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns an array of the whole mesh, of which each process has all values and copies its part."""
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
