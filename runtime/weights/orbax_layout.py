"""Where each parameter's numbers stand in an Orbax checkpoint of ours, and where a Hugging Face tensor's do.

Stored is what a single device holds, layer by layer: QKV by KV head `[K, (G + 2) * H, D]` with all G query heads of the
head, gate and up side by side `[2, F, D]`, vocabulary and MLP without padding. So nothing stored depends on a mesh, and
any shard is made of rectangles of it: KV heads are repeated, query heads split and widths padded as they are read.
"""

import math

import jax.numpy as jnp
from flax import nnx

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.mesh import RULES

from ..api.model_config import ModelConfig
from ..model.qwen3 import abstract_model
from .hf_layout import Pieces

_STACK = "layers."


def model_layout(config: ModelConfig, num_shards: int) -> ShardLayout:
    """The layout of a model on a mesh of `num_shards`.

    Raises:
      ValueError: the degree does not divide the query heads.
    """
    return shard_layout(
        num_shards=num_shards,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        mlp_dim=config.mlp_dim,
    )


def stored_parts(config: ModelConfig) -> dict[str, dict[str, tuple[tuple[int, ...], int | None]]]:
    """The parts of a checkpoint: of each array its shape, and the axis that serving shards, if any."""
    _, abstract = abstract_model(config, model_layout(config, 1), jnp.dtype("float32"))
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {}
    parts: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {}
    for path, weight in nnx.to_flat_state(abstract):
        name = ".".join(map(str, path))
        num_stacked = 1 if name.startswith(_STACK) else 0
        axes = weight.axes[num_stacked:]
        sharded = [index for index, axis in enumerate(axes) if axis in RULES]
        array = (weight.shape[num_stacked:], sharded[0] if sharded else None)
        if num_stacked:
            layer[name.removeprefix(_STACK)] = array
        else:
            parts[name] = {name: array}
    return parts | {part_of_layer(index): layer for index in range(config.num_layers)}


def part_of_layer(layer: int) -> str:
    return f"{_STACK}{layer:04d}"


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every array of the checkpoint."""
    return {
        stored_name(part, key): shape
        for part, arrays in stored_parts(config).items()
        for key, (shape, _) in arrays.items()
    }


def stored_name(part: str, key: str) -> str:
    return part if key == part else f"{part}.{key}"


def stored_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """The pieces of each parameter of the model, by its path; stacked ones layer by layer."""
    parts = stored_parts(config)
    kv_rows = config.num_query_heads // config.num_kv_heads * config.head_dim
    rows, head_dim, embed = layout.group_size * config.head_dim, config.head_dim, config.embed_dim

    def qkv(layer: int) -> list[Piece]:
        name = stored_name(part_of_layer(layer), "attention.qkv")
        pieces = []
        for group in range(layout.num_groups):
            head, first_row = layout.kv_head(group), group % layout.repeats * rows
            pieces += [
                Piece(name, (head, first_row, 0), (1, rows, embed), (group, 0, 0)),
                Piece(name, (head, kv_rows, 0), (1, 2 * head_dim, embed), (group, rows, 0)),
            ]
        return pieces

    def whole(part: str | None, key: str) -> Pieces:
        def pieces(layer: int) -> list[Piece]:
            name = part or part_of_layer(layer)
            return [_whole(stored_name(name, key), parts[name][key][0])]

        return pieces

    tables = {part: whole(part, part) for part in parts if not part.startswith(_STACK)}
    layers = {_STACK + key: whole(None, key) for key in parts[part_of_layer(0)]}
    return tables | layers | {_STACK + "attention.qkv": qkv}


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    zeros = (0,) * len(shape)
    return Piece(name, zeros, shape, zeros)


def hf_pieces_of_stored(config: ModelConfig) -> dict[str, list[Piece]]:
    """The pieces of each Hugging Face tensor in a checkpoint of ours."""
    shapes = stored_shapes(config)
    tensors = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm"}
    if not config.is_tied:
        tensors["lm_head.weight"] = "head"
    pieces = {hf: [_whole(name, shapes[name])] for hf, name in tensors.items()}
    whole = {
        "input_layernorm": "attention_norm",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.o_proj": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.down_proj": "mlp.down",
    }
    head_dim, group_size = config.head_dim, config.num_query_heads // config.num_kv_heads
    for layer in range(config.num_layers):
        part, prefix = part_of_layer(layer), f"model.layers.{layer}."
        for hf, key in whole.items():
            name = stored_name(part, key)
            pieces[f"{prefix}{hf}.weight"] = [_whole(name, shapes[name])]
        name = stored_name(part, "attention.qkv")
        heads = {"q": (0, group_size), "k": (group_size, 1), "v": (group_size + 1, 1)}
        for letter, (first, count) in heads.items():
            rows = count * head_dim
            pieces[f"{prefix}self_attn.{letter}_proj.weight"] = [
                Piece(name, (head, first * head_dim, 0), (1, rows, config.embed_dim), (head * rows, 0))
                for head in range(config.num_kv_heads)
            ]
        for index, hf in enumerate(("mlp.gate_proj", "mlp.up_proj")):
            size = (1, config.mlp_dim, config.embed_dim)
            pieces[f"{prefix}{hf}.weight"] = [Piece(stored_name(part, "mlp.gate_up"), (index, 0, 0), size, (0, 0))]
    return pieces


def num_weight_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of the unsharded, unpadded model."""
    return sum(math.prod(shape) for shape in stored_shapes(config).values()) * dtype.itemsize
