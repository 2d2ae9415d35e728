"""The names and shapes of Qwen3 in trainers written in JAX, whose matrices are transposed: Tunix and MaxText.

Tunix's `Qwen3` (google-tunix 0.1.7) has its layers apart. MaxText's, with `scan_layers`, are stacked along the second
axis of each array. Both hold one array for all experts of a layer, and split the heads of attention's matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..model_files.model_config import ModelConfig
from ..weights.hf_layout import checkpoint_tensors, hf_pieces
from ..weights.orbax_layout import with_plain_matrices
from .name_tables import NameTable, View

_TRANSPOSED = (1, 0)
_HEADS_OUT = (1, 2, 0)  # from [D, N, H] to [N H, D]
_HEADS_IN = (2, 0, 1)  # from [N, H, D] to [D, N H]


@dataclass(frozen=True)
class _Names:
    """What a trainer calls the tensors of a checkpoint."""

    form: str
    tables: Mapping[str, str]
    layer: str  # prefix of a layer's arrays, with {} for the layer if they are not stacked
    modules: Mapping[str, str]  # by the module of a tensor, with {} for the expert
    layer_axis: int | None = None


_TUNIX = _Names(
    "the paths of Tunix's Qwen3",
    {
        "model.embed_tokens.weight": "embedder.input_embedding",
        "model.norm.weight": "final_norm.w",
        "lm_head.weight": "lm_head.w",
    },
    "layers.{}.",
    {
        "input_layernorm": "input_layernorm.w",
        "post_attention_layernorm": "post_attention_layernorm.w",
        "self_attn.q_norm": "attn.q_norm.w",
        "self_attn.k_norm": "attn.k_norm.w",
        "self_attn.q_proj": "attn.q_proj.w",
        "self_attn.k_proj": "attn.k_proj.w",
        "self_attn.v_proj": "attn.v_proj.w",
        "self_attn.o_proj": "attn.o_proj.w",
        "mlp.gate_proj": "mlp.gate_proj.kernel",
        "mlp.up_proj": "mlp.up_proj.kernel",
        "mlp.down_proj": "mlp.down_proj.kernel",
        "mlp.gate": "mlp.router.kernel",
        "mlp.experts.{}.gate_proj": "mlp.gate_proj",
        "mlp.experts.{}.up_proj": "mlp.up_proj",
        "mlp.experts.{}.down_proj": "mlp.down_proj",
    },
)
_MAXTEXT = _Names(
    "the paths of MaxText's Qwen3 with scanned layers",
    {
        "model.embed_tokens.weight": "token_embedder.embedding",
        "model.norm.weight": "decoder.decoder_norm.scale",
        "lm_head.weight": "decoder.logits_dense.kernel",
    },
    "decoder.layers.",
    {
        "input_layernorm": "pre_self_attention_layer_norm.scale",
        "post_attention_layernorm": "post_self_attention_layer_norm.scale",
        "self_attn.q_norm": "self_attention.query_norm.scale",
        "self_attn.k_norm": "self_attention.key_norm.scale",
        "self_attn.q_proj": "self_attention.query.kernel",
        "self_attn.k_proj": "self_attention.key.kernel",
        "self_attn.v_proj": "self_attention.value.kernel",
        "self_attn.o_proj": "self_attention.out.kernel",
        "mlp.gate_proj": "mlp.wi_0.kernel",
        "mlp.up_proj": "mlp.wi_1.kernel",
        "mlp.down_proj": "mlp.wo.kernel",
        "mlp.gate": "moe_block.gate.kernel",
        "mlp.experts.{}.gate_proj": "moe_block.wi_0",
        "mlp.experts.{}.up_proj": "moe_block.wi_1",
        "mlp.experts.{}.down_proj": "moe_block.wo",
    },
    layer_axis=1,
)


def tunix_names(config: ModelConfig) -> NameTable:
    """The paths of the parameters of Tunix's `Qwen3`, dense or with experts."""
    return _table(_TUNIX, config)


def maxtext_names(config: ModelConfig) -> NameTable | None:
    """The paths of MaxText's parameters below `params`; None if some layers have experts and others do not."""
    return _table(_MAXTEXT, config) if len(config.stacks) == 1 else None


def _table(names: _Names, config: ModelConfig) -> NameTable:
    shapes: dict[str, tuple[int, ...]] = {}
    views: dict[str, View] = {}
    for tensor, shape in checkpoint_tensors(with_plain_matrices(config)).items():
        views[tensor] = view = _view(names, tensor, shape)
        array = _array_shape(view, shape, config)
        if view.layer_axis is not None:
            array = (*array[: view.layer_axis], config.num_layers, *array[view.layer_axis :])
        shapes[view.array] = array
    return NameTable(names.form, shapes, views, hf_pieces)


def _view(names: _Names, tensor: str, shape: tuple[int, ...]) -> View:
    if tensor in names.tables:
        return View(names.tables[tensor], axes=_TRANSPOSED if tensor == "lm_head.weight" else None)
    _, _, layer, module = tensor.removesuffix(".weight").split(".", 3)  # model.layers.3.mlp.experts.7.up_proj
    place = module.split(".")
    lead = (int(place[2]),) if place[:2] == ["mlp", "experts"] else ()
    key = ".".join([*place[:2], "{}", *place[3:]]) if lead else module
    view = View(names.layer.format(layer) + names.modules[key], lead=lead)
    if names.layer_axis is not None:
        view = view._replace(layer_axis=names.layer_axis, layer=int(layer))
    if lead:
        return view._replace(axes=(0, 2, 1))
    if place[0] == "self_attn" and len(shape) == 2:
        return view._replace(axes=_HEADS_IN if place[1] == "o_proj" else _HEADS_OUT, shape=shape)
    return view._replace(axes=_TRANSPOSED) if len(shape) == 2 else view


def _array_shape(view: View, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of an array without the axis of layers, given that of the tensor that is cut from it."""
    if view.lead:
        assert config.experts is not None
        return (config.experts.num_experts, *shape[::-1])
    if view.axes == _HEADS_OUT:
        return (shape[1], shape[0] // config.head_dim, config.head_dim)
    if view.axes == _HEADS_IN:
        return (shape[1] // config.head_dim, config.head_dim, shape[0])
    return shape[::-1] if view.axes == _TRANSPOSED else shape
