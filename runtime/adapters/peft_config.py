"""Reads adapter_config.json, in which PEFT says how an adapter was made (https://huggingface.co/docs/peft).

What would change the result and is not implemented is refused by name. Every number is bounded before it is used.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.errors import InvalidAdapterError, UnsupportedModelError
from ..model_files.model_config import read_json
from ..model_files.number_bounds import Bound, shown

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
_RANK, _ALPHA, _LAYER = Bound(1, MAX_RANK), Bound(0, 2**20, is_whole=False, is_above=True), Bound(0, 511)
_MAX_PATTERNS, _MAX_NAMES, _MAX_CHARS = 4_096, 4_096, 4_096
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
ALL_LINEAR = "all-linear"

_RETRAIN = "Train the adapter without it, or merge it into the base model and serve that."
# What may not be set, and what to do instead.
_REFUSED: Mapping[str, str] = {
    "use_dora": f"DoRA is not implemented. {_RETRAIN}",
    "modules_to_save": f"it replaces whole modules of the base model. {_RETRAIN}",
    "lora_bias": f"biases are not implemented. {_RETRAIN}",
    "layer_replication": f"it repeats layers of the base model. {_RETRAIN}",
    "trainable_token_indices": f"it changes the embedding. {_RETRAIN}",
    "target_parameters": f"adapters of experts are not implemented. {_RETRAIN}",
    "fan_in_fan_out": "Qwen3 has no transposed matrices: the adapter is for another model.",
    "use_qalora": f"QALoRA is not implemented. {_RETRAIN}",
    "alora_invocation_tokens": f"activated LoRA is not implemented. {_RETRAIN}",
    "arrow_config": "a router among adapters is not implemented. Name one adapter in each request.",
    "megatron_config": f"Megatron's parallel layers are not implemented. {_RETRAIN}",
    "use_bdlora": f"block-diagonal LoRA is not implemented. {_RETRAIN}",
}  # fmt: skip
# What changes nothing when the adapter is used, or is read below.
_KNOWN = frozenset(
    "peft_type task_type base_model_name_or_path revision inference_mode auto_mapping peft_version runtime_config "
    "r lora_alpha lora_dropout target_modules exclude_modules bias use_rslora init_lora_weights rank_pattern "
    "alpha_pattern layers_to_transform layers_pattern loftq_config eva_config corda_config lora_ga_config "
    "qalora_group_size megatron_core ensure_weight_tying ephemeral_gpu_offload".split()
)
# Other ways to begin change the base model's weights, and the adapter only fits these.
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The options of an adapter that matter when it is used."""

    rank: int
    alpha: float
    ranks: Mapping[str, float]  # whole numbers, of modules whose names end so
    alphas: Mapping[str, float]
    is_rank_stabilised: bool
    targets: tuple[str, ...]  # ends of the names of its modules; empty: its tensors alone tell
    layers: frozenset[int] | None  # the only ones that it changes, if it names any

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by its name such as model.layers.0.self_attn.q_proj."""
        return int(_by_end(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns what the product of the module's two matrices is multiplied by."""
        rank, alpha = self.rank_of(module), _by_end(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def names(self, module: str) -> bool:
        """Returns whether `targets` names a module, if they name any."""
        return not self.targets or any(_ends_with(module, target) for target in self.targets)


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _by_end(values: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first key with which the name of a module ends, as PEFT looks it up."""
    return next((value for key, value in values.items() if _ends_with(module, key)), default)


def read_peft_config(directory: Path) -> tuple[PeftConfig, dict[str, Any]]:
    """Reads a directory's adapter_config.json. Returns the options, and the contents of the file.

    Raises:
      InvalidAdapterError: It is missing or damaged, or has a value that is not allowed or not implemented.
    """
    try:
        raw = read_json(directory / CONFIG_FILE)
    except FileNotFoundError:
        raise InvalidAdapterError(
            f"{directory} has no {CONFIG_FILE}; an adapter is a directory as PEFT's save_pretrained writes it."
        ) from None
    except UnsupportedModelError as error:
        raise InvalidAdapterError(str(error)) from None
    return parsed_config(raw), raw


def parsed_config(raw: Mapping[str, Any]) -> PeftConfig:
    """Reads the contents of an adapter_config.json. Raises as `read_peft_config`."""
    _check_kind(raw)
    for key in ("r", "lora_alpha"):
        _require((_RANK if key == "r" else _ALPHA).accepts(raw.get(key)), raw, key, _RANK if key == "r" else _ALPHA)
    _require(type(raw.get("use_rslora", False)) is bool, raw, "use_rslora", "true or false")
    return PeftConfig(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        ranks=_patterns(raw, "rank_pattern", _RANK),
        alphas=_patterns(raw, "alpha_pattern", _ALPHA),
        is_rank_stabilised=raw.get("use_rslora", False),
        targets=_targets(raw),
        layers=_layers(raw),
    )


def _check_kind(raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"{CONFIG_FILE}: peft_type is {shown(raw.get('peft_type'))}; allowed is LORA. Other methods of PEFT are "
            "not implemented: merge the adapter into the base model and serve that."
        )
    for key, reason in _REFUSED.items():
        if raw.get(key):
            raise InvalidAdapterError(f"{CONFIG_FILE}: {key} is {shown(raw[key])}; {reason}")
    if raw.get("bias", "none") != "none":
        raise InvalidAdapterError(f"{CONFIG_FILE}: bias is {shown(raw['bias'])}; allowed is none. {_RETRAIN}")
    begin = raw.get("init_lora_weights")
    if not isinstance(begin, bool | str | None) or begin not in _INITIALISATIONS:
        raise InvalidAdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {shown(begin)}, which changes the weights of the base model. Convert "
            "the adapter to one of the original model: save it with path_initial_model_for_weight_conversion."
        )
    if unknown := sorted(key for key in raw.keys() - _KNOWN - _REFUSED.keys() if raw[key]):
        raise InvalidAdapterError(
            f"{CONFIG_FILE}: {', '.join(key[:_MAX_CHARS] for key in unknown[:5])} is not known, and may change "
            "what the adapter computes. Remove it if it does not."
        )


def _require(ok: bool, raw: Mapping[str, Any], key: str, allowed: object) -> None:
    if not ok:
        raise InvalidAdapterError(f"{CONFIG_FILE}: {key} is {shown(raw.get(key))}; allowed is {allowed}.")


def _patterns(raw: Mapping[str, Any], key: str, bound: Bound) -> dict[str, float]:
    patterns = raw.get(key) or {}
    _require(isinstance(patterns, dict) and len(patterns) <= _MAX_PATTERNS, raw, key, "an object of few names")
    for name, value in patterns.items():
        if not _PLAIN_NAME.fullmatch(name) or len(name) > _MAX_CHARS:
            raise InvalidAdapterError(
                f"{CONFIG_FILE}: {key} has {shown(name)}; allowed are names of modules or their ends, such as q_proj, "
                "and no regular expressions. Write out the names."
            )
        if not bound.accepts(value):
            raise InvalidAdapterError(f"{CONFIG_FILE}: {key} of {name} is {shown(value)}; allowed is {bound}.")
    return dict(patterns)


def _targets(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the modules. A regular expression is not run: what it chose, the tensors tell."""
    names = raw.get("target_modules")
    if isinstance(names, str) and len(names) <= _MAX_CHARS:
        return ()
    is_list = isinstance(names, list) and len(names) <= _MAX_NAMES and all(isinstance(name, str) for name in names)
    _require(is_list, raw, "target_modules", "a list of names, or text")
    assert isinstance(names, list)
    # Which of them are excluded, or are chosen by a pattern of layers, the tensors tell as well.
    return () if raw.get("exclude_modules") else tuple(names)


def _layers(raw: Mapping[str, Any]) -> frozenset[int] | None:
    layers = raw.get("layers_to_transform")
    if layers is None:
        return None
    layers = [layers] if not isinstance(layers, list) else layers
    _require(len(layers) <= _LAYER.high + 1 and all(map(_LAYER.accepts, layers)), raw, "layers_to_transform", "layers")
    return frozenset(layers)
