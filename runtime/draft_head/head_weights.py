"""Loads the tensors of a published EAGLE-3 head into parameters, for any TP size."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from meshserve.sharding.checkpoints.loading import load_parameters
from meshserve.sharding.checkpoints.parameters import CheckpointError, Parameter, Piece
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import GATE, UP, ShardLayout, shard_layout
from meshserve.sharding.mesh import named_sharding

from ..weights.weight_map import SideBySide, StoredParameter, Whole
from .eagle3 import Eagle3
from .eagle3_config import NUM_LAYERS_READ, Eagle3Config

_EMBEDDING, _HEAD, _OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
_IGNORED = frozenset({"t2d"})  # whether each token of the served model is in the head's vocabulary, which d2t says
_LAYER_PREFIXES = ("midlayer.", "layers.0.")  # of the two published layouts
_DEVIATION = 0.02  # of random weights


def head_layout(config: Eagle3Config, num_shards: int) -> ShardLayout:
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
    config: Eagle3Config, layout: ShardLayout, dtype: jnp.dtype, embedding_rows: int
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the head's structure and its parameters as shapes with logical axes. Allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: Eagle3(config, layout, dtype, embedding_rows=embedding_rows)))


def load_head(
    directory: epath.PathLike | None, config: Eagle3Config, mesh: Mesh, dtype: jnp.dtype, embedding: jax.Array
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the head's structure and its parameters, with each shard on its device.

    Args:
      directory: Of its safetensors files; None for random weights.
      config: The head.
      mesh: The devices.
      dtype: Of its parameters.
      embedding: The served model's, [V, D], which the head uses if its files have none.

    Raises:
      CheckpointError: The files do not contain the head, or are damaged.
    """
    layout = head_layout(config, mesh.size)
    structure, abstract = abstract_head(config, layout, dtype, embedding.shape[0])
    flat = {".".join(map(str, path)): weight for path, weight in nnx.to_flat_state(abstract)}
    arrays: dict[str, jax.Array] = {"embedding": embedding.astype(dtype)}
    offsets = jnp.zeros(layout.vocab_size, jnp.int32)
    if directory is None:
        for key, (name, weight) in zip(jax.random.split(jax.random.key(1), len(flat)), flat.items(), strict=True):
            arrays.setdefault(name, _random(key, name, weight, mesh))
    else:
        files = TensorFiles(directory)
        pieces = _checked_pieces(files, config, layout)
        parameters = {
            name: Parameter(
                shape=weight.shape,
                dtype=weight.get_value().dtype,
                sharding=named_sharding(mesh, weight.axes),
                pieces=partial(_constant, pieces[name]),
            )
            for name, weight in flat.items()
            if name in pieces
        }
        arrays |= load_parameters(files, parameters)
        offsets = arrays.pop("token_ids", offsets)
    vocabulary = jnp.arange(layout.vocab_size, dtype=jnp.int32)
    token_ids = jnp.where(vocabulary < config.layer.vocab_size, vocabulary + offsets, config.served_vocab_size)
    arrays["token_ids"] = jax.device_put(token_ids, named_sharding(mesh, ("vocab",)))
    return structure, jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])


def _constant(pieces: list[Piece], layer: int) -> list[Piece]:
    return pieces


def _random(key: jax.Array, name: str, weight: nnx.Variable, mesh: Mesh) -> jax.Array:
    shape, dtype = weight.shape, weight.get_value().dtype
    make: Callable[[jax.Array], jax.Array] = lambda key: _DEVIATION * jax.random.normal(key, shape, dtype)  # noqa: E731
    if name.endswith("norm") or name == "token_ids":
        make = lambda key: jnp.ones(shape, dtype)  # noqa: E731
    return jax.jit(make, out_shardings=named_sharding(mesh, weight.axes))(key)


def _checked_pieces(files: TensorFiles, config: Eagle3Config, layout: ShardLayout) -> dict[str, list[Piece]]:
    """Returns the pieces of each parameter that the files hold, after checking names, shapes and dtypes.

    Raises:
      CheckpointError: The files do not contain the head.
    """
    layer, embed_dim = config.layer, config.layer.embed_dim
    prefix = next((prefix for prefix in _LAYER_PREFIXES if f"{prefix}hidden_norm.weight" in files), _LAYER_PREFIXES[0])
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    q_dim, kv_dim = layer.num_query_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (embed_dim, NUM_LAYERS_READ * embed_dim),
        f"{prefix}input_layernorm.weight": (embed_dim,),
        f"{prefix}hidden_norm.weight": (embed_dim,),
        f"{attention}q_proj.weight": (q_dim, 2 * embed_dim),
        f"{attention}k_proj.weight": (kv_dim, 2 * embed_dim),
        f"{attention}v_proj.weight": (kv_dim, 2 * embed_dim),
        f"{attention}o_proj.weight": (embed_dim, q_dim),
        f"{prefix}post_attention_layernorm.weight": (embed_dim,),
        f"{mlp}gate_proj.weight": (layer.mlp_dim, embed_dim),
        f"{mlp}up_proj.weight": (layer.mlp_dim, embed_dim),
        f"{mlp}down_proj.weight": (embed_dim, layer.mlp_dim),
        "norm.weight": (embed_dim,),
        _HEAD: (layer.vocab_size, embed_dim),
    }
    whole = {
        "fc": "fc.weight",
        "token_norm": f"{prefix}input_layernorm.weight",
        "feature_norm": f"{prefix}hidden_norm.weight",
        "out": f"{attention}o_proj.weight",
        "mlp_norm": f"{prefix}post_attention_layernorm.weight",
        "mlp.down": f"{mlp}down_proj.weight",
        "norm": "norm.weight",
        "head": _HEAD,
    }
    if _EMBEDDING in files:
        expected[_EMBEDDING], whole["embedding"] = (config.served_vocab_size, embed_dim), _EMBEDDING
    if _OFFSETS in files:
        expected[_OFFSETS], whole["token_ids"] = (layer.vocab_size,), _OFFSETS
    elif layer.vocab_size != config.served_vocab_size:
        raise CheckpointError(f"the draft head has a vocabulary of {layer.vocab_size} tokens, but no tensor d2t.")
    files.check(expected, _IGNORED, {_OFFSETS: ("I64", "I32")})
    pieces = {
        name: Whole(tensor).pieces("", StoredParameter(expected[tensor], layer.head_dim), layout)
        for name, tensor in whole.items()
    }
    gate_up = SideBySide({GATE: f"{mlp}gate_proj.weight", UP: f"{mlp}up_proj.weight"})
    pieces["mlp.gate_up"] = gate_up.pieces("", StoredParameter((2, layer.mlp_dim, embed_dim), layer.head_dim), layout)
    pieces["q"], pieces["kv"] = [], []
    for rows in layout.qkv_rows(layer.head_dim):
        is_q = rows.projection == "q"
        row = rows.row if is_q else rows.row - layout.group_size * layer.head_dim
        size, place = (rows.num_rows, 2 * embed_dim), (rows.group, row, 0)
        tensor = f"{attention}{rows.projection}_proj.weight"
        pieces["q" if is_q else "kv"].append(Piece(tensor, (rows.model_row, 0), size, place))
    return pieces
