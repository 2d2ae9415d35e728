"""Writes the Orbax checkpoints that `checkpoint.py` reads, part by part, so that an interrupted run can resume."""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    ArrayDigest,
    Manifest,
    PartDigest,
    crc32,
    digest_file,
    num_bytes,
    open_array,
    part_directory,
    read_block,
    sha256,
)
from .parameters import Region, bounds, relative
from .storage import is_remote, read_text

_CHUNK_BYTES = 16 * 2**20  # the unit in which tensors are read and held in memory
_SPLITS = 16  # up to this TP size, every shard consists of whole chunks


def storage_sharding(shape: tuple[int, ...], axis: int | None, devices: list[jax.Device]) -> NamedSharding:
    """Shards an array over devices along the axis that serving will shard.

    Orbax never stores a chunk that spans two devices, so each shard of the served model consists of whole chunks. The
    number of devices is the largest one up to 16 that divides the axis.
    """
    num_parts = 1
    if axis is not None:
        num_parts = max(count for count in range(1, min(_SPLITS, len(devices)) + 1) if shape[axis] % count == 0)
    spec = [None if dimension != axis else "parts" for dimension in range(len(shape))]
    return NamedSharding(Mesh(np.asarray(devices[:num_parts]), ("parts",)), PartitionSpec(*spec))


class CheckpointWriter:
    """Writes parts into a directory and finally the manifest, which completes the checkpoint.

    Args:
      directory: where the checkpoint is written.
      source_id: identifies the source of the weights. Parts of an earlier run with the same ID are reused.
    """

    def __init__(self, directory: epath.Path, source_id: str):
        self._directory, self._source_id = directory, source_id
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
        self._checkpointer = ocp.Checkpointer(handler)
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        (directory / "digests").mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST_FILE).exists():
            (directory / MANIFEST_FILE).unlink()  # marks the checkpoint as incomplete until `finish`

    def has(self, part: str) -> bool:
        """Returns whether an earlier run wrote the part from the same source. Reads the part to verify its digests."""
        try:
            digest = PartDigest.from_json(read_text(digest_file(self._directory, part)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if digest.source_id != self._source_id:
            return False
        is_whole = partial(self._is_whole, part_directory(self._directory, part))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return all(pool.map(is_whole, digest.arrays, digest.arrays.values()))

    def write(self, part: str, arrays: Mapping[str, jax.Array]) -> None:
        """Writes a part: first the Orbax files, then the digests, computed from memory rather than from the files."""
        tree: dict[str, Any] = {}
        for key, array in arrays.items():
            *parents, leaf = key.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = array
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        target = part_directory(self._directory, part)
        self._checkpointer.save(target, args=ocp.args.PyTreeSave(tree, save_args=save_args), force=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(partial(self._digest, target), arrays, arrays.values())
            digests = dict(zip(arrays, found, strict=True))
        digest = PartDigest(source_id=self._source_id, arrays=digests)
        _write_atomically(digest_file(self._directory, part), digest.to_json())

    def finish(self, parts: list[str], *, dtype: str, source: Mapping[str, str], version: str) -> int:
        """Writes the manifest. Returns the total size of all arrays in bytes."""
        texts = {part: read_text(digest_file(self._directory, part)) for part in parts}
        total = sum(num_bytes(PartDigest.from_json(text).arrays) for text in texts.values())
        manifest = Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            meshserve_version=version,
            dtype=dtype,
            num_bytes=total,
            source=source,
            parts={part: sha256(text) for part, text in texts.items()},
        )
        _write_atomically(self._directory / MANIFEST_FILE, json.dumps(asdict(manifest), indent=2))
        return total

    def _is_whole(self, directory: epath.Path, key: str, digest: ArrayDigest) -> bool:
        try:
            store = open_array(directory, key, self._context, digest)
            blocks = zip(digest.blocks(), digest.crc32, strict=True)
            return all(crc32(read_block(store, block)) == expected for block, expected in blocks)
        except (ValueError, OSError):
            return False

    def _digest(self, directory: epath.Path, key: str, array: jax.Array) -> ArrayDigest:
        store = open_array(directory, key, self._context)
        digest = ArrayDigest(
            shape=array.shape, dtype=array.dtype.name, block=tuple(store.chunk_layout.read_chunk.shape), crc32=()
        )
        shards = list(_shards(array))
        return replace(digest, crc32=tuple(crc32(_block(shards, block)) for block in digest.blocks()))


def _shards(array: jax.Array) -> Iterator[tuple[Region, np.ndarray]]:
    for shard in array.addressable_shards:
        yield bounds(shard.index, array.shape), np.asarray(shard.data)


def _block(shards: list[tuple[Region, np.ndarray]], block: Region) -> np.ndarray:
    """Returns a block of an array; the block must lie within one shard."""
    for region, values in shards:
        if all(start <= first and last <= stop for (first, last), (start, stop) in zip(block, region, strict=True)):
            return values[relative(block, region)]
    raise AssertionError(f"block {block} lies across shards {[region for region, _ in shards]}")


def _write_atomically(path: epath.Path, text: str) -> None:
    """Writes a file so that readers see either the old or the new text. Object stores guarantee this themselves."""
    if is_remote(path):
        path.write_text(text)
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
