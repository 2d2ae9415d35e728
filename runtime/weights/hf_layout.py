"""Where each parameter's numbers stand in a Hugging Face Qwen3 checkpoint."""

from collections.abc import Callable

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig

Pieces = Callable[[int], list[Piece]]

# A tied checkpoint may repeat the embedding under the head's name.
TIED_HEAD = frozenset({"lm_head.weight"})


def checkpoint_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs."""
    embed, head_dim = config.embed_dim, config.head_dim
    query_width, kv_width = config.num_query_heads * head_dim, config.num_kv_heads * head_dim
    layer = {
        "input_layernorm.weight": (embed,),
        "self_attn.q_proj.weight": (query_width, embed),
        "self_attn.k_proj.weight": (kv_width, embed),
        "self_attn.v_proj.weight": (kv_width, embed),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (embed, query_width),
        "post_attention_layernorm.weight": (embed,),
        "mlp.gate_proj.weight": (config.mlp_dim, embed),
        "mlp.up_proj.weight": (config.mlp_dim, embed),
        "mlp.down_proj.weight": (embed, config.mlp_dim),
    }
    tensors = {"model.embed_tokens.weight": (config.vocab_size, embed), "model.norm.weight": (embed,)}
    if not config.is_tied:
        tensors["lm_head.weight"] = (config.vocab_size, embed)
    for index in range(config.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def hf_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """The pieces of each parameter, by its path in the model; stacked ones layer by layer."""
    shapes = checkpoint_tensors(config)

    def whole(name: str, *, place: tuple[int, ...] = ()) -> Pieces:
        """All of one tensor, at `place` in dimensions that it lacks."""

        def pieces(layer: int) -> list[Piece]:
            tensor = name.format(layer)
            zeros = (0,) * len(shapes[tensor])
            return [Piece(tensor, zeros, shapes[tensor], place + zeros)]

        return pieces

    def of_layer(name: str, **kwargs: tuple[int, ...]) -> Pieces:
        return whole("model.layers.{}." + name, **kwargs)

    def qkv(layer: int) -> list[Piece]:
        prefix = f"model.layers.{layer}.self_attn."
        rows, head_dim, embed = layout.group_size * config.head_dim, config.head_dim, config.embed_dim
        pieces = []
        for group in range(layout.num_groups):
            kv_row = layout.kv_head(group) * head_dim
            pieces += [
                Piece(prefix + "q_proj.weight", (group * rows, 0), (rows, embed), (group, 0, 0)),
                Piece(prefix + "k_proj.weight", (kv_row, 0), (head_dim, embed), (group, rows, 0)),
                Piece(prefix + "v_proj.weight", (kv_row, 0), (head_dim, embed), (group, rows + head_dim, 0)),
            ]
        return pieces

    gate = of_layer("mlp.gate_proj.weight", place=(0,))
    up = of_layer("mlp.up_proj.weight", place=(1,))
    return {
        "embedding": whole("model.embed_tokens.weight"),
        "norm": whole("model.norm.weight"),
        "head": whole("lm_head.weight"),
        "layers.attention_norm": of_layer("input_layernorm.weight"),
        "layers.attention.qkv": qkv,
        "layers.attention.q_norm": of_layer("self_attn.q_norm.weight"),
        "layers.attention.k_norm": of_layer("self_attn.k_norm.weight"),
        "layers.attention.out": of_layer("self_attn.o_proj.weight"),
        "layers.mlp_norm": of_layer("post_attention_layernorm.weight"),
        "layers.mlp.gate_up": lambda layer: gate(layer) + up(layer),
        "layers.mlp.down": of_layer("mlp.down_proj.weight"),
    }
