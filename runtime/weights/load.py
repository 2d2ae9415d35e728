"""Loads a model's parameters from its directory, in either format, to the devices of a mesh."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.checkpoints.checkpoint import MANIFEST_FILE, OrbaxCheckpoint
from meshserve.sharding.checkpoints.loading import load_parameters
from meshserve.sharding.checkpoints.parameters import Parameter, Source
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import shard_bytes
from meshserve.sharding.mesh import named_sharding

from ..api.model_config import ModelConfig
from ..api.quantisation import NOT_QUANTIZED
from ..quantisation.grids import SCALE, Granule
from ..quantisation.quantise import QuantisingSource, is_made
from ..quantisation.sources import DequantisingSource, PublishedMatrices, StoredGrids
from .hf_layout import checkpoint_tensors, dequantised_tensors, hf_pieces, quantised_matrices, tensors_to_ignore
from .orbax_layout import (
    Pieces,
    dequantised_arrays,
    source_table,
    stack_of,
    stored_name,
    stored_parts,
    stored_pieces,
    stored_shapes,
    with_plain_matrices,
)
from .registry import abstract_model, architecture_of, read_model, with_fp8_head

_log = logging.getLogger(__name__)


def is_orbax(directory: epath.PathLike) -> bool:
    """Returns whether a directory is an Orbax checkpoint of meshserve, possibly unfinished."""
    path = epath.Path(directory)
    return (path / MANIFEST_FILE).exists() or (path / "weights").is_dir()


def read_model_with_weights(
    config_file: Path, weights: epath.PathLike | None, quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False
) -> ModelConfig:
    """Reads a config.json as `read_model`, and corrects it where the weight files contradict it.

    As by Hugging Face's transformers, a model with `tie_word_embeddings` is served untied if its checkpoint holds an
    output head that differs from the embedding. If the checkpoint holds a head, both tables are read to compare them.

    Args:
      config_file: The model's config.json.
      weights: Directory of the weights, or None without any.
      quantize: As in `ServeConfig`.
      fp8_head: As in `ServeConfig`.

    Raises:
      UnsupportedModelError, ConfigError: See `read_model`.
      CheckpointError: The weight files are missing or damaged.
    """
    config = _corrected(read_model(config_file, quantize), weights)
    return with_fp8_head(config) if fp8_head else config


def _corrected(config: ModelConfig, weights: epath.PathLike | None) -> ModelConfig:
    """Returns the config of the model that the weights hold; see `read_model_with_weights`."""
    if weights is None or not config.is_tied or is_orbax(weights):  # an Orbax checkpoint never stores an unused head
        return config
    files = _tensor_files(weights, config)
    if not any(files.differ(*tensors) for tensors in architecture_of(config).weight_map.tied_head.items()):
        return config
    _log.warning(
        "config.json sets tie_word_embeddings, but the weights hold an output head that differs from the embedding. "
        "The head is used, as by Hugging Face; set tie_word_embeddings to false to make this explicit."
    )
    return dataclasses.replace(config, is_tied=False)


def _tensor_files(directory: epath.PathLike, config: ModelConfig) -> TensorFiles:
    """Opens the files of a model in Hugging Face's format.

    Embedding models such as Qwen3-Embedding were saved without their output head, so the names of their tensors lack
    the prefix that sets the layers apart from it. It is added here.
    """
    files = TensorFiles(directory)
    (table,) = architecture_of(config).weight_map.tables["embedding"].all_names
    prefix, _, bare = table.partition(".")
    if table not in files and bare in files:
        files.add_prefix(f"{prefix}.")
    return files


class OpenedWeights(NamedTuple):
    """The stored weights of a model, and how its parameters consist of them."""

    source: Source
    pieces: Callable[[ModelConfig, ShardLayout], dict[str, Pieces]]  # pieces of each parameter


def open_weights(directory: epath.PathLike, config: ModelConfig) -> OpenedWeights:
    """Opens the stored tensors of a model and checks their names, shapes and dtypes.

    Raises:
      CheckpointError: The files do not contain the model.
    """
    quantisation = config.quantisation
    if is_orbax(directory):
        checkpoint, made = OrbaxCheckpoint(directory), is_made(quantisation)
        stored = with_plain_matrices(config) if made else _as_stored(config)
        checkpoint.check(stored_shapes(stored))
        source: Source = checkpoint
        if quantisation is not None:
            source = QuantisingSource(checkpoint, quantisation) if made else _grids(checkpoint, stored)
            granules = {name: quantisation.block for name in dequantised_arrays(config)}
            if not made:
                granules = {name: _granules(stored)[f"{name}.{SCALE}"] for name in granules}
            source = DequantisingSource(source, quantisation, granules)
        return OpenedWeights(_with_head(source, config, source_table(config, "head")), stored_pieces)
    files = _tensor_files(directory, config)
    expected: dict[str, tuple[int, ...]] = checkpoint_tensors(config)
    dtypes: dict[str, tuple[str, ...]] = {}
    matrices = quantised_matrices(config)
    for name, matrix in matrices.items():
        del expected[name]
        expected |= matrix.tensors()
        dtypes |= matrix.dtypes()
    files.check(expected, tensors_to_ignore(config), dtypes)
    source = files
    if quantisation is not None and is_made(quantisation):
        plain = {name: quantisation.block for name in dequantised_tensors(config)}
        source = DequantisingSource(QuantisingSource(files, quantisation), quantisation, plain)
    elif quantisation is not None:
        source = PublishedMatrices(files, matrices, quantisation.scale_dtype)
    (head,) = architecture_of(config).weight_map.tables[source_table(config, "head")].all_names
    return OpenedWeights(_with_head(source, config, head), hf_pieces)


def _with_head(source: Source, config: ModelConfig, head: str) -> Source:
    """Quantises the output head while it is read, if the config asks for it."""
    return QuantisingSource(source, config.head_quantisation, {head}) if config.head_quantisation else source


def _as_stored(config: ModelConfig) -> ModelConfig:
    """Returns the config of the model as its Orbax checkpoint stores it."""
    quantisation = None if config.quantisation is None else config.quantisation.held_quantised()
    return dataclasses.replace(config, quantisation=quantisation, head_quantisation=None)


def _grids(checkpoint: OrbaxCheckpoint, config: ModelConfig) -> StoredGrids:
    return StoredGrids(checkpoint, _granules(config), stored_shapes(config))


def _granules(config: ModelConfig) -> dict[str, Granule]:
    """Returns the granule of each part of a quantised matrix in an Orbax checkpoint."""
    arrays = {
        stored_name(part, key): array for part, arrays in stored_parts(config).items() for key, array in arrays.items()
    }
    return {name: array.granule for name, array in arrays.items() if array.granule is not None}


def device_weight_bytes(config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype) -> int:
    """Returns the bytes of parameters per device, including padding and repeated heads."""
    _, abstract = abstract_model(config, layout, dtype)
    weights = [weight for _, weight in nnx.to_flat_state(abstract)]
    return sum(
        math.prod(named_sharding(mesh, weight.axes).shard_shape(weight.shape)) * weight.get_value().dtype.itemsize
        for weight in weights
    )


def load_model(
    directory: epath.PathLike, config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the model's structure and its parameters, with each shard on its device.

    Raises:
      CheckpointError: The files do not contain the model, or are damaged.
    """
    opened = open_weights(directory, config)
    structure, abstract = abstract_model(config, layout, dtype)
    pieces = opened.pieces(config, layout)
    flat = {".".join(map(str, path)): weight for path, weight in nnx.to_flat_state(abstract)}
    stacks = {name: stack_of(config, name) for name in flat}
    parameters = {
        name: Parameter(
            shape=weight.shape,
            dtype=weight.get_value().dtype,
            sharding=named_sharding(mesh, weight.axes),
            pieces=pieces[name],
            num_layers=len(stack.layers) if (stack := stacks[name]) is not None else None,
        )
        for name, weight in flat.items()
    }
    started = time.monotonic()
    arrays = load_parameters(opened.source, parameters)
    seconds, num_bytes = time.monotonic() - started, mesh.size * shard_bytes(arrays)
    kind = dtype.name if config.layer_quantisation is None else config.layer_quantisation.name
    _log.info("%.2f GB of %s weights in %.1f s, %.2f GB/s", num_bytes / 1e9, kind, seconds, num_bytes / 1e9 / seconds)
    return structure, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])
