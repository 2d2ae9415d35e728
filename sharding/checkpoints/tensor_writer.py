"""Writes safetensors files tensor by tensor, so that no file is ever held in memory."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath

from .storage import is_remote
from .tensor_files import DTYPES, INDEX_FILE, SINGLE_FILE

_MAX_FILE_BYTES = 4 * 2**30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SOURCE_KEY = "meshserve_source"
_FILE_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # as `split_files` gives them

Shapes = Mapping[str, tuple[int, ...]]


def split_files(shapes: Shapes, dtype: np.dtype, max_bytes: int = _MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Which tensors go into which file, in their order; a file has at most `max_bytes`, or one tensor."""
    files: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if not files or num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= num_bytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{index:05d}-of-{len(files):05d}.safetensors": names for index, names in enumerate(files, start=1)}


def is_written(path: epath.Path, source_id: str) -> bool:
    """Whether an earlier run has written this file, whole, from the same source."""
    try:
        with path.open("rb") as file:
            start = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start))
        is_ours = header.pop("__metadata__")[_SOURCE_KEY] == source_id
        end = max(tensor["data_offsets"][1] for tensor in header.values())
        return is_ours and path.stat().length == 8 + start + end
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_file(path: epath.Path, shapes: Shapes, dtype: np.dtype, values: Iterable[np.ndarray], source_id: str) -> None:
    """Writes one file; `values` are the tensors in the order of `shapes`. It gets its name when it is whole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", _SOURCE_KEY: source_id}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    target = path if is_remote(path) else path.with_name(path.name + ".tmp")
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), array in zip(shapes.items(), values, strict=True):
            assert array.shape == shape and array.dtype == dtype, name
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    if target != path:
        target.replace(path)


def drop_index(directory: epath.Path) -> None:
    """An index that another run has left would make a model of files of both."""
    if (directory / INDEX_FILE).exists():
        (directory / INDEX_FILE).unlink()


def write_index(directory: epath.Path, files: Mapping[str, Sequence[str]], num_bytes: int) -> None:
    """The index of several files; one file needs none. Weight files that another run has left are removed."""
    for path in directory.glob("model*.safetensors"):
        if _FILE_NAME.fullmatch(path.name) and path.name not in files:
            path.unlink()
    if list(files) == [SINGLE_FILE]:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))
