"""Reads the tensors of safetensors files, local or remote, into shards.

A file is eight bytes with the length of a JSON header, the header (dtype, shape and byte range of each tensor), and the
tensors' bytes (https://huggingface.co/docs/safetensors#format). Rows that are contiguous both in the file
and in a shard are read straight into the shard. Columns go through a buffer of `_BLOCK_BYTES` that each thread reuses.
The safetensors library makes one more copy of every slice, holds the interpreter lock meanwhile, and maps the whole
file: docs/decisions/033-weight-libraries.md has the figures.
"""

import fnmatch
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from .parameters import CheckpointError, Copy, Region, assign, check_tensors, listed, relative
from .storage import File, file_within, open_file, parse_header, read_text, sizes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),  # the exponents of powers of two, as bytes
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
FLOATS = ("BF16", "F16", "F32")  # the dtypes of weights that are not quantized
_BLOCK_BYTES = 8 * 2**20
_COMPARING_THREADS = 4
_MAX_HEADER_BYTES = 32 << 20  # 235 billion parameters in a single file need 11 MB


@dataclass(frozen=True)
class _Tensor:
    path: epath.Path
    file: File
    offset: int  # the first byte's position in the file
    shape: tuple[int, ...]
    dtype: np.dtype
    dtype_name: str  # as the file has it

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class TensorFiles:
    """The safetensors files of a model directory: a single file, or the files listed in an index.

    Args:
      directory: the directory.
      single_file: the name of the only file to read, without looking for an index; empty looks for a model's.

    Raises:
      CheckpointError: no files were found, or one is missing, cut short, or damaged.
    """

    def __init__(self, directory: epath.PathLike, single_file: str = ""):
        self._directory = epath.Path(directory)
        self._single_file = single_file
        self._tensors: dict[str, _Tensor] = {}
        self._memory = threading.local()
        single = [file_within(self._directory, single_file, "the tensors")] if single_file else []
        for path in single or weight_files(self._directory):
            self._add(path)

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        ignored: frozenset[str] = frozenset(),
        dtypes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Checks that the files hold the tensors that a model needs.

        Args:
          expected: shapes of the tensors that the model needs.
          ignored: tensors that may be present but are not used.
          dtypes: allowed dtypes of single tensors; all others must have one of `FLOATS`.

        Raises:
          CheckpointError: tensors are missing, unexpected, of the wrong shape, or of an unsupported dtype; the message
            names them.
        """
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_tensors(self._directory, shapes, expected, ignored)
        wrong: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(self._tensors.keys() - ignored):
            allowed, found = tuple((dtypes or {}).get(name, FLOATS)), self._tensors[name].dtype_name
            if found not in allowed:
                wrong.setdefault(allowed, []).append(f"{name} is {found}")
        if wrong:
            lines: list[str] = []
            for kinds, texts in wrong.items():
                lines += listed(f"of a dtype other than {', '.join(kinds)}", texts)
            raise CheckpointError(f"{self._directory} cannot be served:\n  " + "\n  ".join(lines))

    def differ(self, one: str, other: str) -> bool:
        """Returns whether both tensors are there and their values differ. Reads both, a block at a time.

        Raises:
          CheckpointError: a file cannot be read.
        """
        if one not in self._tensors or other not in self._tensors:
            return False
        first, second = self._tensors[one], self._tensors[other]
        if first.shape != second.shape or not {first.dtype_name, second.dtype_name} <= set(FLOATS):
            return True
        pool = ThreadPoolExecutor(_COMPARING_THREADS)
        try:
            return any(pool.map(lambda block: self._differ_in(first, second, block), self.blocks(one)))
        finally:
            pool.shutdown(cancel_futures=True)

    def _differ_in(self, first: _Tensor, second: _Tensor, block: Region) -> bool:
        shape = [last - start for start, last in block]
        one, other = np.empty(shape, first.dtype), np.empty(shape, second.dtype)
        self._read(first, block[0], one)
        self._read(second, block[0], other)
        if one.dtype != other.dtype:
            return not np.array_equal(one.astype(np.float32), other.astype(np.float32))
        return one.tobytes() != other.tobytes()  # numpy compares bfloat16 slowly

    def add_prefix(self, prefix: str) -> None:
        """Makes the names of all tensors begin with `prefix`."""
        self._tensors = {prefix + name: tensor for name, tensor in self._tensors.items()}

    def rename(self, tensor: str, name: str) -> None:
        """Gives a tensor another name. A scalar becomes an array of one element."""
        stored = self._tensors.pop(tensor)
        self._tensors[name] = replace(stored, shape=stored.shape or (1,))

    def divide(self, tensor: str, parts: Sequence[Sequence[str]]) -> None:
        """Replaces a tensor [E, R, C] by matrices of equal size, which lie in it one after another.

        Args:
          tensor: its name.
          parts: for each of the E indices, the names of the matrices whose rows together are the R rows.

        Raises:
          CheckpointError: it has another shape.
        """
        stored, num_parts = self._tensors.pop(tensor), len(parts[0])
        if len(stored.shape) != 3 or stored.shape[0] != len(parts) or stored.shape[1] % num_parts:
            raise CheckpointError(
                f"{self._directory}: {tensor} is {stored.shape}; it must have {len(parts)} matrices, of a multiple of "
                f"{num_parts} rows each."
            )
        shape = stored.shape[1] // num_parts, stored.shape[2]
        for index, name in enumerate(itertools.chain(*parts)):
            offset = stored.offset + index * math.prod(shape) * stored.dtype.itemsize
            self._tensors[name] = replace(stored, offset=offset, shape=shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype_name(self, tensor: str) -> str:
        """Returns the dtype of a tensor as its file has it."""
        return self._tensors[tensor].dtype_name

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def matching(self, patterns: Sequence[str]) -> frozenset[str]:
        """Returns the names that match one of some patterns, in which * stands for any text."""
        return frozenset(itertools.chain(*(fnmatch.filter(self._tensors, pattern) for pattern in patterns)))

    def is_quantized(self, tensor: str) -> bool:
        """Returns whether a tensor has a dtype other than `FLOATS`."""
        return self._tensors[tensor].dtype_name not in FLOATS

    def read(self, tensor: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Returns a tensor, or some of its rows.

        Raises:
          CheckpointError: the file cannot be read.
        """
        stored = self._tensors[tensor]
        num_rows, *others = stored.shape or (1,)  # a scalar is read as a row
        first, last = rows if rows is not None else (0, num_rows)
        values = np.empty((last - first, *others), stored.dtype)
        self._read(stored, (first, last), values)
        return values if stored.shape else values.reshape(())

    def view_as_bytes(self, tensor: str) -> None:
        """Makes a tensor of integers appear as bytes, with as many more columns, lowest byte first."""
        stored = self._tensors[tensor]
        *leading, columns = stored.shape
        shape = (*leading, columns * stored.dtype.itemsize)
        self._tensors[tensor] = replace(stored, shape=shape, dtype=DTYPES["U8"], dtype_name="U8")

    def blocks(self, tensor: str) -> Sequence[Region]:
        """Returns blocks of whole rows, each of about `_BLOCK_BYTES`."""
        stored = self._tensors[tensor]
        num_rows = stored.shape[0]
        step = max(1, _BLOCK_BYTES // stored.row_bytes)
        rest = tuple((0, length) for length in stored.shape[1:])
        return [((row, min(row + step, num_rows)), *rest) for row in range(0, num_rows, step)]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """Reads what the copies need. Whole rows that need no conversion are read straight into their target."""
        stored = self._tensors[tensor]
        through_memory = []
        for copy in copies:
            is_whole = all(
                bounds == (0, length) for bounds, length in zip(copy.region[1:], stored.shape[1:], strict=True)
            )
            if is_whole and copy.target.dtype == stored.dtype and copy.target.flags.c_contiguous:
                self._read(stored, copy.region[0], copy.target)
            else:
                through_memory.append(copy)
        if through_memory:
            values = self._scratch([last - first for first, last in block], stored.dtype)
            self._read(stored, block[0], values)
            for copy in through_memory:
                assign(copy.target, values[relative(copy.region, block)])

    def _read(self, stored: _Tensor, rows: tuple[int, int], target: np.ndarray) -> None:
        stored.file.read_into(stored.offset + rows[0] * stored.row_bytes, target.reshape(-1).view(np.uint8))

    def _scratch(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Returns this thread's buffer, which is reused because allocating memory costs more than the copy."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = getattr(self._memory, "bytes", None)
        if memory is None or memory.size < num_bytes:
            memory = self._memory.bytes = np.empty(num_bytes, np.uint8)
        return memory[:num_bytes].view(dtype).reshape(shape)

    def _add(self, path: epath.Path) -> None:
        wanted = path.name if self._single_file else f"{SINGLE_FILE} or the files of its index"
        file = open_file(path, f"The directory must hold {wanted}.")
        try:
            self._parse(path, file)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is cut short or damaged ({error}). Download it again.") from None

    def _parse(self, path: epath.Path, file: File) -> None:
        """Reads the header. An error in the header raises one of the exceptions that `_add` catches.

        Raises:
          CheckpointError: a tensor is in another file as well.
        """
        if file.size < 8:
            raise ValueError(f"it has {file.size} bytes")
        header_bytes = int.from_bytes(_bytes(file, 0, 8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file.size - 8):
            raise ValueError(f"its header length is {header_bytes} bytes, the file has {file.size}")
        header: dict[str, Any] = parse_header(_bytes(file, 8, header_bytes))
        header.pop("__metadata__", None)
        start, end = 8 + header_bytes, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = sizes(entry["data_offsets"], high=file.size)
            if first != end:
                raise ValueError(f"{name} begins at byte {first}, but the tensor before it ends at {end}")
            if name in self._tensors:
                files = f"{self._tensors[name].path.name} and {path.name} of {self._directory}"
                raise CheckpointError(
                    f"{name} is in two files, {files}. Leave it in one of them, or download the model into an empty "
                    "directory."
                )
            shape = sizes(entry["shape"])
            dtype = DTYPES.get(entry["dtype"])
            end = last
            if dtype is None:
                dtype = np.dtype(np.uint8)
            elif math.prod(shape) * dtype.itemsize != last - first:
                raise ValueError(f"{name} has shape {shape} but occupies bytes {first} to {last}")
            self._tensors[name] = _Tensor(path, file, start + first, shape, dtype, str(entry["dtype"]))
        if start + end != file.size:
            raise ValueError(f"its header describes {start + end} bytes, the file has {file.size}")


def _bytes(file: File, offset: int, num_bytes: int) -> bytes:
    memory = np.empty(num_bytes, np.uint8)
    file.read_into(offset, memory)
    return memory.tobytes()


def weight_files(directory: epath.Path) -> list[epath.Path]:
    """Returns the paths of the files that hold a model's tensors, sorted by name.

    Raises:
      CheckpointError: the index is unreadable, or a file is not in the directory.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return [file_within(directory, SINGLE_FILE, "the weights")]
    file_within(directory, INDEX_FILE, "the index")
    try:
        names = set(parse_header(read_text(index))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("weight_map has something other than names")
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error}.") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files ({error!r}). Download it again.") from None
    return [file_within(directory, name, str(index)) for name in sorted(names)]
