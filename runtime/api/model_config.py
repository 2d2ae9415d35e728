"""The shapes and options of a model, read from its config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnsupportedModelError
from .quantisation import Quantisation

# Keys of config.json that do not affect the forward pass.
_IGNORED_KEYS = frozenset(
    "_name_or_path attention_dropout bos_token_id chunk_size_feed_forward eos_token_id id2label initializer_range "
    "is_encoder_decoder label2id max_window_layers output_attentions output_hidden_states pad_token_id problem_type "
    "return_dict sliding_window transformers_version use_cache".split()
)
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings".split()
)
_REQUIRED_KEYS = ("model_type", *_SIZES, "rms_norm_eps", "tie_word_embeddings")
# Options of which only one value is implemented.
_FIXED_OPTIONS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
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
    num_chosen: int  # by each token
    mlp_dim: int  # intermediate size of an expert
    is_normalized: bool  # the weights of a token's experts add up to 1
    sparse_step: int  # every so many layers have experts
    dense_layers: tuple[int, ...]  # have none in any case

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts instead of a single MLP."""
        return (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers


TASKS = GENERATE, EMBED, RERANK = "generate", "embed", "rerank"


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
    """A Qwen3 model, as described by its config.json. There are no defaults."""

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
    is_tied: bool  # whether the embedding is also the output head, or what it is quantised from
    dtype: str  # dtype of the checkpoint: "bfloat16", "float32" or "float16"
    rope: RopeConfig
    experts: ExpertsConfig | None  # None: every layer has a single MLP
    quantisation: Quantisation | None  # of the layers' projections; None: they have `dtype`
    head_quantisation: Quantisation | None  # of the output head, made when it is loaded
    pooling: Pooling | None  # None: the model generates tokens; see `weights.model_task`

    @property
    def has_head(self) -> bool:
        """Whether the output head is a table of its own, which a quantised one always is."""
        return not self.is_tied or self.head_quantisation is not None

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
    def layer_quantisation(self) -> Quantisation | None:
        """How the layers' projections are quantised on the devices; None if none is."""
        return self.quantisation if self.quantisation is not None and self.quantisation.parameters else None

    @property
    def quantisation_name(self) -> str:
        """What is quantised and how, for logs and GetModelInfo; empty if nothing is."""
        layers = "" if self.quantisation is None else self.quantisation.name
        layers = f"dequantised {layers}" if layers and self.layer_quantisation is None else layers
        head = "" if self.head_quantisation is None else f"head {self.head_quantisation.name}"
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
        """Returns the weights of the model with so many experts in each layer that has any."""
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
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a config.json. `weights.registry` selects the model class.

        The registry also reads `quantization_config`, which is unknown here.

        Raises:
          UnsupportedModelError: The file has an option that is missing, invalid or not implemented.
        """
        _check_options(raw)
        return cls(
            model_type=raw["model_type"],
            vocab_size=raw["vocab_size"],
            embed_dim=raw["hidden_size"],
            mlp_dim=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_query_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=_number(raw, "rms_norm_eps", above=0.0),
            max_positions=raw["max_position_embeddings"],
            is_tied=raw["tie_word_embeddings"],
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            rope=_rope_config(raw),
            experts=None,
            quantisation=None,
            head_quantisation=None,
            pooling=None,
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


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON file of a model that contains a list of objects. Raises as `read_json`."""
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnsupportedModelError(f"{path} contains JSON of another form; it must be a list of objects.")
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}.") from None


def _require(ok: bool, options: Mapping[str, Any], key: str, allowed: str) -> None:
    if not ok:
        raise UnsupportedModelError(f"config.json: {key} is {options[key]!r}; allowed is {allowed}.")


def _number(options: Mapping[str, Any], key: str, *, above: float, default: float = math.nan) -> float:
    """Returns an option that must be a finite number above a bound, or `default` if it is missing."""
    value = options.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number and above < value < math.inf, options, key, f"a number above {above:g}")
    return float(value)


def _check_options(raw: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED_KEYS if raw.get(key) is None]
    if missing:
        raise UnsupportedModelError(
            f"config.json lacks {', '.join(missing)}. Add the values that the model was trained with."
        )
    for key in _SIZES:
        _require(type(raw[key]) is int and raw[key] >= 1, raw, key, "a whole number, 1 or more")
    _require(raw["head_dim"] % 2 == 0, raw, "head_dim", "an even number")
    _require(type(raw["tie_word_embeddings"]) is bool, raw, "tie_word_embeddings", "true or false")
    for key, allowed in _FIXED_OPTIONS.items():
        if raw.get(key, allowed) != allowed:
            raise UnsupportedModelError(f"config.json: {key} is {raw[key]!r}; meshserve implements only {allowed!r}.")
    _check_layer_types(raw)
    for key in _DTYPE_KEYS:
        _require(raw.get(key) is None or raw[key] in _DTYPES, raw, key, ", ".join(_DTYPES))
    known = {
        *_REQUIRED_KEYS,
        *_FIXED_OPTIONS,
        *_IGNORED_KEYS,
        *_ROPE_KEYS,
        *_DTYPE_KEYS,
        "architectures",
        "layer_types",
    }
    unknown = sorted(key for key, value in raw.items() if key not in known and value is not None)
    if unknown:
        raise UnsupportedModelError(
            f"config.json has options that meshserve does not know: {', '.join(unknown)}. They might change the "
            "model's results, so the model is refused."
        )
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
            f"config.json: layer_types is {layer_types!r}; meshserve implements only full_attention."
        )
    if len(layer_types) != num_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types names {len(layer_types)} layers and num_hidden_layers is {num_layers}; "
            "they must agree."
        )


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads the RoPE options: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` before."""
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        _require(isinstance(raw.get(key, {}), dict | None), raw, key, "an object")
        scaling |= raw.get(key) or {}
    with_theta = {"rope_theta": raw.get("rope_theta"), **scaling}
    if with_theta["rope_theta"] is None:
        raise UnsupportedModelError("config.json lacks rope_theta. Add the value that the model was trained with.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    allowed = {"default": {"rope_type", "type", "rope_theta"}, "yarn": _YARN_KEYS}
    allowed["linear"] = allowed["default"] | {"factor"}
    if not isinstance(kind, str) or kind not in allowed:
        raise UnsupportedModelError(
            f"config.json: rope scaling {kind!r} is not implemented; allowed are {', '.join(sorted(allowed))}."
        )
    unknown = sorted(key for key in scaling if key not in allowed[kind])
    if unknown:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} has unknown options {', '.join(unknown)}.")
    if kind != "default" and scaling.get("factor") is None:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} needs a factor.")
    factor = _number(scaling, "factor", above=0.0, default=1.0)
    _require(factor >= 1.0, scaling, "factor", "1 or more")
    original_key, max_positions = "original_max_position_embeddings", raw["max_position_embeddings"]
    truncate = scaling.get("truncate", True)
    _require(type(truncate) is bool, scaling, "truncate", "true or false")
    original = _number(scaling, original_key, above=0.0, default=max_positions)
    _require(original % 1 == 0, scaling, original_key, "a whole number")
    return RopeConfig(
        theta=_number(with_theta, "rope_theta", above=1.0),
        kind=kind,
        factor=factor,
        original_max_positions=int(original),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        beta_fast=_number(scaling, "beta_fast", above=0.0, default=32.0),
        beta_slow=_number(scaling, "beta_slow", above=0.0, default=1.0),
        truncate=truncate,
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Returns the attention factor of YaRN: the file's, or by default that of arXiv 2309.00071, section 3.4."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", above=0.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(_number(scaling, "mscale", above=0.0)) / mscale(_number(scaling, "mscale_all_dim", above=0.0))
    return mscale(1.0)
