"""Maps the tensors of a published block drafter to its parameters, for any TP size."""

import jax

from meshserve.sharding.checkpoints.parameters import CheckpointError, Piece
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import ShardLayout

from ...weights.qwen3_weights import WEIGHT_MAP
from ...weights.weight_map import StoredParameter, Whole
from .block_config import BlockConfig

_HEAD, _OFFSETS = "lm_head.weight", "d2t"
_LAYER_PREFIX = "layers.{}."
# What the served model has as well, and whether each of its tokens is in the drafter's vocabulary, which d2t says.
_IGNORED = frozenset({"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"})


def block_pieces(files: TensorFiles, config: BlockConfig, layout: ShardLayout) -> dict[str, list[list[Piece]]]:
    """Returns the pieces of each parameter that the files hold, of each layer, after checking names, shapes and dtypes.

    Raises:
      CheckpointError: The files do not contain the drafter.
    """
    layer, embed_dim = config.layer, config.layer.embed_dim
    q_dim, kv_dim = layer.num_query_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    tables: dict[str, tuple[str, tuple[int, ...]]] = {
        "fc": ("fc.weight", (embed_dim, len(config.layers_read) * embed_dim)),
        "feature_norm": ("hidden_norm.weight", (embed_dim,)),
        "norm": ("norm.weight", (embed_dim,)),
    }
    ignored = _IGNORED
    if config.has_own_head:
        if _OFFSETS not in files:
            raise CheckpointError(
                f"the block drafter has a vocabulary of {layer.vocab_size} tokens, but no tensor {_OFFSETS}."
            )
        tables["head"] = (_HEAD, (layer.vocab_size, embed_dim))
        tables["token_ids"] = (_OFFSETS, (layer.vocab_size,))
    else:
        ignored |= {_HEAD, _OFFSETS}
    expected = dict(tables.values())
    of_layer = {
        "input_layernorm.weight": (embed_dim,),
        "self_attn.q_proj.weight": (q_dim, embed_dim),
        "self_attn.k_proj.weight": (kv_dim, embed_dim),
        "self_attn.v_proj.weight": (kv_dim, embed_dim),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (embed_dim, q_dim),
        "post_attention_layernorm.weight": (embed_dim,),
        "mlp.gate_proj.weight": (layer.mlp_dim, embed_dim),
        "mlp.up_proj.weight": (layer.mlp_dim, embed_dim),
        "mlp.down_proj.weight": (embed_dim, layer.mlp_dim),
    }
    prefixes = [_LAYER_PREFIX.format(index) for index in range(layer.num_layers)]
    expected |= {prefix + name: shape for prefix in prefixes for name, shape in of_layer.items()}
    files.check(expected, ignored, {_OFFSETS: ("I64", "I32")})
    pieces = {
        name: [Whole(tensor).pieces("", StoredParameter(shape, layer.head_dim), layout)]
        for name, (tensor, shape) in tables.items()
    }
    stored = {
        "attention.qkv": (layout.qkv_shape(layer.head_dim, embed_dim)),
        "mlp.gate_up": (2, layer.mlp_dim, embed_dim),
    }
    for name, tensors in WEIGHT_MAP.layers.items():
        if name == "attention.kv_scale":
            continue
        shape = stored.get(name) or of_layer[tensors.all_names[0]]
        pieces[f"layers.{name}"] = [
            tensors.pieces(prefix, StoredParameter(shape, layer.head_dim), layout) for prefix in prefixes
        ]
    return pieces


def shared_with_served(config: BlockConfig, head: jax.Array) -> dict[str, jax.Array]:
    """Returns the parameters beside the embedding that the drafter takes from the served model, given its head."""
    return {} if config.has_own_head else {"head": head}
