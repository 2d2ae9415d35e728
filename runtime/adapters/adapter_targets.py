"""The projections that adapters may change: their names in PEFT checkpoints, their sizes, and where they are used."""

from collections.abc import Mapping
from typing import NamedTuple

from ..model.layers.attention import OUT, QKV
from ..model.layers.mlp import DOWN, GATE_UP
from ..model_files.model_config import ModelConfig

# The targets whose rows together form each projection of a layer, in this order within a group of heads or the MLP.
PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    OUT: ("o_proj",),
    GATE_UP: ("gate_proj", "up_proj"),
    DOWN: ("down_proj",),
}


class AdapterTarget(NamedTuple):
    """A matrix that an adapter may change, as the model's files have it."""

    module: str  # its name within a layer
    rows: int
    columns: int
    layers: tuple[int, ...]  # that have one


def targets_of(config: ModelConfig) -> dict[str, AdapterTarget]:
    """Returns the matrices of a model that adapters may change, by their last names. Experts' are none of them."""
    embed, queries = config.embed_dim, config.num_query_heads * config.head_dim
    keys, every = config.num_kv_heads * config.head_dim, tuple(range(config.num_layers))
    dense = every if config.experts is None else config.stacks.get("dense_layers", ())
    found = {
        "q_proj": AdapterTarget("self_attn.q_proj", queries, embed, every),
        "k_proj": AdapterTarget("self_attn.k_proj", keys, embed, every),
        "v_proj": AdapterTarget("self_attn.v_proj", keys, embed, every),
        "o_proj": AdapterTarget("self_attn.o_proj", embed, queries, every),
        "gate_proj": AdapterTarget("mlp.gate_proj", config.mlp_dim, embed, dense),
        "up_proj": AdapterTarget("mlp.up_proj", config.mlp_dim, embed, dense),
        "down_proj": AdapterTarget("mlp.down_proj", embed, config.mlp_dim, dense),
    }
    return {name: target for name, target in found.items() if target.layers}
