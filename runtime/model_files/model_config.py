"""The shapes and options of a model, read from its config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshserve.kernels.router import RouterOptions
from meshserve.sharding.guarded_files import check_contained, read_guarded

from ..api.errors import UnsupportedModelError
from ..api.tasks import EMBED, GENERATE, RERANK
from .config_notes import ConfigNotes
from .number_bounds import check_number, number, parse_json, shown
from .quantization import Quantization

_MAX_FILE_BYTES = 16 << 20

# Keys of config.json that do not affect the forward pass: those of transformers' base class in all its releases, among
# them the parameters of generation (`generation_config` reads its own file), and those of trainers.
_IGNORED_KEYS = frozenset(
    "_name_or_path _attn_implementation _attn_implementation_autoset attn_implementation attention_dropout auto_map "
    "bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id eos_token_id "
    "finetuning_task gradient_checkpointing id2label initializer_range is_encoder_decoder label2id max_window_layers "
    "output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type pruned_heads return_dict "
    "sep_token_id sliding_window task_specific_params tf_legacy_loss tokenizer_class torchscript transformers_version "
    "use_bfloat16 use_cache "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens "
    "min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores "
    "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p "
    "typical_p "
    "unsloth_fixed unsloth_version unsloth_training_args".split()
)
# What the class of transformers assumes for keys that a file lacks.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_DEFAULT_ROPE_THETA = 10_000.0
_SIZES = tuple(key for key, value in DEFAULTS.items() if type(value) is int)
# Options of which only one value is implemented. The others are those of models that compute something else.
_FIXED_OPTIONS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "use_qk_norm": True,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
    **dict.fromkeys(("attention_sinks", "attn_logit_softcapping", "final_logit_softcapping")),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
    **dict.fromkeys(("logit_scale", "residual_scale", "query_pre_attn_scalar")),
}
_ROPE_KEYS = frozenset("rope_theta rope_scaling rope_parameters".split())
_DTYPE_KEYS = frozenset("dtype torch_dtype".split())
_DTYPES = ("bfloat16", "float32", "float16")
_YARN_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow truncate "
    "mscale mscale_all_dim".split()
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Options of the rotary embedding. `kind` is "default", "linear" or "yarn"; only the latter two use the scaling."""

    theta: float
    kind: str
    factor: float
    original_max_positions: int
    attention_factor: float  # multiplies cos and sin; 1 except for YaRN
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture-of-experts model; see `experts_config`."""

    num_experts: int
    router: RouterOptions
    mlp_dim: int  # intermediate size of an expert
    sparse_step: int  # every sparse_step-th layer has experts
    dense_layers: tuple[int, ...]  # have none in any case

    @property
    def num_chosen(self) -> int:
        """Experts that each token goes through."""
        return self.router.num_chosen

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts instead of a single MLP."""
        return (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """The result that a model computes from the last token of each prompt instead of generating tokens."""

    score_token_ids: tuple[int, int] | None  # the tokens "no" and "yes", whose logits are compared; None: the embedding

    @property
    def task(self) -> str:
        """The task of such a model."""
        return EMBED if self.score_token_ids is None else RERANK


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Qwen3 model, as described by its config.json."""

    model_type: str  # the model class: the key in `weights.registry.ARCHITECTURES`
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    is_tied: bool  # whether the embedding is also the output head, or what it is quantized from
    dtype: str  # dtype of the checkpoint: "bfloat16", "float32" or "float16"
    rope: RopeConfig
    experts: ExpertsConfig | None  # None: every layer has a single MLP
    quantization: Quantization | None  # format of the layers' projections; None: they have `dtype`
    head_quantization: Quantization | None  # format of the output head, made when it is loaded
    pooling: Pooling | None  # None: the model generates tokens; see `weights.model_task`
    notes: ConfigNotes = field(default=ConfigNotes(), compare=False)

    @property
    def has_head(self) -> bool:
        """Whether the output head is a table of its own, which a quantized one always is."""
        return not self.is_tied or self.head_quantization is not None

    @property
    def task(self) -> str:
        """One of TASKS."""
        return GENERATE if self.pooling is None else self.pooling.task

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The model's layers in each of its stacks of parameters, by the name of the stack.

        The layers of a stack have the same parameters. A model whose layers are all alike has one stack, `layers`; with
        experts, layers that have none are apart, in `dense_layers`.
        """
        layers = range(self.num_layers)
        if self.experts is None:
            return {"layers": tuple(layers)}
        dense = tuple(layer for layer in layers if not self.experts.has_experts(layer))
        sparse = {"layers": tuple(layer for layer in layers if layer not in dense)}
        return sparse | ({"dense_layers": dense} if dense else {})

    @property
    def layer_quantization(self) -> Quantization | None:
        """How the layers' projections are quantized on the devices; None if none is."""
        return self.quantization if self.quantization is not None and self.quantization.parameters else None

    @property
    def quantization_name(self) -> str:
        """What is quantized and how, for logs and GetModelInfo; empty if nothing is."""
        layers = "" if self.quantization is None else self.quantization.name
        layers = f"dequantized {layers}" if layers and self.layer_quantization is None else layers
        head = "" if self.head_quantization is None else f"head {self.head_quantization.name}"
        return ", ".join(filter(None, (layers, head)))

    @property
    def longest_context(self) -> int:
        """The maximum number of prompt and output tokens; with RoPE scaling, `factor` times the original number."""
        return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))

    @property
    def num_params(self) -> int:
        """The number of weights of the unsharded model, without padding."""
        return self._num_params(self.experts.num_experts if self.experts is not None else 0)

    @property
    def num_active_params(self) -> int:
        """Weights that one token passes through: as `num_params`, with the experts that it chooses alone."""
        return self._num_params(self.experts.num_chosen if self.experts is not None else 0)

    def _num_params(self, num_experts: int) -> int:
        """Returns the number of weights with `num_experts` experts in each layer that has any."""
        heads = (2 * self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim * self.embed_dim
        attention = heads + 2 * self.embed_dim + 2 * self.head_dim
        mlps = self.num_layers * 3 * self.mlp_dim * self.embed_dim
        if self.experts is not None:
            stacks, router = self.stacks, self.experts.num_experts * self.embed_dim
            sparse = router + num_experts * 3 * self.experts.mlp_dim * self.embed_dim
            mlps = len(stacks.get("dense_layers", ())) * 3 * self.mlp_dim * self.embed_dim
            mlps += len(stacks["layers"]) * sparse
        tables = (1 if self.is_tied else 2) * self.vocab_size * self.embed_dim
        return self.num_layers * attention + mlps + tables + self.embed_dim

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], defaults: Mapping[str, Any] = DEFAULTS, known: frozenset[str] = frozenset()
    ) -> "ModelConfig":
        """Reads the contents of a config.json. `weights.registry` selects the model class.

        Args:
          raw: The contents. The registry reads `quantization_config`, which is unknown here.
          defaults: What is assumed for absent keys.
          known: Further keys, which the caller reads.

        Raises:
          UnsupportedModelError: An option is invalid or not implemented.
        """
        if _rope_theta(raw) is None:
            defaults = {**defaults, "rope_theta": _DEFAULT_ROPE_THETA}
        if "num_key_value_heads" in raw and raw["num_key_value_heads"] is None:
            raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}  # null means as many
        raw, assumed = with_defaults(raw, defaults)
        _check_options(raw)
        notes = ConfigNotes(unknown=_unknown_keys(raw, known), assumed=assumed)
        return cls(
            model_type=raw["model_type"],
            vocab_size=raw["vocab_size"],
            embed_dim=raw["hidden_size"],
            mlp_dim=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_query_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=number(raw, "rms_norm_eps"),
            max_positions=raw["max_position_embeddings"],
            is_tied=raw["tie_word_embeddings"],
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            rope=_rope_config(raw),
            experts=None,
            quantization=None,
            head_quantization=None,
            pooling=None,
            notes=notes,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a model.

    Raises:
      FileNotFoundError: The file does not exist.
      UnsupportedModelError: The file cannot be read, or does not contain a JSON object.
    """
    value = _read_json(path)
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} contains JSON of type {type(value).__name__}; it must be an object.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a model; an empty dict if there is none. Raises as `read_json`."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON file of a model that contains a list of objects. Raises as `read_json`."""
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnsupportedModelError(f"{path} contains JSON of another form; it must be a list of objects.")
    return value


def _read_json(path: Path) -> Any:
    try:
        check_contained(path.parent, path)
        return parse_json(read_guarded(path, _MAX_FILE_BYTES).data.decode("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}.") from None


def _require(ok: bool, options: Mapping[str, Any], key: str, allowed: str) -> None:
    if not ok:
        raise UnsupportedModelError(f"config.json: {key} is {shown(options[key])}; allowed is {allowed}.")


def with_defaults(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the options of a config.json, completed by defaults, and what was assumed, such as "head_dim = 128"."""
    missing = {key: value for key, value in defaults.items() if raw.get(key) is None}
    return {**raw, **missing}, tuple(f"{key} = {json.dumps(value)}" for key, value in missing.items())


def _unknown_keys(raw: Mapping[str, Any], known: frozenset[str]) -> tuple[str, ...]:
    """Returns the keys that are not known. One that is null asks for nothing."""
    others = {*DEFAULTS, *_FIXED_OPTIONS, *_ROPE_KEYS, *_DTYPE_KEYS, "model_type", "architectures", "layer_types"}
    return tuple(sorted(key for key in raw.keys() - known - _IGNORED_KEYS - others if raw[key] is not None))


def _check_options(raw: Mapping[str, Any]) -> None:
    for key in _SIZES:
        check_number(raw, key)
    _require(raw["head_dim"] % 2 == 0, raw, "head_dim", "an even number")
    _require(type(raw["tie_word_embeddings"]) is bool, raw, "tie_word_embeddings", "true or false")
    for key, allowed in _FIXED_OPTIONS.items():
        if raw.get(key) not in (None, allowed):
            implemented = "models without it" if allowed is None else f"only {allowed!r}"
            raise UnsupportedModelError(f"config.json: {key} is {shown(raw[key])}; meshserve implements {implemented}.")
    _check_layer_types(raw)
    for key in _DTYPE_KEYS:
        _require(raw.get(key) is None or raw[key] in _DTYPES, raw, key, ", ".join(_DTYPES))
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise UnsupportedModelError(
            f"config.json: {raw['num_attention_heads']} query heads are not a multiple of "
            f"{raw['num_key_value_heads']} KV heads."
        )


def _check_layer_types(raw: Mapping[str, Any]) -> None:
    layer_types, num_layers = raw.get("layer_types"), raw["num_hidden_layers"]
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError(
            f"config.json: layer_types is {shown(layer_types)}; meshserve implements only full_attention."
        )
    if len(layer_types) != num_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types names {len(layer_types)} layers and num_hidden_layers is {num_layers}; "
            "they must agree."
        )


def _rope_scaling(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_parameters` of transformers 5, and `rope_scaling` of earlier releases."""
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        _require(isinstance(raw.get(key, {}), dict | None), raw, key, "an object")
        scaling |= raw.get(key) or {}
    return scaling


def _rope_theta(raw: Mapping[str, Any]) -> Any:
    """Returns the base of the rotary embedding, which stands among the scaling or beside it; None if it is absent."""
    theta = _rope_scaling(raw).get("rope_theta")
    return raw.get("rope_theta") if theta is None else theta


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads the RoPE options."""
    scaling = _rope_scaling(raw)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    allowed = {"default": {"rope_type", "type", "rope_theta"}, "yarn": _YARN_KEYS}
    allowed["linear"] = allowed["default"] | {"factor"}
    if not isinstance(kind, str) or kind not in allowed:
        raise UnsupportedModelError(
            f"config.json: rope scaling {shown(kind)} is not implemented; allowed are {', '.join(sorted(allowed))}."
        )
    unknown = sorted(key for key in scaling if key not in allowed[kind])
    if unknown:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} has unknown options {', '.join(unknown)}.")
    if kind != "default" and scaling.get("factor") is None:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} needs a factor.")
    factor = number(scaling, "factor", 1.0)
    original_key, max_positions = "original_max_position_embeddings", raw["max_position_embeddings"]
    truncate = scaling.get("truncate", True)
    _require(type(truncate) is bool, scaling, "truncate", "true or false")
    original = number(scaling, original_key, max_positions)
    return RopeConfig(
        theta=number({"rope_theta": _rope_theta(raw)}, "rope_theta"),
        kind=kind,
        factor=factor,
        original_max_positions=int(original),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        truncate=truncate,
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Returns the attention factor of YaRN: the file's, or by default that of arXiv 2309.00071, section 3.4."""
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(number(scaling, "mscale")) / mscale(number(scaling, "mscale_all_dim"))
    return mscale(1.0)
