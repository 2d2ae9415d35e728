"""Bytes of device memory: what a KV page costs, and how many fit."""

import math

import jax
from jax.sharding import Mesh

_CPU_CACHE_BYTES = 1 << 30  # virtual CPU devices share the host's memory: a modest cache for all of them together


def free_bytes(mesh: Mesh, fraction: float, kept_bytes: int = 0) -> int:
    """What is left of `fraction` of the fullest device's memory, given what is allocated now and what is to be kept."""
    if mesh.devices.flat[0].platform == "cpu":
        return _CPU_CACHE_BYTES // mesh.size
    left = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        left.append(int(stats["bytes_limit"] * fraction) - stats["bytes_in_use"] - kept_bytes)
    return min(left)


def num_pages_that_fit(mesh: Mesh, fraction: float, page_bytes: int, kept_bytes: int = 0) -> int:
    """Pages of `page_bytes` (of one device's shard) that fit into the free memory if `kept_bytes` of it are kept free.

    Raises:
      MemoryError: not even one.
    """
    available = free_bytes(mesh, fraction, kept_bytes)
    if available < page_bytes:
        raise MemoryError(
            f"{available / 2**30:.2f} GiB are left on each device for the KV cache after the weights, less than one "
            f"page ({page_bytes / 2**20:.1f} MiB). Raise tp, raise memory_fraction, or use a smaller dtype."
        )
    return available // page_bytes


def shard_bytes(arrays: object) -> int:
    """Bytes that a tree of arrays takes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
