"""Computes how much device memory is free, how many KV pages fit, and whether the weights fit."""

import math
from pathlib import Path

import jax
from jax.sharding import Mesh

_MANY_BYTES = 1 << 62
CPU_CACHE_BYTES = 1 << 30  # for all virtual CPU devices together, which share the host's memory


def free_bytes(mesh: Mesh, fraction: float, reserved_bytes: int = 0) -> int:
    """Returns the bytes that remain on the fullest device, out of `fraction` of its memory.

    Memory in use now and `reserved_bytes` are subtracted. The result is a very large number if no device reports its
    memory, as behind a proxy.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return CPU_CACHE_BYTES // mesh.size
    left = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        is_known = stats is not None and "bytes_limit" in stats
        left.append(
            int(stats["bytes_limit"] * fraction) - stats["bytes_in_use"] - reserved_bytes if is_known else _MANY_BYTES
        )
    return min(left)


def num_pages_that_fit(mesh: Mesh, fraction: float, page_bytes: int, reserved_bytes: int = 0) -> int:
    """Returns how many pages of `page_bytes` fit into a device's free memory, less `reserved_bytes`.

    Raises:
      MemoryError: not even one page fits, or the devices do not report their memory.
    """
    available = free_bytes(mesh, fraction, reserved_bytes)
    if available == _MANY_BYTES:
        raise MemoryError(
            "the devices do not report how much memory they have. Set the number of KV cache pages with --num-pages; "
            "`meshserve plan` computes how many fit on a slice."
        )
    if available < page_bytes:
        raise MemoryError(
            f"{available / 2**30:.2f} GiB are left on each device for the KV cache after the weights, less than one "
            f"page ({page_bytes / 2**20:.1f} MiB). Raise tp, raise memory_fraction, or use a smaller dtype."
        )
    return available // page_bytes


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Returns whether a device, or the compiler for one, ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def memory_use(mesh: Mesh) -> str:
    """Returns how much of the memory of this process's devices is in use, for messages."""
    shares = []
    for device in mesh.local_devices:
        stats = device.memory_stats() or {}
        used, limit = stats.get("bytes_in_use"), stats.get("bytes_limit")
        shares.append(f"{_gib(used)} of {_gib(limit)}" if used is not None and limit else "an unknown share")
    return f"while {', '.join(shares)} of the devices' memory are in use"


def shard_bytes(arrays: object) -> int:
    """Returns the bytes that a tree of arrays takes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def added_bytes(program: jax.stages.Compiled) -> int:
    """Returns the bytes that a compiled program needs on each device in addition to its arguments."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def check_weights_fit(
    mesh: Mesh, fraction: float, weight_bytes: int, *, page_bytes: int = 0, held_bytes: int = 0
) -> None:
    """Checks, before any weight is read, that the weights fit on the devices.

    Args:
      mesh: the mesh that will hold the weights.
      fraction: the share of each device's memory that may be used.
      weight_bytes: bytes of the weights on each device.
      page_bytes: bytes of one page of the KV cache on each device.
      held_bytes: bytes on each device that are in use now but will be freed before the weights are loaded.

    Raises:
      MemoryError: the weights do not fit; the message says by how much.
    """
    if mesh.devices.flat[0].platform == "cpu":
        needed, available = weight_bytes + page_bytes, host_free_bytes() // mesh.size + held_bytes
        limit = "its share of the machine's free memory"
        remedy = "Use a machine with more memory, or a smaller dtype"
    else:
        needed, available = weight_bytes + page_bytes, free_bytes(mesh, fraction, 0) + held_bytes
        limit = f"the memory that memory_fraction {fraction} leaves there"
        remedy = "Raise tp, raise memory_fraction, or use a smaller dtype"
    if needed > available:
        page = " and one page of the KV cache" if page_bytes else ""
        raise MemoryError(
            f"the weights{page} take {_gib(needed)} on each of {mesh.size} {mesh.devices.flat[0].platform} device(s); "
            f"{limit} is {_gib(max(available, 0))}, {_gib(needed - max(available, 0))} too little. {remedy}. "
            "No weight was read."
        )


def host_free_bytes() -> int:
    """Returns the bytes this process can still allocate: the machine's free memory, or less under a container limit.

    The result is a very large number on systems that do not report it (other than Linux).
    """
    free = [_MANY_BYTES]
    meminfo = _read("/proc/meminfo")
    free += [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        cached = [line.split()[1] for line in _read("/sys/fs/cgroup/memory.stat").splitlines() if line[:5] == "file "]
        free.append(int(limit) - int(used) + sum(map(int, cached)))  # the kernel reclaims file pages
    return min(free)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
