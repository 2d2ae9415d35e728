"""Loads a model's parameters from its directory, in either format, to the devices of a mesh."""

import dataclasses
import itertools
import logging
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
from meshserve.sharding.checkpoints.parameters import Parameter, TensorSource, listed
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import shard_bytes
from meshserve.sharding.mesh import named_sharding

from ..model_files.model_config import ModelConfig
from ..model_files.quantization import NOT_QUANTIZED
from .formats.grids import Granule
from .formats.quantize import QuantizingSource
from .formats.sources import DequantizingSource, PublishedMatrices, StoredGrids
from .hf_layout import (
    checkpoint_tensors,
    dequantized_tensors,
    hf_pieces,
    kv_scales,
    partly_quantized,
    quantized_matrices,
    tensors_to_ignore,
)
from .orbax_layout import (
    Pieces,
    dequantized_arrays,
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

# Tensors that older releases and trainers store: frequencies that follow from config.json, and a value head.
_NOT_WEIGHTS = ("*.rotary_emb.inv_freq", "v_head.*")


def is_orbax(directory: epath.PathLike) -> bool:
    """Returns whether a directory is an Orbax checkpoint of meshserve, possibly unfinished."""
    path = epath.Path(directory)
    return (path / MANIFEST_FILE).exists() or (path / "weights").is_dir()


def read_model_with_weights(
    config_file: Path, weights: epath.PathLike | None, quantize: str = NOT_QUANTIZED, *, fp8_head: bool = False
) -> ModelConfig:
    """Reads a config.json as `read_model`, logs its notes, and corrects it where the weight files contradict it.

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
    config = read_model(config_file, quantize)
    config.notes.log()
    config = _corrected(config, weights)
    return with_fp8_head(config) if fp8_head else config


def _corrected(config: ModelConfig, weights: epath.PathLike | None) -> ModelConfig:
    """Returns the config of the model that the weights hold; see `read_model_with_weights`."""
    if weights is None or is_orbax(weights):  # an Orbax checkpoint has a corrected config.json
        return config
    is_published = config.quantization is not None and not config.quantization.is_made
    if not config.is_tied and not is_published:
        return config
    files = _tensor_files(weights, config)
    return _with_stored_scales(_with_stored_modules(_with_stored_head(config, files), files), files)


def _with_stored_scales(config: ModelConfig, files: TensorFiles) -> ModelConfig:
    """Leaves out the scales of an FP8 cache if the files hold none."""
    quantization = config.quantization
    if quantization is None or not quantization.has_kv_scales or any(map(files.__contains__, kv_scales(config))):
        return config
    _log.warning("quantization_config has a kv_cache_scheme, but the weights hold no k_scale or v_scale: none are used")
    return dataclasses.replace(config, quantization=dataclasses.replace(quantization, has_kv_scales=False))


def _with_stored_modules(config: ModelConfig, files: TensorFiles) -> ModelConfig:
    """Leaves out modules that config.json calls quantized, and the files do not."""
    stored = quantized_matrices(config)
    plain = [matrix.module for name, matrix in stored.items() if name in files and not files.is_quantized(name)]
    if not plain:
        return config
    assert config.quantization is not None
    _log.warning(
        "%s. The weights hold their matrices as they are, and so they are read.",
        *listed("modules that quantization_config of config.json does not leave out are not quantized", plain),
    )
    quantization = dataclasses.replace(config.quantization, skipped=(*config.quantization.skipped, *plain))
    return architecture_of(config).with_quantization(config, quantization)


def _with_stored_head(config: ModelConfig, files: TensorFiles) -> ModelConfig:
    """Unties an output head that differs from the embedding."""
    repeated = architecture_of(config).weight_map.tied_head if config.is_tied else {}
    if not any(files.differ(*tensors) for tensors in repeated.items()):
        return config
    _log.warning(
        "config.json sets tie_word_embeddings, but the weights hold an output head that differs from the embedding. "
        "The head is used, as by Hugging Face; set tie_word_embeddings to false to make this explicit."
    )
    return dataclasses.replace(config, is_tied=False)


def _tensor_files(directory: epath.PathLike, config: ModelConfig) -> TensorFiles:
    """Opens the files of a model in Hugging Face's format.

    Embedding models such as Qwen3-Embedding were saved without their output head, so the names of their tensors lack
    the prefix that sets the layers apart from it. It is added here. Tensors that hold the matrices of all experts are
    divided into those of each.
    """
    files, weight_map = TensorFiles(directory), architecture_of(config).weight_map
    (table,) = weight_map.tables["embedding"].all_names
    prefix, _, bare = table.partition(".")
    if table not in files and bare in files:
        files.add_prefix(f"{prefix}.")
    for layer, (alias, name) in itertools.product(range(config.num_layers), weight_map.aliases.items()):
        prefix = weight_map.layer_prefix.format(layer)
        if prefix + alias in files and prefix + name not in files:
            files.rename(prefix + alias, prefix + name)
    for layer, (fused, modules) in itertools.product(range(config.num_layers), weight_map.fused.items()):
        for ending in ("", "_scale_inv"):  # numbers, and scales of official FP8 blocks
            tensor = weight_map.layer_prefix.format(layer) + fused + ending
            if tensor in files and config.experts is not None:
                names = [weight_map.layer_prefix.format(layer) + f"{module}.weight{ending}" for module in modules]
                experts = range(config.experts.num_experts)
                files.divide(tensor, [[name.format(expert) for name in names] for expert in experts])
    return files


class OpenedWeights(NamedTuple):
    """The stored weights of a model, and how its parameters consist of them."""

    source: TensorSource
    pieces: Callable[[ModelConfig, ShardLayout], dict[str, Pieces]]  # pieces of each parameter


def open_weights(directory: epath.PathLike, config: ModelConfig) -> OpenedWeights:
    """Opens the stored tensors of a model and checks their names, shapes and dtypes.

    Raises:
      CheckpointError: The files do not contain the model.
    """
    quantization = config.quantization
    if is_orbax(directory):
        checkpoint, made = OrbaxCheckpoint(directory), quantization is not None and quantization.is_made
        stored = with_plain_matrices(config) if made else _as_stored(config)
        checkpoint.check(stored_shapes(stored))
        source: TensorSource = checkpoint
        if quantization is not None:
            source = QuantizingSource(checkpoint, quantization) if made else _grids(checkpoint, stored)
            found = {} if made else _granules(stored)
            plain = {
                name: {grid.part: found.get(f"{name}.{grid.part}", grid.block) for grid in quantization.grids}
                for name in dequantized_arrays(config)
            }
            source = DequantizingSource(source, quantization, plain)
        return OpenedWeights(_with_head(source, config, source_table(config, "head")), stored_pieces)
    files = _tensor_files(directory, config)
    expected: dict[str, tuple[int, ...]] = checkpoint_tensors(config)
    dtypes: dict[str, tuple[str, ...]] = {}
    matrices = quantized_matrices(config)
    for name, matrix in matrices.items():
        del expected[name]
        expected |= matrix.tensors()
        dtypes |= matrix.dtypes()
    for key, module in partly_quantized(config, matrices).items():
        _log.warning("%s is dequantized in all layers, because the checkpoint leaves %s unquantized", key, module)
    files.check(expected, tensors_to_ignore(config) | files.matching(_NOT_WEIGHTS), dtypes)
    source = files
    if quantization is not None and not quantization.is_made:
        source = PublishedMatrices(files, matrices)
    return OpenedWeights(quantized_as_served(source, config), hf_pieces)


def quantized_as_served(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Quantizes tensors with Hugging Face's names while they are read, as `quantize` and `fp8_head` ask for."""
    quantization = config.quantization
    if quantization is not None and quantization.is_made:
        plain = {name: {grid.part: grid.block for grid in quantization.grids} for name in dequantized_tensors(config)}
        source = DequantizingSource(QuantizingSource(source, quantization), quantization, plain)
    (head,) = architecture_of(config).weight_map.tables[source_table(config, "head")].all_names
    return _with_head(source, config, head)


def _with_head(source: TensorSource, config: ModelConfig, head: str) -> TensorSource:
    """Quantizes the output head while it is read, if the config asks for it."""
    return QuantizingSource(source, config.head_quantization, {head}) if config.head_quantization else source


def _as_stored(config: ModelConfig) -> ModelConfig:
    """Returns the config of the model as its Orbax checkpoint stores it."""
    quantization = None if config.quantization is None else config.quantization.held_quantized()
    return dataclasses.replace(config, quantization=quantization, head_quantization=None)


def _grids(checkpoint: OrbaxCheckpoint, config: ModelConfig) -> StoredGrids:
    return StoredGrids(checkpoint, _granules(config), stored_shapes(config))


def _granules(config: ModelConfig) -> dict[str, Granule]:
    """Returns the granule of each part of a quantized matrix in an Orbax checkpoint."""
    arrays = {
        stored_name(part, key): array for part, arrays in stored_parts(config).items() for key, array in arrays.items()
    }
    return {name: array.granule for name, array in arrays.items() if array.granule is not None}


def load_model(
    directory: epath.PathLike, config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the model's structure and its parameters, with each shard on its device.

    Raises:
      CheckpointError: The files do not contain the model, or are damaged.
    """
    return load_opened(open_weights(directory, config), config, layout, mesh, dtype)


def load_opened(
    opened: OpenedWeights, config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """Does the same with weights that are open."""
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
    kind = dtype.name if config.layer_quantization is None else config.layer_quantization.name
    _log.info("%.2f GB of %s weights in %.1f s, %.2f GB/s", num_bytes / 1e9, kind, seconds, num_bytes / 1e9 / seconds)
    return structure, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])
