"""Weight map of Qwen3 dense: the names of its parameters in a Hugging Face checkpoint."""

from meshserve.sharding.layout import GATE, UP

from .weight_map import FusedQKV, PerKVHead, SideBySide, WeightMap, Whole

WEIGHT_MAP = WeightMap(
    tables={
        "embedding": Whole("model.embed_tokens.weight"),
        "norm": Whole("model.norm.weight"),
        "head": Whole("lm_head.weight"),
    },
    layers={
        "attention_norm": Whole("input_layernorm.weight"),
        "attention.qkv": FusedQKV("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "attention.q_norm": Whole("self_attn.q_norm.weight"),
        "attention.k_norm": Whole("self_attn.k_norm.weight"),
        "attention.kv_scale": PerKVHead("self_attn.k_scale", "self_attn.v_scale"),  # in some quantized checkpoints
        "attention.out": Whole("self_attn.o_proj.weight"),
        "mlp_norm": Whole("post_attention_layernorm.weight"),
        "mlp.gate_up": SideBySide({GATE: "mlp.gate_proj.weight", UP: "mlp.up_proj.weight"}),
        "mlp.down": Whole("mlp.down_proj.weight"),
    },
    layer_prefix="model.layers.{}.",
    projections=frozenset({"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}),
    aliases={"self_attn.k_proj.k_scale": "self_attn.k_scale", "self_attn.v_proj.v_scale": "self_attn.v_scale"},
    tied_head={"lm_head.weight": "model.embed_tokens.weight"},
)
