"""Loads a model's parameters from its directory, in either format, to the devices of a mesh."""

import dataclasses
import logging
import math
import time
from pathlib import Path

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
from .hf_layout import checkpoint_tensors, hf_pieces, tensors_to_ignore
from .orbax_layout import Pieces, stack_of, stored_pieces, stored_shapes
from .registry import abstract_model, architecture_of, read_model

_log = logging.getLogger(__name__)


def is_orbax(directory: epath.PathLike) -> bool:
    """Returns whether a directory is an Orbax checkpoint of meshserve, possibly unfinished."""
    path = epath.Path(directory)
    return (path / MANIFEST_FILE).exists() or (path / "weights").is_dir()


def read_model_with_weights(config_file: Path, weights: epath.PathLike | None) -> ModelConfig:
    """Reads a config.json as `read_model`, and corrects it where the weight files contradict it.

    As by Hugging Face's transformers, a model with `tie_word_embeddings` is served untied if its checkpoint holds an
    output head that differs from the embedding. If the checkpoint holds a head, both tables are read to compare them.

    Args:
      config_file: The model's config.json.
      weights: Directory of the weights, or None without any.

    Raises:
      UnsupportedModelError: See `read_model`.
      CheckpointError: The weight files are missing or damaged.
    """
    config = read_model(config_file)
    if weights is None or not config.is_tied or is_orbax(weights):  # an Orbax checkpoint never stores an unused head
        return config
    files = TensorFiles(weights)
    if not any(files.differ(*tensors) for tensors in architecture_of(config).weight_map.tied_head.items()):
        return config
    _log.warning(
        "config.json sets tie_word_embeddings, but the weights hold an output head that differs from the embedding. "
        "The head is used, as by Hugging Face; set tie_word_embeddings to false to make this explicit."
    )
    return dataclasses.replace(config, is_tied=False)


def open_weights(directory: epath.PathLike, config: ModelConfig) -> Source:
    """Opens the stored tensors of a model and checks their names, shapes and dtypes.

    Raises:
      CheckpointError: The files do not contain the model.
    """
    if is_orbax(directory):
        checkpoint = OrbaxCheckpoint(directory)
        checkpoint.check(stored_shapes(config))
        return checkpoint
    files = TensorFiles(directory)
    files.check(checkpoint_tensors(config), ignored=tensors_to_ignore(config))
    return files


def pieces_of(source: Source, config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter for the format of the source."""
    return (stored_pieces if isinstance(source, OrbaxCheckpoint) else hf_pieces)(config, layout)


def device_weight_bytes(config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype) -> int:
    """Returns the bytes of parameters per device, including padding and repeated heads."""
    _, abstract = abstract_model(config, layout, dtype)
    weights = [weight for _, weight in nnx.to_flat_state(abstract)]
    return sum(
        math.prod(named_sharding(mesh, weight.axes).shard_shape(weight.shape)) * dtype.itemsize for weight in weights
    )


def load_model(
    directory: epath.PathLike, config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the model's structure and its parameters, with each shard on its device.

    Raises:
      CheckpointError: The files do not contain the model, or are damaged.
    """
    source = open_weights(directory, config)
    structure, abstract = abstract_model(config, layout, dtype)
    pieces = pieces_of(source, config, layout)
    flat = {".".join(map(str, path)): weight for path, weight in nnx.to_flat_state(abstract)}
    stacks = {name: stack_of(config, name) for name in flat}
    parameters = {
        name: Parameter(
            shape=weight.shape,
            dtype=dtype,
            sharding=named_sharding(mesh, weight.axes),
            pieces=pieces[name],
            num_layers=len(stack.layers) if (stack := stacks[name]) is not None else None,
        )
        for name, weight in flat.items()
    }
    started = time.monotonic()
    arrays = load_parameters(source, parameters)
    seconds, num_bytes = time.monotonic() - started, mesh.size * shard_bytes(arrays)
    _log.info("%.2f GB of weights in %.1f s, %.2f GB/s", num_bytes / 1e9, seconds, num_bytes / 1e9 / seconds)
    return structure, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])
