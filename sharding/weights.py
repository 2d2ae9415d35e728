"""Weights from Hugging Face safetensors files straight into each device's shard.

A parameter is described by `Piece`s: rectangles of checkpoint tensors and where they go. For each shard only the bytes
that fall into it are read, one layer at a time, so that the host never holds the model.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors asks for
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_READABLE_DTYPES = frozenset({"BF16", "F16", "F32"})
_MAX_NAMES = 5  # of a list in an error message
_PROGRESS_DELAY_SECONDS = 2.0


class CheckpointError(ValueError):
    """Weight files that are missing, unreadable, or do not hold the tensors the model asks for."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a checkpoint tensor, and the place of its first element in a parameter.

    `place` may have more dimensions than the tensor; the piece has extent 1 along the leading ones.
    """

    tensor: str
    start: tuple[int, ...]  # in the tensor
    size: tuple[int, ...]
    place: tuple[int, ...]  # in the parameter (of one layer, where layers are stacked)


@dataclass(frozen=True)
class Parameter:
    """What to load: global shape, dtype and sharding as jax sees them, and the pieces it is made of.

    With `num_layers` the parameter's first dimension is the layer, and `pieces(layer)` describes one layer; without,
    `pieces(0)` describes it all. What no piece covers is padding and becomes zero.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: NamedSharding
    pieces: Callable[[int], Sequence[Piece]]
    num_layers: int | None = None


class TensorFiles:
    """The safetensors files of a model directory: one, or several behind an index.

    Raises:
      CheckpointError: there are none, one is missing, or one is cut short or damaged.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._handles = {path.name: _open(path) for path in _weight_files(directory)}
        self._file_of = {name: file for file, handle in self._handles.items() for name in handle.keys()}

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: frozenset[str] = frozenset()) -> None:
        """Compares the files with the tensors a model needs; `ignored` ones may be there without use.

        Raises:
          CheckpointError: names the missing, surplus and misshapen tensors, and those of a dtype that is not served.
        """
        problems = []
        present = set(self._file_of)
        problems += _listed("missing", sorted(expected.keys() - present))
        problems += _listed("not part of this model", sorted(present - expected.keys() - ignored))
        misshapen, wrong_dtype = [], []
        for name in sorted(expected.keys() & present):
            tensor = self._slice(name)
            if tuple(tensor.get_shape()) != expected[name]:
                misshapen.append(f"{name} is {tuple(tensor.get_shape())}, config.json asks for {expected[name]}")
            if tensor.get_dtype() not in _READABLE_DTYPES:
                wrong_dtype.append(f"{name} is {tensor.get_dtype()}")
        problems += _listed("of another shape", misshapen)
        problems += _listed(f"of a dtype other than {', '.join(sorted(_READABLE_DTYPES))}", wrong_dtype)
        if problems:
            raise CheckpointError(
                f"{self._directory} does not hold the model its config.json describes:\n  " + "\n  ".join(problems)
            )

    def read(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
        """A region of a tensor; only its bytes are read."""
        return self._slice(name)[region]

    def _slice(self, name: str):  # type: ignore[no-untyped-def]  # safetensors' PySafeSlice has no public name
        return self._handles[self._file_of[name]].get_slice(name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX_FILE
    if not index.exists():
        return [directory / _SINGLE_FILE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files ({error!r}). Download it again.") from None


def _open(path: Path) -> safe_open:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. The directory must hold {_SINGLE_FILE} or the files of its index."
        )
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut short or damaged ({error}). Download it again.") from None


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return [f"{len(names)} {what}: {'; '.join(names[:_MAX_NAMES])}{more}"]


def load_parameters(files: TensorFiles, parameters: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """Loads each parameter onto its devices, with a progress bar when it takes long."""
    num_bytes = sum(math.prod(p.shape) * p.dtype.itemsize for p in parameters.values())
    arrays = {}
    with tqdm(
        total=num_bytes, unit="B", unit_scale=True, desc="weights", delay=_PROGRESS_DELAY_SECONDS, leave=False
    ) as progress:
        for name, parameter in parameters.items():
            arrays[name] = _load(files, parameter, progress)
    return arrays


def _load(files: TensorFiles, parameter: Parameter, progress: tqdm) -> jax.Array:
    if parameter.num_layers is None:
        array = _load_whole(files, parameter.shape, parameter, parameter.sharding, 0)
        progress.update(array.nbytes)
        return array
    spec = parameter.sharding.spec
    layer_sharding = NamedSharding(parameter.sharding.mesh, PartitionSpec(*spec[1:]))
    stack = jax.jit(partial(jnp.zeros, parameter.shape, parameter.dtype), out_shardings=parameter.sharding)()
    for layer in range(parameter.num_layers):
        array = _load_whole(files, parameter.shape[1:], parameter, layer_sharding, layer)
        stack = _put_layer(stack, array, layer)
        progress.update(array.nbytes)
    return stack


@partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)


def _load_whole(
    files: TensorFiles, shape: tuple[int, ...], parameter: Parameter, sharding: NamedSharding, layer: int
) -> jax.Array:
    pieces = parameter.pieces(layer)

    def read(region: tuple[slice, ...] | None) -> np.ndarray:
        assert region is not None  # jax passes None for arrays without a layout only
        return _assemble(files, pieces, shape, region, parameter.dtype)

    return jax.make_array_from_callback(shape, sharding, read)


def _assemble(
    files: TensorFiles, pieces: Sequence[Piece], shape: tuple[int, ...], region: tuple[slice, ...], dtype: jnp.dtype
) -> np.ndarray:
    """The block of a parameter that `region` selects, read from the parts of the pieces that fall into it."""
    bounds = [axis.indices(length)[:2] for axis, length in zip(region, shape, strict=True)]
    block = np.zeros([stop - start for start, stop in bounds], dtype)
    for piece in pieces:
        extent = (1,) * (len(shape) - len(piece.size)) + piece.size
        overlap = [
            (max(start, place), min(stop, place + length))
            for (start, stop), place, length in zip(bounds, piece.place, extent, strict=True)
        ]
        if any(first >= last for first, last in overlap):
            continue
        rank = len(piece.size)
        source = tuple(
            slice(origin + first - place, origin + last - place)
            for origin, place, (first, last) in zip(piece.start, piece.place[-rank:], overlap[-rank:], strict=True)
        )
        target = tuple(
            slice(first - start, last - start) for (first, last), (start, _) in zip(overlap, bounds, strict=True)
        )
        block[target] = files.read(piece.tensor, source)
    return block
