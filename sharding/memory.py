"""Bytes of device memory: what a KV page costs, and how many fit."""

import math
from pathlib import Path

import jax
from jax.sharding import Mesh

_MANY_BYTES = 1 << 62
CPU_CACHE_BYTES = 1 << 30  # virtual CPU devices share the host's memory: a modest cache for all of them together


def free_bytes(mesh: Mesh, fraction: float, reserved_bytes: int = 0) -> int:
    """What is left of `fraction` of the fullest device's memory, given what is allocated now and what is to be kept.

    Without bound where a device does not tell, as behind a proxy.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return CPU_CACHE_BYTES // mesh.size
    left = []
    for device in mesh.local_devices:
        stats = device.memory_stats()
        is_told = stats is not None and "bytes_limit" in stats
        left.append(
            int(stats["bytes_limit"] * fraction) - stats["bytes_in_use"] - reserved_bytes if is_told else _MANY_BYTES
        )
    return min(left)


def num_pages_that_fit(mesh: Mesh, fraction: float, page_bytes: int, reserved_bytes: int = 0) -> int:
    """Returns how many pages of `page_bytes` fit into a device's free memory, less `reserved_bytes`.

    Raises:
      MemoryError: not even one, or the devices do not tell.
    """
    available = free_bytes(mesh, fraction, reserved_bytes)
    if available == _MANY_BYTES:
        raise MemoryError(
            "the devices do not tell how much memory they have. Say how many pages the KV cache takes: --num-pages; "
            "`meshserve plan` knows how many fit on a slice."
        )
    if available < page_bytes:
        raise MemoryError(
            f"{available / 2**30:.2f} GiB are left on each device for the KV cache after the weights, less than one "
            f"page ({page_bytes / 2**20:.1f} MiB). Raise tp, raise memory_fraction, or use a smaller dtype."
        )
    return available // page_bytes


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether a device, or the compiler for one, has too little room."""
    return "RESOURCE_EXHAUSTED" in str(error)


def shard_bytes(arrays: object) -> int:
    """Bytes that a tree of arrays takes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def added_bytes(program: jax.stages.Compiled) -> int:
    """What a compiled program needs on each device beside its arguments."""
    analysis = program.memory_analysis()
    if analysis is None:
        return 0
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def check_weights_fit(
    mesh: Mesh, fraction: float, weight_bytes: int, *, page_bytes: int = 0, held_bytes: int = 0
) -> None:
    """Refuses weights for which the devices are too small, before any is read.

    Args:
      weight_bytes, page_bytes: what the weights and one page of the cache take on each device.
      held_bytes: what will be free on each device by then.

    Raises:
      MemoryError: names what is short and by how much.
    """
    if mesh.devices.flat[0].platform == "cpu":
        needed, available = weight_bytes + page_bytes, host_free_bytes() // mesh.size + held_bytes
        limit = "its part of the machine's free memory"
        remedy = "Use a machine with more memory, or a smaller dtype"
    else:
        needed, available = weight_bytes + page_bytes, free_bytes(mesh, fraction, 0) + held_bytes
        limit = f"what memory_fraction {fraction} leaves there"
        remedy = "Raise tp, raise memory_fraction, or use a smaller dtype"
    if needed > available:
        page = " and one page of the KV cache" if page_bytes else ""
        raise MemoryError(
            f"the weights{page} take {_gib(needed)} on each of {mesh.size} {mesh.devices.flat[0].platform} device(s); "
            f"{limit} is {_gib(max(available, 0))}, {_gib(needed - max(available, 0))} too little. {remedy}. "
            "No weight was read."
        )


def host_free_bytes() -> int:
    """What this process can still allocate: the machine's free memory, or less in a container with a limit.

    Where the system does not tell (it is not Linux) this is without bound.
    """
    free = [_MANY_BYTES]
    meminfo = _read("/proc/meminfo")
    free += [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        cached = [line.split()[1] for line in _read("/sys/fs/cgroup/memory.stat").splitlines() if line[:5] == "file "]
        free.append(int(limit) - int(used) + sum(map(int, cached)))  # the kernel gives file pages back
    return min(free)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
