"""Maps the tensors of a published EAGLE-3 head to its parameters, for any TP size."""

from meshserve.sharding.checkpoints.parameters import CheckpointError, Piece
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import GATE, UP, ShardLayout

from ...weights.weight_map import SideBySide, StoredParameter, Whole
from .eagle3_config import NUM_LAYERS_READ, Eagle3Config

_EMBEDDING, _HEAD, _OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
_IGNORED = frozenset({"t2d"})  # whether each token of the served model is in the head's vocabulary, which d2t says
_LAYER_PREFIXES = ("midlayer.", "layers.0.")  # in the two published layouts


def eagle3_pieces(files: TensorFiles, config: Eagle3Config, layout: ShardLayout) -> dict[str, list[list[Piece]]]:
    """Returns the pieces of each parameter that the files hold, after checking names, shapes and dtypes.

    Each parameter has a list of one entry, because the head has one layer; see `head_weights.HeadKind`.

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
    return {name: [its_pieces] for name, its_pieces in pieces.items()}
