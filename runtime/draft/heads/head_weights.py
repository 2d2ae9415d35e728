"""The kinds of trained heads, and how their files become parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.checkpoints.loading import load_parameters
from meshserve.sharding.checkpoints.parameters import Parameter, Piece
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.mesh import named_sharding

from ...model_files.model_config import ModelConfig
from .block import BlockDrafter
from .block_config import BlockConfig, is_block_drafter, read_block_drafter
from .block_programs import BlockHead
from .block_weights import block_pieces, shared_with_served
from .eagle3 import Eagle3
from .eagle3_config import Eagle3Config, is_eagle3, read_eagle3
from .eagle3_programs import Eagle3Head
from .eagle3_weights import eagle3_pieces
from .head_programs import Head

HeadConfig = Eagle3Config | BlockConfig
_DEVIATION = 0.02  # standard deviation of random weights
_STACK = "layers."  # begins the names of the parameters that have a dimension for the layer


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of trained heads. The functions take what `config` returns for the heads of this kind."""

    is_described: Callable[[Mapping[str, Any]], bool]  # by a parsed config.json
    config: Callable[[Mapping[str, Any], ModelConfig], Any]  # reads one, given the served model
    module: Callable[..., nnx.Module]
    head: Callable[..., Head]
    # The pieces that files hold of each parameter: a list for each layer, of one entry if layers are not stacked.
    pieces: Callable[[TensorFiles, Any, ShardLayout], dict[str, list[list[Piece]]]]
    # The parameters beside the embedding that are the served model's, given its output head.
    shared: Callable[[Any, jax.Array], dict[str, jax.Array]]
    # The elements that a device keeps of each token, given the KV heads and the features that it holds.
    num_kept: Callable[[Any, int, int], int]


def _nothing(config: Eagle3Config, head: jax.Array) -> dict[str, jax.Array]:
    return {}


def _kept_by_eagle3(config: Eagle3Config, num_groups: int, num_features: int) -> int:
    return num_groups * 2 * config.layer.head_dim + num_features


def _kept_by_block_drafter(config: BlockConfig, num_groups: int, num_features: int) -> int:
    return config.layer.num_layers * num_groups * 2 * config.layer.head_dim


KINDS = (
    HeadKind(
        is_described=is_eagle3,
        config=read_eagle3,
        module=Eagle3,
        head=Eagle3Head,
        pieces=eagle3_pieces,
        shared=_nothing,
        num_kept=_kept_by_eagle3,
    ),
    HeadKind(
        is_described=is_block_drafter,
        config=read_block_drafter,
        module=BlockDrafter,
        head=BlockHead,
        pieces=block_pieces,
        shared=shared_with_served,
        num_kept=_kept_by_block_drafter,
    ),
)


def kind_of(raw: Mapping[str, Any]) -> HeadKind | None:
    """Returns the kind of head that a config.json describes; None if it describes no head."""
    return next((kind for kind in KINDS if kind.is_described(raw)), None)


def head_layout(config: HeadConfig, num_shards: int) -> ShardLayout:
    """Returns the layout of a head.

    Raises:
      ValueError: `num_shards` does not divide its query heads or its embedding size.
    """
    layer = config.layer
    if layer.embed_dim % num_shards:
        raise ValueError(f"tp is {num_shards}, which does not divide the draft head's {layer.embed_dim} features.")
    return shard_layout(
        num_shards=num_shards,
        num_query_heads=layer.num_query_heads,
        num_kv_heads=layer.num_kv_heads,
        vocab_size=layer.vocab_size,
        mlp_dim=layer.mlp_dim,
    )


def abstract_head(
    kind: HeadKind, config: HeadConfig, layout: ShardLayout, dtype: jnp.dtype, embedding_rows: int
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the head's structure and its parameters as shapes with logical axes. Allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: kind.module(config, layout, dtype, embedding_rows=embedding_rows)))


def load_head(
    kind: HeadKind,
    directory: epath.PathLike | None,
    config: HeadConfig,
    mesh: Mesh,
    dtype: jnp.dtype,
    served: Mapping[str, jax.Array],
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the head's structure and its parameters, with each shard on its device.

    Args:
      kind: The kind of head.
      directory: The directory of its safetensors files; None for random weights.
      config: The head.
      mesh: The devices.
      dtype: The dtype of its parameters.
      served: The parameters `embedding` [V, D] and, for heads that use it, `head` of the served model.

    Raises:
      CheckpointError: The files do not contain the head, or are damaged.
    """
    layout = head_layout(config, mesh.size)
    structure, abstract = abstract_head(kind, config, layout, dtype, served["embedding"].shape[0])
    flat = {".".join(map(str, path)): weight for path, weight in nnx.to_flat_state(abstract)}
    shared = {"embedding": served["embedding"]} | kind.shared(config, served.get("head", served["embedding"]))
    arrays = {name: array.astype(dtype) for name, array in shared.items()}
    offsets = jnp.zeros(layout.vocab_size, jnp.int32)
    if directory is None:
        for key, (name, weight) in zip(jax.random.split(jax.random.key(1), len(flat)), flat.items(), strict=True):
            if name not in arrays:
                arrays[name] = _random(key, name, weight, mesh)
    else:
        files = TensorFiles(directory)
        pieces = kind.pieces(files, config, layout)
        arrays |= load_parameters(files, {name: _parameter(name, flat[name], pieces[name], mesh) for name in pieces})
        offsets = arrays.pop("token_ids", offsets)
    vocabulary = jnp.arange(layout.vocab_size, dtype=jnp.int32)
    token_ids = jnp.where(vocabulary < config.layer.vocab_size, vocabulary + offsets, config.served_vocab_size)
    arrays["token_ids"] = jax.device_put(token_ids, named_sharding(mesh, ("vocab",)))
    return structure, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])


def _parameter(name: str, weight: nnx.Variable, pieces: list[list[Piece]], mesh: Mesh) -> Parameter:
    return Parameter(
        shape=weight.shape,
        dtype=weight.get_value().dtype,
        sharding=named_sharding(mesh, weight.axes),
        pieces=pieces.__getitem__,
        num_layers=len(pieces) if name.startswith(_STACK) else None,
    )


def _random(key: jax.Array, name: str, weight: nnx.Variable, mesh: Mesh) -> jax.Array:
    shape, dtype = weight.shape, weight.get_value().dtype
    make: Callable[[jax.Array], jax.Array] = lambda key: _DEVIATION * jax.random.normal(key, shape, dtype)  # noqa: E731
    if name.endswith("norm") or name == "token_ids":
        make = lambda key: jnp.ones(shape, dtype)  # noqa: E731
    return jax.jit(make, out_shardings=named_sharding(mesh, weight.axes))(key)
