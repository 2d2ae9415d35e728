"""Weights of checkpoints as trainers hold them."""

from typing import Any

import jax.numpy as jnp


def tunix_tree(arrays: dict[str, Any], num_heads: tuple[int, int]) -> dict[str, Any]:
    """Returns the weights as Tunix's Qwen3 holds them, by the rules of its `params.py`, nested."""
    tree: dict[str, Any] = {"embedder": {"input_embedding": arrays["model.embed_tokens.weight"]},
                            "final_norm": {"w": arrays["model.norm.weight"]}, "layers": {}}  # fmt: skip
    if "lm_head.weight" in arrays:
        tree["lm_head"] = {"w": arrays["lm_head.weight"].T}
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in arrays)):
        given = {
            name.removeprefix(prefix).removesuffix(".weight"): array
            for name, array in arrays.items()
            if name.startswith(prefix := f"model.layers.{layer}.")
        }
        attention = {f"{norm}_norm": {"w": given[f"self_attn.{norm}_norm"]} for norm in "qk"}
        for projection, count in zip("qkv", (num_heads[0], num_heads[1], num_heads[1]), strict=True):
            matrix = given[f"self_attn.{projection}_proj"].T
            attention[f"{projection}_proj"] = {"w": matrix.reshape(matrix.shape[0], count, -1)}
        out = given["self_attn.o_proj"].T
        attention["o_proj"] = {"w": out.reshape(num_heads[0], -1, out.shape[1])}
        mlp: dict[str, Any] = {}
        for kind in ("gate_proj", "up_proj", "down_proj"):
            if f"mlp.{kind}" in given:
                mlp[kind] = {"kernel": given[f"mlp.{kind}"].T}
            else:
                experts = [name for name in given if name.startswith("mlp.experts.") and name.endswith(kind)]
                ordered = [given[f"mlp.experts.{expert}.{kind}"].T for expert in range(len(experts))]
                mlp[kind] = jnp.stack(ordered)
        if "mlp.gate" in given:
            mlp["router"] = {"kernel": given["mlp.gate"].T}
        norms = {norm: {"w": given[norm]} for norm in ("input_layernorm", "post_attention_layernorm")}
        tree["layers"][layer] = {"attn": attention, "mlp": mlp, **norms}
    return tree
