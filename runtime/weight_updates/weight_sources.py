"""The weights that an update may be given, each as a `Source`: it checks itself, then makes parameters beside the old.

A tree of arrays becomes parameters device to device; if the engine quantizes its weights, by way of the host, with the
code that quantizes a checkpoint. A directory is loaded as at the start of a server.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshserve.sharding.checkpoints.parameters import CheckpointError, Copy, Region, assign, relative
from meshserve.sharding.checkpoints.storage import as_path
from meshserve.sharding.memory import shard_bytes

from ..api.errors import InvalidRequestError
from ..model_files.model_config import ModelConfig
from ..resolve.resolved_server import PlacedServer
from ..weights.hf_layout import checkpoint_tensors, hf_pieces
from ..weights.hub import is_hub_id
from ..weights.load import OpenedWeights, load_opened, open_weights, quantized_as_served
from ..weights.locate import find_model
from ..weights.orbax_layout import with_plain_matrices
from ..weights.registry import read_model
from .assembly import assembled, layers_of
from .named_arrays import SOURCE, NamedArrays, named_arrays

Arrays = Mapping[str, jax.Array]  # parameters by their paths


@dataclass(frozen=True)
class Source:
    """Checked weights.

    Attributes:
      num_bytes: What the new parameters take on each device.
      make: Returns new parameters by their paths, given the old ones, which stay as they are.
    """

    num_bytes: int
    make: Callable[[Arrays], Arrays]


def by_path(params: nnx.State) -> dict[str, jax.Array]:
    """Returns parameters by their paths."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}


def open_source(
    source: Any, server: PlacedServer, params: nnx.State, *, is_partial: bool, is_donated: bool = False
) -> Source:
    """Checks names, shapes and dtypes of new weights. Changes nothing.

    Args:
      source: A tree of arrays (`named_arrays.flattened`), or a directory with safetensors or an Orbax checkpoint.
      server: The server on its present mesh.
      params: Its parameters.
      is_partial: Whether some of the weights may be missing, which stay as they are.
      is_donated: Whether `make` deletes the arrays on devices, each as soon as all that consists of it has been made.

    Raises:
      InvalidRequestError: They do not fit the model, or this server cannot take them in this form.
      CheckpointError: A directory does not hold the model.
    """
    if isinstance(source, str | os.PathLike):
        if is_partial:
            raise InvalidRequestError("partial", "a directory must hold all weights. Pass arrays to replace some only.")
        return _of_directory(os.fspath(source), server, params)
    named = named_arrays(source, server.model, is_partial=is_partial)
    if server.model.quantization is None and server.model.head_quantization is None:
        return _of_arrays(named, server, params, is_donated=is_donated)
    return _of_quantized(named, server, params, is_partial=is_partial, is_donated=is_donated)


def _of_arrays(named: NamedArrays, server: PlacedServer, params: nnx.State, *, is_donated: bool) -> Source:
    pieces = named.table.pieces(server.model, server.layout)
    old = by_path(params)
    layers = {name: layers_of(name, server.model, pieces[name], named) for name in old}
    replaced = {name: found for name, found in layers.items() if found}
    if not replaced:
        raise InvalidRequestError(SOURCE, "has none of the model's weights.")

    def make(old: Arrays) -> Arrays:
        new = {}
        for name, found in replaced.items():
            new[name] = assembled(old[name], found, named.arrays)
            if is_donated:
                uses.subtract(arrays_of[name])
                _delete(named.arrays[array] for array in arrays_of[name] if not uses[array])
        return new

    arrays_of = {name: {view.array for layer in found for view in layer.arrays} for name, found in replaced.items()}
    uses = Counter(array for arrays in arrays_of.values() for array in arrays)
    return Source(shard_bytes([old[name] for name in replaced]), make)


def _delete(arrays: Iterable[jax.Array | np.ndarray]) -> None:
    """Frees arrays on devices; what is being computed of them goes on."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.delete()


def _of_quantized(
    named: NamedArrays, server: PlacedServer, params: nnx.State, *, is_partial: bool, is_donated: bool
) -> Source:
    model = server.model
    if model.quantization is not None and not model.quantization.is_made:
        raise InvalidRequestError(
            SOURCE,
            f"the served checkpoint is stored as {model.quantization.name}; arrays cannot be quantized to it. Pass a "
            "directory in the same format, or serve the unquantized model with --quantize.",
        )
    if is_partial:
        raise InvalidRequestError("partial", "a quantized model takes all weights at once. Pass all of them.")
    if named.table.pieces is not hf_pieces:
        raise InvalidRequestError(SOURCE, "a quantized model takes arrays with Hugging Face's names. Rename them.")
    opened = OpenedWeights(quantized_as_served(_Tensors(named, model), model), hf_pieces)
    loaded = _loaded(opened, server, params)

    def make(old: Arrays) -> Arrays:
        new = loaded.make(old)
        if is_donated:
            _delete(named.arrays.values())
        return new

    return dataclasses.replace(loaded, make=make)


def _of_directory(directory: str, server: PlacedServer, params: nnx.State) -> Source:
    if not is_hub_id(directory) and not as_path(directory).is_dir():
        raise InvalidRequestError(SOURCE, f"{directory} is no directory. Pass one with safetensors or Orbax weights.")
    files = find_model(directory)
    assert files.weights is not None
    _check_config(files.small / "config.json", server)
    return _loaded(open_weights(files.weights, server.model), server, params)


def _loaded(opened: OpenedWeights, server: PlacedServer, params: nnx.State) -> Source:
    def make(old: Arrays) -> Arrays:
        return by_path(load_opened(opened, server.model, server.layout, server.mesh, server.dtype)[1])

    return Source(shard_bytes(params), make)


def _check_config(file: Path, server: PlacedServer) -> None:
    """Raises CheckpointError if a config.json describes another model. A directory may have none."""
    if not file.exists():
        return
    found, served = read_model(file), server.model
    irrelevant = {"notes", "quantization", "head_quantization", "pooling", "is_tied", "dtype"}
    for name in (field.name for field in dataclasses.fields(ModelConfig) if field.name not in irrelevant):
        if getattr(found, name) != getattr(served, name):
            raise CheckpointError(
                f"{file} describes another model than the one that is served: {name} is {getattr(found, name)}, and "
                f"{getattr(served, name)} is served. Start a server for it."
            )


class _Tensors:
    """A `TensorSource` of arrays with Hugging Face's names, read by way of the host."""

    def __init__(self, named: NamedArrays, config: ModelConfig):
        self._named, self._shapes = named, checkpoint_tensors(with_plain_matrices(config))

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `TensorSource`: the whole tensor."""
        return [tuple((0, length) for length in self._shapes[tensor])]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `TensorSource`."""
        view = self._named.table.views[tensor]
        array = np.asarray(self._named.arrays[view.array])  # JAX keeps this copy for the next call
        array = array if view.layer_axis is None else array.take(view.layer, view.layer_axis)
        values = view.of(array)[view.first_row : view.first_row + self._shapes[tensor][0]]
        for copy in copies:
            assign(copy.target, values[relative(copy.region, block)])
