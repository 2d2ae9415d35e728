"""Keeps a server's host tier between two runs: reads its files at the start, and writes them at the end.

    start:  files -> checked, newest first, by threads -> host memory -> the engine finds their pages
    stop:   the engine has ended -> pages that only the devices hold -> blocks in host memory -> files

So a server that is replaced does not begin cold. docs/long_contexts.md tells what a restart costs.
"""

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..api.versions import installed_version
from ..engine.engine import Engine
from ..host_cache.block_files import BlockFiles, StoredBlock
from ..host_cache.host_cache import HostCache
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer
from ..supervision.supervisor import BackgroundTask, Supervisor
from .live_reshard import Resharder

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 20.0
_NUM_THREADS = 4  # SHA-256 takes about 1.5 GB/s of each


class PersistentHostCache:
    """The files of one engine's host tier.

    Args:
      directory: Where they are.
      key: What they are signed with; see `file_key`.
      engine: The engine, which has a host tier.
      resharder: Knows the server, whose TP size may change.

    Raises:
      ConfigError: The directory cannot be used.
    """

    def __init__(self, directory: Path, key: bytes, engine: Engine, resharder: Resharder):
        assert engine.host_cache is not None
        self._engine, self._host, self._resharder = engine, engine.host_cache, resharder
        self._files = BlockFiles(directory, key, self._host.size.block_bytes * resharder.server.mesh.size)
        self._is_stopping = threading.Event()
        self._reading: BackgroundTask | None = None
        self._host.on_clear = self._forget

    def begin(self, supervisor: Supervisor) -> None:
        """Begins to read the files, and waits for them, but not longer than a start may take: the rest comes later."""
        identity = self._identity()
        self._reading = supervisor.once("host-cache-files", lambda: self._read(identity), is_daemon=False)
        self._reading.join(_WAIT_SECONDS)

    def _forget(self) -> None:
        """Removes the files: what was flushed must not come back."""
        self._is_stopping.set()
        self._files.keep_only(())

    def _identity(self) -> str:
        runner = self._engine.runner
        assert isinstance(runner, StepRunner)
        return identity_of(self._resharder.server, self._host, runner.params)

    def _read(self, identity: str) -> None:
        started, num_pages, epoch = time.monotonic(), 0, self._host.epoch
        runner = self._engine.runner
        assert isinstance(runner, StepRunner) and runner.copies is not None
        names = self._files.newest_first()[: self._host.size.num_blocks]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for first in range(0, len(names), _NUM_THREADS):
                if self._is_stopping.is_set():
                    return
                reading = names[first : first + _NUM_THREADS]
                for name, block in zip(reading, pool.map(partial(self._files.read, identity), reading), strict=True):
                    if block is None:
                        self._files.remove(name)  # or it would be taken for the block's file at the stop
                        continue
                    try:
                        shards = runner.copies.to_pinned(block.parts)
                    except (ValueError, jax.errors.JaxRuntimeError) as error:
                        _log.warning("the rest of the host tier's files is not read: %s", error)
                        return
                    num_pages += len(block.keys)
                    self._host.adopt(epoch, block.keys, shards)
        if names:
            _log.info(
                "host tier: read %d pages of the last run from %d files in %.1f s",
                num_pages, len(names), time.monotonic() - started,
            )  # fmt: skip

    def close(self) -> None:
        """Writes the tier to its files. The engine has ended."""
        self._is_stopping.set()
        if self._reading is not None:
            self._reading.join()
        runner = self._engine.runner
        if self._engine.failure is not None or not isinstance(runner, StepRunner) or runner.copies is None:
            return  # the devices may be in any state
        if not runner.has_state:
            return  # asleep: the weights that the tier depends on are not there
        started, copies = time.monotonic(), runner.copies
        with self._resharder.compiling():
            identity = self._identity()
        self._host.save_rest(runner.copy_pages)
        oldest_first = self._host.blocks()
        names = {block: self._files.name_of(identity, keys) for block, keys in oldest_first}
        self._files.keep_only(names.values())

        has_failed = threading.Event()

        def write(block: int, keys: tuple[bytes, ...]) -> bool:
            if self._files.has(names[block]) or has_failed.is_set():
                return False
            try:
                return self._files.write(identity, StoredBlock(keys, copies.content(block)))
            except (OSError, KeyError, jax.errors.JaxRuntimeError) as error:
                _log.warning("the rest of the host tier is not written: %s", error)
                has_failed.set()
                return False

        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            num_written = sum(pool.map(write, *zip(*reversed(oldest_first), strict=True))) if oldest_first else 0
        self._files.keep_only(names.values())
        _log.info(
            "host tier: stored %d pages in %d files, of which %d are new, in %.1f s",
            self._host.num_pages, len(names), num_written, time.monotonic() - started,
        )  # fmt: skip


def identity_of(server: PlacedServer, host: HostCache, params: nnx.State) -> str:
    """Returns a digest of everything that the bits in a block depend on, the weights included."""
    facts = {
        "version": installed_version(),
        "model": dataclasses.asdict(server.model),
        "layout": dataclasses.asdict(server.layout),
        "dtypes": [str(server.dtype), str(server.cache_dtype)],
        "page_size": server.limits.page_size,
        "block_pages": host.size.block_pages,
        "weights": _fingerprint(jax.tree.leaves(params)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset | set) else str(value)


def _fingerprint(arrays: Iterable[jax.Array]) -> list[int]:
    """Returns a number for each array that depends on every bit of it."""
    return [int(np.asarray(_weighted_sum(array))) for array in arrays]


@jax.jit
def _weighted_sum(array: jax.Array) -> jax.Array:
    """Returns the sum of an array's bits with odd weights that depend on the place, modulo 2^32."""
    bits = array
    if jnp.issubdtype(array.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    total = bits.astype(jnp.uint32)
    for axis in range(array.ndim - 1, -1, -1):
        weights = (2 * jnp.arange(total.shape[axis], dtype=jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
        total = (total * weights).sum(axis=axis, dtype=jnp.uint32)
    return total
