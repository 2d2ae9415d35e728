"""Reads weights from Orbax checkpoints and verifies their digests.

    DIR/checkpoint.json         manifest: dtype, source, and the SHA-256 of every part's digest file. Written last
    DIR/weights/PART/           a separate Orbax checkpoint (OCDBT, uncompressed): one layer, or an embedding table
    DIR/digests/PART.json       shape and dtype of the part's arrays, and the CRC-32 of each of their blocks
    DIR/config.json, ...        the model's other files, unchanged

A tensor is named PART.KEY, for example `layers.0007.attention.qkv`. Parts make writing resumable: Orbax renames a part
into place once it is complete. Blocks are the chunks that Orbax stores. Each block is read whole, and its CRC-32 is
checked before any of its bytes are used. A plain Orbax restore can read a part as well. This module reads the chunks
with TensorStore directly, because a shard may need parts of arrays, repeated and padded.
"""

import hashlib
import json
import math
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
from etils import epath

from .parameters import CheckpointError, Copy, Region, assign, check_tensors, relative
from .storage import file_within, is_remote, parse_header, read_text, sizes

MANIFEST_FILE = "checkpoint.json"
FORMAT = "meshserve orbax"
FORMAT_VERSION = 1
_MAX_BLOCKS = 2**22  # of an array
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of checkpoint.json."""

    format: str
    format_version: int
    meshserve_version: str
    dtype: str
    num_bytes: int  # in all arrays
    source: Mapping[str, str]  # SHA-256 of each source weight file, by name
    parts: Mapping[str, str]  # SHA-256 of each part's digest file


@dataclass(frozen=True, kw_only=True)
class ArrayDigest:
    """The digest of a stored array: its block grid and the CRC-32 of each block, in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...]  # shape of a block; the last block along each dimension may be smaller
    crc32: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return math.prod(-(-length // step) for length, step in zip(self.shape, self.block, strict=True))

    def blocks(self) -> list[Region]:
        axes = [
            [(start, min(start + step, length)) for start in range(0, length, step)]
            for length, step in zip(self.shape, self.block, strict=True)
        ]
        return list(product(*axes))


@dataclass(frozen=True, kw_only=True)
class PartDigest:
    """The contents of digests/PART.json. `source_id` identifies the conversion that wrote the part."""

    source_id: str
    arrays: Mapping[str, ArrayDigest]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PartDigest":
        """Parses the JSON text.

        Raises:
          ValueError, KeyError or TypeError: the text is not a valid part digest.
        """
        raw = parse_header(text)
        arrays = {
            name: ArrayDigest(
                shape=sizes(array["shape"]),
                dtype=array["dtype"],
                block=sizes(array["block"], low=1),
                crc32=sizes(array["crc32"], most=_MAX_BLOCKS, high=2**32 - 1),
            )
            for name, array in raw["arrays"].items()
        }
        for name, array in arrays.items():
            if array.dtype not in DTYPES or array.num_blocks != len(array.crc32):
                raise ValueError(f"{name} has an unknown dtype or the wrong number of checksums")
        return cls(source_id=raw["source_id"], arrays=arrays)


def part_directory(directory: epath.Path, part: str) -> epath.Path:
    return directory / "weights" / part


def digest_file(directory: epath.Path, part: str) -> epath.Path:
    return directory / "digests" / f"{part}.json"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def crc32(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def read_manifest(directory: epath.Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
      CheckpointError: the checkpoint is incomplete, damaged, or in a format that this release cannot read.
    """
    path = directory / MANIFEST_FILE
    try:
        raw: dict[str, Any] = parse_header(read_text(path))
        if (raw["format"], raw["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{path} has another format or version than this release reads, {FORMAT!r}, version {FORMAT_VERSION}. "
                "Convert the model again."
            )
        manifest = Manifest(**raw)
        if not isinstance(manifest.parts, dict):
            raise TypeError("parts is not an object")
        return manifest
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: the conversion did not end. Run it again; it resumes where it stopped."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). Convert the model again.") from None


class OrbaxCheckpoint:
    """A local or remote checkpoint written by `writer.py`, as a `Source` of tensors.

    Raises:
      CheckpointError: see `read_manifest`; or a part is missing, damaged, or comes from another checkpoint.
    """

    def __init__(self, directory: epath.PathLike):
        self._directory = epath.Path(directory)
        self.manifest = read_manifest(self._directory)
        self._arrays: dict[str, tuple[str, str, ArrayDigest]] = {}  # part, key, digest
        self._crcs: dict[str, dict[Region, int]] = {}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 16 * 2**20}})  # for the nodes of the B-tree
        self._stores: dict[str, Any] = {}
        self._opening = threading.Lock()
        for part, digest in self.manifest.parts.items():
            self._add(part, digest)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the checkpoint holds exactly the arrays that a model needs.

        Raises:
          CheckpointError: arrays are missing, unexpected, or of the wrong shape; the message names them.
        """
        check_tensors(self._directory, {name: array.shape for name, (_, _, array) in self._arrays.items()}, expected)

    def names(self) -> list[str]:
        return list(self._arrays)

    def blocks(self, tensor: str) -> Sequence[Region]:
        return list(self._crcs[tensor])

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        values = self._read(tensor, block)
        for copy in copies:
            assign(copy.target, values[relative(copy.region, block)])

    def verify(self, tensor: str) -> int:
        """Reads a whole tensor and checks its digests.

        Returns:
          The tensor's size in bytes.

        Raises:
          CheckpointError: the tensor is damaged.
        """
        return sum(self._read(tensor, block).nbytes for block in self.blocks(tensor))

    def _read(self, tensor: str, block: Region) -> np.ndarray:
        part = self._arrays[tensor][0]
        where = f"{part_directory(self._directory, part)}, array {tensor}"
        try:
            values = read_block(self._store(tensor), block)
        except (ValueError, OSError) as error:
            reason = str(error).split(" [source locations")[0]
            raise CheckpointError(f"{where}: cut short or damaged ({reason}). Convert the model again.") from None
        if crc32(values) != self._crcs[tensor][block]:
            raise CheckpointError(
                f"{where}: the block at {block} differs from what was written (its CRC-32 differs). The disk or the "
                "copy is bad; convert or copy the model again."
            )
        return values

    def _store(self, tensor: str) -> Any:
        """Returns the opened array, whose shape and dtype match the digest."""
        with self._opening:
            store = self._stores.get(tensor)
        if store is None:
            part, key, digest = self._arrays[tensor]
            store = open_array(part_directory(self._directory, part), key, self._context, digest)
            with self._opening:
                self._stores[tensor] = store
        return store

    def _add(self, part: str, expected: str) -> None:
        file_within(self._directory, part, str(self._directory / MANIFEST_FILE))
        path = digest_file(self._directory, part)
        try:
            text = read_text(path)
            digest = PartDigest.from_json(text)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist. Copy or convert the model again.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is cut short or damaged ({error}). Convert the model again.") from None
        if sha256(text) != expected:
            raise CheckpointError(
                f"{path} does not match {MANIFEST_FILE} (its SHA-256 differs): it is damaged, or part {part} comes "
                "from another model. Copy or convert the model again."
            )
        for key, array in digest.arrays.items():
            name = f"{part}.{key}" if key != part else part
            self._arrays[name] = (part, key, array)
            self._crcs[name] = dict(zip(array.blocks(), array.crc32, strict=True))


def open_array(directory: epath.Path, key: str, context: ts.Context, digest: ArrayDigest | None = None) -> Any:
    """Opens an array of an Orbax checkpoint for reading.

    Raises:
      ValueError: TensorStore cannot open it, or its shape or dtype differs from the digest.
    """
    text = os.fspath(directory)
    base = f"{text}/" if is_remote(text) else f"file://{text}/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
    store = ts.open(spec, open=True, read=True, context=context).result()
    found = tuple(store.shape), store.dtype.numpy_dtype
    if digest is not None and found != (digest.shape, DTYPES[digest.dtype]):
        raise ValueError(f"the array is {store.dtype.name} {tuple(store.shape)}, not {digest.dtype} {digest.shape}")
    return store


def read_block(store: Any, block: Region) -> np.ndarray:
    """Reads a block of an open array.

    Raises:
      ValueError, OSError: TensorStore cannot read it: a node's checksum is wrong, a chunk is cut short, or a file is
        missing.
    """
    return store[tuple(slice(first, last) for first, last in block)].read().result()


def num_bytes(arrays: Mapping[str, ArrayDigest]) -> int:
    return sum(math.prod(array.shape) * DTYPES[array.dtype].itemsize for array in arrays.values())
